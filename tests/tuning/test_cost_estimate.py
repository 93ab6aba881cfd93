"""Tests the estimate of a sweep's cost before it starts."""

from dataclasses import replace
from pathlib import Path

import pytest

import journaled
import tiny_project
import tiny_sweep
from ratchet.config.sweep import FinalistSettings, ObjectiveSettings, PrunerSettings, SamplerSettings, SweepParameter
from ratchet.runs.directory import RunDirectory, RunSpec
from ratchet.storage.records.data import DatasetCard
from ratchet.training.run_spec import build_run_spec
from ratchet.tuning.cost_estimate import SweepEstimate, estimate_sweep
from ratchet.tuning.search_space import SearchSpace


def test_tokens_are_between_those_of_the_first_rung_and_those_of_complete_trainings() -> None:
    estimate = SweepEstimate(
        trials=20, complete_trainings=3, training_tokens=1000, first_pruning=0.1, tokens_per_s=10.0, workers=2
    )  # fmt: skip
    assert (estimate.least_tokens, estimate.most_tokens) == (3000 + 1700, 20_000)
    assert estimate.format() == (
        "20 trials; a complete training has 1,000 answer tokens, the sweep needs 4,700 to 20,000; at best 3 min "
        "55 s to 16 min 40 s, at the speed of the last complete run"
    )


def test_without_pruning_and_without_a_run_there_is_one_number_and_no_time() -> None:
    estimate = SweepEstimate(
        trials=4, complete_trainings=3, training_tokens=1000, first_pruning=1.0, tokens_per_s=None, workers=1
    )  # fmt: skip
    assert estimate.format() == (
        "4 trials; a complete training has 1,000 answer tokens, the sweep needs 4,000; the time left is shown "
        "while the sweep runs: no complete run with this base was trained alone and is long enough for an estimate"
    )


def test_the_time_of_trials_together_is_not_known(tmp_path: Path) -> None:
    settings = tiny_sweep.settings(concurrent_trials=4)
    layout = tiny_project.prepared(tmp_path / "project", settings)
    alone, space = build_run_spec(layout, settings), SearchSpace.from_settings(settings)

    def estimate_after_a_run(spec: RunSpec, steps: int = 100) -> SweepEstimate:
        run = RunDirectory.open(layout.runs, spec)
        journaled.attempt(run, 1, 1, steps)
        journaled.seal_result(run.paths)
        run.close()
        return estimate_sweep(layout, settings, space, workers=2)

    assert estimate_after_a_run(alone.model_copy(update={"is_grouped": True})).tokens_per_s is None
    short = alone.model_copy(update={"train": alone.train.model_copy(update={"seed": 9})})
    assert estimate_after_a_run(short, steps=10).tokens_per_s is None
    text = estimate_after_a_run(alone).format()
    assert "for one trial at a time on each worker" in text
    assert text.endswith("how much faster 4 at a time (sweep.concurrent_trials) are is not known")


@pytest.mark.parametrize("epochs", [None, SweepParameter(low=1, high=4), SweepParameter(choices=(1, 4))])
def test_a_project_is_estimated_by_its_longest_training(tmp_path: Path, epochs: SweepParameter | None) -> None:
    settings = tiny_sweep.settings(trials=8, finalists=FinalistSettings(top_k=2))
    layout = tiny_project.prepared(tmp_path / "project", settings)
    if epochs is not None:
        sweep = settings.sweep.model_copy(update={"space": {**settings.sweep.space, "train.epochs": epochs}})
        settings = settings.model_copy(update={"sweep": sweep})
    length = settings.train.epochs if epochs is None else 4
    card = DatasetCard.load(layout.dataset_card)
    estimate = estimate_sweep(layout, settings, SearchSpace.from_settings(settings), workers=1)
    assert estimate.training_tokens == round(card.lengths["train"].trained * length)
    assert (estimate.trials, estimate.complete_trainings, estimate.tokens_per_s) == (8, 2, None)


