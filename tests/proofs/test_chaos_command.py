"""Proves rows R1, R4 and R5 with the command for users: "ratchet chaos" kills and damages a real training."""

import json
import random
import shutil
from pathlib import Path

import pytest

import tiny_project
from chaos_cases import (
    prepared,  # noqa: F401 (a fixture)
    result,
)
from ratchet.cli.chaos import format_chaos
from ratchet.runs.fault_injection import plan
from ratchet.runs.fault_injection.injection import InjectedFault
from ratchet.runs.fault_injection.plan import FaultTrial
from ratchet.stages.chaos import ChaosOptions, FaultCampaign, chaos
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "runs", "training")
STEPS = 12


def other_numbers(chance: random.Random, shape: plan.TrainingShape, number: int) -> FaultTrial:
    """Plan a trial that the command must detect: a training whose result differs without any error."""
    return FaultTrial("none", number, faults=(InjectedFault(kind="spike", step=3, times=0),))


def test_a_damaged_training_ends_with_the_same_bytes_and_another_one_is_found_out(
    prepared: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan, "FAULT_CATEGORIES", {**plan.FAULT_CATEGORIES, "none": plan.FaultCategory("other numbers", other_numbers)}
    )
    before = {p: p.read_bytes() for p in prepared.root.rglob("*") if p.is_file()}
    options = ChaosOptions(1, 5, ("none", "bitflip"), STEPS, output=tmp_path / "out")
    told: list[str] = []
    outcome = chaos(Project.from_parts(prepared, tiny_project.SETTINGS), options, told.append)
    well, text = outcome.has_passed, format_chaos(outcome)
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
    assert "Timeline of trials" in (tmp_path / "out" / "timeline.html").read_text(encoding="utf-8")
    assert {p: p.read_bytes() for p in prepared.root.rglob("*") if p.is_file()} == before


def test_when_all_is_well_the_command_says_so_and_leaves_the_project_as_it_was(
    prepared: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultCampaign, "run", lambda self, trials: [result(trial) for trial in trials])
    outcome = chaos(Project.from_parts(prepared, tiny_project.SETTINGS), ChaosOptions(seed=4))
    well, text = outcome.has_passed, format_chaos(outcome)
    assert well
    assert "seed 4: all 24 trials are exact and unaided" in text
    assert [line.split()[0].strip("*") for line in text.splitlines()[1:-2]] == list(plan.FAULT_CATEGORIES)
    assert {p.name for p in (prepared.experiments / "chaos").iterdir()} == {"chaos.json", "timeline.html"}
    assert list(prepared.runs.glob(".chaos-*")) == []
