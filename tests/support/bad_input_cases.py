"""Invalid input: the command prints one message with location, value and fix, exits with code 2, and leaves no
files."""

import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_project
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("bad") / "project")


@pytest.fixture
def layout(finished: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    shutil.copytree(finished.root, tmp_path / "project")
    return ProjectLayout(tmp_path / "project")


def repro(layout: ProjectLayout) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["dvc", "repro"], cwd=layout.root, env=tiny_project.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
