"""Tests batches: every row occurs once per epoch, batch i is a pure function, and micro-batches lose no row."""

import math
import random
from collections import Counter
from itertools import zip_longest
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows, split_micro_batches
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DataError, SettingsError

Batching = Literal["shuffled", "by_length", "packed"]
KINDS: tuple[Batching, ...] = ("shuffled", "by_length", "packed")
LAWS = settings(max_examples=60, deadline=None, derandomize=True)


def plan_of(rows: int, batch_rows: int, epochs: float, seed: int) -> BatchPlan:
    """Return a shuffled plan of rows of equal length."""
    return BatchPlan([5] * rows, Train(batch_size=batch_rows, epochs=epochs, seed=seed))


def sequences(plan: BatchPlan) -> list[list[int]]:
    return [sequence for step in range(plan.steps) for sequence in plan.batch(step)]


def stream(plan: BatchPlan) -> list[int]:
    return [row for sequence in sequences(plan) for row in sequence]


@st.composite
def plans(draw: st.DrawFn, epochs: st.SearchStrategy[float]) -> tuple[list[int], Train]:
    """Draw row lengths and settings of any kind of batching."""
    train = Train(
        batching=draw(st.sampled_from(KINDS)), batch_size=draw(st.integers(1, 9)), epochs=draw(epochs),
        seed=draw(st.integers(0, 3)), pack_tokens=32,
    )  # fmt: skip
    return draw(st.lists(st.integers(1, 32), min_size=1, max_size=150)), train


@LAWS
@given(plans(st.integers(1, 4)))
def test_every_row_occurs_once_per_epoch_with_every_batching(case: tuple[list[int], Train]) -> None:
    lengths, train = case
    plan = BatchPlan(lengths, train)
    found = sequences(plan)
    assert len(found) == plan.sequences * train.epochs
    for epoch in range(int(train.epochs)):
        rows = [row for s in found[epoch * plan.sequences : (epoch + 1) * plan.sequences] for row in s]
        assert sorted(rows) == list(range(len(lengths)))
    sizes = [len(plan.batch(step)) for step in range(plan.steps)]
    assert set(sizes[:-1]) <= {train.batch_size}
    assert 1 <= sizes[-1] <= train.batch_size
    capacity = train.pack_tokens if train.batching == "packed" else 0
    assert all(len(s) == 1 or sum(lengths[row] for row in s) <= capacity for s in found)


@LAWS
@given(plans(st.floats(0.1, 3.5)), st.randoms(use_true_random=False))
def test_a_batch_is_a_function_of_the_settings_and_the_step(
    case: tuple[list[int], Train], order: random.Random
) -> None:
    """Batches are equal in any order, any number of times, from a fresh plan or a used one, as after restarts."""
    lengths, train = case
    walked = BatchPlan(lengths, train)
    batches = [walked.batch(step) for step in range(walked.steps)]
    steps = list(range(walked.steps)) * 2
    order.shuffle(steps)
    assert all(walked.batch(step) == batches[step] for step in steps)
    assert all(BatchPlan(lengths, train).batch(step) == batches[step] for step in steps[:3])


@LAWS
@given(plans(st.floats(0.1, 2)))
def test_more_epochs_do_not_change_earlier_full_batches(case: tuple[list[int], Train]) -> None:
    lengths, train = case
    short, long = BatchPlan(lengths, train), BatchPlan(lengths, train.model_copy(update={"epochs": 5}))
    full = short.total_sequences // train.batch_size
    assert [short.batch(step) for step in range(full)] == [long.batch(step) for step in range(full)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [0.3, 1.5, 2.25])
def test_a_fraction_of_an_epoch_takes_that_fraction_of_sequences(kind: Batching, epochs: float) -> None:
    lengths = [length % 13 + 1 for length in range(80)]
    plan = BatchPlan(lengths, Train(batching=kind, batch_size=6, epochs=epochs, seed=3, pack_tokens=26))
    found = sequences(plan)
    assert len(found) == round(plan.sequences * epochs)
    assert plan.steps == math.ceil(len(found) / 6)
    rows = [row for s in found[plan.sequences * int(epochs) :] for row in s]
    assert len(set(rows)) == len(rows)
    assert len(stream(plan_of(3, 2, 0.01, seed=0))) == 1  # at least one row


def test_batch_size_does_not_change_the_order_of_rows() -> None:
    assert stream(plan_of(50, 8, 3, seed=5)) == stream(plan_of(50, 32, 3, seed=5))


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_and_seed_has_a_different_order(kind: Batching) -> None:
    def order(seed: int) -> list[int]:
        lengths = [length % 7 + 1 for length in range(50)]
        return stream(BatchPlan(lengths, Train(batching=kind, batch_size=10, epochs=3, seed=seed, pack_tokens=14)))

    epochs = {tuple(order(0)[k * 50 : (k + 1) * 50]) for k in range(3)}
    seeds = {tuple(order(seed)[:50]) for seed in range(5)}
    assert len(epochs) == 3
    assert len(seeds) == 5
    assert tuple(range(50)) not in epochs | seeds


