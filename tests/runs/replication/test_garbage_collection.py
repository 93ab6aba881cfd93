"""Tests of garbage collection in a replica, and of recovery when another process removes an object."""

from pathlib import Path

import pytest

from garbage_collection_cases import (
    first,  # noqa: F401 (a fixture)
    objects_of,
    objects_there,
)
from machines import NAMES, Node, store, wait_until
from ratchet.errors import ReplicaError
from ratchet.runs.replication.store import ReplicaStore
from ratchet.runs.replication.upload import GarbageCollectionResult, ReplicaGarbageCollector


def test_a_removed_object_is_noticed_and_sent_again(tmp_path: Path, first: Node) -> None:
    first.save(6, best=2)
    first.wait_until_replicated()
    gone = sorted(objects_of(first, 2) - objects_of(first, 4))[0]
    store(tmp_path).remove([NAMES.object(gone)])
    first.save(8, best=2)
    first.wait_until_replicated()
    wait_until(lambda: gone in objects_there(tmp_path))
    assert any("sending them again" in text for text in first.texts("notice"))


def test_nothing_is_broken_where_all_is_there(tmp_path: Path, first: Node) -> None:
    first.replicator._upload.end()
    tidier = ReplicaGarbageCollector(store(tmp_path), NAMES, 1, first.replicator._lease)
    only = objects_of(first, 2) - objects_of(first, 4)
    assert tidier.collect() == GarbageCollectionResult(1 + len(only), frozenset())
    assert tidier.collect() == GarbageCollectionResult(0, frozenset())
    assert objects_there(tmp_path) == objects_of(first, 4)


def test_a_request_to_remove_is_asked_for_at_each_try(tmp_path: Path) -> None:
    here: ReplicaStore = store(tmp_path)
    here.write("a", b"1")
    here.write("b", b"2")
    left = iter([None])

    def require() -> None:
        if next(left, "over") == "over":
            raise ReplicaError("not any more")

    with pytest.raises(ReplicaError, match="not any more"):
        here.remove(["a", "b"], require)
    assert sorted(here.list("")) == ["b"]
