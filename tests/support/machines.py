"""Simulated machines: run directories of one run with one replica, and small checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snapshots
from ratchet.config.machine import Machine
from ratchet.runs.directory import RunDirectory
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.replication.replicator import MultiNodeReplicator, RunReplicator
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits
from ratchet.storage import files

PATIENCE_S = 30.0
NAMES = RunObjectNames(snapshots.SPEC.run_id)


def settings(root: Path) -> Machine:
    return Machine(
        replica=str(root / "replica"),
        lease_timeout_s=2.0,
        replica_interval_s=0.1,
        replica_timeout_s=1.0,
        keep_checkpoints=2,
    )


def together(root: Path, **more: Any) -> Machine:
    """Return the settings of one of several machines that train together."""
    meeting = {"nodes": "1:3", "rendezvous": "one.example:29400", "rendezvous_timeout_s": 60.0}
    return Machine.model_validate(settings(root).model_dump() | meeting | more)


def store(root: Path) -> ReplicaStore:
    return ReplicaStore(str(root / "replica"), TransferLimits(retry_timeout_s=2), lambda: False)


def never() -> bool:
    return False


def wait_until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


class Node:
    """A machine with its own disk and with the replication part of its supervisor."""

    def __init__(self, root: Path, name: str, machine: Machine | None = None) -> None:
        self._here = True
        self.run = RunDirectory.open(root / name / "runs", snapshots.SPEC)
        self.paths = self.run.paths
        machine = machine or settings(root)
        self.replicator: Any = (RunReplicator if machine.active_rendezvous is None else MultiNodeReplicator)(
            self.run, machine
        )

    def acquire(self) -> "Node":
        self.replicator.acquire(never)
        return self

    def save(self, step: int, best: int = 0, good: int = 0) -> None:
        """Seal a checkpoint, as a worker does."""
        for n in range(step - 1, step + 1):
            self.run.journal.append("step", step=n, loss=1.0 / n)
        snapshots.save(self.paths, step, best, good)
        cost = {"size_bytes": 1, "bytes_written": 1, "bytes_linked": 0, "blocked_s": 0, "seconds": 0}
        self.run.journal.append("checkpoint_saved", step=step, is_best=False, **cost)

    def finish(self) -> None:
        with files.sealed_directory(self.paths.result, "result") as scratch:
            files.link_tree(self.paths.checkpoint(self.paths.checkpoint_steps()[-1]), scratch / "checkpoints" / "last")
            (scratch / "train.json").write_text('{"well": "trained"}')

    def wait_until_replicated(self) -> None:
        assert self.replicator.wait_until_replicated(PATIENCE_S) is None

    def events(self, kind: str) -> list[JournalEvent]:
        return [event for event in JournalReader(self.paths.journal).read() if event.kind == kind]

    def texts(self, kind: str) -> list[str]:
        return [event.data["text"] for event in self.events(kind)]

    def vanish(self) -> None:
        """Simulate a machine that disappears without notice: its threads do no more work."""
        if isinstance(self.replicator, MultiNodeReplicator):
            self.replicator._task.end()
            self.replicator._task.join()
            lease, upload = self.replicator._held or (None, None)
        else:
            lease, upload = self.replicator._lease, self.replicator._upload
        if lease is not None:
            lease._ended.set()
            lease._renewal_thread.join()
        if upload is not None:
            upload.end()
        self._close()

    def close(self) -> None:
        """Shut down normally."""
        if self._here:
            self.replicator.release()
            self._close()

    def _close(self) -> None:
        self._here = False
        self.run.close()
