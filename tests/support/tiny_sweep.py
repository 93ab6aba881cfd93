"""Sweeps that take a minute: a tiny project whose trainings take seconds, and queries of its study."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tiny_project
from ratchet.config.settings import Settings
from ratchet.config.sweep import FinalistSettings, PrunerSettings, SamplerSettings, Sweep, SweepParameter
from ratchet.runs.fork_server import ForkServer
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import SweepReport, Trial
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.scheduler import TrialScheduler
from ratchet.tuning.study_session import StudySession

SPACE = {
    "train.rank": SweepParameter(low=2, high=8, log=True),
    "train.alpha": SweepParameter(tie="2 * train.rank"),
    "train.learning_rate": SweepParameter(low=1e-3, high=1e-1, log=True),
}

DEADLINE_S = 600.0
"""Timeout in seconds for actions that take seconds."""


def open_scheduler(
    stack: ExitStack, layout: ProjectLayout, wanted: Settings, fork: bool = False
) -> tuple[TrialScheduler, StudySession]:
    """Open the study of a project; return a scheduler in it, which has no server, and the session."""
    session = stack.enter_context(StudySession.open(layout, wanted, fork))
    worker = SweepWorker.current()
    return TrialScheduler(layout, wanted, session.store, worker, ForkServer(), lambda: None), session


def settings(**sweep: Any) -> Settings:
    """Return the settings of the tiny project with a sweep of four trials and no final round; `sweep` changes this."""
    chosen: dict[str, Any] = {
        "space": SPACE, "trials": 4, "sampler": SamplerSettings(n_startup_trials=2),
        "pruner": PrunerSettings(kind="asha", min_resource_fraction=0.25), "finalists": FinalistSettings(top_k=1),
    }  # fmt: skip
    train = tiny_project.TRAIN.model_copy(update={"epochs": 1.0, "validate_every_steps": 3})
    machine = tiny_project.MACHINE.model_copy(update={"lease_timeout_s": 4.0, "checkpoint_every": 1})
    return tiny_project.SETTINGS.model_copy(
        update={"sweep": Sweep(**(chosen | sweep)), "train": train, "machine": machine}
    )


def report(layout: ProjectLayout, study: str = "sweep") -> SweepReport:
    """Return the report that the command wrote."""
    return SweepReport.load(layout.sweep(study) / "report.json")


def told(trials: tuple[Trial, ...]) -> list[tuple[Any, ...]]:
    """Return the fields that must be equal in two equal sweeps, without times and processes."""
    return [
        (t.number, t.values, t.run_id, t.state, t.objectives, t.curve, t.constraints, t.continues, t.adapter_digest)
        for t in trials
    ]


def begin(layout: ProjectLayout, *arguments: str, extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `ratchet sweep` in its own process group."""
    return subprocess.Popen(
        tiny_project.command("sweep", *arguments), cwd=layout.root, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=tiny_project.environment() | dict(extra or {}), start_new_session=True,
    )  # fmt: skip


def until(there: Callable[[], bool], sweep: subprocess.Popen[str]) -> None:
    """Wait until the condition holds while the sweep runs."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not there():
        assert sweep.poll() is None, sweep.communicate()[0]
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.05)


def steps_done(runs: Path) -> int:
    """Count the optimizer steps in all journals."""
    return sum(path.read_text(encoding="utf-8").count('"event":"step"') for path in runs.glob("*/journal.jsonl"))


def processes_of(text: str) -> list[int]:
    """Return the ids of the processes whose command line contains this text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if text in line:
                found.append(int(entry.name))
    return found


def kill_all(layout: ProjectLayout, sweep: subprocess.Popen[str]) -> None:
    """Simulate a power failure: kill the command, the workers and the trainers at once, without notice."""
    for pid in [sweep.pid, *processes_of(str(layout.root))]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    sweep.communicate()
    deadline_s = time.monotonic() + 60
    while processes_of(str(layout.root)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
