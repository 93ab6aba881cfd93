"""Tests paired binary tests: the formulas, and their exact error rates."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import xlogy
from statsmodels.stats.contingency_tables import mcnemar

from ratchet.quality_gate import statistics

Z = float(stats.norm.ppf(0.95))


def likeliest_score(better: int, worse: int, n: int, d: float) -> float:
    """Compute Tango's statistic for a hypothetical difference d, with a numerical maximum-likelihood estimate."""

    def unlikely(q: float) -> float:  # q: the share of pairs that became worse
        return -(xlogy(better, q + d) + xlogy(worse, q) + xlogy(n - better - worse, 1 - 2 * q - d))

    ends = (max(0.0, -d), (1 - d) / 2)
    q = optimize.minimize_scalar(unlikely, bounds=ends, method="bounded", options={"xatol": 1e-10}).x
    return (better - worse - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))


@pytest.mark.parametrize(
    "counts", [(12, 5, 100), (10, 0, 10), (0, 1, 1), (0, 0, 100), (1, 1, 4), (60, 40, 1000), (0, 40, 40)]
)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.995])
def test_bounds_are_where_tangos_statistic_is_the_normal_quantile(
    counts: tuple[int, int, int], confidence: float
) -> None:
    z = float(stats.norm.ppf(confidence))
    for bound, expected in zip(statistics.tango_bounds(*counts, z), (z, -z), strict=True):
        if abs(bound) < 1.0:
            assert likeliest_score(*counts, bound) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("n", [1, 10, 250])
def test_no_discordant_pair_leaves_the_doubt_that_the_number_of_samples_leaves(n: int) -> None:
    low, high = statistics.tango_bounds(0, 0, n, Z)
    assert (low, high) == pytest.approx((-Z * Z / (n + Z * Z), Z * Z / (n + Z * Z)))


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (7, 7), (30, 18), (4, 11), (17, 0), (17, 9)])
def test_mid_p_is_the_exact_one_less_half_of_what_was_seen(better: int, worse: int) -> None:
    seen = float(stats.binom.pmf(better, better + worse, 0.5))
    exact = 1.0
    if better + worse:
        exact = stats.binomtest(better, better + worse, alternative="greater").pvalue
    assert statistics.mcnemar_mid_p(better, worse) == pytest.approx(exact - seen / 2)
    if better > worse:  # statsmodels' exact test is two-sided
        theirs = mcnemar([[5, better], [worse, 5]], exact=True).pvalue
        assert statistics.mcnemar_mid_p(better, worse) == pytest.approx(theirs / 2 - seen / 2)
    assert statistics.mcnemar_mid_p(better, worse) + statistics.mcnemar_mid_p(worse, better) == pytest.approx(1.0)


def test_the_score_test_at_nought_is_mcnemars() -> None:
    """The reference has no continuity correction."""
    theirs = mcnemar([[5, 31], [18, 5]], exact=False, correction=False)
    assert 2 * statistics.tango_p_value(31, 18, 300, 0.0) == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize("counts", [(12, 5, 100), (0, 0, 10), (2, 0, 400), (0, 7, 50)])
def test_a_bound_is_refuted_exactly_where_the_interval_ends(counts: tuple[int, int, int]) -> None:
    low, _ = statistics.tango_bounds(*counts, Z)
    assert statistics.tango_p_value(*counts, low) == pytest.approx(0.05)
    assert statistics.tango_p_value(*counts, low - 0.01) < 0.05 < statistics.tango_p_value(*counts, low + 0.01)


def test_shares_differ_by_one_at_most() -> None:
    assert statistics.tango_p_value(0, 10, 10, -2.0) == 0.0
    assert statistics.tango_p_value(10, 0, 10, 1.0) == 1.0
    assert statistics.tango_p_value(0, 10, 10, -1.0) == pytest.approx(0.5)


def tables(n: int, better: float, worse: float) -> list[tuple[float, int, int]]:
    """Return every outcome of relevant probability: probability, better, worse."""
    found = []
    for discordant in range(n + 1):
        p_discordant = stats.binom.pmf(discordant, n, better + worse)
        if p_discordant < 1e-5:
            continue
        p = p_discordant * stats.binom.pmf(np.arange(discordant + 1), discordant, better / (better + worse))
        found += [(float(p[wins]), wins, discordant - wins) for wins in range(discordant + 1) if p[wins] > 1e-6]
    return found


@pytest.mark.parametrize(
    ("n", "better", "worse"),
    [(100, 0.0, 0.02), (400, 0.0, 0.02), (100, 0.0, 0.05), (200, 0.0, 0.1), (100, 0.01, 0.03), (200, 0.02, 0.07)],
)
def test_a_model_that_is_worse_by_the_margin_passes_as_rarely_as_promised(n: int, better: float, worse: float) -> None:
    """The margin of the must_not_regress rule is worse - better."""
    outcomes = tables(n, better, worse)
    assert (
        sum(p for p, wins, losses in outcomes if statistics.tango_p_value(wins, losses, n, better - worse) < 0.05)
        < 0.06
    )