def test_a_limit_of_tokens_limits_the_estimate() -> None:
    estimate = SweepEstimate(
        trials=20, complete_trainings=3, training_tokens=1000, first_pruning=0.1, tokens_per_s=None, workers=1,
        max_tokens=3000,
    )  # fmt: skip
    assert (estimate.least_tokens, estimate.most_tokens) == (3000, 3000)
    one = replace(estimate, max_tokens=10)
    assert (one.least_tokens, one.most_tokens) == (1000, 1000), "one training is completed nevertheless"


def test_the_final_round_is_part_of_the_estimate(tmp_path: Path) -> None:
    estimate = SweepEstimate(
        trials=20, complete_trainings=3, training_tokens=1000, first_pruning=0.1, tokens_per_s=10.0, workers=1,
        final_trainings=6,
    )  # fmt: skip
    assert (estimate.least_tokens, estimate.most_tokens) == (4700 + 6000, 26_000)
    limited = replace(estimate, max_tokens=10, may_skip_final_trainings=True)
    assert (limited.least_tokens, limited.most_tokens) == (1000, 7000)
    assert "20 trials and 1 training of finalists;" in replace(estimate, final_trainings=1).format()
    assert estimate.format().startswith("20 trials and 6 trainings of finalists; a complete training has 1,000 answer")
    layout = tiny_project.prepared(tmp_path / "project", tiny_sweep.settings())
    for top_k, seeds, together, expected in ((3, 3, 1, 6), (3, 3, 4, 9), (1, 3, 1, 0), (1, 3, 4, 1), (9, 2, 1, 8)):
        finalists = FinalistSettings(top_k=top_k, seeds=seeds)
        settings = tiny_sweep.settings(trials=8, concurrent_trials=together, finalists=finalists)
        space = SearchSpace.from_settings(settings)
        assert estimate_sweep(layout, settings, space, workers=1).final_trainings == expected
    finalists = FinalistSettings(top_k=3, seeds=3, wilcoxon_p_threshold=0.05)
    settings = tiny_sweep.settings(trials=8, finalists=finalists)
    found = estimate_sweep(layout, settings, SearchSpace.from_settings(settings), workers=1)
    assert (found.final_trainings, found.may_skip_final_trainings) == (6, True)
    two = (ObjectiveSettings(metric="validation_loss"), ObjectiveSettings(metric="adapter_bytes"))
    settings = tiny_sweep.settings(trials=8, objectives=two, pruner=PrunerSettings(kind="none"))
    assert estimate_sweep(layout, settings, SearchSpace.from_settings(settings), workers=1).final_trainings == 0


def test_a_space_with_few_points_has_few_trials(tmp_path: Path) -> None:
    points = {"train.rank": SweepParameter(choices=(2, 4)), "train.learning_rate": SweepParameter(choices=(0.001,))}
    settings = tiny_sweep.settings(trials=8, space=points, finalists=FinalistSettings(top_k=3, seeds=3))
    layout = tiny_project.prepared(tmp_path / "project", settings)
    estimate = estimate_sweep(layout, settings, SearchSpace.from_settings(settings), workers=1)
    assert (estimate.trials, estimate.final_trainings) == (2, 2 * 2)


def test_a_grid_has_as_many_trials_as_points(tmp_path: Path) -> None:
    space = {"train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True)}
    settings = tiny_sweep.settings(trials=20, space=space, sampler=SamplerSettings(kind="grid"))
    layout = tiny_project.prepared(tmp_path / "project", settings)
    assert estimate_sweep(layout, settings, SearchSpace.from_settings(settings), workers=1).trials == 4


def test_the_first_rung_is_judged_at_the_next_validation(tmp_path: Path) -> None:
    settings = tiny_sweep.settings(pruner=PrunerSettings(kind="asha", min_resource_fraction=0.25))
    layout = tiny_project.prepared(tmp_path / "project", settings)
    rows = DatasetCard.load(layout.dataset_card).splits["train"] * settings.train.epochs
    steps = rows / settings.train.batch_size
    for every, wanted in ((1, 0.25), (10**6, 1.0)):
        train = settings.train.model_copy(update={"validate_every_steps": every})
        changed = settings.model_copy(update={"train": train})
        found = estimate_sweep(layout, changed, SearchSpace.from_settings(changed), workers=1).first_pruning
        assert wanted <= found <= wanted + 1 / steps
