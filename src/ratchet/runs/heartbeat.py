"""Heartbeat of a worker: a page of memory that the worker shares with its supervisor, and the detection of stalls.

The page does not depend on a disk. It has two slots for records, which are written in turn. A record consists of
number, time of the beat, deadline, phase, and their CRC-32. A reader takes the newer record with a valid checksum. If
the writer stops in the middle of a record, the record in the other slot stays intact. Times are CLOCK_MONOTONIC, which
is equal for all processes of a machine, is never set back, and stops while the machine is suspended.
"""

import contextlib
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from ratchet.runs.worker_process import WorkerProcess

Phase = Literal["load", "step", "validate", "save", "peers"]
PHASES: tuple[Phase, ...] = get_args(Phase)

STALL_FACTOR = 10
"""A unit of work has stalled if it takes more than this many times as long as the longest unit of its phase so far, and
longer than `machine.stall_timeout_s`."""

STOP_EXTRA_S = 15.0
"""A worker that was asked to stop is killed when the grace period and this time have passed, if its last beat is also
older than this time."""

SUSPENDED_S = 2.0
"""If the last check is longer ago than this, the supervisor counts as suspended, and perhaps the worker was suspended
too."""

DUMP_WAIT_S = 2.0
DUMP_POLL_S = 0.05

_STATES = {
    psutil.STATUS_STOPPED: "it was stopped by a signal",
    psutil.STATUS_TRACING_STOP: "it is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a device",
    psutil.STATUS_ZOMBIE: "it had ended",
}

_RECORD = struct.Struct("<QddQ")  # number, beat_s, deadline_s, phase
_CHECKSUM = struct.Struct("<Q")
_SLOT_BYTES = _RECORD.size + _CHECKSUM.size
_READ_ATTEMPTS = 1000


@dataclass(frozen=True)
class HeartbeatReading:
    """The last heartbeat of a worker."""

    number: int
    phase: Phase
    """Phase of the unit of work that began with the beat."""
    age_s: float
    deadline_s: float
    """Age of the beat in seconds above which the worker counts as stalled; 0: never."""


