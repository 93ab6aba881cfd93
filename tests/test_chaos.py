"""`ratchet chaos`: real trainings under real faults, and a table that says what came of them."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_project
from ratchet.chaos import Options, chaos, rows, shortened
from ratchet.errors import DataError, SettingsError
from ratchet.faults import plan
from ratchet.faults.campaign import Campaign, TrialResult
from ratchet.faults.chronicle import Chronicle
from ratchet.faults.injection import Fault
from ratchet.faults.plan import Trial
from ratchet.layout import Layout
from ratchet.services import plots

STEPS = 12


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return tiny_project.prepared(tmp_path_factory.mktemp("chaos") / "my project")


def quiet(text: str) -> None:
    """Nobody listens."""


def no_picture(lanes: Sequence[plots.Lane], target: Path) -> None:
    """Nobody looks."""


def other_numbers(chance: random.Random, shape: plan.Shape, number: int) -> Trial:
    """What must be found out: a training that learns something else, and says nothing about it."""
    return Trial("none", number, faults=(Fault(kind="spike", step=3, times=0),))


def test_a_damaged_training_ends_with_the_same_bytes_and_another_one_is_found_out(
    prepared: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "ROWS", {**plan.ROWS, "none": plan.Row("other numbers", other_numbers)})
    before = {p: p.read_bytes() for p in prepared.root.rglob("*") if p.is_file()}
    options = Options(1, 5, ("none", "bitflip"), STEPS, output=tmp_path / "out")
    told: list[str] = []
    well, text = chaos(prepared, tiny_project.SETTINGS, options, plots.timeline, told.append)
    report = json.loads((tmp_path / "out" / "chaos.json").read_text())
    other, flipped = report["trials"]
    assert "seed 5" in told[0]
    assert report["seed"] == 5
    assert (flipped["exact"], flipped["recovered"], flipped["delivered"]) == (True, True, 1), flipped
    assert flipped["events"]["notice"] >= 1
    assert flipped["folder"] is None
    assert (other["exact"], other["recovered"]) == (False, True)
    assert any("instead of" in difference for difference in other["differences"])
    assert not well
    assert f"none-0: its project is kept in {other['folder']}" in text
    assert "1 of 2 trials FAILED" in text
    folder = Path(other["folder"]).parent
    assert {p.name for p in folder.iterdir()} == {"none-0", "template"}
    shutil.rmtree(folder)
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert {p: p.read_bytes() for p in prepared.root.rglob("*") if p.is_file()} == before


def test_when_all_is_well_the_command_says_so_and_leaves_the_project_as_it_was(
    prepared: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Campaign, "run", lambda self, trials: [result(trial) for trial in trials])
    well, text = chaos(prepared, tiny_project.SETTINGS, Options(seed=4), plots.timeline, quiet)
    assert well
    assert "seed 4: all 24 trials are exact and unaided" in text
    assert [line.split()[0].strip("*") for line in text.splitlines()[1:-2]] == list(plan.ROWS)
    assert {p.name for p in (prepared.experiments / "chaos").iterdir()} == {"chaos.json", "timeline.png"}
    assert list(prepared.runs.glob(".chaos-*")) == []


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
@pytest.mark.parametrize("steps", [12, 24, 31])
def test_short_settings_make_so_many_steps_and_are_else_the_projects_own(
    prepared: Layout, batching: str, steps: int
) -> None:
    from ratchet.data import tokens
    from ratchet.data.batches import BatchPlan, Rows

    train = tiny_project.TRAIN.model_copy(update={"batching": batching, "pack_tokens": 128})
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    short = shortened(prepared, settings, steps)
    lengths = Rows.from_arrow(tokens.read(prepared.data, "train").with_format("arrow")[:]).lengths
    assert BatchPlan(lengths, short.train).steps == steps
    changed = {name for name, value in short.train if value != getattr(train, name)}
    assert changed <= {"epochs", "validate_every_steps", "early_stopping"}
    assert short.model_copy(update={"train": train}) == settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(faults=("sigkill", "gremlin")), ["--faults", "gremlin", "sigkill, supervisor"]),
        (Options(kills=0), ["--kills"]),
        (Options(steps=3), ["--steps", "3"]),
        (Options(output=Path(__file__) / "out"), ["--output"]),
    ],
    ids=["unknown", "kills", "steps", "output"],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(
    prepared: Layout, options: Options, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as raised:
        chaos(prepared, tiny_project.SETTINGS, options, no_picture, quiet)
    assert all(word in str(raised.value) for word in words)


def test_a_project_whose_stages_have_not_run_is_told_so(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    with pytest.raises((DataError, SettingsError), match="dvc repro") as raised:
        chaos(layout, tiny_project.SETTINGS, Options(), no_picture, quiet)
    assert raised.value.exit_code == 2
    assert not (layout.experiments / "chaos").exists()


def result(trial: Trial, **changes: object) -> TrialResult:
    seen = Chronicle(
        attempts=[[0.0, 4.0], [4.5, 9.0]], steps=[(3.0, 1), (3.5, 2), (8.0, 2), (8.5, 3)], checkpoints=[(3.6, 2)],
        marks=[(4.0, "kill worker")], recoveries_s=[4.0], lost_steps=[1], kinds=Counter(step=4), delivered=1,
    )  # fmt: skip
    return replace(TrialResult(trial, (), (), seen, 9.0, None), **changes)  # type: ignore[arg-type]


def test_one_trial_that_is_not_exact_or_needed_a_hand_shows_in_its_row() -> None:
    trials = [Trial("sigkill", n) for n in range(3)]
    found = rows([result(trials[0]), result(trials[1], differences=("x",)), result(trials[2], problems=("y", "z"))])
    (line,) = found
    assert (line["trials"], line["exact"], line["recovered"], line["faults"]) == (3, 2, 2, 3)
    assert (line["slowest_recovery_s"], line["most_lost_steps"]) == (4.0, 1)


def test_the_picture_takes_trainings_of_any_kind(tmp_path: Path) -> None:
    plain = plots.Lane("none-0", [(0.0, 3.0)], [(1.0, 1), (2.0, 2)], [2.0], [], True)
    marks = [(float(n), f"kind {n}") for n in range(20)]
    lanes = [plain, plots.Lane("odd", [], [], [], marks, False)]
    for name, drawn in (("none", []), ("one", lanes[:1]), ("two", lanes)):
        plots.timeline(drawn, tmp_path / f"{name}.png")
    sizes = {p.stem: len(p.read_bytes()) for p in tmp_path.glob("*.png")}
    assert sizes["none"] < sizes["one"] < sizes["two"]
