"""A run that moves from machine to machine through its replica."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machines import Node

Nodes = Callable[[str], Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Nodes]:
    """Makes machines that end with the test."""
    made: list[Node] = []

    def make(name: str) -> Node:
        made.append(Node(tmp_path, name))
        return made[-1]

    yield make
    for one in made:
        one.close()