class Heartbeat:
    """A heartbeat page. The worker beats at the start of every unit of work; the unit ends at the next beat.

    Args:
        fd: descriptor of the shared memory, such as a worker inherits; None for a private page. An invalid descriptor
            raises OSError or ValueError.
        stall_timeout_s: shortest deadline in seconds, for a unit of a phase that has occurred before; 0: no unit has
            a deadline.
        first_stall_timeout_s: deadline of the first unit of each phase (which may compile) and of every unit of
            loading; 0: none.
    """

    def __init__(self, fd: int | None, stall_timeout_s: float, first_stall_timeout_s: float) -> None:
        self._fd = fd
        self._stall_s, self._stall_first_s = stall_timeout_s, first_stall_timeout_s
        self._page = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self._mutex = threading.Lock()
        self._longest_s: dict[Phase, float] = {}
        self._number = 0
        self._begun: tuple[Phase, float] | None = None

    @classmethod
    def create(cls, stall_timeout_s: float, first_stall_timeout_s: float) -> "Heartbeat":
        """Create a page for a worker. The deadline of its start-up begins now."""
        fd = os.memfd_create("ratchet-heartbeat")
        os.truncate(fd, mmap.PAGESIZE)
        page = cls(fd, stall_timeout_s, first_stall_timeout_s)
        page.beat("load")
        return page

    @classmethod
    def attach_at(cls, address: str, index: int, stall_timeout_s: float, first_stall_timeout_s: float) -> "Heartbeat":
        """Open the page of worker `index` through /proc, by the `address_of` the pages of all workers, because their
        parent, the elastic agent, did not inherit the descriptors."""
        pid, descriptors = address.split(":")
        fd = os.open(f"/proc/{pid}/fd/{descriptors.split(',')[index]}", os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, stall_timeout_s, first_stall_timeout_s)

    @staticmethod
    def address_of(pages: Sequence["Heartbeat"]) -> str:
        """Return the address, PID:FD,FD,..., by which other processes of this user can open pages of this process."""
        return f"{os.getpid()}:{','.join(str(page.fd) for page in pages)}"

    @property
    def fd(self) -> int:
        """Descriptor that a child must inherit. Raises RuntimeError for a private page."""
        if self._fd is None:
            raise RuntimeError("this heartbeat is not shared")
        return self._fd

    def beat(self, phase: Phase) -> None:
        """Record the start of a unit of this phase. Call this method in the working thread, or in a thread that waits
        for that thread."""
        with self._mutex:
            now_s = time.monotonic()
            if self._begun is not None:
                last_phase, start_s = self._begun
                self._longest_s[last_phase] = max(self._longest_s.get(last_phase, 0.0), now_s - start_s)
            self._begun = (phase, now_s)
            # A worker that attaches continues the numbering of the supervisor's first record.
            self._number = max(self._number, self._newest()[0]) + 1
            record = _RECORD.pack(self._number, now_s, self._deadline_s(phase), PHASES.index(phase))
            start = self._number % 2 * _SLOT_BYTES
            self._page[start : start + _SLOT_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))

    def _deadline_s(self, phase: Phase) -> float:
        longest_s = self._longest_s.get(phase)
        if not self._stall_s:
            return 0.0
        if longest_s is None or phase == "load":  # units of loading differ in length: a check, then the weights
            return self._stall_first_s
        return max(self._stall_s, STALL_FACTOR * longest_s)

    def read(self) -> HeartbeatReading:
        """Read the last complete beat, even while the writer writes the next one."""
        number, beat_s, deadline_s, phase = self._newest()
        return HeartbeatReading(number, PHASES[phase], max(0.0, time.monotonic() - beat_s), deadline_s)

    def _newest(self) -> tuple[int, float, float, int]:
        for _ in range(_READ_ATTEMPTS):
            content = self._page[: 2 * _SLOT_BYTES]
            valid: list[tuple[int, float, float, int]] = []
            for start in (0, _SLOT_BYTES):
                record = content[start : start + _RECORD.size]
                if _CHECKSUM.unpack_from(content, start + _RECORD.size)[0] == zlib.crc32(record):
                    valid.append(_RECORD.unpack(record))
            if valid:
                return max(valid)
        return 0, time.monotonic(), 0.0, 0  # no beat yet

    def close(self) -> None:
        """Close the page in this process. The mapping of the other process stays valid."""
        self._page.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class HangDetector:
    """Detector of a stall of one worker, by its heartbeat."""

    def __init__(self, heartbeat: Heartbeat, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._clock = clock
        self._checked_s = clock()
        self._suspended_s = 0.0
        self._number = 0

    def overdue(self, requested_s: float | None = None) -> str:
        """Return why the worker must be killed; empty if it need not be.

        Periods without a call do not count, because a paused container stops both the supervisor and the worker.

        Args:
            requested_s: time of the request to stop, by the same clock; None: there was none.
        """
        now_s = self._clock()
        gap_s, self._checked_s = now_s - self._checked_s, now_s
        beat = self._heartbeat.read()
        if beat.number != self._number:
            self._number, self._suspended_s = beat.number, 0.0
        if gap_s > SUSPENDED_S:
            self._suspended_s += min(gap_s, beat.age_s)
        silent_s = beat.age_s - self._suspended_s
        silence = f"no heartbeat for {silent_s:.3g} s in phase {beat.phase}"
        if beat.deadline_s and silent_s > beat.deadline_s:
            return f"{silence} (deadline {beat.deadline_s:.3g} s)"
        if requested_s is not None:
            waited_s = now_s - requested_s - self._suspended_s
            if waited_s > self._grace_s + STOP_EXTRA_S and silent_s > STOP_EXTRA_S:
                return f"asked to stop {waited_s:.3g} s ago; {silence}"
        return ""


def dump_stacks_and_kill(worker: WorkerProcess, stacks: Path, rank: int | None = None) -> str:
    """Let the worker write the stacks of its threads (training/worker_main.py: faulthandler on SIGUSR1), then kill it.

    faulthandler does not need the interpreter lock, so it also shows a thread that never releases the lock. A stopped
    process handles signals only after SIGCONT.

    Args:
        worker: process to kill; its children die with it.
        stacks: file to which the worker writes the stacks.
        rank: LOCAL_RANK of the child that has stalled; None: the worker itself.

    Returns:
        State of the process and location of the stacks, such as `it was stopped by a signal; stacks in PATH`.
    """
    pid = worker.pid if rank is None else _find_child(worker.pid, rank)
    if pid == os.getpid():  # a training group that has not accepted the run yet
        pid = 0
    state = read_process_state(pid) if pid else ""
    size = _file_size(stacks)
    if state and state != psutil.STATUS_ZOMBIE:
        os.kill(pid, signal.SIGUSR1)
        if state == psutil.STATUS_STOPPED:
            os.kill(pid, signal.SIGCONT)
    deadline_s, last_size, current = time.monotonic() + (DUMP_WAIT_S if pid else 0.0), size, size
    while time.monotonic() < deadline_s and worker.poll() is None and (current == size or current != last_size):
        time.sleep(DUMP_POLL_S)  # until the file has grown and stopped growing
        last_size, current = current, _file_size(stacks)
    worker.kill()
    findings = [_STATES[state]] if state in _STATES else []
    findings.append(f"stacks in {stacks}" if _file_size(stacks) > size else "it wrote no stacks")
    return "; ".join(findings)


def read_process_state(pid: int) -> str:
    """Return psutil's name of the state of a process, such as `stopped`; empty if the process is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""


def _find_child(parent: int, rank: int) -> int:
    """Return the process id of the child with this LOCAL_RANK in its environment; 0 if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("LOCAL_RANK") == str(rank):
                    return int(child.pid)
    return 0


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
