"""Simulates glibc's malloc for the allocations of a training on a CPU: resident memory exceeds live memory.

torch requests aligned blocks (posix_memalign). glibc 2.36 searches a block that is larger by alignment and a header,
and frees the remainder. A freed block is then too small for the next request of the same size, unless it merged with
its neighbours; and autograd's records (edges, versions, hooks: tens of bytes each, alive until the block's backward
pass) are placed in those remainders and keep neighbours apart. Freed blocks serve only smaller requests, the heap
grows, and its pages stay resident. On small models we measured twice the live memory.

The simulation covers best fit, merging of free blocks, trimming of the top, and large blocks that are mapped separately
above a dynamic threshold (malloc/malloc.c: _int_malloc, _int_memalign, _int_free, sysmalloc, systrim).
"""

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

PAGE = 4096
HEADER = 8
ALIGNMENT = 64
"""Alignment of torch's CPU allocator (c10/core/alignment.h, gAlignment)."""
MIN_BLOCK = 32
ALIGNMENT_SLACK = ALIGNMENT + MIN_BLOCK
"""Additional bytes that an aligned request asks for."""
TOP_PADDING = 128 * 1024
"""The heap grows by this beyond a request, and a trimmed top keeps it (DEFAULT_TOP_PAD)."""
MAX_MMAP_THRESHOLD = 32 * 2**20
"""Larger blocks are always mapped separately (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""
HELD_SHARE = 0.6
"""Share of the remainders next to blocks of a forward pass that autograd's records occupy. The only fitted number here:
fitted to the resident memory of trainings with and without checkpointing."""


@dataclass(frozen=True)
class AllocationEvent:
    """Allocation or release of a block, or release of a part of the autograd graph."""

    key: Hashable
    size_bytes: int
    """Size of a new block; negative: the block, or a part of the graph, is released."""
    graph: Hashable = None
    """Part of the graph that a block of a forward pass belongs to; with a negative size and no key: the released
    part."""


class MallocSimulator:
    """The main heap of a process. Addresses are offsets from its beginning.

    Args:
        threshold_bytes: initial size from which blocks are mapped separately.
    """

    def __init__(self, threshold_bytes: int) -> None:
        self.peak_bytes = 0
        """Highest resident memory since it was last set to 0."""
        self._threshold = min(max(TOP_PADDING, threshold_bytes), MAX_MMAP_THRESHOLD)
        self._top = self._end = self._touched = self._mapped = 0
        self._free: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._live: dict[Hashable, tuple[int | None, int]] = {}
        self._held_remainders: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self._held_fraction = 0.0

    @property
    def resident_bytes(self) -> int:
        """Touched heap pages that were not trimmed, plus mapped blocks."""
        return self._touched + self._mapped

    def replay(self, events: Iterable[AllocationEvent]) -> int:
        """Apply the events; return the highest resident memory meanwhile."""
        self.peak_bytes = self.resident_bytes
        live_keys: set[Hashable] = set()
        for event in events:
            if event.size_bytes > 0:
                self._allocate(event)
                live_keys.add(event.key)
            elif event.key is None:
                self._free_graph(event.graph)
            elif event.key in live_keys:
                live_keys.remove(event.key)
                self._release(event.key)
        for key in live_keys:  # memory that outlives a micro-batch is counted elsewhere
            self._release(key)
        for graph in list(self._held_remainders):
            self._free_graph(graph)
        return self.peak_bytes

    def _allocate(self, event: AllocationEvent) -> None:
        needed = max(MIN_BLOCK, -(-(event.size_bytes + HEADER) // 16) * 16)
        start, size = self._find_block(needed + ALIGNMENT_SLACK)
        if start is None:
            self._mapped += size
        else:
            size = self._split_remainder(start, needed, size, event.graph)
        self._live[event.key] = start, size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _split_remainder(self, start: int, needed: int, size: int, graph: Hashable) -> int:
        """Free the remainder of a block, or let the graph hold it; return the size that the block keeps."""
        self._held_fraction += HELD_SHARE if graph is not None else 0.0
        if graph is not None and self._held_fraction >= 1:
            self._held_fraction -= 1
            self._held_remainders[graph].append((start + needed, size - needed))
        else:
            self._free_block(start + needed, size - needed)
        return needed

    def _find_block(self, size: int) -> tuple[int | None, int]:
        """Return start and size of the smallest sufficient free block, or of new memory; start None: mapped
        separately."""
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index < len(self._by_size):
            block_size, start = self._by_size[index]
            self._remove_free(start)
            if block_size - size >= MIN_BLOCK:
                self._add_free(start + size, block_size - size)
                block_size = size
            return start, block_size
        if self._end - self._top < size + MIN_BLOCK:
            if size >= self._threshold:
                return None, _round_up_to_pages(size + HEADER)
            self._end += _round_up_to_pages(size + TOP_PADDING + MIN_BLOCK - (self._end - self._top))
        start, self._top = self._top, self._top + size
        self._touched = max(self._touched, self._top)
        return start, size

    def _release(self, key: Hashable) -> None:
        start, size = self._live.pop(key)
        if start is not None:
            self._free_block(start, size)
            return
        self._mapped -= size
        if self._threshold < size <= MAX_MMAP_THRESHOLD:
            self._threshold = size

    def _free_block(self, start: int, size: int) -> None:
        """Free a block and merge it with free neighbours; at the top, trim a large top."""
        if start in self._by_end:
            neighbour = self._by_end[start]
            size += self._remove_free(neighbour)
            start = neighbour
        if start + size in self._free:
            size += self._remove_free(start + size)
        if start + size != self._top:
            self._add_free(start, size)
            return
        self._top = start

    def _free_graph(self, graph: Hashable) -> None:
        for start, size in self._held_remainders.pop(graph, ()):
            self._free_block(start, size)

    def _remove_free(self, start: int) -> int:
        size = self._free.pop(start)
        del self._by_end[start + size]
        self._by_size.pop(bisect.bisect_left(self._by_size, (size, start)))
        return size

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._by_end[start + size] = start
        bisect.insort(self._by_size, (size, start))


def _round_up_to_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
