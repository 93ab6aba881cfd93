"""Proves that each logger has what MLflow has, each point once, after kills of the worker and of the supervisor."""

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import logged_points
import tiny_project
from ratchet.runs.directory import list_runs
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("tracking", "runs")
KEY = "0123456789abcdef" * 2 + "01234567"
"""Has the form of a key of W&B."""
DEADLINE_S = 300.0


def start(layout: ProjectLayout, *faults: dict[str, object]) -> "subprocess.Popen[str]":
    changed = {"RATCHET_FAULTS": json.dumps(faults), "WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
    changed["WANDB_SERVICE"] = "3-1-unix-/nowhere/socket"  # a service of another process is not used
    return subprocess.Popen(
        tiny_project.command("train"), cwd=layout.root, env=tiny_project.environment() | changed,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_every_logger_has_what_mlflow_has_after_kills_of_worker_and_supervisor(
    tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    names = ("mlflow", *logged_points.READERS)
    changed: dict[str, Any] = {"loggers": names, "checkpoint_every": 4, "system_metrics_interval_s": 1.0}
    machine = tiny_project.MACHINE.model_copy(update=changed)
    train = tiny_project.TRAIN.model_copy(update={"epochs": 1.0})
    settings = tiny_project.SETTINGS.model_copy(update={"machine": machine, "train": train})
    layout = tiny_project.prepared(tmp_path / "project", settings)
    # The worker dies in step 3, and hangs in step 7 until the supervisor is killed, two steps after its checkpoint.
    faults = ({"kind": "die", "step": 3, "mark": "died"}, {"kind": "hang", "step": 7, "mark": "hung"})
    started.append(start(layout, *faults))
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(has_step(layout, name, 6) for name in logged_points.READERS):
        assert started[-1].poll() is None and time.monotonic() < deadline_s
        time.sleep(0.2)
    started[-1].send_signal(signal.SIGKILL)
    started[-1].wait()
    started.append(start(layout, *faults))
    output, _ = started[-1].communicate(timeout=DEADLINE_S)
    assert started[-1].returncode == 0, output

    [run] = list_runs(layout.runs)
    steps = Counter(event.data["step"] for event in JournalReader(run.journal).read() if event.kind == "step")
    assert steps == Counter(dict.fromkeys(range(1, 13), 1) | dict.fromkeys([1, 2, 5, 6], 2))
    expected = logged_points.read_mlflow(layout, run)
    assert {step for key, step, _ in expected if key == "train/loss"} == set(range(1, 13))
    assert {key.split("/")[0] for key, _, _ in expected} == {"train", "validation", "system"}
    assert set(expected.values()) == {1}
    for name in logged_points.READERS:
        found = logged_points.read(name, run)
        assert found == expected, (name, found - expected, expected - found, output)
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == [] and KEY not in output


def has_step(layout: ProjectLayout, name: str, step: int) -> bool:
    """Return whether a logger has a step. W&B writes its file with a delay of up to 15 s, so its file must exist."""
    for run in list_runs(layout.runs):
        try:
            found = logged_points.read(name, run)
        except (OSError, ValueError):  # it is being written
            return False
        return ("train/loss", step) in {point[:2] for point in found} or (
            name == "wandb" and any(run.loggers.glob("wandb/wandb/*/*.wandb"))
        )
    return False
