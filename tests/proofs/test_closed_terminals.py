"""Proves row R7 for a closed terminal: the training saves its last step and stops. With nohup, it continues."""

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import tiny_project
from ratchet.runs import status
from ratchet.runs.directory import RunPaths, list_runs
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("cli", "runs")
PATIENCE_S = 120
SLOW, SLOWER = (json.dumps([InjectedFault(kind="slow", seconds=each).model_dump(mode="json")]) for each in (0.2, 1.0))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("hangup") / "project")


@pytest.fixture
def project(template: ProjectLayout, tmp_path: Path) -> ProjectLayout:
    """Copy the project without runs. The test would mistake a run of another test for the run that it has just
    started."""
    shutil.copytree(template.root, tmp_path / "project", symlinks=True)
    return ProjectLayout(tmp_path / "project")


def begun(layout: ProjectLayout, process: subprocess.Popen[bytes], step: int) -> RunPaths:
    """Wait until a run has reached this step, and return its paths."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for paths in list_runs(layout.runs):
            if status.read_progress(paths).step >= step:
                return paths
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_closed_terminal_stops_a_training_with_its_last_step_sealed(project: ProjectLayout) -> None:
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in tiny_project.environment().items() if k != "CI"} | {
        "TERM": "xterm",
        VARIABLE: SLOWER,
    }
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP; the tests may run under nohup
    process = subprocess.Popen(
        tiny_project.command("train"), cwd=project.root, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    signal.signal(signal.SIGHUP, inherited)
    os.close(theirs)
    os.set_blocking(ours, False)
    run = begun(project, process, 2)
    os.close(ours)  # from here on, each write to the terminal fails
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE_S) == 75
    found = status.read_progress(run)
    assert found.stopped
    assert found.checkpoint_step == found.step >= 2
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 0, done.stderr
    assert status.read_progress(run).lost_steps == 0


def test_nohup_is_heeded(project: ProjectLayout, tmp_path: Path) -> None:
    """nohup ignores SIGHUP and then becomes the training process, so the training ignores SIGHUP too."""
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["nohup", *tiny_project.command("train")], cwd=project.root,
            env=tiny_project.environment() | {VARIABLE: SLOW}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        begun(project, process, 1)
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
