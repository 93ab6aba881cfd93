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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        scope = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        return cls(socket.gethostname(), scope, os.getpid(), _read_process("self")[1])

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
            try:
                os.kill(self.pid, 0)  # it exists if /proc hides it from this user (mount option hidepid)
            except OSError as error:
                return error.errno == errno.ESRCH
            return False
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

    @property
    def heartbeat_key(self) -> str:
        """Key of the attribute that contains the holder's heartbeat."""
        return _heartbeat_key(len(self.workers) - 1)

    def heartbeat(self, attributes: Mapping[str, Any]) -> Heartbeat:
        """Return the holder's last heartbeat."""
        return len(self.workers) - 1, attributes.get(self.heartbeat_key, (0, 0.0))[0]

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
