"""Wilson's bounds, beside scipy's and statsmodels'."""

import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from ratchet.gating.intervals import wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 1), (37, 50), (960, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_bounds_are_those_of_statsmodels_and_scipy(successes: int, n: int, confidence: float) -> None:
    """A two-sided interval at 2 confidence - 1 has these ends."""
    theirs = proportion_confint(successes, n, alpha=2 * (1 - confidence), method="wilson")
    assert wilson(successes, n, confidence) == pytest.approx(theirs, abs=1e-12)
    scipys = stats.binomtest(successes, n).proportion_ci(2 * confidence - 1, method="wilson")
    assert wilson(successes, n, confidence) == pytest.approx((scipys.low, scipys.high), abs=1e-12)


@pytest.mark.parametrize("n", [3, 10, 49, 1000])
def test_none_and_all_are_the_ends(n: int) -> None:
    assert wilson(0, n, 0.95)[0] == 0.0
    assert wilson(n, n, 0.95)[1] == 1.0


def test_fractions_of_a_success_count() -> None:
    whole, half = wilson(7, 10, 0.95), wilson(7.5, 10, 0.95)
    assert whole[0] < half[0] < wilson(8, 10, 0.95)[0]


@pytest.mark.parametrize(("n", "share"), [(30, 0.9), (100, 0.5), (200, 0.97)])
def test_a_floor_that_is_the_truth_is_held_as_rarely_as_promised(n: int, share: float) -> None:
    """The true share lies below the lower bound in 5 % of cases; counts are whole, so no method keeps it exactly."""
    wrong = sum(
        float(stats.binom.pmf(successes, n, share))
        for successes in range(n + 1)
        if wilson(successes, n, 0.95)[0] > share
    )
    assert wrong < 0.065


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 5), (float("nan"), 5)])
def test_what_is_no_share_is_refused(successes: float, n: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        wilson(successes, n, 0.95)


def test_what_is_no_confidence_is_refused() -> None:
    with pytest.raises(ValueError, match="not between 0 and 1"):
        wilson(1, 2, 1.0)
