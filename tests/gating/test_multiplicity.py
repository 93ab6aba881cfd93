"""Holm's adjustment, beside statsmodels'."""

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from ratchet.gating.multiplicity import holm


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_adjusted_values_are_those_of_statsmodels(count: int, seed: int) -> None:
    p = (np.random.default_rng(seed).random(count) ** 3).tolist()
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1].tolist())


def test_equal_values_stay_equal_and_nothing_exceeds_one() -> None:
    assert holm([0.04, 0.04, 0.9, 0.8]) == pytest.approx([0.16, 0.16, 1.0, 1.0])


def test_nothing_claimed_is_nothing_adjusted() -> None:
    assert holm([]) == []


def test_one_of_many_claims_is_false_as_rarely_as_promised() -> None:
    """Two claims are true, eight are not."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(2000):
        p = [1e-6, 1e-5, *rng.random(8)]
        false += min(holm(p)[2:]) < 0.05
    assert 0.03 < false / 2000 < 0.065


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_what_is_no_p_value_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="no p-value"):
        holm([0.5, p])
