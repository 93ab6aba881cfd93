"""Who works on a trial, and how others see that nobody does any more.

A trial that is trained carries a lease: who took it up, one after the other. The holder gives signs of life, a counter
under a key of its own take, so that a holder that was replaced can write what it likes and changes nothing of its
successor's. Its process on the same machine is asked for at once; on another one the counter must have stood still for
the length of the lease, by the clock of whoever looks: clocks of machines differ, and none is compared with another.
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
"""Key of a trial's attribute."""
Sign = tuple[int, int]
"""Which take, and how many signs of life it has given."""


class TrialLeaseLostError(RatchetError):
    """Another worker has this trial now, or it is over; what this one still knows of it must not be written."""


def _read_process(pid: int | str) -> tuple[str, int]:
    """State letter, and start in clock ticks since boot, of a process (proc(5), fields 3 and 22 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _has_process(pid: int) -> bool:
    """Whether there is such a process, even one that /proc hides from this user (mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _boot_identity() -> str:
    """What process ids mean something within: this boot of this machine, and the container's namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@dataclass(frozen=True)
class SweepWorker:
    """A process that works on trials."""

    host: str
    """Name of the machine, for people."""
    boot: str
    """Boot and process namespace; where they are equal, process ids can be compared."""
    pid: int
    started: int
    """Clock ticks after boot: a process id is given again, but not at the same time."""

    @classmethod
    def here(cls) -> "SweepWorker":
        """This process."""
        return cls(socket.gethostname(), _boot_identity(), os.getpid(), _read_process("self")[1])

    @property
    def name(self) -> str:
        """Such as `node7/4711`."""
        return f"{self.host}/{self.pid}"

    def is_gone(self, seen_from: "SweepWorker") -> bool:
        """Whether its process has certainly ended; False where that cannot be seen from there."""
        if self.boot != seen_from.boot:
            return False
        try:
            state, started = _read_process(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return not _has_process(self.pid)
        return started != self.started or state in "ZX"


@dataclass(frozen=True)
class TrialLease:
    """Everybody who had a trial, the holder last."""

    workers: tuple[SweepWorker, ...]
    begun: tuple[float, ...]
    """Unix time of each take."""
    released: bool = False
    """Given back by its holder: anybody may take it at once."""

    @classmethod
    def first(cls, worker: SweepWorker) -> "TrialLease":
        """Of a trial that is begun now."""
        return cls((worker,), (time.time(),))

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "TrialLease | None":
        """From the attributes of a trial; None where nobody ever held it."""
        if LEASE not in attributes:
            return None
        stored = attributes[LEASE]
        return cls(
            tuple(SweepWorker(**take["worker"]) for take in stored["takes"]),
            tuple(take["begun"] for take in stored["takes"]),
            stored["released"],
        )

    def document(self) -> dict[str, Any]:
        """As it is stored."""
        takes = [{"worker": asdict(w), "begun": begun} for w, begun in zip(self.workers, self.begun, strict=True)]
        return {"takes": takes, "released": self.released}

    def taken_by(self, worker: SweepWorker) -> "TrialLease":
        """With a new holder."""
        return TrialLease((*self.workers, worker), (*self.begun, time.time()))

    def given_back(self) -> "TrialLease":
        """Free for anybody."""
        return replace(self, released=True)

    def is_held_by(self, worker: SweepWorker) -> bool:
        """Whether this worker may write to the trial."""
        return not self.released and self.workers[-1] == worker

    @property
    def sign_key(self) -> str:
        """Attribute with the holder's signs of life."""
        return _heartbeat_key(len(self.workers) - 1)

    def sign(self, attributes: Mapping[str, Any]) -> Sign:
        """The holder's last sign of life."""
        return len(self.workers) - 1, attributes.get(self.sign_key, (0, 0.0))[0]

    def takes(self, attributes: Mapping[str, Any]) -> tuple[TrialExecution, ...]:
        """As records; times by the clocks of the workers."""
        return tuple(
            TrialExecution(worker=worker.name, begun=begun, seen=attributes.get(_heartbeat_key(index), (0, begun))[1])
            for index, (worker, begun) in enumerate(zip(self.workers, self.begun, strict=True))
        )


def _heartbeat_key(take: int) -> str:
    return f"seen.{take}"


def next_heartbeat(sign: Sign) -> tuple[int, float]:
    """What a holder stores to be seen alive: its counter, and the time for people."""
    return sign[1] + 1, time.time()


class TrialLeaseMonitor:
    """Remembers since when, by this process's own clock, each trial's counter stands still."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[Sign, float]] = {}

    def still_for(self, number: int, sign: Sign) -> float:
        """Seconds for which a trial's sign of life has been the same, as far as this process has looked."""
        now = time.monotonic()
        known = self._since.get(number)
        if known is None or known[0] != sign:
            known = self._since[number] = (sign, now)
        return now - known[1]
