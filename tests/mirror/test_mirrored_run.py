"""Real trainings that lose their machine, disk and all: the same command elsewhere ends with the same bytes."""

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
from ratchet.faults.attack import worker_of
from ratchet.layout import Layout
from ratchet.run import mirrored
from ratchet.run.directory import newest
from ratchet.run.journal import Event, Reader
from tiny_project import outcome
from tiny_project import start_training as start

PATIENCE_S = 120.0

Bytes = dict[str, str]
Machines = Callable[[str], Layout]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Layout:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


@pytest.fixture(scope="session")
def reference(prepared: Layout, tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    """What an uninterrupted training without a mirror makes."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(prepared.root, root)
    done = tiny_project.ratchet(Layout(root), "train")
    assert done.returncode == 0, done.stderr
    return outcome(Layout(root))


@pytest.fixture
def machine(prepared: Layout, tmp_path: Path) -> Machines:
    """Makes a machine: a clone of the project with nothing trained, that mirrors to the same place as all others."""

    def make(name: str) -> Layout:
        shutil.copytree(prepared.root, tmp_path / name)
        more = {"mirror": str(tmp_path / "mirror"), "lease_s": 2.0, "mirror_every_s": 0.2, "mirror_wait_s": 20.0}
        settings = tiny_project.SETTINGS
        settings = settings.model_copy(update={"machine": settings.machine.model_copy(update=more)})
        tiny_project.save(Layout(tmp_path / name), settings)
        return Layout(tmp_path / name)

    return make


def events(layout: Layout, kind: str) -> list[Event]:
    run = newest(layout.runs)
    return [event for event in Reader(run.journal).read() if event.kind == kind] if run else []


def wait_for(process: subprocess.Popen[str], there: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def durable(layout: Layout) -> tuple[int, ...]:
    run = newest(layout.runs)
    noted = mirrored.read(run) if run else None
    return noted.durable_steps if noted else ()


def train_until(layout: Layout, more_steps: int) -> subprocess.Popen[str]:
    """Start a training and stop its worker after so many more steps, with what it has sealed in the mirror."""
    process = start(layout)
    wait_for(process, lambda: durable(layout) or events(layout, "ready"))
    began = len(events(layout, "step"))
    wait_for(process, lambda: len(events(layout, "step")) >= began + more_steps)
    worker = worker_of(process.pid, layout.root)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    run = newest(layout.runs)
    assert run is not None
    wait_for(process, lambda: durable(layout)[-1:] == tuple(run.checkpoint_steps()[-1:]) != ())
    return process


def lose(layout: Layout, process: subprocess.Popen[str]) -> None:
    """The machine is gone, and its disk with it."""
    process.kill()
    process.communicate()
    shutil.rmtree(layout.root)


def test_machines_that_vanish_with_their_disks_change_nothing(machine: Machines, reference: Bytes) -> None:
    for name in ("first", "second"):
        layout = machine(name)
        lose(layout, train_until(layout, 3))
    third = machine("third")
    done = tiny_project.ratchet(third, "train")
    assert done.returncode == 0, done.stderr
    assert "taken from the mirror: the checkpoint of step" in done.stderr
    assert outcome(third) == reference
    steps = [event.data["step"] for event in events(third, "step")]
    assert set(steps) == set(range(1, max(steps) + 1)), "figures of all steps, whoever did them"
    assert len(events(third, "attempt")) == 3
    # And whoever comes later takes what is finished.
    fourth = machine("fourth")
    done = tiny_project.ratchet(fourth, "train")
    assert done.returncode == 0, done.stderr
    assert outcome(fourth) == reference
    assert len(events(fourth, "attempt")) == 3, "nothing was trained there"


def test_a_notice_to_leave_is_enough_time_for_the_mirror_and_a_damaged_copy_is_passed_over(
    machine: Machines, reference: Bytes, tmp_path: Path
) -> None:
    first = machine("first")
    process = start(first)
    wait_for(process, lambda: len(durable(first)) >= 1 and len(events(first, "step")) > 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    assert "its mirror lacks" not in output
    (stopped,) = events(first, "stopped")
    assert stopped.data["step"] in durable(first)
    run = newest(first.runs)
    assert run is not None
    weights = hashlib.sha256((run.checkpoint(stopped.data["step"]) / "trainable.safetensors").read_bytes()).hexdigest()
    shutil.rmtree(first.root)
    copy = tmp_path / "mirror" / "runs" / run.root.name / "objects" / weights
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    second = machine("second")
    done = tiny_project.ratchet(second, "train")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint of step {stopped.data['step']} in the mirror is passed over" in done.stderr
    assert outcome(second) == reference


def test_a_run_is_done_when_its_mirror_has_the_result(machine: Machines, reference: Bytes, tmp_path: Path) -> None:
    layout = machine("first")
    text = layout.params.read_text().replace("mirror_wait_s: 20", "mirror_wait_s: 1")
    layout.params.write_text(text)
    process = start(layout)
    wait_for(process, lambda: events(layout, "ready"))
    (tmp_path / "mirror").rename(tmp_path / "away")
    (tmp_path / "mirror").write_text("no folder")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    assert "is trained, but not done: its mirror lacks the result" in output
    assert not layout.train.exists()
    (tmp_path / "mirror").unlink()
    (tmp_path / "away").rename(tmp_path / "mirror")
    again = tiny_project.ratchet(layout, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(layout) == reference
    assert len(events(layout, "attempt")) == 1
    shutil.rmtree(layout.root)
    other = machine("other")
    assert tiny_project.ratchet(other, "train").returncode == 0
    assert outcome(other) == reference


def test_a_machine_that_was_stopped_for_too_long_ends_when_it_comes_back(machine: Machines, reference: Bytes) -> None:
    first = machine("first")
    process = train_until(first, 3)
    worker = worker_of(process.pid, first.root)
    assert worker is not None
    busy = tiny_project.ratchet(machine("too early"), "train")
    assert busy.returncode == 2
    assert "one machine at a time may" in busy.stderr
    process.send_signal(signal.SIGSTOP)
    second = machine("second")
    done = tiny_project.ratchet(second, "train")
    assert done.returncode == 0, done.stderr
    assert outcome(second) == reference
    os.kill(worker, signal.SIGCONT)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, output
    assert "has trained it" in output
    third = machine("third")
    assert tiny_project.ratchet(third, "train").returncode == 0
    assert outcome(third) == reference
