"""Real training processes that are killed by real signals: a repeated command gives the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny_project
from ratchet.runs.directory import find_newest_run
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage.layout import ProjectLayout
from tiny_project import outcome

PATIENCE_S = 120.0
Bytes = dict[str, str]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> ProjectLayout:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


@pytest.fixture
def project(prepared: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    """Copy the project for each test. The path differs on purpose, because a run must not depend on its path."""
    shutil.copytree(prepared.root, tmp_path / "copy of project")
    return ProjectLayout(tmp_path / "copy of project")


@pytest.fixture(scope="session")
def reference(prepared: ProjectLayout, tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    """Return the output of an uninterrupted training."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(prepared.root, root)
    done = tiny_project.ratchet(ProjectLayout(root), "train")
    assert done.returncode == 0, done.stderr
    return outcome(ProjectLayout(root))


def events(layout: ProjectLayout) -> list[JournalEvent]:
    run = find_newest_run(layout.runs)
    return list(JournalReader(run.journal).read()) if run else []


def wait_for(
    layout: ProjectLayout, process: subprocess.Popen[str], there: Callable[[list[JournalEvent]], bool]
) -> bool:
    """Wait until the journal satisfies the condition. Return False if the process ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if there(events(layout)):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    raise AssertionError(f"nothing after {PATIENCE_S} s: {events(layout)[-3:]}")


def steps_after(count: int) -> Callable[[list[JournalEvent]], bool]:
    """Return a condition: the journal has more than `count` step events."""
    return lambda found: sum(e.kind == "step" for e in found) > count


@pytest.fixture
def random_points() -> Iterator[random.Random]:
    seed = int(os.environ.get("RATCHET_TEST_SEED", "7"))
    print(f"seed of the kill points: {seed} (RATCHET_TEST_SEED)")
    yield random.Random(seed)


def train_with_kills(layout: ProjectLayout, kills: int, random_points: random.Random) -> str:
    """Train, and kill the worker `kills` times at random points. Return the output of the command."""
    process = tiny_project.start_training(layout)
    killed = 0
    while killed < kills:
        done = sum(e.kind == "step" for e in events(layout))
        if not wait_for(layout, process, steps_after(done + random_points.randrange(3))):
            break
        time.sleep(random_points.uniform(0, 0.05))
        pid = find_worker(process.pid, layout.root)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert killed == kills
    assert sum(e.kind == "worker_exited" for e in events(layout)) == kills
    return output
