"""Extends the events of a trace to those of a model with more decoder blocks of the same kind.

A trace of five periods of equal blocks contains all that a trace of eighty would: the events of an inner period repeat,
forward in the order of the blocks and backward in the opposite order.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from ratchet.models.memory.trace import AllocationEvent, Segment

MIN_PERIODS = 5
"""Number of periods that a traced model needs: two between the first and the last two, which differ from all others
because the last block is computed only at trained positions (chunked_loss.py)."""

_Name = tuple[Segment, int]
"""Name of a memory block, independent of other segments: the segment that allocates it, and its number there."""


def repeat_periods(
    events: Iterable[AllocationEvent], first: int, period: int, extra: int
) -> list[AllocationEvent] | None:  # fmt: skip
    """Return the events of a model with `extra` more periods; None if this cannot be said.

    It cannot be said if the second and the third period have different events, or if memory of them is released in a
    period that is not next to them.

    Args:
        events: events of a model with at least MIN_PERIODS periods.
        first: number of decoder blocks before the first period.
        period: number of decoder blocks in a period.
    """
    segments = _name_memory_blocks(events)
    if segments is None:
        return None
    periods = _Periods(first, period)
    for segment, named in segments.items():
        number = periods.number_of(segment)
        if number == 1 and segments.get(_shift_segment(segment, period)) != _shift(named, period, first):
            return None
        near = range(number - 1, number + 2) if number is not None else range(0)
        if any(owner in (1, 2) and owner not in near for owner in map(periods.number_of, _owners(named))):
            return None
    repeated: list[AllocationEvent] = []
    for segment, named in segments.items():
        direction, _, block = segment
        number = periods.number_of(segment)
        if number in (0, 1):
            repeated += named
            continue
        if number != 2:
            repeated += _shift(named, extra * period, first + 2 * period)
            continue
        is_forward = direction == "forward"
        copied = range(first + period, first + 2 * period)
        if block != (copied.start if is_forward else copied[-1]) + period:
            continue  # it was added together with the first of its period
        for copy in range(1, extra + 2) if is_forward else range(extra + 1, 0, -1):
            for source in copied if is_forward else reversed(copied):
                repeated += _shift(segments[direction, "block", source], copy * period, first)
    return repeated


@dataclass(frozen=True)
class _Periods:
    """Positions of the periods in a model."""

    first: int
    period: int

    def number_of(self, segment: Segment) -> int | None:
        """Return the number of the period that a segment belongs to; None for a segment outside of all periods."""
        _, position, block = segment
        return (block - self.first) // self.period if position == "block" and block >= self.first else None


def _name_memory_blocks(events: Iterable[AllocationEvent]) -> dict[Segment, list[AllocationEvent]] | None:
    """Return the events by segment, with names as keys; None if a segment was left and entered again."""
    segments: dict[Segment, list[AllocationEvent]] = {}
    counts: dict[Segment, int] = defaultdict(int)
    names: dict[Hashable, _Name] = {}
    last: Segment | None = None
    for event in events:
        if event.segment != last and event.segment in segments:
            return None
        last, key = event.segment, cast(Hashable, None)
        if event.size_bytes > 0:
            key = names[event.key] = event.segment, counts[event.segment]
            counts[event.segment] += 1
        elif event.key is not None and (key := names.pop(event.key, None)) is None:
            continue  # memory that existed before the trace
        segments.setdefault(event.segment, []).append(
            AllocationEvent(key, event.size_bytes, event.graph, event.segment)
        )
    return segments


def _owners(events: Iterable[AllocationEvent]) -> Iterator[Segment]:
    """Yield the segments that allocated the memory blocks of these events."""
    for event in events:
        if event.key is not None:
            yield cast(_Name, event.key)[0]


def _shift(events: Iterable[AllocationEvent], count: int, lowest: int) -> list[AllocationEvent]:
    """Return the events of decoder blocks that are `count` further back; numbers below `lowest` stay."""

    def shift(segment: Segment) -> Segment:
        return _shift_segment(segment, count) if segment[1] == "block" and segment[2] >= lowest else segment

    shifted = []
    for event in events:
        key, graph = event.key, event.graph
        if key is not None:
            owner, number = cast(_Name, key)
            key = shift(owner), number
        if graph is not None:
            graph = shift(("", *cast(tuple[str, int], graph)))[1:]
        shifted.append(AllocationEvent(key, event.size_bytes, graph, shift(event.segment)))
    return shifted


def _shift_segment(segment: Segment, count: int) -> Segment:
    direction, position, block = segment
    return direction, position, block + count
