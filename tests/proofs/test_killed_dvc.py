"""Proves row R25 for DVC: a second "dvc repro" is refused, and a killed one leaves a checkpoint and no trainer
process."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import tiny_project
from bad_input_cases import (
    finished,  # noqa: F401 (a fixture)
    layout,  # noqa: F401 (a fixture)
    repro,
)
from ratchet.config.settings import Settings
from ratchet.runs.directory import find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("runs", "cli")


def test_a_second_dvc_repro_is_refused_and_the_first_goes_on(
    tmp_path: Path, mlflow_template: Path, finished: ProjectLayout
) -> None:
    layout = project_with_dvc(tmp_path / "project", finished, mlflow_template)
    first = repro(layout)
    deadline = time.monotonic() + 120
    while not (layout.runs.is_dir() and find_newest_run(layout.runs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = repro(layout)
    output, _ = second.communicate(timeout=120)
    assert second.returncode != 0
    assert "is busy" in output or "in use by process" in output
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert attempts(layout) == [1]


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])  # dvc runs the commands of stages with $SHELL
def test_killing_dvc_seals_a_checkpoint_and_leaves_no_trainer_behind(
    tmp_path: Path, mlflow_template: Path, finished: ProjectLayout, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", shell)
    layout = project_with_dvc(tmp_path / "project", finished, mlflow_template)
    first = repro(layout)
    deadline = time.monotonic() + 120
    while not steps(layout) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    again = repro(layout)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    found = steps(layout)
    assert sorted(set(found)) == list(range(1, max(found) + 1))
    assert attempts(layout) == [1, 2]


def steps(layout: ProjectLayout) -> list[int]:
    run = find_newest_run(layout.runs) if layout.runs.is_dir() else None
    return [e.data["step"] for e in JournalReader(run.journal).read() if e.kind == "step"] if run else []


def attempts(layout: ProjectLayout) -> list[int]:
    run = find_newest_run(layout.runs)
    assert run is not None
    return [event.attempt for event in JournalReader(run.journal).read() if event.kind == "attempt_started"]


def project_with_dvc(root: Path, finished: ProjectLayout, mlflow_template: Path) -> ProjectLayout:
    """Create a DVC project with only stage train. The earlier stages have already run."""
    shutil.copytree(finished.root, root)
    layout = ProjectLayout(root)
    settings: Settings = tiny_project.SETTINGS
    tiny_project.save(layout, settings.model_copy(update={"train": settings.train.model_copy(update={"epochs": 6})}))
    stage = "  train:\n    cmd: ratchet train\n    params: [train]\n    outs: [experiments/train]\n"
    (layout.root / "dvc.yaml").write_text(f"stages:\n{stage}")
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    subprocess.run(
        ["dvc", "init", "-q", "--no-scm"], cwd=root, env=tiny_project.environment(), check=True, capture_output=True
    )
    return layout
