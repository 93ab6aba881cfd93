"""Learning from a teacher's probabilities: loss and gradient, sealed targets, and refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

import tiny_project
from ratchet.config.settings import Settings
from ratchet.config.train import DistillSettings
from ratchet.storage.layout import ProjectLayout


def with_teacher(layout: ProjectLayout, **changes: Any) -> Settings:
    """Settings of the tiny project with a teacher; written to its params.yaml."""
    train = tiny_project.TRAIN.model_copy(
        update={"distill": DistillSettings(**{"teacher": "teacher", "top_k": 8} | changes)}
    )
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    tiny_project.save(layout, settings)
    return settings


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Stages base and prepare have run; the teacher is the base itself, for what it knows does not matter here."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("distill") / "project")
    shutil.copytree(layout.tiny_model, layout.root / "teacher")
    return layout


@pytest.fixture
def project(prepared: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    shutil.copytree(prepared.root, tmp_path / "project", symlinks=True)
    return ProjectLayout(tmp_path / "project")


def nothing(_: ProjectLayout) -> None:
    """The settings alone are wrong."""


def other_tokenizer(project: ProjectLayout) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(project.root / "teacher")
    tokenizer.add_tokens(["quite another"])
    tokenizer.save_pretrained(project.root / "teacher")


def short_context(project: ProjectLayout) -> None:
    path = project.root / "teacher" / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 16'))


def padded(project: ProjectLayout) -> None:
    """The embedding gets more rows than there are tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(project.root / "teacher")
    model.resize_token_embeddings(512, mean_resizing=False)
    model.save_pretrained(project.root / "teacher")
