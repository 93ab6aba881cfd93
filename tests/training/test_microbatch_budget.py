"""Tests of the micro-batch budget: it shrinks down to single rows, grows after good steps, and is the same after a
replay."""

from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.data.batches import split_micro_batches
from ratchet.training.microbatch_budget import GROW_AFTER_STEPS, MAX_WAIT_STEPS, MicrobatchBudget

LAWS = settings(max_examples=100, deadline=None, derandomize=True)
NO_LIMIT = 10**9


def after_good(budget: MicrobatchBudget, steps: int) -> MicrobatchBudget:
    for _ in range(steps):
        budget = budget.record_good_step()
    return budget


def limit(budget: MicrobatchBudget) -> int:
    return NO_LIMIT if budget.tokens is None else budget.tokens


@pytest.mark.parametrize(
    ("tokens", "failed", "repeated", "expected"),
    [
        (None, 1000, False, 800),  # a fifth less, as specified
        (None, 1001, False, 800),  # rounded down
        (800, 700, False, 560),
        (800, 700, True, 350),  # half of the failed size, because that is below the budget
        (600, 600, True, 300),
        (None, 600, True, 300),
        (100, 900, False, 100),  # a single long row does not raise the budget
        (100, 900, True, 50),
        (None, 2, False, 1),
        (None, 1, False, 1),
        (1, 1, True, 1),
    ],
)
def test_what_did_not_fit_is_made_smaller(tokens: int | None, failed: int, repeated: bool, expected: int) -> None:
    shrunk = MicrobatchBudget(tokens, good_steps=7).shrink(failed, repeated)
    assert shrunk == MicrobatchBudget(expected, failed_tokens=failed)


def test_a_micro_batch_without_tokens_cannot_fail() -> None:
    with pytest.raises(ValueError, match="failed_tokens: found 0; expected at least 1"):
        MicrobatchBudget().shrink(0, False)


@LAWS
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 3000),
    st.one_of(st.none(), st.integers(1, 5000)),
)
def test_failures_in_a_step_end_with_what_fits_or_with_single_rows(
    lengths: list[int], rows: int, fits: int, tokens: int | None
) -> None:
    budget, failures = MicrobatchBudget(tokens), 0
    while True:
        pieces = split_micro_batches(list(range(len(lengths))), lengths, rows, budget.tokens)
        sizes = [(len(piece), len(piece) * max(lengths[k] for k in piece)) for piece in pieces]
        failed = next((size for count, size in sizes if size > fits and count > 1), None)
        if failed is None:
            break
        before, budget, failures = budget, budget.shrink(failed, repeated=failures > 0), failures + 1
        assert limit(budget) < min(failed, limit(before) + 1)
        assert failures <= 16  # a batch has at most 40 x 300 tokens here, fewer than 2**14
    assert all(size <= fits or count == 1 for count, size in sizes)


def test_a_shrunk_budget_grows_by_a_quarter_record_good_steps() -> None:
    shrunk = MicrobatchBudget().shrink(8000, False).shrink(6400, True)
    assert shrunk.tokens == 3200
    waiting = after_good(shrunk, GROW_AFTER_STEPS - 1)
    assert waiting.tokens == 3200
    grown = waiting.record_good_step()
    assert (grown.tokens, grown.grown, grown.good_steps) == (4000, True, 0)
    assert after_good(grown, GROW_AFTER_STEPS - 1).tokens == 4000
    assert after_good(grown, GROW_AFTER_STEPS).tokens == 5000


def test_growth_to_what_failed_takes_the_limit_away() -> None:
    grown = after_good(MicrobatchBudget().shrink(1000, False), GROW_AFTER_STEPS)
    assert (grown.tokens, grown.grown) == (None, True)
    later = after_good(grown, 3)
    assert (later.tokens, later.good_steps) == (None, 3)


def test_each_failure_of_a_grown_budget_doubles_the_wait_up_to_a_longest() -> None:
    budget, waits = MicrobatchBudget(), []
    for _ in range(12):
        budget = budget.shrink(1000, False)
        assert budget.tokens == 800
        waits.append(budget.wait_steps)
        assert after_good(budget, budget.wait_steps - 1).tokens == 800
        budget = after_good(budget, budget.wait_steps)
        assert budget.tokens is None
    assert waits[:4] == [GROW_AFTER_STEPS, 2 * GROW_AFTER_STEPS, 4 * GROW_AFTER_STEPS, 8 * GROW_AFTER_STEPS]
    assert waits[-2:] == [MAX_WAIT_STEPS, MAX_WAIT_STEPS]


def test_further_failures_in_the_step_do_not_double_the_wait_again() -> None:
    grown = after_good(MicrobatchBudget().shrink(1000, False), GROW_AFTER_STEPS)
    assert grown.shrink(1000, False).shrink(800, True).wait_steps == 2 * GROW_AFTER_STEPS
    assert (
        after_good(MicrobatchBudget(1, failed_tokens=10), GROW_AFTER_STEPS).tokens == 2
    )  # the smallest budget grows too


# Each event is a good step (None), or a failure with a number of tokens and whether it is repeated.
events = st.lists(st.one_of(st.just(None), st.tuples(st.integers(1, 4000), st.booleans())), max_size=30)


@LAWS
@given(events, st.integers(0, 30), st.lists(st.integers(0, 120), min_size=30, max_size=30))
def test_growth_is_earned_and_a_replay_from_any_place_comes_to_the_same(
    happened: list[tuple[int, bool] | None], place: int, good: list[int]
) -> None:
    def follow(budget: MicrobatchBudget, start: int) -> list[MicrobatchBudget]:
        found = [budget]
        for event, steps in list(zip(happened, good, strict=False))[start:]:
            if event is not None:
                found.append(found[-1].shrink(*event))
            for _ in range(steps if event is None else 1):
                found.append(found[-1].record_good_step())
        return found

    budgets = follow(MicrobatchBudget(), 0)
    since = 0
    for before, after in pairwise(budgets):
        if limit(after) > limit(before):
            assert since + 1 >= before.wait_steps >= GROW_AFTER_STEPS
        if after.good_steps == 0:
            since = 0
        else:
            since += 1
            assert after.good_steps == since
    prefix = happened[: min(place, len(happened))]
    saved = MicrobatchBudget()
    for event, steps in zip(prefix, good, strict=False):
        saved = saved if event is None else saved.shrink(*event)
        saved = after_good(saved, steps if event is None else 1)
    assert follow(MicrobatchBudget(**asdict(saved)), len(prefix))[-1] == budgets[-1]
