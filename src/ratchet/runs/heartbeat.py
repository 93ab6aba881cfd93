"""A worker's sign of life: a page of memory that it shares with its supervisor. A full or dead disk has no part in it.

The page has two places, written in turn. A record is (number, time of the beat, deadline, phase) and its CRC-32: a
writer that is stopped in the middle of one leaves the other whole, and a reader takes the newer one whose sum is right.
Times are CLOCK_MONOTONIC: the same for all processes of a machine, never set back, and it stands still during suspend.
"""

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["load", "step", "validate", "save", "peers"]
PHASES: tuple[Phase, ...] = get_args(Phase)

SLOWER = 10
"""How many times longer than the longest unit so far one may take before it counts as a stall."""

_RECORD = struct.Struct("<QddQ")  # number, beat_s, deadline_s, phase
_SUM = struct.Struct("<Q")
_PLACE = _RECORD.size + _SUM.size
_READS = 1000


@dataclass(frozen=True)
class HeartbeatReading:
    """The last sign of life."""

    number: int
    """Counts the beats."""
    phase: Phase
    """What was begun with it."""
    age_s: float
    deadline_s: float
    """Age from which on the worker counts as dead; 0: never."""


class Heartbeat:
    """One page. The worker beats at the start of every unit of work; the unit ends at the next beat.

    Args:
        fd: of the shared memory, or None for a page that nobody else sees.
        stall_s: shortest deadline of a unit whose kind was seen before, in seconds; 0: none.
        stall_first_s: deadline of the first unit of each kind (compilation) and of every unit of loading; 0: none.
    """

    def __init__(self, fd: int | None, stall_s: float, stall_first_s: float) -> None:
        self._fd = fd
        self._stall_s, self._stall_first_s = stall_s, stall_first_s
        self._page = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self._mutex = threading.Lock()
        self._longest_s: dict[Phase, float] = {}
        self._number = 0
        self._begun: tuple[Phase, float] | None = None

    @classmethod
    def create(cls, stall_s: float, stall_first_s: float) -> "Heartbeat":
        """A page to pass on to a worker, with the deadline of its start running."""
        fd = os.memfd_create("ratchet-heartbeat")
        os.truncate(fd, mmap.PAGESIZE)
        made = cls(fd, stall_s, stall_first_s)
        made.beat("load")
        return made

    @classmethod
    def attach(cls, fd: int, stall_s: float, stall_first_s: float) -> "Heartbeat":
        """The supervisor's page, in a worker that inherited `fd`. Raises OSError or ValueError when it is none."""
        return cls(fd, stall_s, stall_first_s)

    @classmethod
    def private(cls) -> "Heartbeat":
        """A page that nobody watches: for work without a supervisor."""
        return cls(None, 0.0, 0.0)

    @classmethod
    def attach_at(cls, address: str, place: int, stall_s: float, stall_first_s: float) -> "Heartbeat":
        """The page of one of several workers, whose parent did not inherit them.

        Args:
            address: as `address_of` makes it.
            place: of the worker, from 0.
            stall_s: see the class.
            stall_first_s: see the class.
        """
        pid, descriptors = address.split(":")
        fd = os.open(f"/proc/{pid}/fd/{descriptors.split(',')[place]}", os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, stall_s, stall_first_s)

    @staticmethod
    def address_of(pages: Sequence["Heartbeat"]) -> str:
        """Where the pages of this process are found by others of this user: PID:FD,FD,..."""
        return f"{os.getpid()}:{','.join(str(page.fd) for page in pages)}"

    @property
    def fd(self) -> int:
        """The descriptor that a child must inherit. Raises RuntimeError for a page that is not shared."""
        if self._fd is None:
            raise RuntimeError("this heartbeat is not shared")
        return self._fd

    def beat(self, phase: Phase) -> None:
        """I live, and begin a unit of this phase. For the thread that does the work, or one that it waits for."""
        with self._mutex:
            now_s = time.monotonic()
            if self._begun is not None:
                before, since_s = self._begun
                self._longest_s[before] = max(self._longest_s.get(before, 0.0), now_s - since_s)
            self._begun = (phase, now_s)
            # A worker that attaches goes on counting where the supervisor's first record stands.
            self._number = max(self._number, self._newest()[0]) + 1
            record = _RECORD.pack(self._number, now_s, self._deadline_s(phase), PHASES.index(phase))
            start = self._number % 2 * _PLACE
            self._page[start : start + _PLACE] = record + _SUM.pack(zlib.crc32(record))

    def _deadline_s(self, phase: Phase) -> float:
        longest_s = self._longest_s.get(phase)
        if not self._stall_s:
            return 0.0
        if longest_s is None or phase == "load":  # units of loading are unlike each other: a check, then the weights
            return self._stall_first_s
        return max(self._stall_s, SLOWER * longest_s)

    def read(self) -> HeartbeatReading:
        """The last beat, whole, whatever the writer is doing now."""
        number, beat_s, deadline_s, phase = self._newest()
        return HeartbeatReading(number, PHASES[phase], max(0.0, time.monotonic() - beat_s), deadline_s)

    def _newest(self) -> tuple[int, float, float, int]:
        for _ in range(_READS):
            content = self._page[: 2 * _PLACE]
            found: list[tuple[int, float, float, int]] = []
            for start in (0, _PLACE):
                record = content[start : start + _RECORD.size]
                if _SUM.unpack_from(content, start + _RECORD.size)[0] == zlib.crc32(record):
                    found.append(_RECORD.unpack(record))
            if found:
                return max(found)
        return 0, time.monotonic(), 0.0, 0  # nobody has beaten yet

    def close(self) -> None:
        """Give the page back; the other side keeps its own."""
        self._page.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# Is the worker alive? Reads its heartbeat, and puts down one that has stalled, after it has told what it was doing.

