"""Proves rows R13 and R25 for spot machines: after the loss of a machine and its disk, the run continues on the next
machine."""

import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from ratchet.runs import replication_protocol
from ratchet.runs.directory import find_newest_run
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage.layout import ProjectLayout
from tiny_project import outcome
from tiny_project import start_training as start

PACKAGES = ("runs",)
PATIENCE_S = 120.0
Bytes = dict[str, str]
Machines = Callable[[str], ProjectLayout]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> ProjectLayout:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


@pytest.fixture(scope="session")
def reference(prepared: ProjectLayout, tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    """Return the output of an uninterrupted training without a replica."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(prepared.root, root)
    done = tiny_project.ratchet(ProjectLayout(root), "train")
    assert done.returncode == 0, done.stderr
    return outcome(ProjectLayout(root))


@pytest.fixture
def machine(prepared: ProjectLayout, tmp_path: Path) -> Machines:
    """Return a function that creates a machine: a copy of the project without a training. All machines use the same
    replica."""

    def make(name: str) -> ProjectLayout:
        shutil.copytree(prepared.root, tmp_path / name)
        more = {
            "replica": str(tmp_path / "replica"),
            "lease_timeout_s": 8.0,
            "replica_interval_s": 0.2,
            "replica_timeout_s": 20.0,
        }
        settings = tiny_project.SETTINGS
        settings = settings.model_copy(update={"machine": settings.machine.model_copy(update=more)})
        tiny_project.save(ProjectLayout(tmp_path / name), settings)
        return ProjectLayout(tmp_path / name)

    return make


def events(layout: ProjectLayout, kind: str) -> list[JournalEvent]:
    run = find_newest_run(layout.runs)
    return [event for event in JournalReader(run.journal).read() if event.kind == kind] if run else []


def wait_for(process: subprocess.Popen[str], there: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def durable(layout: ProjectLayout) -> tuple[int, ...]:
    run = find_newest_run(layout.runs)
    noted = replication_protocol.read_replication_state(run) if run else None
    return noted.durable_steps if noted else ()


def train_until(layout: ProjectLayout, more_steps: int) -> subprocess.Popen[str]:
    """Start a training and stop its worker after more steps. The sealed checkpoints are then in the replica."""
    process = start(layout)
    wait_for(process, lambda: durable(layout) or events(layout, "worker_ready"))
    began = len(events(layout, "step"))
    wait_for(process, lambda: len(events(layout, "step")) >= began + more_steps and events(layout, "checkpoint_saved"))
    worker = find_worker(process.pid, layout.root)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    run = find_newest_run(layout.runs)
    assert run is not None
    wait_for(process, lambda: durable(layout)[-1:] == tuple(run.checkpoint_steps()[-1:]) != ())
    return process


def lose(layout: ProjectLayout, process: subprocess.Popen[str]) -> str:
    """Kill the machine and delete its disk. Return the output of the command."""
    process.kill()
    said, _ = process.communicate()
    shutil.rmtree(layout.root)
    return said


def damage_newest(layout: ProjectLayout, replica: Path) -> int:
    """Change a byte of the weights of the newest checkpoint in the replica. Return the step of the checkpoint."""
    run = find_newest_run(layout.runs)
    assert run is not None
    step = run.checkpoint_steps()[-1]
    weights = hashlib.sha256((run.checkpoint(step) / "trainable.safetensors").read_bytes()).hexdigest()
    copy = replica / "runs" / run.root.name / "objects" / weights
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    return step


def test_machines_that_are_taken_away_with_their_disks_change_nothing(
    machine: Machines, reference: Bytes, tmp_path: Path
) -> None:
    """The first machine receives a notice early enough to complete its replica; the second one receives none. A damaged
    checkpoint is skipped."""
    first = machine("first")
    process = start(first)
    wait_for(process, lambda: len(durable(first)) >= 1 and len(events(first, "step")) > 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    assert "its replica lacks" not in output
    (stopped,) = events(first, "interrupted")
    assert stopped.data["step"] in durable(first)
    assert damage_newest(first, tmp_path / "replica") == stopped.data["step"]
    shutil.rmtree(first.root)
    second = machine("second")
    said = lose(second, train_until(second, 3))
    assert f"checkpoint of step {stopped.data['step']} in the replica is skipped" in said
    third = machine("third")
    done = tiny_project.ratchet(third, "train")
    assert done.returncode == 0, done.stderr
    assert "restored from the replica: the checkpoint of step" in done.stderr
    assert outcome(third) == reference
    steps = [event.data["step"] for event in events(third, "step")]
    assert set(steps) == set(range(1, max(steps) + 1)), "figures of all steps, whoever did them"
    assert len(events(third, "attempt_started")) == 3
    # A later machine receives the finished result.
    fourth = machine("fourth")
    done = tiny_project.ratchet(fourth, "train")
    assert done.returncode == 0, done.stderr
    assert outcome(fourth) == reference
    assert len(events(fourth, "attempt_started")) == 3, "nothing was trained there"


def test_a_machine_that_was_stopped_for_too_long_is_succeeded_by_one_that_is_done_when_the_replica_has_the_result(
    machine: Machines, reference: Bytes, tmp_path: Path
) -> None:
    first = machine("first")
    stopped = train_until(first, 3)
    worker = find_worker(stopped.pid, first.root)
    assert worker is not None
    second = machine("second")
    busy = tiny_project.ratchet(second, "train")
    assert busy.returncode == 75, busy.stderr
    assert "only one machine may" in busy.stderr
    assert "the last start was refused: run" in tiny_project.ratchet(second, "status").stdout
    stopped.send_signal(signal.SIGSTOP)
    second.params.write_text(second.params.read_text().replace("replica_timeout_s: 20", "replica_timeout_s: 1"))
    process = start(second)
    wait_for(process, lambda: len(events(second, "worker_ready")) == 2)
    (tmp_path / "replica").rename(tmp_path / "away")
    (tmp_path / "replica").write_text("no folder")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    assert "training is complete, but its replica lacks the result" in output
    lacking = next(line for line in output.splitlines() if "its replica lacks the result" in line)
    assert "cannot" in lacking, "and why"
    assert not second.train.exists()
    (tmp_path / "replica").unlink()
    (tmp_path / "away").rename(tmp_path / "replica")
    second.params.write_text(second.params.read_text().replace("replica_timeout_s: 1\n", "replica_timeout_s: 20\n"))
    again = tiny_project.ratchet(second, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(second) == reference
    assert len(events(second, "attempt_started")) == 2, "one there, one here: nothing is trained again"
    os.kill(worker, signal.SIGCONT)
    stopped.send_signal(signal.SIGCONT)
    output, _ = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 75, output
    assert "has trained it" in output
    third = machine("third")
    assert tiny_project.ratchet(third, "train").returncode == 0
    assert outcome(third) == reference
