"""Cases for training on a teacher's probabilities: loss and gradient, sealed targets, and refusals."""

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
    """Write settings with a teacher to params.yaml of the tiny project and return them."""
    train = tiny_project.TRAIN.model_copy(
        update={"distill": DistillSettings(**{"teacher": "teacher", "top_k": 8} | changes)}
    )
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    tiny_project.save(layout, settings)
    return settings


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project with completed stages base and prepare. The teacher is a copy of the base, because its answers
    do not matter here."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("distill") / "project")
    shutil.copytree(layout.tiny_model, layout.root / "teacher")
    return layout


@pytest.fixture
def project(prepared: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    shutil.copytree(prepared.root, tmp_path / "project", symlinks=True)
    return ProjectLayout(tmp_path / "project")


def nothing(_: ProjectLayout) -> None:
    """Leave the project unchanged: only the settings are wrong."""


def other_tokenizer(project: ProjectLayout) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(project.root / "teacher")
    tokenizer.add_tokens(["quite another"])
    tokenizer.save_pretrained(project.root / "teacher")


def short_context(project: ProjectLayout) -> None:
    path = project.root / "teacher" / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 16'))


def padded(project: ProjectLayout) -> None:
    """Resize the embedding so that it has more rows than there are tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(project.root / "teacher")
    model.resize_token_embeddings(512, mean_resizing=False)
    model.save_pretrained(project.root / "teacher")
