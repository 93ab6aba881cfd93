"""What users get wrong: one message that says what, where, what was found, what to do; exit 2; nothing left behind."""

import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_project
from ratchet.storage.layout import Layout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return tiny_project.prepared(tmp_path_factory.mktemp("bad") / "project")


@pytest.fixture
def layout(finished: Layout, tmp_path: Path) -> Layout:
    shutil.copytree(finished.root, tmp_path / "project")
    return Layout(tmp_path / "project")


def repro(layout: Layout) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["dvc", "repro"], cwd=layout.root, env=tiny_project.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