def test_orders_are_uniform() -> None:
    firsts = Counter(plan_of(6, 1, 1, seed=seed).batch(0)[0][0] for seed in range(600))
    assert firsts.keys() == set(range(6))
    assert sum((n - 100) ** 2 / 100 for n in firsts.values()) < 25.7  # chi-squared, 5 degrees of freedom, p = 1e-4


def test_the_order_of_rows_is_stable_across_versions() -> None:
    """Golden values: with another order, a resumed run would get other batches than before the interruption."""
    plan = plan_of(10, 6, 2, seed=1)
    found = [[row for (row,) in plan.batch(step)] for step in (0, 1, 3)]
    assert found == [[8, 4, 7, 0, 1, 2], [5, 9, 6, 3, 7, 2], [9, 8]]
    assert all(type(row) is int for row in stream(plan))
    lengths = [4, 9, 2, 7, 5, 1, 8, 3, 6, 10]
    by_length = BatchPlan(lengths, Train(batching="by_length", batch_size=4, epochs=2, seed=1))
    found = [[row for (row,) in by_length.batch(step)] for step in range(by_length.steps)]
    assert found == [[4, 8, 1, 9], [5, 2, 7, 0], [6, 3, 7, 2], [5, 0, 4, 8], [3, 6, 1, 9]]
    packed = BatchPlan(lengths, Train(batching="packed", pack_tokens=12, batch_size=3, epochs=2, seed=1))
    assert [packed.batch(step) for step in (0, 1)] == [[[8, 5], [9, 2], [1, 7]], [[6, 0], [3, 4], [1, 7]]]
    assert packed.steps == 4


def test_batches_by_length_have_similar_lengths_except_between_epochs() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.6, 1003).astype(int) + 1
    plan = BatchPlan(lengths, Train(batching="by_length", batch_size=16, epochs=3, seed=0))
    spread = [np.ptp(lengths[np.ravel(plan.batch(step))]) for step in range(plan.steps)]
    # Without the batches of the longest rows of each epoch, and those that span two epochs.
    others = np.sort(spread)[:-6]
    assert max(others) < 0.1 * np.ptp(lengths)
    assert np.median(spread) < 0.01 * np.ptp(lengths)
    rows = [np.mean(lengths[np.ravel(plan.batch(step))]) for step in range(62)]
    assert abs(np.corrcoef(range(62), rows)[0, 1]) < 0.4  # short and long batches are mixed


def test_by_length_and_packed_batching_reduce_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.15, 0.42, 3000).astype(int), 40, 800)

    def padded_share(kind: Batching) -> float:
        plan = BatchPlan(lengths, Train(batching=kind, batch_size=16, epochs=1))
        tokens = [[int(lengths[s].sum()) for s in plan.batch(step)] for step in range(plan.steps)]
        return 1 - sum(map(sum, tokens)) / sum(max(batch) * len(batch) for batch in tokens)

    assert padded_share("shuffled") > 0.4
    assert padded_share("by_length") < 0.03
    assert padded_share("packed") < 0.03


def test_a_multi_row_sequence_is_found() -> None:
    plan = BatchPlan([9, 4, 3, 9], Train(batching="packed", pack_tokens=9))
    assert sorted(plan.find_multi_row_sequence() or []) == [1, 2]
    assert BatchPlan([9, 8, 9], Train(batching="packed", pack_tokens=9)).find_multi_row_sequence() is None
    assert BatchPlan([4, 3], Train()).find_multi_row_sequence() is None


def test_a_row_longer_than_a_pack_is_refused_only_when_packing() -> None:
    with pytest.raises(SettingsError, match=r"train\.pack_tokens: found 9, but row 1 has 10 tokens"):
        BatchPlan([9, 10], Train(batching="packed", pack_tokens=9))
    assert BatchPlan([9, 10], Train(batching="by_length", pack_tokens=9)).steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_without_rows_is_refused(kind: Batching) -> None:
    with pytest.raises(DataError, match="no rows"):
        BatchPlan([], Train(batching=kind))


def test_micro_batches_group_rows_of_similar_length() -> None:
    pieces = split_micro_batches([10, 11, 12, 13, 14], [5, 90, 6, 91, 7], 2)
    assert [sorted(piece) for piece in pieces] == [[11, 13], [12, 14], [10]]
    assert split_micro_batches([4, 2, 9], [7, 7, 7], 2) == [[4, 2], [9]]  # rows of equal length keep their order
    assert split_micro_batches([], [], 4) == []


