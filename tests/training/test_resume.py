"""Real training processes, killed by real signals: the same command again ends with the same bytes."""

import json
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
from ratchet.config import Settings
from ratchet.faults.attack import worker_of
from ratchet.layout import Layout
from ratchet.run.directory import newest
from ratchet.run.journal import Event, Reader
from tiny_project import outcome
from tiny_project import start_training as start

KILLS = 3
PATIENCE_S = 120.0

Bytes = dict[str, str]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Layout:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


@pytest.fixture
def project(prepared: Layout, tmp_path: Path) -> Layout:
    """A copy of its own for each test: another path on purpose, for a run must not depend on it."""
    shutil.copytree(prepared.root, tmp_path / "copy of project")
    return Layout(tmp_path / "copy of project")


@pytest.fixture(scope="session")
def reference(prepared: Layout, tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    """What an uninterrupted training makes."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(prepared.root, root)
    done = tiny_project.ratchet(Layout(root), "train")
    assert done.returncode == 0, done.stderr
    return outcome(Layout(root))


def events(layout: Layout) -> list[Event]:
    run = newest(layout.runs)
    return list(Reader(run.journal).read()) if run else []


def wait_for(layout: Layout, process: subprocess.Popen[str], there: Callable[[list[Event]], bool]) -> bool:
    """Wait until the journal shows something; False when the process ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if there(events(layout)):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    raise AssertionError(f"nothing after {PATIENCE_S} s: {events(layout)[-3:]}")


def steps_after(count: int) -> Callable[[list[Event]], bool]:
    """More than `count` step events in the journal so far."""
    return lambda found: sum(e.kind == "step" for e in found) > count


@pytest.fixture
def random_points() -> Iterator[random.Random]:
    seed = int(os.environ.get("RATCHET_TEST_SEED", "7"))
    print(f"seed of the kill points: {seed} (RATCHET_TEST_SEED)")
    yield random.Random(seed)


def test_workers_killed_at_random_points_change_nothing(
    project: Layout, reference: Bytes, random_points: random.Random
) -> None:
    process = start(project)
    killed = 0
    while killed < KILLS:
        done = sum(e.kind == "step" for e in events(project))
        if not wait_for(project, process, steps_after(done + random_points.randrange(3))):
            break
        time.sleep(random_points.uniform(0, 0.05))
        pid = worker_of(process.pid, project.root)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert killed == KILLS
    assert outcome(project) == reference
    assert sum(e.kind == "died" for e in events(project)) == KILLS


def test_supervisors_killed_at_random_points_take_their_worker_along_and_change_nothing(
    project: Layout, reference: Bytes, random_points: random.Random
) -> None:
    for _ in range(KILLS):
        process = start(project)
        done = sum(e.kind == "step" for e in events(project))
        if not wait_for(project, process, steps_after(done + random_points.randrange(3))):
            break
        time.sleep(random_points.uniform(0, 0.05))
        pid = worker_of(process.pid, project.root)
        process.kill()
        process.communicate()
        assert pid is None or gone(pid)
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(project) == reference


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_sigterm_seals_a_checkpoint_and_says_repeat(project: Layout, reference: Bytes) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    while process.poll() is None:  # one who does not stop asking, down to the last moment of the process
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    last = [e for e in events(project) if e.kind in ("step", "stopped", "checkpoint")]
    stopped = next(e.data["step"] for e in last if e.kind == "stopped")
    assert max(e.data["step"] for e in last if e.kind == "step") == stopped
    assert max(e.data["step"] for e in last if e.kind == "checkpoint") == stopped
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(project) == reference


def test_another_micro_batch_between_attempts_is_told_of(project: Layout) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    machine = tiny_project.MACHINE.model_copy(update={"micro_batch_rows": 5})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    assert tiny_project.ratchet(project, "train").returncode == 0
    notices = [e.data["text"] for e in events(project) if e.kind == "notice"]
    assert any("not bit-exact" in text and "micro_batch_rows 8 → 5" in text for text in notices)


def test_a_second_trainer_of_the_same_run_is_refused(project: Layout) -> None:
    process = start(project)
    assert wait_for(project, process, lambda found: any(e.kind == "attempt" for e in found))
    second = tiny_project.ratchet(project, "train")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr


def test_a_dead_mlflow_changes_nothing_in_training_and_is_told_everything_later(
    project: Layout, reference: Bytes
) -> None:
    project.mlflow_database.write_text("this is no database")
    first = tiny_project.ratchet(project, "train")
    assert first.returncode == 0, first.stderr
    assert any("mlflow failed" in e.data["text"] for e in events(project) if e.kind == "notice")
    assert "is not logged to MLflow" in first.stderr
    assert outcome(project) == reference
    project.mlflow_database.unlink()
    assert tiny_project.ratchet(project, "train").returncode == 0
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project.mlflow_database}", f"sqlite:///{project.mlflow_database}")
    (run,) = client.search_runs([client.get_experiment_by_name("ratchet-model").experiment_id])
    sent = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sent == sorted({e.data["step"] for e in events(project) if e.kind == "step"})
    assert run.info.status == "FINISHED"


def test_a_finished_run_is_not_trained_again(project: Layout, reference: Bytes) -> None:
    assert tiny_project.ratchet(project, "train").returncode == 0
    before = events(project)
    shutil.rmtree(project.train)
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0
    assert "trained before" in again.stdout
    assert outcome(project) == reference
    assert events(project) == before


def test_damaged_newest_checkpoints_are_passed_over_loudly(project: Layout, reference: Bytes) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"keep_checkpoints": 4, "checkpoint_every": 1})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    process = start(project)
    assert wait_for(project, process, lambda found: any(e.kind == "checkpoint" and e.data["step"] >= 6 for e in found))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    run = newest(project.runs)
    assert run is not None
    damaged = run.checkpoint_steps()[-3:]
    for step, damage in zip(damaged, (flip, truncate, Path.unlink), strict=True):
        damage(run.checkpoint(step) / "optimizer.safetensors")
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    notices = " ".join(e.data["text"] for e in events(project) if e.kind == "notice")
    assert all(f"checkpoint of step {step} is passed over" in notices for step in damaged)
    assert outcome(project) == reference


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def test_a_worker_that_always_dies_ends_the_run_with_the_reason(project: Layout) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"retries": 2})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    process = start(project)
    while process.poll() is None:
        pid = worker_of(process.pid, project.root)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "gave up after 2 restarts without a new checkpoint" in output
    assert [e.data["decision"] for e in events(project) if e.kind == "died"] == ["Retry", "Retry", "GiveUp"]


def test_divergence_ends_the_run_with_a_diagnosis(project: Layout) -> None:
    settings = with_train(learning_rate=1e30, max_grad_norm=1e30, schedule="constant", warmup=0.0)
    tiny_project.save(project, settings)
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 1
    assert "loss is nan, computed twice; 6 bad steps in a row" in done.stderr
    assert "no weight was changed by these steps" in done.stderr
    assert not project.train.exists()
    losses = [json.dumps(e.data["loss"]) for e in events(project) if e.kind == "step"]
    assert "NaN" not in losses


def with_train(**changes: object) -> Settings:
    train = tiny_project.TRAIN.model_copy(update=changes)
    return tiny_project.SETTINGS.model_copy(update={"train": train})
