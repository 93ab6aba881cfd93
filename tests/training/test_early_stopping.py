"""Tests of the rules that stop a training before its last step."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from ratchet.config.train import EarlyStoppingSettings
from ratchet.training.early_stopping import has_improved, should_stop
from ratchet.training.train_state import TrainState
from ratchet.training.trend import mann_kendall
from small_loop import SMALL, loop_of


def state_of(losses: list[float], accuracies: list[float] | None = None) -> TrainState:
    return TrainState(
        validation_loss={10 * (k + 1): loss for k, loss in enumerate(losses)},
        token_accuracy={10 * (k + 1): accuracy for k, accuracy in enumerate(accuracies or [])},
    )


def test_the_trend_statistic_is_that_of_kendall() -> None:
    """Without ties, Z follows from Kendall's tau with the positions: S = tau n (n - 1) / 2, minus 1 for continuity."""
    for seed in range(20):
        values = np.random.default_rng(seed).normal(size=12) + 0.1 * seed * np.arange(12)
        score = stats.kendalltau(np.arange(12), values).statistic * 66
        expected = (score - np.sign(score)) / np.sqrt(12 * 11 * 29 / 18)
        assert mann_kendall(values.tolist()) == pytest.approx(expected)
    assert mann_kendall([1.0, 1.0, 1.0, 1.0]) == 0.0
    # With ties: S = 5 of the 6 pairs, and the variance (4 * 3 * 13 - 2 * 1 * 9) / 18 = 7.67.
    assert mann_kendall([1.0, 2.0, 2.0, 3.0]) == pytest.approx(4 / np.sqrt(138 / 18))


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([4.0, 3.0, 2.0], False),  # fewer than the test needs
        ([4.0, 3.0, 2.0, 1.0], False),
        ([4.0, 3.0, 2.0, 2.1], True),
        ([9.0, 8.0, 1.0, 2.0, 3.0, 4.0], True),  # only the last four count
        ([9.0, 1.0, 4.0, 3.0, 2.0, 1.9], False),  # worse than the best, but improving
    ],
)
def test_a_plateau_is_a_row_of_validations_without_an_improving_trend(losses: list[float], stops: bool) -> None:
    assert should_stop(EarlyStoppingSettings(plateau_validations=4), state_of(losses)) == stops
    assert not should_stop(EarlyStoppingSettings(), state_of(losses))


def test_training_goes_on_while_one_of_several_metrics_improves() -> None:
    both = EarlyStoppingSettings(plateau_validations=4, metrics=("loss", "token_accuracy"))
    overfits = [1.0, 1.1, 1.2, 1.3]
    assert not should_stop(both, state_of(overfits, [0.1, 0.2, 0.3, 0.4]))
    assert should_stop(both, state_of(overfits, [0.1, 0.2, 0.3, 0.3]))
    state = TrainState(best_step=10, validation_loss={10: 1.0}, token_accuracy={10: 0.5})
    assert has_improved(both, state, 1.2, 0.6)
    assert has_improved(both, state, 0.9, 0.5)
    assert not has_improved(both, state, 1.0, 0.5)
    loss_only = EarlyStoppingSettings(patience=1)
    assert not has_improved(loss_only, state, 1.2, 0.6)


def test_a_training_stops_on_a_plateau_and_resumes_as_stopped(tmp_path: Path) -> None:
    stopping = EarlyStoppingSettings(plateau_validations=5, metrics=("loss", "token_accuracy"))
    # At this rate nothing is learned, so no trend can be found.
    train = SMALL.model_copy(update={"early_stopping": stopping, "learning_rate": 1e-9, "validate_every_steps": 2})
    loop = loop_of(tmp_path, train)
    state = loop.run()
    assert loop.end_reason == "early_stopped"
    assert state.step < loop.plan.steps
    assert state.token_accuracy.keys() == state.validation_loss.keys()
    assert all(0 <= share <= 1 for share in state.token_accuracy.values())
    again = loop_of(tmp_path, train)
    assert again.end_reason == "early_stopped"
    assert again.run() == state


def test_small_decreases_add_up_to_the_threshold() -> None:
    rules = EarlyStoppingSettings(patience=1, threshold=0.1)
    assert has_improved(rules, state_of([]), 5.0, 0.0)
    assert not has_improved(rules, state_of([1.0]), 0.95, 0.0)
    assert has_improved(rules, state_of([1.0, 0.95]), 0.85, 0.0)
    assert not has_improved(rules, state_of([1.0, 0.95, 0.85]), 0.8, 0.0)
