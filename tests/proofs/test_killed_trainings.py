"""Proves rows R1, R4, R5, R8 and R24: a training that is killed, finds damaged checkpoints or diverges ends with the
exact result or with a diagnosis."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import tiny_project
from ratchet.config.settings import Settings
from ratchet.models.cpu_kernels import library
from ratchet.runs.directory import find_newest_run
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.storage.layout import ProjectLayout
from resume_cases import (
    PATIENCE_S,
    Bytes,
    events,
    prepared,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    random_points,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    steps_after,
    train_with_kills,
    wait_for,
)
from tiny_project import outcome
from tiny_project import start_training as start

PACKAGES = ("runs", "training")
KILLS = 3


def test_workers_killed_at_random_points_change_nothing(
    project: ProjectLayout, reference: Bytes, random_points: random.Random
) -> None:
    train_with_kills(project, KILLS, random_points)
    assert outcome(project) == reference


def test_supervisors_killed_at_random_points_take_their_worker_along_and_change_nothing(
    project: ProjectLayout, reference: Bytes, random_points: random.Random
) -> None:
    for _ in range(KILLS):
        process = start(project)
        done = sum(e.kind == "step" for e in events(project))
        if not wait_for(project, process, steps_after(done + random_points.randrange(3))):
            break
        time.sleep(random_points.uniform(0, 0.05))
        pid = find_worker(process.pid, project.root)
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


def test_another_micro_batch_between_attempts_is_told_of(project: ProjectLayout) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    machine = tiny_project.MACHINE.model_copy(update={"micro_batch_size": 5})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    assert tiny_project.ratchet(project, "train").returncode == 0
    notices = [e.data["text"] for e in events(project) if e.kind == "notice"]
    assert any("not bit-exact" in text and "micro_batch_size 8 → 5" in text for text in notices)


@pytest.mark.skipif(not library.load_kernels().is_available, reason=library.load_kernels().text)
def test_a_resume_without_kernels_is_told_of(project: ProjectLayout) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    environment = tiny_project.environment() | {"RATCHET_CPU_KERNELS": "0"}
    subprocess.run(tiny_project.command("train"), cwd=project.root, env=environment, check=True, capture_output=True)
    notices = [e.data["text"] for e in events(project) if e.kind == "notice"]
    used, digest = library.load_kernels().text, library.load_kernels().digest[:8]
    told = f"from here on not bit-exact: kernels {used} {digest} → torch's (RATCHET_CPU_KERNELS is 0)"
    assert told in notices


def test_a_second_trainer_of_the_same_run_is_refused(project: ProjectLayout) -> None:
    process = start(project)
    assert wait_for(project, process, lambda found: any(e.kind == "attempt_started" for e in found))
    second = tiny_project.ratchet(project, "train")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr


def test_a_dead_mlflow_changes_nothing_in_training_and_is_told_everything_later(
    project: ProjectLayout, reference: Bytes
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


def test_a_finished_run_is_not_trained_again(project: ProjectLayout, reference: Bytes) -> None:
    assert tiny_project.ratchet(project, "train").returncode == 0
    before = events(project)
    shutil.rmtree(project.train)
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0
    assert "trained before" in again.stdout
    assert outcome(project) == reference
    assert events(project) == before


def test_damaged_newest_checkpoints_are_passed_over_loudly(project: ProjectLayout, reference: Bytes) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"keep_checkpoints": 4, "checkpoint_every": 1})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    process = start(project)
    assert wait_for(
        project, process, lambda found: any(e.kind == "checkpoint_saved" and e.data["step"] >= 6 for e in found)
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    run = find_newest_run(project.runs)
    assert run is not None
    damaged = run.checkpoint_steps()[-3:]
    for step, damage in zip(damaged, (flip, truncate, Path.unlink), strict=True):
        damage(run.checkpoint(step) / "optimizer.safetensors")
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    notices = " ".join(e.data["text"] for e in events(project) if e.kind == "notice")
    assert all(f"checkpoint of step {step} is skipped" in notices for step in damaged)
    assert outcome(project) == reference


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def test_a_worker_that_always_dies_ends_the_run_with_the_reason(project: ProjectLayout) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"max_restarts": 2})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    process = start(project)
    while process.poll() is None:
        pid = find_worker(process.pid, project.root)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "gave up after 2 restarts without a new checkpoint" in output
    assert [e.data["decision"] for e in events(project) if e.kind == "worker_exited"] == ["Retry", "Retry", "GiveUp"]


def test_divergence_ends_the_run_with_a_diagnosis(project: ProjectLayout) -> None:
    settings = with_train(learning_rate=1e30, max_grad_norm=1e30, schedule="constant", warmup_ratio=0.0)
    tiny_project.save(project, settings)
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 1
    assert "loss is nan, computed twice; the first output that is not finite is that of model." in done.stderr
    assert "; 6 bad steps in a row" in done.stderr
    assert "these steps changed no weight" in done.stderr
    assert not project.train.exists()
    losses = [json.dumps(e.data["loss"]) for e in events(project) if e.kind == "step"]
    assert "NaN" not in losses


def with_train(**changes: object) -> Settings:
    train = tiny_project.TRAIN.model_copy(update=changes)
    return tiny_project.SETTINGS.model_copy(update={"train": train})
