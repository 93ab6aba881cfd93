"""Tests the winner's values in params.yaml: a minimal diff, comments kept."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import DataError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import ParameterAxis, SweepObjective, SweepReport, Trial
from ratchet.tuning.report import adopt_trial


def trial(number: int, state: str = "complete", **values: Any) -> Trial:
    told = {f"train.{key}": value for key, value in values.items()} or {"train.rank": 16}
    objectives = (1.0 + number,) if state == "complete" else ()
    return Trial(number=number, values=told, run_id=f"run{number}", state=state, objectives=objectives)


def report(*trials: Trial, **fields: Any) -> SweepReport:
    return SweepReport(
        study="sweep", storage="sqlite", objectives=(SweepObjective(metric="validation_loss", direction="minimize"),),
        axes=(ParameterAxis(name="train.rank", kind="int", low=4, high=64, log=True),), sampler="TPE", pruner="none",
        versions={}, data_digest="d", base_digest="b", planned_trials=3, trials=trials, **fields,
    )  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return ProjectLayout(tmp_path)


@pytest.fixture
def path(layout: ProjectLayout) -> Path:
    found = layout.params
    text = params_file.dump(Settings()).replace("  rank: 16\n", "  rank: 16  # of the paper\n")
    found.write_text(text, encoding="utf-8")
    return found


def test_only_what_differs_is_written_and_comments_stay(layout: ProjectLayout, path: Path) -> None:
    before = path.read_text(encoding="utf-8").splitlines()
    winner = trial(1, rank=8, alpha=32.0, learning_rate=0.0013)
    adopted = adopt_trial(layout, params_file.load(path), report(trial(0), winner, winner=1, best=(1,)), None)
    after = path.read_text(encoding="utf-8").splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("  rank: 16  # of the paper", "  rank: 8  # of the paper"),
        ("  learning_rate: 0.0002", "  learning_rate: 0.0013"),
    ]
    assert "-  rank: 16  # of the paper" in adopted.diff
    assert "+  rank: 8  # of the paper" in adopted.diff
    assert not adopted.is_trained_here


def test_values_that_are_there_already_change_nothing(layout: ProjectLayout, path: Path) -> None:
    before = path.read_bytes()
    adopted = adopt_trial(layout, params_file.load(path), report(trial(0, rank=16), winner=0, best=(0,)), None)
    assert path.read_bytes() == before
    assert adopted.diff == ()


def test_any_complete_trial_can_be_named(layout: ProjectLayout, path: Path) -> None:
    adopt_trial(layout, params_file.load(path), report(trial(0, rank=4), trial(1, rank=8), winner=0, best=(0,)), 1)
    assert params_file.load(path).train.rank == 8


@pytest.mark.parametrize(
    ("fields", "number", "says"),
    [
        ({"best": (0,)}, None, "not over"),
        ({"best": (0, 1)}, None, "choose a trial of the Pareto front: 0, 1"),
        ({}, None, "no trial is complete"),
        ({"best": (0,)}, 1, "trial 1 of study sweep is pruned; complete trials: 0"),
        ({"best": (0,)}, 7, "missing"),
    ],
)
def test_adopting_an_unfinished_or_missing_trial_is_refused(
    layout: ProjectLayout, path: Path, fields: dict[str, Any], number: int | None, says: str
) -> None:
    before = path.read_bytes()
    with pytest.raises(DataError, match=says):
        adopt_trial(layout, params_file.load(path), report(trial(0), trial(1, "pruned"), **fields), number)
    assert path.read_bytes() == before
