"""Cases for `ratchet sweep` from the user's view: real studies, workers, trainings and kills."""

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import tiny_project
import tiny_sweep
from ratchet.config.sweep import PrunerSettings
from ratchet.storage.files import FileLock
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


def request(layout: ProjectLayout, *arguments: str, code: int = 0) -> str:
    """Run `ratchet sweep` with a request about a trial; return its output."""
    done = tiny_project.ratchet(layout, "sweep", *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def begin_slow(layout: ProjectLayout, epochs: float = 8.0, **sweep: Any) -> subprocess.Popen[str]:
    """Start a sweep with trainings that last longer than a command; wait until the first one has a checkpoint."""
    wanted = tiny_sweep.settings(pruner=PrunerSettings(kind="none"), **sweep)
    train = wanted.train.model_copy(update={"epochs": epochs})
    tiny_project.save(layout, wanted.model_copy(update={"train": train}))
    running = tiny_sweep.begin(layout)
    tiny_sweep.until(lambda: tiny_sweep.steps_done(layout.runs) > 3, running)
    return running


def stop_worker(layout: ProjectLayout, pid: int) -> None:
    """Stop a sweep worker by SIGSTOP while it neither holds the lock of the studies nor writes to their database, so
    that other processes can use them."""
    lock = FileLock(layout.studies.with_name(f"{layout.studies.name}.lock"), "the studies")
    for _ in range(600):
        os.kill(pid, signal.SIGSTOP)
        try:
            with sqlite3.connect(layout.studies, timeout=1.0, isolation_level=None) as connection:
                connection.execute("begin immediate")
                connection.execute("rollback")
            if not lock.is_held():
                return
        except sqlite3.OperationalError:  # it is in a transaction
            pass
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the worker never released the studies")
