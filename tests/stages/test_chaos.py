"""Tests of `ratchet chaos`: shortened settings, refused options and projects, and the table and plot of results."""

from pathlib import Path

import pytest

import tiny_project
from chaos_cases import (
    prepared,  # noqa: F401 (a fixture)
    result,
)
from ratchet.errors import DataError, SettingsError
from ratchet.reports import plots
from ratchet.runs.fault_injection.plan import FaultTrial
from ratchet.stages.chaos import ChaosOptions, chaos, shorten_training, summarize_results
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
@pytest.mark.parametrize("steps", [12, 24, 31])
def test_short_settings_change_only_the_number_of_steps(prepared: ProjectLayout, batching: str, steps: int) -> None:
    from ratchet.data import token_files
    from ratchet.data.batches import BatchPlan, TokenRows

    train = tiny_project.TRAIN.model_copy(update={"batching": batching, "pack_tokens": 128})
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    short = shorten_training(prepared, settings, steps)
    lengths = TokenRows.from_arrow(token_files.open_split(prepared.data, "train").with_format("arrow")[:]).lengths
    assert BatchPlan(lengths, short.train).steps == steps
    changed = {name for name, value in short.train if value != getattr(train, name)}
    assert changed <= {"epochs", "validate_every_steps", "early_stopping"}
    assert short.model_copy(update={"train": train}) == settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ChaosOptions(faults=("sigkill", "gremlin")), ["--faults", "gremlin", "sigkill, supervisor"]),
        (ChaosOptions(kills=0), ["--kills"]),
        (ChaosOptions(steps=3), ["--steps", "3"]),
        (ChaosOptions(output=Path(__file__) / "out"), ["--output"]),
    ],
    ids=["unknown", "kills", "steps", "output"],
)
def test_invalid_options_are_refused_before_anything_runs(
    prepared: ProjectLayout, options: ChaosOptions, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as raised:
        chaos(Project.from_parts(prepared, tiny_project.SETTINGS), options)
    assert all(word in str(raised.value) for word in words)


def test_a_project_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    with pytest.raises((DataError, SettingsError), match="dvc repro") as raised:
        chaos(Project.from_parts(layout, tiny_project.SETTINGS))
    assert raised.value.exit_code == 2
    assert not (layout.experiments / "chaos").exists()


def test_a_trial_that_is_not_exact_or_needed_help_shows_in_its_row() -> None:
    trials = [FaultTrial("sigkill", n) for n in range(3)]
    found = summarize_results(
        [result(trials[0]), result(trials[1], differences=("x",)), result(trials[2], problems=("y", "z"))]
    )
    (line,) = found
    assert (line["trials"], line["exact"], line["recovered"], line["faults"]) == (3, 2, 2, 3)
    assert (line["slowest_recovery_s"], line["most_lost_steps"]) == (4.0, 1)


def test_the_plot_accepts_trainings_of_any_kind(tmp_path: Path) -> None:
    plain = plots.TimelineLane("none-0", [(0.0, 3.0)], [(1.0, 1), (2.0, 2)], [2.0], [], True)
    marks = [(float(n), f"kind {n}") for n in range(20)]
    lanes = [plain, plots.TimelineLane("odd", [], [], [], marks, False)]
    for name, drawn in (("none", []), ("one", lanes[:1]), ("two", lanes)):
        plots.draw_timeline(drawn, tmp_path / f"{name}.html")
    sizes = {p.stem: len(p.read_bytes()) for p in tmp_path.glob("*.html")}
    assert sizes["none"] < sizes["one"] < sizes["two"]
