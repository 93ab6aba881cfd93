"""Projects with runs that several ranks train, on one or several machines, with real processes."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_project
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.runs.directory import find_newest_run
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.training import TrainReport

PATIENCE_S = 240
STEPS = 24
EVEN = tiny_project.TRAIN.model_copy(update={"dropout": 0.0})
"""Without dropout, the number of ranks only changes the order of sums."""
SLOW = InjectedFault(kind="slow", seconds=0.3)
"""Slows each step to a third of a second, so that other actions can happen between steps."""


def settings(train: Train = tiny_project.TRAIN, **machine: Any) -> Settings:
    known = tiny_project.MACHINE.model_dump() | {"stall_timeout_s": 30, "first_stall_timeout_s": 90} | machine
    return tiny_project.SETTINGS.model_copy(update={"train": train, "machine": Machine.model_validate(known)})


def project(prepared: Path, root: Path, chosen: Settings) -> ProjectLayout:
    shutil.copytree(prepared, root)
    layout = ProjectLayout(root)
    tiny_project.save(layout, chosen)
    return layout


def start(layout: ProjectLayout, faults: Sequence[InjectedFault] = ()) -> "subprocess.Popen[str]":
    environment = tiny_project.environment() | {
        VARIABLE: json.dumps([fault.model_dump(mode="json") for fault in faults]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        tiny_project.command("train"), cwd=layout.root, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def train(layout: ProjectLayout, faults: Sequence[InjectedFault] = ()) -> str:
    """Train to the end and return the output."""
    process = start(layout, faults)
    said, complained = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complained + log(layout)
    return said + complained


def log(layout: ProjectLayout) -> str:
    run = find_newest_run(layout.runs)
    return run.worker_log.read_text(encoding="utf-8")[-4000:] if run and run.worker_log.exists() else ""


def events(layout: ProjectLayout, kind: str) -> list[JournalEvent]:
    run = find_newest_run(layout.runs)
    return (
        [event for event in JournalReader(run.journal).read() if event.kind == kind]
        if run and run.journal.exists()
        else []
    )


def report(layout: ProjectLayout) -> TrainReport:
    return TrainReport.load(layout.train_report)


def batches(layout: ProjectLayout) -> dict[int, str]:
    """Return the digest of the rows of each step. If a step was repeated, the last digest counts."""
    return {event.data["step"]: event.data["batch"] for event in events(layout, "step")}


def wait_until(condition: Any, *processes: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def world(layout: ProjectLayout) -> int:
    ready = events(layout, "worker_ready")
    return int(ready[-1].data["ranks"]) if ready else 0
