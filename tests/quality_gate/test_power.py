"""Tests required numbers of samples against published values."""

import pytest
from scipy import stats

from ratchet.quality_gate.statistics import detectable_difference, required_pairs


@pytest.mark.parametrize(
    ("margin", "share", "samples"),
    [(0.01, 0.1, 6183), (0.02, 0.1, 1546), (0.03, 0.1, 687), (0.05, 0.1, 248), (0.02, 0.2, 3092), (0.05, 0.2, 495)],
)
def test_required_samples_to_show_that_an_equal_model_is_not_worse(margin: float, share: float, samples: int) -> None:
    """The number of samples is (1.6449 + 0.8416)^2 share / margin^2."""
    assert required_pairs(margin, share, 0.95, 0.8) == samples


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("margin", [0.01, 0.05, 0.3, 1.0, 2.0])
def test_the_needed_samples_detect_a_difference_and_one_less_does_not(share: float, margin: float) -> None:
    needed = required_pairs(margin, share, 0.95, 0.8)
    assert detectable_difference(needed, share, 0.95, 0.8) <= margin * (1 + 1e-9)
    if needed > 1:
        assert detectable_difference(needed - 1, share, 0.95, 0.8) > margin


def test_models_that_never_differ_take_samples_all_the_same() -> None:
    assert detectable_difference(10, 0.0, 0.95, 0.8) == pytest.approx(0.2129, abs=1e-4)
    assert required_pairs(0.05, 0.0, 0.95, 0.8) == 52


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"discordance": 1.5}, {"discordance": -0.1}, {"confidence": 1.0}, {"power": 0.0}]
)
def test_an_invalid_plan_is_refused(wrong: dict[str, float]) -> None:
    plan = {"n": 10, "discordance": 0.1, "confidence": 0.95, "power": 0.8} | wrong
    with pytest.raises(ValueError, match=r"expected n > 0|not between 0 and 1"):
        detectable_difference(**plan)


@pytest.mark.parametrize("margin", [0.0, -0.1, float("nan")])
def test_no_number_of_samples_shows_no_difference(margin: float) -> None:
    with pytest.raises(ValueError, match="no number of samples"):
        required_pairs(margin, 0.1, 0.95, 0.8)


def test_more_power_and_more_confidence_take_more_samples() -> None:
    usual = required_pairs(0.02, 0.1, 0.95, 0.8)
    assert usual < required_pairs(0.02, 0.1, 0.95, 0.9) < required_pairs(0.02, 0.1, 0.99, 0.9)
    assert required_pairs(0.02, 0.1, 0.95, 0.5) == pytest.approx(stats.norm.ppf(0.95) ** 2 * 0.1 / 0.02**2, abs=1)
