"""What glibc's malloc makes of the blocks that a CPU's training allocates: resident memory is more than what lives.

torch asks for aligned blocks (posix_memalign). glibc 2.36 finds one by looking for a block that is larger by alignment
and a header, and gives the rest back. A freed block is then too small for the next request of the same size, unless it
grew together with its neighbours; and what torch notes of its graph (edges, versions, hooks: tens of bytes each, alive
until the block's backward pass) settles in those rests and keeps neighbours apart. Freed blocks serve smaller requests
only, the heap grows, and its pages stay resident. On small models we measured twice the memory that lived.

This is that allocator in outline: best fit, growing together, a top that is given back, large blocks mapped one by one
above a threshold that moves (malloc/malloc.c: _int_malloc, _int_memalign, _int_free, sysmalloc, systrim).
"""

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

PAGE = 4096
HEADER = 8
ALIGNMENT = 64
"""Of torch's CPU allocator (c10/core/alignment.h, gAlignment)."""
SMALLEST = 32
SPARE = ALIGNMENT + SMALLEST
"""Bytes that an aligned request asks for beyond what it needs."""
PADDING = 128 * 1024
"""By which the heap grows beyond a request, and that a trimmed top keeps (DEFAULT_TOP_PAD)."""
LARGEST_THRESHOLD = 32 * 2**20
"""Blocks above it are mapped in any case (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""
HELD = 0.6
"""Share of the rests beside blocks of a forward pass in which something of the graph settles. The one figure here that
was fitted: to resident memory of trainings with and without checkpointing, see docs/memory.md."""


@dataclass(frozen=True)
class AllocationEvent:
    """One thing that happens to blocks."""

    key: Hashable
    size_bytes: int
    """Of a block that comes to life; negative where it dies, or where a part of the graph does."""
    graph: Hashable = None
    """The part of the graph that a block of a forward pass belongs to; with a negative size and no key: which dies."""


class MallocSimulator:
    """The main heap of a process. Addresses are offsets from its beginning.

    Args:
        threshold_bytes: from which size on blocks are mapped one by one, to begin with.
    """

    def __init__(self, threshold_bytes: int) -> None:
        self.peak_bytes = 0
        """The most that was resident since it was last set to 0."""
        self._threshold = min(max(PADDING, threshold_bytes), LARGEST_THRESHOLD)
        self._top = self._end = self._touched = self._mapped = 0
        self._free: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._live: dict[Hashable, tuple[int | None, int]] = {}
        self._rests: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self._held = 0.0

    @property
    def resident_bytes(self) -> int:
        """Pages of the heap that were touched and not given back, and mapped blocks."""
        return self._touched + self._mapped

    def replay(self, events: Iterable[AllocationEvent]) -> int:
        """Let it all happen; returns the most that was resident meanwhile."""
        self.peak_bytes = self.resident_bytes
        alive: set[Hashable] = set()
        for event in events:
            if event.size_bytes > 0:
                self._allocate(event)
                alive.add(event.key)
            elif event.key is None:
                self._settle(event.graph)
            elif event.key in alive:
                alive.remove(event.key)
                self._release(event.key)
        for key in alive:  # what outlives a micro-batch is counted elsewhere
            self._release(key)
        for graph in list(self._rests):
            self._settle(graph)
        return self.peak_bytes

    def _allocate(self, event: AllocationEvent) -> None:
        needed = max(SMALLEST, -(-(event.size_bytes + HEADER) // 16) * 16)
        start, size = self._found(needed + SPARE)
        if start is None:
            self._mapped += size
        else:
            size = self._divided(start, needed, size, event.graph)
        self._live[event.key] = start, size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _divided(self, start: int, needed: int, size: int, graph: Hashable) -> int:
        """Give back the rest of a block, or let it be held by the graph; returns what the block has."""
        self._held += HELD if graph is not None else 0.0
        if graph is not None and self._held >= 1:
            self._held -= 1
            self._rests[graph].append((start + needed, size - needed))
        else:
            self._give(start + needed, size - needed)
        return needed

    def _found(self, size: int) -> tuple[int | None, int]:
        """The smallest free block that is large enough, else new memory; no start: mapped for itself."""
        place = bisect.bisect_left(self._by_size, (size, 0))
        if place < len(self._by_size):
            found, start = self._by_size[place]
            self._take(start)
            if found - size >= SMALLEST:
                self._put(start + size, found - size)
                found = size
            return start, found
        if self._end - self._top < size + SMALLEST:
            if size >= self._threshold:
                return None, _round_up_to_pages(size + HEADER)
            self._end += _round_up_to_pages(size + PADDING + SMALLEST - (self._end - self._top))
        start, self._top = self._top, self._top + size
        self._touched = max(self._touched, self._top)
        return start, size

    def _release(self, key: Hashable) -> None:
        start, size = self._live.pop(key)
        if start is not None:
            self._give(start, size)
            return
        self._mapped -= size
        if self._threshold < size <= LARGEST_THRESHOLD:
            self._threshold = size

    def _give(self, start: int, size: int) -> None:
        """A free block grows together with those beside it, and with the top, which is cut when it is large."""
        if start in self._by_end:
            before = self._by_end[start]
            size += self._take(before)
            start = before
        if start + size in self._free:
            size += self._take(start + size)
        if start + size != self._top:
            self._put(start, size)
            return
        self._top = start

    def _settle(self, graph: Hashable) -> None:
        for start, size in self._rests.pop(graph, ()):
            self._give(start, size)

    def _take(self, start: int) -> int:
        size = self._free.pop(start)
        del self._by_end[start + size]
        self._by_size.pop(bisect.bisect_left(self._by_size, (size, start)))
        return size

    def _put(self, start: int, size: int) -> None:
        self._free[start] = size
        self._by_end[start + size] = start
        bisect.insort(self._by_size, (size, start))


def _round_up_to_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
