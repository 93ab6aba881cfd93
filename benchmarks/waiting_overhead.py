"""Measures the overhead of a training for benchmarks/waiting.py: the supervisor's CPU time, and the worker's journal.

    python benchmarks/waiting_overhead.py PROJECT     trains a project as `ratchet train` does, without MLflow

A project of benchmarks/small_project.py does more than 20 steps per second. The supervisor's share is read from /proc
between two of its steps, so that it includes neither its start nor the worker's. The worker's share is the cost of the
same calls in this process on the same kind of disk: one `step` event and the heartbeats of its micro-batches.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report_rows import Row, at_most, middle, told
from small_project import SETTINGS, build, linked

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.console.callback import ConsoleCallback
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.stages.project import Project
from ratchet.stages.train import train
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.experiments import MlflowStore

STEP_S = 1 / 20
"""Seconds of a step of the fastest training to which the target applies."""
WARM_STEPS = 40
WARM_S = 10.0
"""Seconds after WARM_STEPS in which MLflow is imported and receives the earlier events."""
PATIENCE_S = 300.0
BEATS = 5
"""Heartbeats of a step: four micro-batches and the optimizer."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def rows_of_overhead(scratch: Path, rounds: int, seconds: float) -> list[Row]:
    """Return rows for both shares and their sum, as fractions of a step of STEP_S, and for the speed of the
    training."""
    project = build(scratch / "overhead")
    endless = SETTINGS.model_copy(
        update={
            "train": SETTINGS.train.model_copy(update={"epochs": 10_000, "validate_every_steps": 1_000_000}),
            "machine": SETTINGS.machine.model_copy(update={"checkpoint_every": 1_000_000}),
        }
    )
    with MlflowStore(project).connected():  # creating MLflow's database takes 6 s, once per project
        pass
    bare, logged = [], []
    for number in range(rounds):
        for name, found in (("bare", bare), ("logged", logged)):
            layout = linked(project, scratch / f"{name}{number}", endless)
            shutil.copytree(project.mlruns, layout.mlruns, dirs_exist_ok=True)
            found.append(supervised(layout, name == "logged", seconds))
    told_s = recorded(scratch / "records", rounds)
    supervisor, spread = middle([share for share, _ in bare])
    worker, worker_spread = middle([one / STEP_S for one in told_s])
    steps, steps_spread = middle([rate for _, rate in bare])
    with_mlflow, mlflow_spread = middle([share for share, _ in logged])
    return [
        told("steps/s of that training", steps, steps_spread),
        told("supervisor: CPU seconds per second", supervisor, spread),
        told("supervisor with MLflow: CPU seconds per second", with_mlflow, mlflow_spread),
        told("worker: journal and heart-beat, ms a step", worker * STEP_S * 1e3, worker_spread),
        at_most("supervisor and journal, share of a step of 50 ms", supervisor + worker, 0.01),
    ]


def supervised(layout: ProjectLayout, mlflow: bool, seconds: float) -> tuple[float, float]:
    """Return the supervisor's CPU seconds per second of training, and steps per second."""
    command = [sys.executable, "-m", "ratchet", "--project", str(layout.root), "train"]
    if not mlflow:
        command = [sys.executable, __file__, str(layout.root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        steps_done(process, layout, WARM_STEPS)
        time.sleep(WARM_S if mlflow else 0.0)
        first = steps_done(process, layout, WARM_STEPS)
        began_s, used_s = time.monotonic(), cpu_s(process.pid)
        time.sleep(seconds)
        took_s, used_s = time.monotonic() - began_s, cpu_s(process.pid) - used_s
        return used_s / took_s, (steps_done(process, layout, 1) - first) / took_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def steps_done(process: "subprocess.Popen[bytes]", layout: ProjectLayout, at_least: int) -> int:
    """Wait until the journal has this many steps. Return their number."""
    deadline_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline_s:
        done = sum(event.kind == "step" for event in events_of(layout))
        if done >= at_least:
            return done
        time.sleep(0.2)
    raise SystemExit(f"{layout.root}: the training ended, or did not begin; see worker.log in {layout.runs}")


def events_of(layout: ProjectLayout) -> list[JournalEvent]:
    """Return the events of a project's only run."""
    return [event for path in layout.runs.glob("*/journal.jsonl") for event in JournalReader(path).read()]


def cpu_s(process: int) -> float:
    """Return user and system time of all threads of a process in seconds (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def recorded(folder: Path, rounds: int, steps: int = 1000) -> list[float]:
    """Return the seconds that a training thread spends on recording one step, each the mean over `steps` steps."""
    folder.mkdir()
    draw, found = random.Random(0), []
    for number in range(rounds):
        journal, heartbeat = Journal(folder / f"{number}.jsonl", 1), Heartbeat.create(120.0, 1800.0)
        batch = [[draw.randrange(100_000)] for _ in range(16)]
        began_s = time.perf_counter()
        for step in range(steps):
            for _ in range(BEATS):
                heartbeat.beat("step")
            journal.append(
                "step", step=step, loss=draw.random(), learning_rate=draw.random(), grad_norm=draw.random(),
                trained_tokens=1234, input_tokens=5678, batch=digests.hash_json(batch)[: digests.SHORT], step_s=0.05,
            )  # fmt: skip
        found.append((time.perf_counter() - began_s) / steps)
        journal.close()
        heartbeat.close()
    return found


def main(arguments: Sequence[str]) -> None:
    """Train the project until asked to stop."""
    layout = ProjectLayout(Path(arguments[0]))
    settings: Settings = params_file.load(layout.params)
    train(Project.from_parts(layout, settings), lambda _: [ConsoleCallback()], lambda *_: None)


if __name__ == "__main__":
    main(sys.argv[1:])
