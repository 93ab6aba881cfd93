"""A run that moves between machines through its replica."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machines import Node

Nodes = Callable[[str], Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Nodes]:
    """Return a function that creates machines. The machines end with the test."""
    made: list[Node] = []

    def make(name: str) -> Node:
        made.append(Node(tmp_path, name))
        return made[-1]

    yield make
    for one in made:
        one.close()