@LAWS
@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 12), st.integers(1, 700))
def test_micro_batches_respect_both_limits_and_lose_no_row(lengths: list[int], micro: int, max_tokens: int) -> None:
    rows = [1000 - k for k in range(len(lengths))]
    of_row = dict(zip(rows, lengths, strict=True))
    pieces = split_micro_batches(rows, lengths, micro, max_tokens)
    flat = [row for piece in pieces for row in piece]
    assert sorted(flat) == sorted(rows)
    # A budget changes where the rows are cut, not their order.
    assert flat == [row for piece in split_micro_batches(rows, lengths, micro) for row in piece]
    for piece, following in zip_longest(pieces, pieces[1:]):
        padded = len(piece) * max(of_row[row] for row in piece)
        assert len(piece) <= micro
        assert padded <= max_tokens or len(piece) == 1
        if following:  # no piece is smaller than necessary
            longest = max(of_row[row] for row in piece)
            assert len(piece) == micro or (len(piece) + 1) * longest > max_tokens


@LAWS
@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 12))
def test_a_sufficient_token_budget_does_not_change_micro_batches(lengths: list[int], micro: int) -> None:
    rows = list(range(len(lengths)))
    pieces = split_micro_batches(rows, lengths, micro)
    assert len(pieces) == math.ceil(len(rows) / micro)
    largest = micro * max(lengths)
    assert (
        split_micro_batches(rows, lengths, micro, largest) == split_micro_batches(rows, lengths, micro, None) == pieces
    )


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (12, [[1], [3, 0], [4, 2]]),
        (14, [[1], [3, 0], [4, 2]]),
        (20, [[1, 3], [0, 4, 2]]),
        (9, [[1], [3], [0], [4, 2]]),
        (1, [[1], [3], [0], [4], [2]]),
    ],
)
def test_micro_batches_with_a_token_budget(max_tokens: int, expected: list[list[int]]) -> None:
    """The rows have lengths 5, 10, 2, 6 and 4; the longest come first."""
    assert split_micro_batches([0, 1, 2, 3, 4], [5, 10, 2, 6, 4], 8, max_tokens) == expected


INPUT_IDS = [[5, 6, 7], [8], [9, 10, 11, 12]]
LABELS = [[5, IGNORE_INDEX, 7], [8], [IGNORE_INDEX, IGNORE_INDEX, 11, 12]]


def test_rows_of_a_chunked_arrow_table_equal_those_of_lists() -> None:
    listed = TokenRows.from_lists(INPUT_IDS, LABELS)
    ints = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", ints), ("labels", ints)])
    whole = pa.table({"input_ids": INPUT_IDS, "labels": LABELS}, schema=schema)
    pieces = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2)])
    for table in (whole, pieces):
        rows = TokenRows.from_arrow(table)
        assert len(rows) == 3
        assert rows.lengths.tolist() == [3, 1, 4]
        for name in ("input_ids", "labels", "offsets"):
            assert np.array_equal(getattr(rows, name), getattr(listed, name))
        assert rows.input_ids.dtype == rows.labels.dtype == np.int32
    assert len(TokenRows.from_arrow(whole.slice(1, 0))) == 0
    assert TokenRows.from_arrow(whole.slice(1, 2)).pad([[1]]).input_ids.tolist() == [INPUT_IDS[2]]


def test_rows_of_a_single_chunk_are_not_copied() -> None:
    """A million rows of 250 tokens take 2 GB, so they stay in the memory-mapped file."""
    values = pa.array(np.arange(1000, dtype=np.int32))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 1001, 10, dtype=np.int32)), values)
    rows = TokenRows.from_arrow(pa.table({"input_ids": lists, "labels": lists}))
    assert rows.input_ids.ctypes.data == values.buffers()[1].address


def test_a_row_with_fewer_labels_than_ids_is_refused() -> None:
    with pytest.raises(DataError, match="different numbers of token ids and labels"):
        TokenRows.from_lists([[1, 2], [3]], [[1], [2, 3]])


def test_token_counts_exclude_padding_and_first_tokens_are_not_trained() -> None:
    rows = TokenRows.from_lists(INPUT_IDS, LABELS)
    assert rows.count_tokens([0, 2]) == 7
    assert [rows.count_trained([row]) for row in range(3)] == [1, 0, 2]
    assert rows.count_trained([2, 0]) == 3


def test_positions_restart_in_each_row_of_a_pack_and_first_labels_are_masked() -> None:
    batch = TokenRows.from_lists(INPUT_IDS, LABELS).pad([[2, 0], [1]])
    assert batch.input_ids.tolist() == [[9, 10, 11, 12, 5, 6, 7], [8, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [
        [IGNORE_INDEX, IGNORE_INDEX, 11, 12, IGNORE_INDEX, IGNORE_INDEX, 7],
        [IGNORE_INDEX] * 7,
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0] * 7]


def test_a_pack_that_is_too_small_for_a_pair_names_the_limit_of_one_answer() -> None:
    train = Train(objective="dpo", batching="packed", pack_tokens=20)
    with pytest.raises(SettingsError, match=r"the pair of answers 1 has 22 tokens.*prepare\.max_tokens to 10 "):
        BatchPlan([5, 6, 11, 11], train)
