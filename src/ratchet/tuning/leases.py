"""Leases of trials: a lease records which worker runs a trial, and shows other workers when this worker has stopped.

The lease of a running trial lists all workers that have held the trial, with one execution for each worker. The holder
stores heartbeats: it increases a counter under the key of its execution. Each execution has its own key, so that a
replaced holder cannot change the counter of its successor. Workers on the same machine check the holder's process
directly. A worker on another machine may take over the trial when the counter has not changed for the duration of the
lease. It measures this time by its own clock, because clocks of machines differ.
"""

import errno
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.errors import RatchetError
from ratchet.storage.records.sweep import TrialExecution

LEASE = "lease"
"""Key of the attribute of a trial that contains its lease."""
Heartbeat = tuple[int, int]
"""Index of the execution, and the counter of its heartbeats."""


class TrialLeaseLostError(RatchetError):
    """Another worker holds this trial, or the trial is over; this worker must not store anything more about it."""


def _read_process(pid: int | str) -> tuple[str, int]:
    """Return state letter and start (in clock ticks since boot) of a process (proc(5), fields 3 and 22 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _has_process(pid: int) -> bool:
    """Return whether a process exists, even one that /proc hides from this user (mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _boot_identity() -> str:
    """Return the scope of process ids: this boot of this machine, and the container's process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@dataclass(frozen=True)
class SweepWorker:
    """A process that runs trials."""

    host: str
    """Name of the machine, for display."""
    boot: str
    """Boot and process namespace; workers with the same value can compare process ids."""
    pid: int
    started: int
    """Start of the process in clock ticks after boot; it distinguishes processes with the same id, which is reused."""

    @classmethod
    def current(cls) -> "SweepWorker":
        """Return this process."""
        return cls(socket.gethostname(), _boot_identity(), os.getpid(), _read_process("self")[1])

    @property
    def name(self) -> str:
        """Name for display, such as `node7/4711`."""
        return f"{self.host}/{self.pid}"

    def is_gone(self, seen_from: "SweepWorker") -> bool:
        """Return whether the worker's process has certainly ended; False if the worker `seen_from` cannot check it."""
        if self.boot != seen_from.boot:
            return False
        try:
            state, started = _read_process(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return not _has_process(self.pid)
        return started != self.started or state in "ZX"


@dataclass(frozen=True)
class TrialLease:
    """All workers that have held a trial, the current holder last."""

    workers: tuple[SweepWorker, ...]
    started: tuple[float, ...]
    """Unix time at which each worker took the trial."""
    released: bool = False
    """Whether the holder has released the trial, so that any worker may take it at once."""

    @classmethod
    def first(cls, worker: SweepWorker) -> "TrialLease":
        """Return the lease of a trial that begins now."""
        return cls((worker,), (time.time(),))

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> "TrialLease | None":
        """Return the lease in the attributes of a trial; None if there is none."""
        if LEASE not in attributes:
            return None
        stored = attributes[LEASE]
        return cls(
            tuple(SweepWorker(**execution["worker"]) for execution in stored["executions"]),
            tuple(execution["started"] for execution in stored["executions"]),
            stored["released"],
        )

    def document(self) -> dict[str, Any]:
        """Return the lease as JSON, as it is stored."""
        executions = [
            {"worker": asdict(w), "started": started} for w, started in zip(self.workers, self.started, strict=True)
        ]
        return {"executions": executions, "released": self.released}

    def taken_by(self, worker: SweepWorker) -> "TrialLease":
        """Return the lease with a new holder."""
        return TrialLease((*self.workers, worker), (*self.started, time.time()))

    def release(self) -> "TrialLease":
        """Return the released lease."""
        return replace(self, released=True)

    def is_held_by(self, worker: SweepWorker) -> bool:
        """Return whether this worker may write to the trial."""
        return not self.released and self.workers[-1] == worker

    @property
    def heartbeat_key(self) -> str:
        """Key of the attribute that contains the holder's heartbeat."""
        return _heartbeat_key(len(self.workers) - 1)

    def heartbeat(self, attributes: Mapping[str, Any]) -> Heartbeat:
        """Return the holder's last heartbeat."""
        return len(self.workers) - 1, attributes.get(self.heartbeat_key, (0, 0.0))[0]

    def next_heartbeat(self, attributes: Mapping[str, Any]) -> tuple[int, float]:
        """Return the holder's next heartbeat to store: its counter, and the time for display."""
        return self.heartbeat(attributes)[1] + 1, time.time()

    def executions(self, attributes: Mapping[str, Any]) -> tuple[TrialExecution, ...]:
        """Return the executions as records; times are by the clocks of the workers."""
        return tuple(
            TrialExecution(
                worker=worker.name, started=started, last_seen=attributes.get(_heartbeat_key(index), (0, started))[1]
            )
            for index, (worker, started) in enumerate(zip(self.workers, self.started, strict=True))
        )


def _heartbeat_key(execution: int) -> str:
    return f"heartbeat.{execution}"


class TrialLeaseMonitor:
    """Observer of heartbeats, which measures by its own clock for how long each heartbeat has not changed."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[Heartbeat, float]] = {}

    def unchanged_s(self, number: int, heartbeat: Heartbeat) -> float:
        """Return for how many seconds this process has seen the same heartbeat of a trial."""
        now = time.monotonic()
        last_change = self._since.get(number)
        if last_change is None or last_change[0] != heartbeat:
            last_change = self._since[number] = (heartbeat, now)
        return now - last_change[1]
