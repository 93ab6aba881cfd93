"""Decides when training stops before the last step, as pure functions of its state."""

import math

from ratchet.config.train import EarlyStoppingSettings
from ratchet.training.train_state import TrainState
from ratchet.training.trend import mann_kendall

PLATEAU_Z = 1.645
"""A metric improves if the statistic of Mann and Kendall is above this: the quantile of the normal distribution for p =
0.05, one-sided. A perfectly steady improvement over four validations has 1.70."""


def has_improved(rules: EarlyStoppingSettings, state: TrainState, loss: float, token_accuracy: float) -> bool:
    """Return whether any metric of a new validation is better than in all validations of the state.

    The loss must be below the loss of the last improvement by more than the threshold, so small decreases add up.
    """
    reference = math.inf
    for step in sorted(state.validation_loss):
        if state.validation_loss[step] < reference - rules.threshold:
            reference = state.validation_loss[step]
    is_better = {
        "loss": loss < reference - rules.threshold,
        "token_accuracy": token_accuracy > max(state.token_accuracy.values(), default=-1.0),
    }
    return any(is_better[metric] for metric in rules.metrics)


def should_stop(rules: EarlyStoppingSettings, state: TrainState) -> bool:
    """Return whether `patience` is exhausted, or no metric has improved over the last `plateau_validations`."""
    if rules.patience and state.bad_validations >= rules.patience:
        return True
    count = rules.plateau_validations
    if count is None or len(state.validation_loss) < count:
        return False
    improvements = {
        "loss": [-state.validation_loss[step] for step in sorted(state.validation_loss)],
        "token_accuracy": [state.token_accuracy[step] for step in sorted(state.token_accuracy)],
    }
    return all(mann_kendall(improvements[metric][-count:]) <= PLATEAU_Z for metric in rules.metrics)
