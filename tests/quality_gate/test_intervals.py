"""Tests Wilson's bounds against scipy and statsmodels."""

import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from ratchet.quality_gate.statistics import wilson_bounds


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 1), (37, 50), (960, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_bounds_are_those_of_statsmodels_and_scipy(successes: int, n: int, confidence: float) -> None:
    """The bounds at `confidence` are the ends of a two-sided interval at 2 confidence - 1."""
    theirs = proportion_confint(successes, n, alpha=2 * (1 - confidence), method="wilson")
    assert wilson_bounds(successes, n, confidence) == pytest.approx(theirs, abs=1e-12)
    scipys = stats.binomtest(successes, n).proportion_ci(2 * confidence - 1, method="wilson")
    assert wilson_bounds(successes, n, confidence) == pytest.approx((scipys.low, scipys.high), abs=1e-12)


@pytest.mark.parametrize("n", [3, 10, 49, 1000])
def test_no_and_only_successes_are_bounded_by_0_and_1(n: int) -> None:
    assert wilson_bounds(0, n, 0.95)[0] == 0.0
    assert wilson_bounds(n, n, 0.95)[1] == 1.0


def test_fractions_of_a_success_count() -> None:
    assert wilson_bounds(7, 10, 0.95)[0] < wilson_bounds(7.5, 10, 0.95)[0] < wilson_bounds(8, 10, 0.95)[0]


@pytest.mark.parametrize(
    ("successes", "n", "confidence", "says"),
    [
        (0, 0, 0.95, "expected 0 <= successes <= n"),
        (3, 2, 0.95, "expected 0 <= successes <= n"),
        (-1, 5, 0.95, "expected 0 <= successes <= n"),
        (float("nan"), 5, 0.95, "expected 0 <= successes <= n"),
        (1, 2, 1.0, "not between 0 and 1"),
    ],
)
def test_invalid_shares_and_confidences_are_refused(successes: float, n: int, confidence: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wilson_bounds(successes, n, confidence)
