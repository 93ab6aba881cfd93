"""Tests packing: capacity, best-fit decreasing against a naive implementation, and speed with a million rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from ratchet.data.batches import PackingPlan, count_packs
from ratchet.errors import DataError, SettingsError

LEDGER = settings(max_examples=100, deadline=None, derandomize=True)


def pack_rows(lengths: ArrayLike, capacity: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the row indices of each pack of an epoch."""
    plan = PackingPlan(lengths, capacity)
    return [pack.tolist() for pack in np.split(plan.epoch(seed, epoch), plan.offsets[1:-1])] if len(plan) else []


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw row lengths, and a capacity that holds the longest row."""
    capacity = draw(st.sampled_from([1, 2, 7, 64, 1024, 32_768]))
    return draw(st.lists(st.integers(1, capacity), max_size=120)), capacity


def row_by_row(lengths: list[int], capacity: int) -> list[int]:
    """Return the tokens in each pack by the definition: longest row first, each into the fullest pack that fits it."""
    packs: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [k for k, tokens in enumerate(packs) if tokens + length <= capacity]
        if fitting:
            packs[max(fitting, key=lambda k: packs[k])] += length
        else:
            packs.append(length)
    return sorted(packs)


@LEDGER
@given(splits(), st.integers(0, 5), st.integers(0, 5))
def test_every_row_is_in_one_pack_and_no_pack_exceeds_its_capacity(
    split: tuple[list[int], int], seed: int, epoch: int
) -> None:
    lengths, capacity = split
    packs = pack_rows(lengths, capacity, seed, epoch)
    assert sorted(row for rows in packs for row in rows) == list(range(len(lengths)))
    assert all(1 <= sum(lengths[row] for row in rows) <= capacity for rows in packs)


@LEDGER
@given(splits())
def test_packs_equal_those_of_naive_best_fit_decreasing(split: tuple[list[int], int]) -> None:
    lengths, capacity = split
    packs = pack_rows(lengths, capacity, 0, 0)
    assert sorted(sum(lengths[row] for row in rows) for rows in packs) == row_by_row(lengths, capacity)
    assert count_packs(np.bincount(np.array(lengths, dtype=np.int64)), capacity) == len(packs)


@LEDGER
@given(splits(), st.randoms(use_true_random=False))
def test_the_fill_of_packs_depends_only_on_the_lengths(split: tuple[list[int], int], order: object) -> None:
    lengths, capacity = split
    shuffled = list(lengths)
    order.shuffle(shuffled)  # type: ignore[attr-defined]

    def fills(rows: list[int], seed: int, epoch: int) -> list[list[int]]:
        return sorted(sorted(rows[k] for k in found) for found in pack_rows(rows, capacity, seed, epoch))

    assert fills(lengths, 0, 0) == fills(shuffled, 0, 0) == fills(lengths, 3, 8)


def test_packs_are_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).lognormal(mean=5.15, sigma=0.42, size=3000).astype(int).clip(40, 800)
    assert pack_rows(lengths, 1024, 1, 2) == pack_rows(lengths.tolist(), 1024, 1, 2)
    drawn = [pack_rows(lengths, 1024, seed, epoch) for seed, epoch in [(1, 2), (2, 1), (1, 3), (0, 0)]]
    assert len({str(packs) for packs in drawn}) == 4
    together = [{frozenset(rows) for rows in packs if len(rows) > 1} for packs in drawn]
    assert len(together[0] & together[2]) < 0.1 * len(together[0])  # another epoch packs other rows together


def test_packs_are_stable_across_versions() -> None:
    """Golden values: with other packs, a resumed run would get other batches than before the interruption."""
    assert pack_rows([5, 3, 3, 2, 2, 2, 7, 1], 8, seed=1, epoch=0) == [[6], [0, 2], [1, 5, 4, 7], [3]]
    assert pack_rows([5, 3, 3, 2, 2, 2, 7, 1], 8, seed=1, epoch=1) == [[6], [0, 1], [2, 5, 3, 7], [4]]


@pytest.mark.parametrize("capacity", [1024, 32_768])
def test_a_million_rows_are_packed(capacity: int) -> None:
    """Packing takes about half a second; an algorithm of quadratic time would not finish."""
    lengths = np.random.default_rng(1).integers(1, capacity + 1, 1_000_000)
    plan = PackingPlan(lengths, capacity)
    rows = plan.epoch(0, 0)
    assert np.array_equal(np.sort(rows), np.arange(len(lengths)))
    fill = np.add.reduceat(lengths[rows], plan.offsets[:-1])
    assert fill.max() <= capacity
    assert fill.mean() > 0.99 * capacity


def test_rows_that_fit_no_pack_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"train\.pack_tokens: found 64, but row 2 has 65 tokens.*prepare\.max_tokens"
    ):
        pack_rows([3, 64, 65, 5], 64, 0, 0)
    with pytest.raises(DataError, match="row 1 has no tokens"):
        pack_rows([3, 0], 64, 0, 0)


def test_no_rows_give_no_packs() -> None:
    assert pack_rows([], 64, 0, 0) == []
