"""Tests Holm's adjustment against statsmodels."""

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from ratchet.quality_gate.statistics import adjust_p_values


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_adjusted_values_are_those_of_statsmodels(count: int, seed: int) -> None:
    p = (np.random.default_rng(seed).random(count) ** 3).tolist()
    assert adjust_p_values(p) == pytest.approx(multipletests(p, method="holm")[1].tolist())


@pytest.mark.parametrize(("p", "adjusted"), [([0.04, 0.04, 0.9, 0.8], [0.16, 0.16, 1.0, 1.0]), ([], [])])
def test_equal_values_stay_equal_and_nothing_exceeds_one(p: list[float], adjusted: list[float]) -> None:
    assert adjust_p_values(p) == pytest.approx(adjusted)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_invalid_p_values_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"p-value .* is not between 0 and 1"):
        adjust_p_values([0.5, p])
