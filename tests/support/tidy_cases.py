"""What is removed from a mirror, and what a holder that was frozen while it did so can still do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import NAMES, Node, settings, store
from ratchet.storage import files


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Node]:
    """A holder that has copied the steps 2 and 4."""
    node = Node(tmp_path, "first", settings(tmp_path)).take()
    for step in (2, 4):
        node.save(step)
        node.settled()
    yield node
    node.leave()


def objects_there(root: Path) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in store(root).list(NAMES.folder("objects"))}


def objects_of(node: Node, step: int) -> set[str]:
    return {digest for digest, _ in files.read_manifest(node.paths.checkpoint(step)).files.values()}
