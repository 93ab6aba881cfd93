"""Projects with a teacher in memory: identity of runs, kills, ranks, and messages."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rank_projects
import tiny_project
from rank_projects import train
from ratchet.cli.distill import format_distillation
from ratchet.config.settings import Settings
from ratchet.config.train import DistillSettings, Train
from ratchet.stages.distill import distill
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from tiny_project import outcome


def distill_settings(**changes: Any) -> Train:
    chosen = {"teacher": "teacher", "mode": "online", "top_k": None, "weight": 0.7, "temperature": 1.5} | changes
    return tiny_project.TRAIN.model_copy(update={"distill": DistillSettings(**chosen)})


def with_teacher(layout: ProjectLayout, machine: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """Write settings with a teacher to params.yaml of the tiny project and return them."""
    chosen = rank_projects.settings(distill_settings(**changes), **(machine or {}))
    tiny_project.save(layout, chosen)
    return chosen


def make_teacher(place: Path, base: Path) -> None:
    """Write a teacher: a copy of the base with noise added to its weights."""
    shutil.copytree(base, place)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    model.save_pretrained(place)


@pytest.fixture(scope="module")
def with_one(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distilled") / "project"
    shutil.copytree(prepared, root)
    make_teacher(root / "teacher", ProjectLayout(root).tiny_model)
    return root


@pytest.fixture
def project(with_one: Path, tmp_path: Path) -> ProjectLayout:
    shutil.copytree(with_one, tmp_path / "copy of project")
    return ProjectLayout(tmp_path / "copy of project")


@pytest.fixture(scope="module")
def reference(with_one: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProjectLayout, dict[str, str]]:
    """Train without interruption and return the project and its outputs."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(with_one, root)
    layout = ProjectLayout(root)
    with_teacher(layout)
    train(layout)
    return layout, outcome(layout)


def told(layout: ProjectLayout, settings: Settings, forecast: bool = False) -> str:
    return format_distillation(distill(Project.from_parts(layout, settings), forecast=forecast))
