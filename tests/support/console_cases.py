"""Cases for the output of a training in a terminal."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_project
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[ProjectLayout]:
    """Create a project that trains for some seconds."""
    train = tiny_project.TRAIN.model_copy(update={"epochs": 6})
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    layout = tiny_project.prepared(tmp_path_factory.mktemp("console") / "project", settings)
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    yield layout
