"""Finished runs with real adapters and bases, for tests of scores on validation rows."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_project
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.runs.directory import RESULT, RunPaths, RunSpec
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ValidationJob, ValidationLaunch
from ratchet.tuning import scheduler

SETTINGS = tiny_project.SETTINGS
FORMS: dict[str, dict[str, Any]] = {
    "first": {},
    "second": {"train.rank": 2, "train.seed": 4},
    "plain": {"train.quantization": "none"},
}


def run_of(layout: ProjectLayout, changes: dict[str, Any]) -> str:
    """Create a finished run with an adapter of random numbers. Return its id."""
    settings: Settings = params_file.apply_changes(SETTINGS, changes)
    report = tiny_project.adapted(layout, settings, seed=len(changes) + 3, strength=0.5)
    spec = RunSpec(train=settings.train, data_digest=report.data_digest, base_digest=report.base_digest)
    paths = RunPaths(layout.runs / spec.run_id)
    spec.save(paths.spec)
    with files.sealed_directory(paths.result, RESULT) as scratch:
        shutil.copytree(layout.train, scratch, dirs_exist_ok=True)
        (scratch / files.MANIFEST).unlink()
    return spec.run_id


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Create a prepared project with three finished runs."""
    torch.set_num_threads(1)
    layout = tiny_project.prepared(tmp_path_factory.mktemp("held out") / "project")
    return layout.root, {name: run_of(layout, changes) for name, changes in FORMS.items()}


@pytest.fixture
def ids(made: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return made[1]


@pytest.fixture
def layout(made: tuple[Path, dict[str, str]], tmp_path: Path) -> ProjectLayout:
    shutil.copytree(made[0], tmp_path / "project")
    return ProjectLayout(tmp_path / "project")


def launch(run_ids: list[str], metrics: tuple[str, ...] = ("validation_loss",), **changes: Any) -> ValidationLaunch:
    asked = {"run_ids": run_ids, "metrics": metrics, "rows": changes.pop("rows", 0)}
    machine = SETTINGS.machine.model_copy(update=changes)
    return ValidationLaunch(job=ValidationJob.model_validate(asked), max_new_tokens=8, machine=machine)


def damage(layout: ProjectLayout, run_id: str) -> None:
    weights = layout.runs / run_id / "result" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")


def scorer(layout: ProjectLayout, asked: ValidationLaunch, *more: str) -> list[str]:
    return [sys.executable, "-m", scheduler.SCORER_MODULE, str(layout.root), asked.model_dump_json(), *more]


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
