"""Cases for garbage collection in a replica by a lease holder that may have been suspended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import NAMES, Node, settings, store
from ratchet.storage import files


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Node]:
    """Start a machine that holds the lease and has replicated the checkpoints of steps 2 and 4."""
    node = Node(tmp_path, "first", settings(tmp_path)).acquire()
    for step in (2, 4):
        node.save(step)
        node.wait_until_replicated()
    yield node
    node.close()


def objects_there(root: Path) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in store(root).list(NAMES.folder("objects"))}


def objects_of(node: Node, step: int) -> set[str]:
    return {digest for digest, _ in files.read_manifest(node.paths.checkpoint(step)).files.values()}
