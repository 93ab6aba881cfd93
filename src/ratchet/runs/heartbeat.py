"""A worker's sign of life: a page of memory that it shares with its supervisor. A full or dead disk has no part in it.

The page has two places, written in turn. A record is (number, time of the beat, deadline, phase) and its CRC-32: a
writer that is stopped in the middle of one leaves the other whole, and a reader takes the newer one whose sum is right.
Times are CLOCK_MONOTONIC: the same for all processes of a machine, never set back, and it stands still during suspend.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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
class Beat:
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

    def read(self) -> Beat:
        """The last beat, whole, whatever the writer is doing now."""
        number, beat_s, deadline_s, phase = self._newest()
        return Beat(number, PHASES[phase], max(0.0, time.monotonic() - beat_s), deadline_s)

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
