"""Tests Hall's transformation of a t-statistic."""

import numpy as np
import pytest
from scipy import stats

from ratchet.quality_gate.statistics import add_skewness, remove_skewness


@pytest.mark.parametrize("skewness", [-4.0, -0.3, 0.0, 1e-9, 2.0])
@pytest.mark.parametrize("n", [5, 80])
@pytest.mark.parametrize("t", [-30.0, -1.7, 0.0, 2.5])
def test_one_turns_the_other_around(t: float, skewness: float, n: int) -> None:
    assert remove_skewness(add_skewness(t, skewness, n), skewness, n) == pytest.approx(t, abs=1e-6)


def test_mirrored_samples_have_mirrored_statistics() -> None:
    assert add_skewness(-1.7, -2.0, 30) == pytest.approx(-add_skewness(1.7, 2.0, 30))


def test_larger_statistics_stay_larger() -> None:
    values = [remove_skewness(t, -3.0, 10) for t in np.linspace(-50, 50, 500).tolist()]
    assert values == sorted(values)


def test_a_t_statistic_of_skewed_samples_becomes_one_that_is_not() -> None:
    """For exponential samples, about 5 % exceed each quantile afterwards; before, 12 % and 1 % do."""
    rng, n = np.random.default_rng(0), 20
    drawn = rng.exponential(size=(4000, n))
    before = (drawn.mean(axis=1) - 1) / (drawn.std(axis=1, ddof=1) / np.sqrt(n))
    after = [remove_skewness(t, g, n) for t, g in zip(before.tolist(), stats.skew(drawn, axis=1).tolist(), strict=True)]
    z = stats.t.ppf(0.95, n - 1)
    assert (before < -z).mean() > 0.1
    assert (np.asarray(after) < -z).mean() < 0.085
    assert 0.025 < (np.asarray(after) > z).mean() < 0.065
