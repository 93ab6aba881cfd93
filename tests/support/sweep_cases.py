"""Cases for `ratchet sweep` from the user's view: real studies, workers, trainings and kills."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tiny_project
import tiny_sweep
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> ProjectLayout:
    """Create a prepared project for tests to copy."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("sweep") / "my project", tiny_sweep.settings())
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


@pytest.fixture
def project(template: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    shutil.copytree(template.root, tmp_path / "a project")
    return ProjectLayout(tmp_path / "a project")


def of_mlflow(layout: ProjectLayout, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(layout.mlflow_database) as connection:
        return connection.execute(query).fetchall()
