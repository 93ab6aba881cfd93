"""Objects that are removed from a mirror, and noticed when another process removed them."""

from pathlib import Path

import pytest

from machines import NAMES, Node, store, wait_until
from ratchet.errors import MirrorError
from ratchet.runs.replication.garbage_collection import GarbageCollectionResult, ReplicaGarbageCollector
from ratchet.runs.replication.store import ReplicaStore
from tidy_cases import (
    first,  # noqa: F401 (a fixture)
    objects_of,
    objects_there,
)


def test_a_removed_object_is_noticed_and_sent_again(tmp_path: Path, first: Node) -> None:
    first.save(6, best=2)
    first.settled()
    gone = sorted(objects_of(first, 2) - objects_of(first, 4))[0]
    store(tmp_path).remove([NAMES.object(gone)])
    first.save(8, best=2)
    first.settled()
    wait_until(lambda: gone in objects_there(tmp_path))
    assert any("sent again" in text for text in first.texts("notice"))


def test_nothing_is_broken_where_all_is_there(tmp_path: Path, first: Node) -> None:
    first.keeper._upload.end()
    tidier = ReplicaGarbageCollector(store(tmp_path), NAMES, 1, first.keeper._lease)
    only = objects_of(first, 2) - objects_of(first, 4)
    assert tidier.tidy() == GarbageCollectionResult(1 + len(only), frozenset())
    assert tidier.tidy() == GarbageCollectionResult(0, frozenset())
    assert objects_there(tmp_path) == objects_of(first, 4)


def test_a_request_to_remove_is_asked_for_at_each_try(tmp_path: Path) -> None:
    here: ReplicaStore = store(tmp_path)
    here.write("a", b"1")
    here.write("b", b"2")
    left = iter([None])

    def require() -> None:
        if next(left, "over") == "over":
            raise MirrorError("not any more")

    with pytest.raises(MirrorError, match="not any more"):
        here.remove(["a", "b"], require)
    assert sorted(here.list("")) == ["b"]
