"""Tests the prediction of final losses from incomplete trainings, on curves whose ends are known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from ratchet.tuning.learning_curves import LearningCurve, LearningCurveModel, Prediction, log_expected_improvement

RUNGS = (0.1, 0.2, 0.4, 0.8, 1.0)


def final_loss(position: Sequence[float]) -> float:
    return 0.5 + 0.8 * (position[0] - 0.6) ** 2 + 0.1 * position[1]


def loss_at(position: Sequence[float], progress: float) -> float:
    """Return a loss that falls as a power of progress; good values at the end are slow at first."""
    speed = 0.4 + 0.4 * position[0]
    return final_loss(position) + 0.5 * (progress**-speed - 1)


def observed(position: Sequence[float], rungs: int) -> LearningCurve:
    progress = RUNGS[:rungs]
    return LearningCurve(tuple(position), progress, tuple(loss_at(position, share) for share in progress))


def some_curves(rungs: Sequence[int], seed: int = 0) -> list[LearningCurve]:
    source = np.random.default_rng(seed)
    return [observed(source.random(2), count) for count in rungs]


def test_the_end_of_a_training_is_predicted_from_its_first_half() -> None:
    curves = some_curves([5] * 4 + [3] * 8)
    prediction = LearningCurveModel(curves).predict_observed(range(4, 12))
    wanted = np.array([math.log(final_loss(curve.position)) for curve in curves[4:]])
    assert np.abs(prediction.mean - wanted).max() < 0.05
    last_losses = np.array([math.log(curve.losses[-1]) for curve in curves[4:]])
    assert np.abs(prediction.mean - wanted).mean() < np.abs(last_losses - wanted).mean() / 5
    assert (np.abs(prediction.mean - wanted) < 4 * prediction.std).all()


def test_values_without_a_training_are_predicted_from_others_and_with_less_confidence() -> None:
    curves = some_curves([5] * 6 + [2] * 10)
    model = LearningCurveModel(curves)
    points = np.random.default_rng(1).random((20, 2))
    prediction = model.predict_new(points)
    wanted = np.log([final_loss(point) for point in points])
    assert np.corrcoef(prediction.mean, wanted)[0, 1] > 0.9
    assert prediction.std.mean() > model.predict_observed(range(6)).std.mean()


def test_final_losses_are_not_predicted_too_high_before_a_training_is_complete() -> None:
    """In each of five histories, the mean error of the predicted logarithms is below 0.12; without the common slope, it
    is 0.2."""
    for seed in range(5):
        curves = some_curves([3] * 10, seed)
        prediction = LearningCurveModel(curves).predict_observed(range(10))
        wanted = np.log([final_loss(curve.position) for curve in curves])
        assert (prediction.mean - wanted).mean() < 0.12


def test_values_are_predicted_along_a_valley_that_lies_diagonally() -> None:
    """The best sum of both values is 1.1, as a larger rank needs a smaller learning rate. The trainings cover only the
    lower 60 % of the first value's range; the predictions are for the rest. Without the direction, the mean error is
    0.2."""

    def diagonal(position: Sequence[float], progress: float) -> float:
        end = 0.4 + 2 * (position[0] + position[1] - 1.1) ** 2 + 0.15 * (1 - position[0])
        return end + 0.5 * (progress**-0.4 - 1)

    points = np.array([(first, 1.1 - first) for first in np.linspace(0.65, 1, 8)])
    wanted = np.log([diagonal(point, 1.0) for point in points])
    errors = []
    for seed in range(5):
        source = np.random.default_rng(seed)
        positions = source.random((12, 2)) * [0.6, 1]
        rungs = [RUNGS[:5]] * 4 + [RUNGS[:2]] * 8
        curves = [
            LearningCurve(tuple(position), shares, tuple(diagonal(position, share) for share in shares))
            for position, shares in zip(positions, rungs, strict=True)
        ]
        errors.append(np.abs(LearningCurveModel(curves).predict_new(points).mean - wanted).mean())
    assert np.mean(errors) < 0.12


def test_losses_that_are_not_finite_or_enormous_count_as_bad_and_spoil_no_other_prediction() -> None:
    curves = some_curves([5] * 4 + [2] * 8)
    bad = [LearningCurve((0.98, 0.5), RUNGS[:2], (math.inf, math.nan)), LearningCurve((0.97, 0.1), (0.1,), (1e30,))]
    plain = LearningCurveModel(curves).predict_observed(range(12))
    both = LearningCurveModel([*curves, *bad])
    assert np.abs(both.predict_observed(range(4)).mean - plain.mean[:4]).max() < 0.02
    assert both.predict_observed([12, 13]).mean.min() > plain.mean.max()


def test_a_single_loss_is_enough() -> None:
    curves = [LearningCurve((0.5,), (0.1,), (2.0,))]
    prediction = LearningCurveModel(curves).predict_observed([0])
    assert np.isfinite(prediction.mean).all()
    assert prediction.std[0] > 0


def test_many_trainings_are_modelled_with_fewer_losses_each() -> None:
    curves = some_curves([5] * 200)
    prediction = LearningCurveModel(curves).predict_observed(range(200))
    wanted = np.log([final_loss(curve.position) for curve in curves])
    assert np.abs(prediction.mean - wanted).max() < 0.02


@pytest.mark.parametrize("z", [-5.0, -1.0, -0.99, 0.0, 2.0])
def test_expected_improvement_is_the_closed_form(z: float) -> None:
    found = log_expected_improvement(Prediction(np.array([1.0]), np.array([0.3])), 1.0 + 0.3 * z)
    wanted = 0.3 * (norm.pdf(z) + z * norm.cdf(z))
    assert found[0] == pytest.approx(math.log(wanted), rel=1e-4)


def test_expected_improvement_orders_hopeless_trainings_too() -> None:
    means = np.array([1.0, 10.0, 30.0, 60.0, 1e4, 1e6])
    found = log_expected_improvement(Prediction(means, np.full(6, 1.0)), 0.0)
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
