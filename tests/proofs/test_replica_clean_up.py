"""Proves row R27: if a machine is suspended while it removes old objects and loses its lease, it removes at most one
more object."""

import threading
from pathlib import Path

import pytest

import snapshots
from garbage_collection_cases import (
    first,  # noqa: F401 (a fixture)
    objects_of,
    objects_there,
)
from machines import NAMES, Node, settings, store, wait_until
from ratchet.errors import ReplicaError
from ratchet.runs.replication.upload import ReplicaGarbageCollector
from snapshots import contents

PACKAGES = ("runs",)


class Frozen:
    """Collects garbage in a thread that is suspended right before it removes the second object, when the removal is
    already requested."""

    def __init__(self, root: Path, holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asleep, self._wakes = threading.Event(), threading.Event()
        self.raised: BaseException | None = None
        self.removed: list[str] = []
        slow = store(root)
        remove = slow._storage.remove

        def freezing(name: str) -> None:
            if self.removed:
                self.asleep.set()
                self._wakes.wait()
            self.removed.append(name)
            remove(name)

        monkeypatch.setattr(slow._storage, "remove", freezing)
        self._garbage_collector = ReplicaGarbageCollector(slow, NAMES, 1, holder.replicator._lease)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.asleep.wait()

    def _run(self) -> None:
        try:
            self._garbage_collector.collect()
        except BaseException as error:
            self.raised = error

    def wake(self) -> None:
        self._wakes.set()
        self._thread.join()


def test_a_holder_that_was_frozen_while_it_removed_things_removes_no_more_than_one(
    tmp_path: Path, first: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = Frozen(tmp_path, first, monkeypatch)
    first.replicator._lease._ended.set()  # also stops the heartbeat of the lease
    first.replicator._upload.end()
    second = Node(tmp_path, "second", settings(tmp_path)).acquire()
    assert snapshots.newest(second.paths) == (4, []), "what is restored is on nobody's list"
    second.save(2)  # the same content that the first machine is about to remove
    second.save(6, best=2)
    second.wait_until_replicated()
    assert objects_there(tmp_path) >= objects_of(second, 2) | objects_of(second, 6)
    frozen.wake()
    assert isinstance(frozen.raised, ReplicaError)
    assert "lease of the run is uncertain" in str(frozen.raised)
    assert len(frozen.removed) == 2
    second.save(8, best=2)
    second.wait_until_replicated()
    wait_until(lambda: objects_there(tmp_path) >= objects_of(second, 2) | objects_of(second, 8))
    second.wait_until_replicated()
    made = contents(second.paths.checkpoint(2))
    second.close()
    third = Node(tmp_path, "third", settings(tmp_path)).acquire()
    assert snapshots.newest(third.paths) == (8, [])
    assert contents(third.paths.checkpoint(2)) == made
    third.close()
