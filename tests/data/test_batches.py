"""Batches: every row once an epoch, batch i from (rows, seed, i) alone, micro-batches that change nothing."""

import math
import random
from collections import Counter

import pytest

from ratchet.data.batches import BatchPlan, micro_batches


def stream(plan: BatchPlan) -> list[int]:
    return [row for step in range(plan.steps) for row in plan.batch(step)]


@pytest.mark.parametrize(
    ("rows", "batch_rows", "epochs"), [(10, 3, 1), (7, 7, 3), (7, 10, 4), (1, 4, 5), (100, 32, 3), (5, 1, 2)]
)
def test_every_row_comes_once_an_epoch(rows: int, batch_rows: int, epochs: int) -> None:
    found = stream(BatchPlan(rows, batch_rows, epochs, seed=0))
    assert len(found) == rows * epochs
    for epoch in range(epochs):
        assert sorted(found[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@pytest.mark.parametrize("epochs", [0.3, 1.5, 2.25])
def test_a_fraction_of_an_epoch_takes_that_share_of_the_rows(epochs: float) -> None:
    plan = BatchPlan(40, 6, epochs, seed=3)
    found = stream(plan)
    assert len(found) == round(40 * epochs)
    assert plan.steps == math.ceil(len(found) / 6)
    last = found[40 * int(epochs) :]
    assert len(set(last)) == len(last)


def test_a_fraction_too_small_for_a_row_still_gives_one() -> None:
    assert len(stream(BatchPlan(3, 2, 0.01, seed=0))) == 1


def test_all_batches_are_full_but_the_last() -> None:
    plan = BatchPlan(10, 4, 1.8, seed=0)
    assert [len(plan.batch(step)) for step in range(plan.steps)] == [4, 4, 4, 4, 2]
    even = BatchPlan(8, 4, 1, seed=0)
    assert [len(even.batch(step)) for step in range(even.steps)] == [4, 4]


def test_a_batch_is_a_function_of_seed_and_step_alone() -> None:
    fresh = [BatchPlan(50, 8, 3, seed=5).batch(step) for step in range(19)]
    plan = BatchPlan(50, 8, 3, seed=5)
    order = list(range(19)) * 2
    random.Random(0).shuffle(order)
    for step in order:  # any order, any number of times, as after restarts
        assert plan.batch(step) == fresh[step]


def test_more_epochs_change_no_batch_before() -> None:
    short, long = BatchPlan(50, 8, 2, seed=5), BatchPlan(50, 8, 9, seed=5)
    assert [short.batch(step) for step in range(12)] == [long.batch(step) for step in range(12)]


def test_another_batch_size_takes_the_same_rows_in_the_same_order() -> None:
    assert stream(BatchPlan(50, 8, 3, seed=5)) == stream(BatchPlan(50, 32, 3, seed=5))


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    found = stream(BatchPlan(50, 10, 3, seed=0))
    epochs = {tuple(found[k * 50 : (k + 1) * 50]) for k in range(3)}
    seeds = {tuple(stream(BatchPlan(50, 10, 1, seed=seed))) for seed in range(5)}
    assert len(epochs) == 3
    assert len(seeds) == 5
    assert tuple(range(50)) not in epochs | seeds


def test_orders_are_fair() -> None:
    firsts = Counter(BatchPlan(6, 1, 1, seed=seed).batch(0)[0] for seed in range(600))
    assert firsts.keys() == set(range(6))
    assert sum((n - 100) ** 2 / 100 for n in firsts.values()) < 25.7  # chi-squared, 5 degrees of freedom, p = 1e-4


def test_the_order_never_changes() -> None:
    """A golden value: another order would give a resumed run other batches than it began with."""
    plan = BatchPlan(10, 6, 2, seed=1)
    assert [plan.batch(0), plan.batch(1), plan.batch(3)] == [[8, 4, 7, 0, 1, 2], [5, 9, 6, 3, 7, 2], [9, 8]]


def test_rows_are_plain_numbers() -> None:
    assert all(type(row) is int for row in BatchPlan(10, 4, 1, seed=0).batch(0))


@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8, 100])
def test_micro_batches_hold_the_rows_of_the_batch_once_each(micro: int) -> None:
    rng = random.Random(micro)
    rows = rng.sample(range(1000), 8)
    lengths = [rng.randint(1, 5) for _ in rows]
    pieces = micro_batches(rows, lengths, micro)
    assert sorted(row for piece in pieces for row in piece) == sorted(rows)
    assert all(1 <= len(piece) <= micro for piece in pieces)
    assert len(pieces) == math.ceil(8 / micro)


def test_micro_batches_put_rows_of_like_length_together() -> None:
    pieces = micro_batches([10, 11, 12, 13, 14], [5, 90, 6, 91, 7], 2)
    assert [sorted(piece) for piece in pieces] == [[11, 13], [12, 14], [10]]


def test_micro_batches_of_the_same_rows_are_the_same() -> None:
    assert micro_batches([4, 2, 9], [7, 7, 7], 2) == micro_batches([4, 2, 9], [7, 7, 7], 2) == [[4, 2], [9]]


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert micro_batches([], [], 4) == []
