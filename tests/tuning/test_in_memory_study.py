"""Tests the history that samplers get: every training once, in the form that each of them understands."""

import math

import optuna

from ratchet.storage.records.sweep import SweepObjective
from ratchet.tuning.samplers import WORST, build_in_memory_study, group_by_lineage
from study_histories import LOSS, RANK, RATE, drawn, eventful, space_of, trial


def states(study: optuna.Study) -> list[str]:
    return [one.state.name for one in study.trials]


def test_the_estimator_gets_every_training_once() -> None:
    space = space_of(RANK, RATE)
    history = eventful(space)
    told = build_in_memory_study(space, LOSS, history, "tpe").trials
    # Trial 8 continued 3, trial 14 continues 5, and trial 7 failed, so 16 trials give 13 trainings.
    assert [one.params["train.learning_rate"] for one in told] == [
        history[number].values["train.learning_rate"] for number in (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 15)
    ]
    by_number = dict(zip((0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 15), told, strict=True))
    assert by_number[2].constraints == {"memory": 0.4}
    assert by_number[2].state.name == "PRUNED"
    assert by_number[3].state.name == "COMPLETE"
    assert by_number[3].values == list(history[8].objectives)
    assert by_number[5].state.name == "PRUNED"
    assert by_number[5].intermediate_values == {100: 2.5, 300: WORST}
    assert by_number[15].state.name == "RUNNING"
    assert "train.alpha" not in by_number[0].params  # a tied value is not a hyperparameter


def test_the_gaussian_process_gets_a_figure_for_every_finished_training() -> None:
    space = space_of(RANK, RATE)
    history = [
        trial(0, drawn(space, 0), objectives=(2.0,)),
        trial(1, drawn(space, 1), objectives=(3.0,)),
        trial(2, drawn(space, 2), "pruned", curve={100: 4.0, 200: 3.5}),
        trial(3, drawn(space, 3), "infeasible", constraints={"memory": 0.1, "diverged": -1.0}),
        trial(4, drawn(space, 4), "running"),
        trial(5, drawn(space, 5), objectives=(math.nan,)),
    ]
    told = build_in_memory_study(space, LOSS, history, "gp").trials
    assert [one.values for one in told] == [[2.0], [3.0], [3.5], [3.5], None, [3.5]]
    assert [next(iter(one.constraints.values()), None) for one in told] == [-1, -1, -1, 1, None, 1]
    unconstrained = build_in_memory_study(space, LOSS, history[:3], "gp").trials
    assert all(one.constraints == {} for one in unconstrained)
    accuracy = (SweepObjective(metric="accuracy", direction="maximize"),)
    assert [one.values for one in build_in_memory_study(space, accuracy, history[:3], "gp").trials] == [
        [-2.0],
        [-3.0],
        [-2.0],
    ]


def test_a_promoted_trial_that_failed_leaves_what_was_known_before() -> None:
    space = space_of(RATE)
    pruned = trial(0, drawn(space, 0), "pruned", curve={100: 2.0})
    failed = trial(1, pruned.values, "failed", continues=0, curve={100: 2.0, 300: 1.5})
    diverged = trial(1, pruned.values, "infeasible", continues=0, constraints={"diverged": 1.0})
    assert group_by_lineage([failed, pruned])[0].decisive is pruned
    assert group_by_lineage([failed, pruned])[0].curve == {100: 2.0, 300: 1.5}
    assert group_by_lineage([diverged, pruned])[0].decisive is diverged
    assert states(build_in_memory_study(space, LOSS, [pruned, failed], "tpe")) == ["PRUNED"]
