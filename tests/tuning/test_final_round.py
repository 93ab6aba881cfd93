"""Tests the plan of the final round: the choice of finalists, and the same rounds for each worker until a winner."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep
from ratchet.errors import DamagedFileError, DataError
from ratchet.quality_gate import evidence
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ObjectiveSet, ValidationJob, ValidationScores
from ratchet.storage.records.sweep import FinalRound, SweepObjective, TrainingCost, Trial
from ratchet.tuning import final_round
from ratchet.tuning.final_round import (
    FinalistTraining,
    TrainingBatch,
    plan_next_step,
    select_comparison_objective,
    values_for_seed,
    write_objective,
)

ROWS = 40
VALIDATION_LOSS = SweepObjective(metric="validation_loss", direction="minimize")


def trial(number: int, *objectives: float, **more: Any) -> Trial:
    fields: dict[str, Any] = {
        "values": {"train.rank": 2 + number}, "run_id": f"run{number}.0", "state": "complete",
        "cost": TrainingCost(trainable_parameters=1000 - number),
    }  # fmt: skip
    return Trial(number=number, objectives=objectives, **(fields | more))


def sweep(**finalists: Any) -> Sweep:
    objectives = finalists.pop("objectives", None)
    settings: dict[str, Any] = {"finalists": {"top_k": 3, "seeds": 3, "wilcoxon_p_threshold": 0.01, **finalists}}
    if objectives:
        settings |= {"objectives": [{"metric": one} for one in objectives], "pruner": {"kind": "none"}}
    return Sweep.model_validate(settings)


def held_out(run_id: str, nats: Sequence[float], rows: int = 0, **more: Any) -> ValidationScores:
    fields: dict[str, Any] = {
        "ids": tuple(f"{i:02}" for i in range(len(nats))), "groups": (None,) * len(nats),
        "tokens": (2,) * len(nats), "values": {"validation_loss": tuple(nats)},
    }  # fmt: skip
    return ValidationScores(
        request_digest="q", run_id=run_id, adapter_digest="a", data_digest="d", base_digest="b", rows=rows, metrics={},
        numerics={}, **(fields | more),
    )  # fmt: skip


class World:
    """Trains and scores all requested models; `levels` is the true loss of each trial, in nats per row."""

    def __init__(self, levels: Mapping[int, float], fails: Mapping[tuple[int, int], str] | None = None) -> None:
        self.levels, self.fails = levels, fails or {}
        self.hard = np.random.default_rng(0).normal(4, 1, ROWS)
        self.trainings: list[FinalistTraining] = []
        self.scores: dict[str, ValidationScores] = {}
        self.told: list[Any] = []

    def run(self, settings: Sweep, trials: Sequence[Trial], grouped: Collection[int] = ()) -> FinalRound:
        for _ in range(50):
            step = plan_next_step(settings, trials, self.trainings, self.scores, grouped)
            reordered = self.trainings[::-1], dict(reversed(self.scores.items()))
            assert plan_next_step(settings, trials, *reordered, grouped) == step
            if isinstance(step, FinalRound):
                return step
            self.told.append(step if isinstance(step, tuple) else step.run_ids)
            if isinstance(step, tuple):
                self.train(step)
            else:
                self.score(step)
        raise AssertionError("the plan has no end")

    def train(self, step: TrainingBatch) -> None:
        for number, index in step:
            assert (number, index) not in {(one.number, one.index) for one in self.trainings}
            self.trainings.append(
                FinalistTraining(number, index, f"run{number}.{index}", self.fails.get((number, index), ""))
            )

    def score(self, job: ValidationJob) -> None:
        for run_id in job.run_ids:
            assert run_id not in self.scores
            number, index = map(int, run_id.removeprefix("run").split("."))
            rng = np.random.default_rng([number, index])
            nats = self.hard + self.levels[number] + rng.normal(0, 0.2, ROWS) + rng.normal(0, 0.02)
            self.scores[run_id] = held_out(run_id, nats.tolist(), job.rows)


# --------------------------------------------------------------------------------------------------------------- rounds


def test_every_round_trains_one_seed_of_all_that_are_not_dropped() -> None:
    """Trial 2 is far behind from the start, the others are close."""
    world = World({0: 0.0, 1: 0.02, 2: 1.0})
    found = world.run(sweep(), [trial(0, 2.0), trial(1, 2.1), trial(2, 2.2), trial(3, 9.0)])
    assert world.told == [
        ("run0.0", "run1.0", "run2.0"),
        ((0, 1), (1, 1)),
        ("run0.1", "run1.1"),
        ((0, 2), (1, 2)),
        ("run0.2", "run1.2"),
    ]
    assert [one.number for one in found.finalists][2] == 2
    assert found.finalists[2].dropped.startswith("worse than trial")
    assert found.finalists[2].run_ids == ("run2.0",)
    assert [len(one.means) for one in found.finalists] == [3, 3, 1]
    assert found.winner == 1  # the cheaper of two indistinguishable trials
    assert found.rows == ROWS
    assert found.finalists[0].mean == pytest.approx(2.0, abs=0.3)  # nats per token; a row has two tokens


SIX_RUNS = tuple(f"run{number}.{index}" for number in range(3) for index in range(2))


@pytest.mark.parametrize(
    ("settings", "levels", "told", "means", "winner"),
    [
        ({}, {0: 0.0, 1: 1.0, 2: 1.0}, [("run0.0", "run1.0", "run2.0")], [1, 1, 1], 0),
        (
            {"wilcoxon_p_threshold": None, "seeds": 2},
            {0: 0.0, 1: 0.02, 2: 1.0},
            [((0, 1), (1, 1), (2, 1)), SIX_RUNS],
            [2, 2, 2],
            1,
        ),
        ({"seeds": 1, "top_k": 2}, {0: 0.0, 1: 0.01}, [("run0.0", "run1.0")], [1, 1], 1),
    ],
    ids=["a winner by far needs no further seeds", "without dropping all seeds are trained at once", "one seed"],
)
def test_no_more_is_trained_than_the_settings_need(
    settings: dict[str, Any], levels: dict[int, float], told: list[Any], means: list[int], winner: int
) -> None:
    world = World(levels)
    found = world.run(sweep(**settings), [trial(0, 2.0), trial(1, 2.1), trial(2, 2.2)])
    assert (world.told, found.winner) == (told, winner)
    assert [len(one.means) for one in found.finalists] == means
    assert ("one seed" in found.reason) is (max(means) == 1)
    assert all(one.better for one in found.comparisons) is (winner == 0)


def test_trainings_under_way_are_waited_for_and_only_what_is_missing_is_wanted() -> None:
    trials = [trial(0, 2.0), trial(1, 2.1)]
    world = World({0: 0.0, 1: 0.02})
    world.score(ValidationJob(run_ids=("run0.0", "run1.0"), metrics=("validation_loss",)))
    world.train(((1, 1),))
    assert plan_next_step(sweep(), trials, world.trainings, world.scores) == ((0, 1),)


def test_a_finalist_that_cannot_be_trained_again_does_not_win() -> None:
    world = World({0: 0.0, 1: 0.01, 2: 0.02}, {(0, 1): "it diverged"})
    found = world.run(sweep(), [trial(0, 2.0), trial(1, 2.1), trial(2, 2.2)])
    assert not any((0, 2) in told for told in world.told)
    [dropped] = [one for one in found.finalists if one.dropped]
    assert (dropped.number, dropped.dropped) == (0, "could not be trained with another seed: it diverged")
    assert found.winner == 2
    alone = World({0: 0.0, 1: 0.01}, {(0, 1): "it diverged"})
    assert alone.run(sweep(), [trial(0, 2.0), trial(1, 2.1)]).winner == 1


def test_trials_of_a_group_are_trained_alone_and_one_that_fails_then_is_replaced() -> None:
    trials = [trial(0, 2.0), trial(1, 2.1), trial(2, 2.2), trial(3, 2.3)]
    world = World({1: 0.0, 2: 0.5, 3: 9.0}, fails={(0, 0): "diverged"})
    found = world.run(sweep(top_k=2, seeds=1), trials, grouped=[0, 1])
    assert world.told == [((0, 0), (1, 0)), ("run1.0", "run2.0")]
    assert found.winner == 1
    alone = World({0: 0.0})
    assert alone.run(sweep(top_k=1), trials, grouped=[0]).winner == 0
    assert alone.told == [((0, 0),)]


def test_scores_of_another_sample_are_asked_for_again_and_of_other_rows_refused() -> None:
    trials = [trial(0, 2.0), trial(1, 2.1)]
    scores = {"run0.0": held_out("run0.0", [1.0, 2.0]), "run1.0": held_out("run1.0", [1.0, 2.0], ids=("x", "y"))}
    asked = ValidationJob(run_ids=("run0.0", "run1.0"), metrics=("validation_loss",), rows=7)
    assert plan_next_step(sweep(rows=7), trials, [], scores) == asked
    with pytest.raises(DataError, match=r"run1\.0 was scored on other validation rows"):
        plan_next_step(sweep(), trials, [], scores)


def test_rows_without_tokens_to_learn_count_nowhere() -> None:
    some = {
        f"run{number}.0": held_out(f"run{number}.0", [4.0 + number, 0.0, 6.0], tokens=(2, 0, 3)) for number in range(2)
    }
    found = plan_next_step(sweep(seeds=1), [trial(0, 2.0), trial(1, 2.1)], [], some)
    assert isinstance(found, FinalRound)
    assert (found.rows, [one.mean for one in found.finalists]) == (2, [2.0, 2.2])


@pytest.mark.parametrize("top", [0, 1])
def test_without_a_comparison_the_best_trial_is_named(top: int) -> None:
    found = plan_next_step(sweep(top_k=top), [trial(0, 2.0), trial(1, 1.5)], [], {})
    assert isinstance(found, FinalRound)
    assert (found.winner, found.comparisons, found.rows) == (1, (), 0)
    assert found.finalists[0].means == (1.5,)
    assert f"top_k is {top}" in found.reason


def test_an_only_trial_wins_and_no_trial_is_an_error() -> None:
    others = [trial(1, state="failed"), trial(2, state="pruned"), trial(3, state="infeasible", run_id=None)]
    found = plan_next_step(sweep(), [trial(0, 2.0), *others], [], {})
    assert isinstance(found, FinalRound)
    assert (found.winner, "it is the only one" in found.reason) == (0, True)
    with pytest.raises(DataError, match="none of the 3 trials"):
        plan_next_step(sweep(), others, [], {})


@pytest.mark.parametrize(
    ("first", "metric", "direction"),
    [
        ("accuracy", "accuracy", "maximize"),
        ("token_f1", "token_f1", "maximize"),
        ("train_seconds", "validation_loss", "minimize"),
        ("validation_loss", "validation_loss", "minimize"),
    ],
)
def test_finalists_are_compared_by_the_first_objective_where_rows_have_it(
    first: str, metric: str, direction: str
) -> None:
    asked, objective = select_comparison_objective(sweep(objectives=[first, "memory_bytes"]))
    assert (asked, objective) == (metric, SweepObjective.model_validate({"metric": metric, "direction": direction}))
    wanted = plan_next_step(sweep(objectives=[first, "memory_bytes"]), [trial(0, 0.5, 3), trial(1, 0.4, 2)], [], {})
    if first not in {"accuracy", "token_f1"}:  # otherwise each trial is better by one of the objectives
        assert isinstance(wanted, FinalRound)  # trial 1 is better by both, so it alone is on the front
    else:
        assert wanted == ValidationJob(run_ids=("run0.0", "run1.0"), metrics=(asked,))


def test_the_seed_of_an_index_is_so_many_further() -> None:
    settings: Settings = params_file.apply_changes(Settings(), {"train.seed": 7})
    one = trial(0, 1.0)
    assert values_for_seed(settings, one, 0) == one.values
    assert values_for_seed(settings, one, 2) == {"train.rank": 2, "train.seed": 9}
    searched = trial(0, 1.0, values={"train.seed": 100})
    assert values_for_seed(settings, searched, 1) == {"train.seed": 101}


# ---------------------------------------------------------------------------------------------------------- finalists


def test_the_best_are_ranked_by_the_direction_each_training_once() -> None:
    trials = [
        trial(0, 3.0),
        trial(1, 1.0),
        trial(3, 2.0, run_id="run1.0"),  # another trial with the run of trial 1
        trial(4, state="pruned", run_id="run5.0"),
        trial(5, 2.5, continues=4),
        trial(6, float("nan")),
        trial(7, state="running"),
        trial(8, 1.0),
    ]
    assert [one.number for one in final_round.best_trials(reversed(trials), [VALIDATION_LOSS], 3)] == [1, 8, 5]
    up = SweepObjective(metric="accuracy", direction="maximize")
    assert [one.number for one in final_round.best_trials(trials, [up], 2)] == [0, 5]
    assert final_round.leader_numbers(trials, [up]) == (0,)
    assert final_round.leader_numbers([], [up]) == ()


def test_only_the_front_of_several_objectives_counts() -> None:
    objectives = [VALIDATION_LOSS, SweepObjective(metric="accuracy", direction="maximize")]
    trials = [trial(0, 1.0, 0.5), trial(1, 2.0, 0.9), trial(2, 1.5, 0.4), trial(3, 0.5, 0.1), trial(4, 2.0, 0.9)]
    assert final_round.leader_numbers(trials, objectives) == (0, 1, 3, 4)
    assert [one.number for one in final_round.best_trials(trials, objectives, 3)] == [3, 0, 1]


# ---------------------------------------------------------------------------------------------- rows that select models


def test_rows_that_models_are_chosen_by_are_refused_to_the_gate(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    write_objective(layout, "sweep.2", ["b", "a"])
    path = layout.objectives / "sweep.2.json"
    before, place = path.read_bytes(), path.stat().st_ino
    write_objective(layout, "sweep.2", ["a", "b"])
    write_objective(layout, "sweep.2", ["a"])
    assert (path.read_bytes(), path.stat().st_ino) == (before, place)
    assert evidence.count_overlaps(layout, ["a", "z"], []) == {"sweep sweep.2": 1}
    write_objective(layout, "sweep.2", ["c"])  # the other rows stay, because models were selected by them
    assert ObjectiveSet.load(path).sample_ids == ("a", "b", "c")
    path.write_text("{}")
    with pytest.raises(DamagedFileError):
        write_objective(layout, "sweep.2", ["a"])
