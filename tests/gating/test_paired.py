"""Paired differences: the formulas, and whether their bounds hold as often as they say."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import xlogy

from ratchet.gating.paired import difference


def score(better: int, worse: int, n: int, d: float) -> float:
    """Tango's statistic of a supposed difference d, the nuisance share found by maximising the likelihood."""

    def unlikely(q: float) -> float:  # q: share of pairs that became worse
        return -(xlogy(better, q + d) + xlogy(worse, q) + xlogy(n - better - worse, 1 - 2 * q - d))

    ends = (max(0.0, -d), (1 - d) / 2)
    q = optimize.minimize_scalar(unlikely, bounds=ends, method="bounded", options={"xatol": 1e-10}).x
    return (better - worse - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))


def table(both: int, better: int, worse: int, neither: int) -> tuple[list[float], list[float]]:
    """Scores (new, old) with so many pairs of each kind."""
    pairs = [(1.0, 1.0)] * both + [(1.0, 0.0)] * better + [(0.0, 1.0)] * worse + [(0.0, 0.0)] * neither
    return [new for new, _ in pairs], [old for _, old in pairs]


@pytest.mark.parametrize(
    "cells", [(40, 12, 5, 43), (0, 10, 0, 0), (0, 0, 1, 0), (50, 0, 0, 50), (1, 1, 1, 1), (900, 60, 40, 0)]
)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.995])
def test_right_and_wrong_answers_are_compared_by_their_discordant_pairs(
    cells: tuple[int, int, int, int], confidence: float
) -> None:
    found = difference(*table(*cells), confidence)
    z = stats.norm.ppf(confidence)
    for bound, expected in ((found.low, z), (found.high, -z)):
        if abs(bound) < 1.0:
            assert score(cells[1], cells[2], sum(cells), bound) == pytest.approx(expected, rel=1e-3)


def test_losses_of_nought_and_one_count_like_scores() -> None:
    """A loss is handed over with its sign turned."""
    new, old = table(30, 9, 4, 20)
    scores = difference(new, old, 0.95)
    losses = difference([new_score - 1 for new_score in new], [old_score - 1 for old_score in old], 0.95)
    assert (losses.mean, losses.low, losses.high) == pytest.approx((scores.mean, scores.low, scores.high))


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [2, 3, 30, 500])
def test_other_scores_are_compared_by_students_t(n: int, confidence: float) -> None:
    rng = np.random.default_rng(n)
    old = rng.normal(2.0, 1.0, n)
    new = old + rng.normal(0.1, 0.5, n)
    found = difference(new.tolist(), old.tolist(), confidence)
    changes = new - old
    low = stats.t.interval(2 * confidence - 1, n - 1, loc=changes.mean(), scale=stats.sem(changes))
    assert (found.mean, found.low, found.high) == pytest.approx((changes.mean(), *low))


def test_the_bound_agrees_with_the_one_sided_t_test() -> None:
    rng = np.random.default_rng(1)
    old = rng.normal(size=60)
    new = old + rng.normal(0.2, 0.6, 60)
    p = stats.ttest_rel(new, old, alternative="greater").pvalue
    assert difference(new.tolist(), old.tolist(), 1 - p).low == pytest.approx(0.0, abs=1e-12)


def test_the_pairing_is_used() -> None:
    """The same change on samples of very different difficulty is seen at once; unpaired it would drown."""
    old = [float(difficulty) for difficulty in range(100)]
    new = [x + 0.1 + 0.01 * (k % 2) for k, x in enumerate(old)]
    found = difference(new, old, 0.95)
    assert 0.09 < found.low < found.mean < found.high < 0.12


def test_swapping_the_models_turns_the_difference_around() -> None:
    for new, old in (table(40, 12, 5, 43), ([1.5, 2.0, 0.1], [1.0, 2.5, 0.7])):
        there, back = difference(new, old, 0.95), difference(old, new, 0.95)
        assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low))


def test_more_confidence_makes_wider_bounds() -> None:
    for pair in (table(40, 12, 5, 43), ([1.5, 2.0, 0.1], [1.0, 2.5, 0.7])):
        wide, narrow = difference(*pair, 0.99), difference(*pair, 0.9)
        assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_identical_right_and_wrong_answers_still_leave_doubt() -> None:
    found = difference(*table(50, 0, 0, 50), 0.95)
    assert found.mean == 0.0
    assert found.low < 0.0 < found.high


def test_identical_losses_differ_by_exactly_nothing() -> None:
    scores = [0.5, 1.25, 3.0]
    found = difference(scores, scores, 0.95)
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_one_sample_says_nothing_about_losses_and_little_about_answers() -> None:
    one = difference([0.3], [0.7], 0.95)
    assert (one.low, one.high, one.n) == (-math.inf, math.inf, 1)
    answer = difference([1.0], [0.0], 0.95)
    assert answer.low < 0.0 < answer.high <= 1.0


@pytest.mark.parametrize(("new", "old"), [([], []), ([1.0], []), ([1.0], [1.0, 0.0])])
def test_what_cannot_be_paired_is_refused(new: list[float], old: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        difference(new, old, 0.95)


CONFIDENCE = 0.95


def misses(n: int, better: float, worse: float) -> tuple[float, float]:
    """How often the truth lies below the lower and above the upper bound: every possible table, by its probability."""
    below = above = 0.0
    for discordant in range(n + 1):
        p_discordant = stats.binom.pmf(discordant, n, better + worse)
        if p_discordant < 1e-5:
            continue
        for wins in range(discordant + 1):
            p = p_discordant * stats.binom.pmf(wins, discordant, better / (better + worse))
            if p > 1e-6:
                found = difference(*table(n - discordant, wins, discordant - wins, 0), CONFIDENCE)
                below += p * (found.low > better - worse)
                above += p * (found.high < better - worse)
    return below, above


@pytest.mark.parametrize(
    ("n", "better", "worse"),
    [(50, 0.05, 0.05), (200, 0.08, 0.08), (30, 0.02, 0.02), (100, 0.3, 0.3), (100, 0.05, 0.1), (100, 0.1, 0.05)],
)
def test_a_model_that_is_no_better_is_called_better_as_rarely_as_promised(n: int, better: float, worse: float) -> None:
    below, above = misses(n, better, worse)
    assert below < 0.06  # 0.05, but counts are whole numbers, and so no method keeps it exactly
    assert above < 0.06


@pytest.mark.parametrize(
    ("n", "better", "worse"),
    [(100, 0.0, 0.02), (400, 0.0, 0.02), (100, 0.0, 0.05), (200, 0.0, 0.1), (100, 0.01, 0.03), (200, 0.02, 0.07)],
)
def test_a_model_that_is_worse_by_the_margin_passes_as_rarely_as_promised(n: int, better: float, worse: float) -> None:
    """A must_not_regress rule with the margin worse - better: the chance to pass is that of low > better - worse."""
    below, _ = misses(n, better, worse)
    assert below < 0.06


def test_bounds_of_losses_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    below = above = 0
    rounds = 2000
    for _ in range(rounds):
        old = rng.normal(2.0, 1.0, 25)
        new = old + rng.normal(0.3, 0.7, 25)
        found = difference(new.tolist(), old.tolist(), CONFIDENCE)
        below += found.low > 0.3
        above += found.high < 0.3
    assert below / rounds == pytest.approx(1 - CONFIDENCE, abs=0.017)  # 3.5 sigma
    assert above / rounds == pytest.approx(1 - CONFIDENCE, abs=0.017)
