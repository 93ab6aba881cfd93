"""What tests of trainings have in common."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_project


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stages base and prepare have run."""
    return tiny_project.prepared(tmp_path_factory.mktemp("ranks") / "project").root


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are killed when the test is over."""
    all_of_them: list[subprocess.Popen[str]] = []
    yield all_of_them
    for process in all_of_them:
        process.kill()
        if process.stdout and not process.stdout.closed:
            process.communicate()
