"""Tests the malloc simulation: reuse of freed memory, and separate mapping."""

from ratchet.models.memory.trace import HELD_SHARE, AllocationEvent, MallocSimulator

MIB = 2**20
LARGE = 40 * MIB


def alive(keys: range, size: int, graph: object = None) -> list[AllocationEvent]:
    return [AllocationEvent(key, size, graph) for key in keys]  # type: ignore[arg-type]


def dead(keys: range) -> list[AllocationEvent]:
    return [AllocationEvent(key, -1) for key in keys]


def test_what_lives_is_resident() -> None:
    found = MallocSimulator(32 * MIB).replay(alive(range(10), MIB))
    assert 10 * MIB <= found < 10.1 * MIB


def test_freed_neighbours_grow_together_and_serve_again() -> None:
    heap = MallocSimulator(32 * MIB)
    events = [*alive(range(10), MIB), *dead(range(10)), *alive(range(10, 15), 2 * MIB - 4096)]
    assert heap.replay(events) < 10.1 * MIB


def test_what_a_graph_holds_keeps_freed_blocks_apart_until_it_dies() -> None:
    first, again = [*alive(range(100), MIB, "graph"), *dead(range(100))], alive(range(100, 200), MIB)
    apart = MallocSimulator(32 * MIB).replay([*first, *again])
    together = MallocSimulator(32 * MIB).replay([*first, AllocationEvent(None, -1, "graph"), *again])
    assert together < 101 * MIB
    assert apart > 100 * MIB * (1 + HELD_SHARE / 3)


def test_large_blocks_are_given_back_and_small_ones_stay() -> None:
    heap = MallocSimulator(MIB)
    heap.replay([*alive(range(3), LARGE), *dead(range(3))])
    assert heap.resident_bytes == 0
    heap.replay([*alive(range(3), MIB // 2), *dead(range(3))])
    assert 1.5 * MIB <= heap.resident_bytes < 1.6 * MIB


def test_the_threshold_follows_mapped_blocks_that_were_freed() -> None:
    heap = MallocSimulator(MIB)
    heap.replay([AllocationEvent(0, 2 * MIB), AllocationEvent(0, -1)])
    assert heap.resident_bytes == 0
    heap.replay([AllocationEvent(0, 2 * MIB - 4096), AllocationEvent(0, -1)])
    assert heap.resident_bytes > MIB


def test_what_outlives_the_events_is_let_go_at_their_end() -> None:
    heap = MallocSimulator(32 * MIB)
    one = [*alive(range(5), MIB), *dead(range(3))]
    assert heap.replay(one) == heap.replay(one)
