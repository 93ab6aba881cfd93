"""Tests comparisons that stay valid however often anyone looks, and when rows are added."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from ratchet.quality_gate import sequential_test
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan, PairedTestResult, compare
from ratchet.quality_gate.sequential_test import Hypothesis, SequentialUnits

PLAN = PairedTestPlan(confidence=0.95, power=0.8, discordance=0.1, resamples=1000, seed=0)
ALPHA = 1 - PLAN.confidence
MARGIN = 0.05


def draw(rng: np.random.Generator, n: int, difference: float, discordance: float = 0.1) -> PairedScores:
    """Draw right and wrong answers of two models with this true difference, in one addition."""
    won, lost = (discordance + difference) / 2, (discordance - difference) / 2
    kinds = rng.choice(4, size=n, p=[0.7, won, lost, 0.3 - won - lost])
    new, old = np.array([1.0, 1, 0, 0])[kinds], np.array([1.0, 0, 1, 0])[kinds]
    return PairedScores(new.tolist(), old.tolist(), "higher", planned=[n] * n, limit=1.0)


def first(pairs: PairedScores, n: int) -> PairedScores:
    """Return the first n samples."""
    return replace(
        pairs, new=pairs.new[:n], old=pairs.old[:n], groups=pairs.groups and pairs.groups[:n],
        planned=pairs.planned and pairs.planned[:n],
    )  # fmt: skip


@pytest.mark.parametrize(("bound", "effect"), [(-0.1, 0.1), (0.0, None), (0.2, None)])
def test_the_expected_capital_stays_one_if_the_hypothesis_is_just_true(bound: float, effect: float | None) -> None:
    """The sum over all sequences of seven changes, weighted by their probabilities, is exact."""
    probabilities = {1.0: (0.4 + bound) / 2, -1.0: (0.4 - bound) / 2, 0.0: 0.6}
    total = 0.0
    for changes in itertools.product(probabilities, repeat=7):
        units = SequentialUnits(np.array(changes), np.ones(7), np.full(7, 7.0), limit=1.0)
        bets = sequential_test.compute_bets(units, Hypothesis(bound, effect, 2.5))
        capital = math.exp(sequential_test.compute_log_capital(units, bets, bound)[-1])
        total += capital * math.prod(probabilities[change] for change in changes)
    assert total == pytest.approx(1, abs=1e-12)


def test_a_model_that_is_worse_by_the_margin_rarely_passes_at_any_look() -> None:
    """The p-value is the smallest of all looks so far, so one comparison with 600 rows is 600 looks."""
    rng = np.random.default_rng(1)
    wrong = sum(compare(draw(rng, 600, -MARGIN), -MARGIN, PLAN).p < ALPHA for _ in range(500))
    assert wrong / 500 <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 500)


def test_an_equal_model_passes_with_a_moderate_number_of_rows() -> None:
    rng = np.random.default_rng(2)
    results = [compare(draw(rng, 400, 0.0), -MARGIN, PLAN) for _ in range(200)]
    passed = sum(result.low > -MARGIN for result in results)
    assert sum(result.high < 0 for result in results) / 200 <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 200)
    assert passed / 200 >= 0.8  # a fixed test needs 248 rows for this power, times 1.4 to 1.5


@pytest.mark.parametrize("kind", ["answers", "losses", "scores without a limit"])
def test_added_rows_leave_the_earlier_evidence_as_it_is(kind: str) -> None:
    pairs = draw(np.random.default_rng(3), 300, 0.03)
    if kind != "answers":
        rng = np.random.default_rng(3)
        old = rng.lognormal(0, 1, 300)
        old[299] = 40.0
        new = old - 0.03 + rng.normal(0, 0.1, 300)
        pairs = PairedScores(new.tolist(), old.tolist(), "lower" if kind == "losses" else "higher")
    grown = replace(pairs, planned=[200] * 200 + [300] * 100)
    for bound in (-MARGIN, 0.0):
        before, after = compare(first(grown, 200), bound, PLAN), compare(grown, bound, PLAN)
        assert after.p <= before.p
        assert after.low >= before.low - 1e-9
        assert after.high <= before.high + 1e-9
        assert (before.n, after.n, after.is_sequential, after.method) == (200, 300, True, "betting")


def comparisons() -> list[PairedScores]:
    """Return comparisons of each kind of scores."""
    rng = np.random.default_rng(4)
    losses = rng.lognormal(0, 1, 300)
    nats = rng.normal(25, 4, 300)
    tokens = rng.integers(5, 20, 300).astype(float)
    groups = [f"g{k // 3}" for k in range(300)]
    return [
        draw(rng, 300, 0.02),
        replace(draw(rng, 300, 0.02), groups=groups),
        PairedScores((losses - rng.normal(0.05, 0.1, 300)).tolist(), losses.tolist(), "lower", planned=[300] * 300),
        PairedScores(
            (nats - tokens * 0.03).tolist(), nats.tolist(), "lower", "perplexity", tokens.tolist(), planned=[300] * 300
        ),
        PairedScores(rng.random(300).tolist(), rng.random(300).tolist(), "higher", planned=[300] * 300, limit=1.0),
    ]  # fmt: skip


@pytest.mark.parametrize("pairs", comparisons(), ids=["answers", "groups", "losses", "perplexity", "shares"])
def test_bounds_and_p_value_agree(pairs: PairedScores) -> None:
    result = compare(pairs, -MARGIN, PLAN)
    assert result.low <= result.difference <= result.high
    limit = (result.low + result.difference) / 2 if result.low > -MARGIN else -MARGIN
    for bound in (-MARGIN, limit):
        again = compare(pairs, bound, PLAN)
        assert (again.low > bound) == (again.p < ALPHA)


def test_a_smaller_share_of_alpha_needs_stronger_evidence_for_promotion_only() -> None:
    pairs = draw(np.random.default_rng(5), 500, 0.04)
    whole, rest = compare(pairs, -MARGIN, PLAN), compare(pairs, -MARGIN, replace(PLAN, alpha_share=0.01))
    assert rest.low < whole.low - 0.005
    assert (rest.high, rest.p) == (whole.high, whole.p)


def test_losses_decide_nothing_with_few_rows_however_clear_they_are() -> None:
    def clear(n: int) -> PairedTestResult:
        noise = np.random.default_rng(6).normal(0, 0.01, n)
        return compare(PairedScores((1 + noise).tolist(), [2.0] * n, "lower", planned=[n] * n), -MARGIN, PLAN)

    assert (clear(119).n, clear(119).min_units) == (119, 120)
    assert (clear(120).min_units, clear(120).low > -MARGIN) == (120, True)


def test_rows_that_are_added_to_a_group_of_earlier_rows_are_left_out() -> None:
    pairs = draw(np.random.default_rng(7), 100, 0.0)
    groups = [f"g{k % 60}" for k in range(90)] + [None] * 10
    grown = replace(pairs, groups=groups, planned=[60] * 60 + [100] * 40)
    kept = [*range(60), *range(90, 100)]
    expected = PairedScores(
        [pairs.new[k] for k in kept], [pairs.old[k] for k in kept], "higher", groups=[groups[k] for k in kept],
        planned=[60] * 60 + [100] * 10, limit=1.0,
    )  # fmt: skip
    assert compare(grown, -MARGIN, PLAN) == compare(expected, -MARGIN, PLAN)
    assert compare(grown, -MARGIN, PLAN).n == 70
