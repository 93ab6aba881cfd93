"""Tests that importances name the hyperparameter that matters, and none if too little is known."""

import math
from typing import Any

import pytest

from ratchet.config.sweep import SweepParameter
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.report import MIN_TRIALS, compute_importances
from study_histories import CONDITIONAL, DROPOUT, LOSS, RANK, RATE, TARGETS, drawn, space_of, trial


def history(space: Any, value: Any, trials: int = 40) -> list[Trial]:
    found = (drawn(space, number) for number in range(trials))
    return [trial(number, values, objectives=(value(values),)) for number, values in enumerate(found)]


def position(values: dict[str, Any]) -> float:
    """Return the position of the learning rate on its logarithmic scale, from 0 to 1."""
    return math.log(values["train.learning_rate"] / 1e-4) / math.log(100)


def test_the_knob_that_decides_explains_most_and_shares_sum_to_one() -> None:
    space = space_of(RANK, RATE, DROPOUT, TARGETS)
    found = compute_importances(
        space, LOSS, history(space, lambda values: position(values) + values["train.dropout"]), 0
    )
    assert next(iter(found)) == "train.learning_rate"
    assert found["train.learning_rate"] > 0.6 > found["train.dropout"] > found["train.target_modules"]
    assert sum(found.values()) == pytest.approx(1)
    # A tied value is not listed.
    assert set(found) == {"train.rank", "train.learning_rate", "train.dropout", "train.target_modules"}


def test_choices_count_as_such_and_ranges_on_their_own_scale() -> None:
    space = space_of(RATE, TARGETS)
    found = compute_importances(
        space, LOSS, history(space, lambda values: float(values["train.target_modules"] == "all")), 0
    )
    assert found["train.target_modules"] > 0.8
    # A quarter of the logarithmic range is below 3e-4, but only a fiftieth of the linear range.
    space = space_of(RATE, DROPOUT)
    value = lambda values: float(position(values) < 0.25) + 3 * values["train.dropout"]  # noqa: E731
    assert compute_importances(space, LOSS, history(space, value, 60), 0)["train.learning_rate"] > 0.55


def test_knobs_that_some_trials_lack_are_left_out() -> None:
    space = space_of(RATE, CONDITIONAL)
    assert set(compute_importances(space, LOSS, history(space, position), 0)) == {
        "train.learning_rate",
        "train.adapter",
    }


def test_the_same_history_and_seed_give_the_same() -> None:
    space = space_of(RANK, RATE)
    known = history(space, lambda values: position(values) + values["train.rank"] / 50)
    first = compute_importances(space, LOSS, known, 3)
    assert first == compute_importances(space, LOSS, known[::-1], 3)
    assert first != compute_importances(space, LOSS, known, 4)


def test_only_complete_trials_count() -> None:
    space = space_of(RATE, DROPOUT)
    known = history(space, position, 12)
    number = len(known)
    values = drawn(space, 99)
    noise = [
        trial(number, values, "pruned", curve={10: 50.0}),
        trial(number + 1, values, "infeasible"),
        trial(number + 3, values, "running"),
        trial(number + 4, values, objectives=(math.inf,)),
    ]
    assert compute_importances(space, LOSS, known + noise, 0) == compute_importances(space, LOSS, known, 0)


def test_where_pruning_has_left_few_complete_the_first_validation_counts() -> None:
    space = space_of(RATE, DROPOUT)
    known = [
        trial(number, values := drawn(space, number), "pruned", curve={32: position(values), 64: 0.5})
        for number in range(30)
    ]
    others = [trial(30 + k, drawn(space, 30 + k), "pruned", curve={48: 9.0}) for k in range(4)]
    found = compute_importances(space, LOSS, [*known, *others], 0)
    assert found["train.learning_rate"] > 0.8, "trials whose first validation came elsewhere were mixed in"
    accuracy = [SweepObjective(metric="accuracy", direction="maximize")]
    assert compute_importances(space, accuracy, known, 0) == {}


def test_the_first_of_several_objectives_counts() -> None:
    space = space_of(RATE, DROPOUT)
    both = (
        SweepObjective(metric="accuracy", direction="maximize"),
        SweepObjective(metric="memory_bytes", direction="minimize"),
    )
    known = [
        one.model_copy(update={"objectives": (*one.objectives, 1e9 * one.values["train.dropout"])})
        for one in history(space, position)
    ]
    assert compute_importances(space, both, known, 0)["train.learning_rate"] > 0.8


def test_nothing_is_said_where_too_little_is_known() -> None:
    space = space_of(RATE, DROPOUT)
    assert compute_importances(space, LOSS, [], 0) == {}
    assert compute_importances(space, LOSS, history(space, position, MIN_TRIALS - 1), 0) == {}
    assert compute_importances(space, LOSS, history(space, position, MIN_TRIALS), 0) != {}
    # All trials have the same result.
    assert compute_importances(space, LOSS, history(space, lambda values: 1.0), 0) == {}
    same = [trial(number, drawn(space, 1), objectives=(float(number),)) for number in range(9)]
    assert compute_importances(space, LOSS, same, 0) == {}
    wide = space_of(RATE, DROPOUT, RANK, TARGETS, {"train.warmup_ratio": SweepParameter(low=0.0, high=0.2)})
    assert compute_importances(wide, LOSS, history(wide, position, 9), 0) == {}
    assert compute_importances(wide, LOSS, history(wide, position, 10), 0) != {}