STOP_EXTRA_S = 15.0
"""Beyond the grace: a worker that was asked to stop, and neither ends nor shows life for so long, is killed."""

BLIND_S = 2.0
"""When we have not looked for longer than this, we were stopped ourselves, and perhaps the worker with us."""

DUMP_WAIT_S = 2.0
DUMP_POLL_S = 0.05

_STATES = {
    "T": "it was stopped by a signal",
    "t": "a debugger holds it",
    "D": "it waits for a disk or a device",
    "Z": "it had ended",
}


class HangDetector:
    """Judges one worker's heartbeat.

    Args:
        heartbeat: of the worker.
        grace_s: `machine.grace_s`.
        clock: monotonic seconds.
    """

    def __init__(self, heartbeat: Heartbeat, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._clock = clock
        self._looked_s = clock()
        self._blind_s = 0.0
        self._number = 0

    def overdue(self, asked_s: float | None = None) -> str:
        """Why the worker has to be given up, or nothing.

        Time in which nobody looked is not held against it: a container that was paused stops both of us.

        Args:
            asked_s: when it was asked to stop, by the same clock.
        """
        now_s = self._clock()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        beat = self._heartbeat.read()
        if beat.number != self._number:
            self._number, self._blind_s = beat.number, 0.0
        if gap_s > BLIND_S:
            self._blind_s += min(gap_s, beat.age_s)
        silent_s = beat.age_s - self._blind_s
        silence = f"no sign of life for {silent_s:.3g} s in phase {beat.phase}"
        if beat.deadline_s and silent_s > beat.deadline_s:
            return f"{silence} (deadline {beat.deadline_s:.3g} s)"
        if asked_s is not None:
            waited_s = now_s - asked_s - self._blind_s
            if waited_s > self._grace_s + STOP_EXTRA_S and silent_s > STOP_EXTRA_S:
                return f"asked to stop {waited_s:.3g} s ago; {silence}"
        return ""


def dump_stacks_and_kill(worker: subprocess.Popen[bytes], stacks: Path, rank: int | None = None) -> str:
    """Let the worker write what its threads are doing (training/start.py: faulthandler on SIGUSR1), then kill it.

    faulthandler needs no interpreter lock, so a thread that holds it for ever is shown too. A stopped process takes
    signals only when it goes on, hence SIGCONT.

    Args:
        worker: to be killed; what it has started dies with it.
        stacks: where those of its threads are written.
        rank: the process that is to tell is its child of this LOCAL_RANK; None: the worker itself.

    Returns:
        What was found, such as `it was stopped by a signal; stacks in PATH`.
    """
    pid = worker.pid if rank is None else _find_child(worker.pid, rank)
    state = read_process_state(pid) if pid else ""
    size = _file_size(stacks)
    if state and state != "Z":
        os.kill(pid, signal.SIGUSR1)
        if state == "T":
            os.kill(pid, signal.SIGCONT)
    told = _wait_for_growth(worker, stacks, size)
    worker.kill()
    found = [_STATES[state]] if state in _STATES else []
    found.append(f"stacks in {stacks}" if told else "it wrote no stacks")
    return "; ".join(found)


def read_process_state(pid: int) -> str:
    """The letter for a process's state in /proc/PID/stat (proc_pid_stat(5)); nothing when it is gone."""
    try:
        # The name in brackets may hold anything, also brackets: the state follows the last one.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def _find_child(parent: int, rank: int) -> int:
    """The child with this LOCAL_RANK in its environment; 0 when there is none."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, children.read_text(encoding="ascii").split()):
            with contextlib.suppress(OSError):
                if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
    return 0


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_for_growth(worker: subprocess.Popen[bytes], path: Path, size: int) -> bool:
    """Whether the file grows within DUMP_WAIT_S; waits until it has stopped growing."""
    deadline_s = time.monotonic() + DUMP_WAIT_S
    seen = size
    while time.monotonic() < deadline_s and worker.poll() is None:
        time.sleep(DUMP_POLL_S)
        now = _file_size(path)
        if now > size and now == seen:
            break
        seen = now
    return _file_size(path) > size
