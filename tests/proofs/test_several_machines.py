"""Proves rows R14, R18 and R19: machines that join, leave and vanish change nothing that is learned."""

import signal
import subprocess
from pathlib import Path

import pytest

import tiny_project
from ports import free_port
from rank_projects import (
    EVEN,
    PATIENCE_S,
    SLOW,
    STEPS,
    batches,
    events,
    project,
    report,
    settings,
    start,
    train,
    wait_until,
    world,
)
from ratchet.runs.fault_injection.injection import InjectedFault

PACKAGES = ("runs", "training", "models")


def test_machines_join_and_leave(prepared: Path, tmp_path: Path, started: list["subprocess.Popen[str]"]) -> None:
    """With 1 → 2 → 4 → 2 ranks, each epoch uses each sample once, and the losses are those of one rank."""
    chosen = settings(
        EVEN.model_copy(update={"epochs": 8}), nodes="1:3", rendezvous=f"127.0.0.1:{free_port()}", grace_period_s=10
    )
    whole = project(prepared, tmp_path / "alone", settings(chosen.train))
    train(whole)
    first, second, third = (project(prepared, tmp_path / name, chosen) for name in ("first", "second", "third"))
    tiny_project.save(third, chosen.model_copy(update={"machine": chosen.machine.model_copy(update={"gpus": 2})}))
    started.append(start(first, [SLOW]))
    wait_until(lambda: len(events(first, "step")) > 3, *started)
    started.append(start(second, [SLOW]))
    wait_until(lambda: world(first) == world(second) == 2, *started)
    joined = events(second, "worker_ready")[-1].data["start_step"]
    assert joined >= 4, "a new machine has the checkpoint from one that was there"
    started.append(start(third, [SLOW]))
    wait_until(lambda: world(first) == world(second) == world(third) == 4, *started)
    began = len(events(first, "step"))
    wait_until(lambda: len(events(first, "step")) > began + 3, *started)
    started[2].send_signal(signal.SIGTERM)
    said = started[2].communicate(timeout=PATIENCE_S)[1]
    assert started[2].returncode == 75, said
    wait_until(lambda: world(first) == world(second) == 2, started[0], started[1])
    for process in started[:2]:
        said = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == 0, said
    assert batches(first) == batches(whole)
    losses = [event.data["loss"] for event in events(whole, "step")]
    by_step = {event.data["step"]: event.data["loss"] for event in events(first, "step")}
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(losses, rel=5e-3)
    assert report(first).adapter_digest == report(second).adapter_digest
    assert report(first).validation_loss == pytest.approx(report(whole).validation_loss, rel=5e-3)


def test_a_machine_that_vanishes_is_done_without(
    prepared: Path, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    chosen = settings(nodes="1:2", rendezvous=f"127.0.0.1:{free_port()}", checkpoint_every=1000)
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    started.append(start(first, [SLOW]))
    wait_until(lambda: bool(events(first, "attempt_started")), *started)  # so this machine hosts the rendezvous
    started.append(start(second, [SLOW]))
    wait_until(lambda: world(first) == world(second) == 2, *started)
    wait_until(lambda: len(events(first, "step")) > 4, *started)
    done = len(events(first, "step"))
    started[1].kill()
    said = started[0].communicate(timeout=PATIENCE_S)[1]
    assert started[0].returncode == 0, said
    assert [event.data["failure_class"] for event in events(first, "worker_exited")] == ["peers"]
    assert events(first, "worker_ready")[-1].data["start_step"] >= done, "what was done is sealed when others are lost"
    assert report(first).steps == STEPS


def test_machines_that_would_train_different_things_are_refused(
    prepared: Path, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    chosen = settings(nodes="2", rendezvous=f"127.0.0.1:{free_port()}")
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    tiny_project.save(
        second, chosen.model_copy(update={"machine": chosen.machine.model_copy(update={"micro_batch_size": 4})})
    )
    started += [start(first), start(second)]
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    for text in said:
        assert "would train different things" in text
        assert "micro_batch_size: 8 and 4" in text or "micro_batch_size: 4 and 8" in text


def test_a_meeting_that_nobody_comes_to_ends_with_where_it_was(prepared: Path, tmp_path: Path) -> None:
    port = free_port()
    layout = project(
        prepared, tmp_path / "project", settings(nodes="2", rendezvous=f"127.0.0.1:{port}", rendezvous_timeout_s=13)
    )
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 75
    assert f"2 machines did not meet at 127.0.0.1:{port} within 13 s" in said
    (told,) = [event.data["text"] for event in events(layout, "notice") if "waits at" in event.data["text"]]
    assert f"this machine waits at 127.0.0.1:{port}: 2 machines train the run together" in told


def test_a_rank_that_others_wait_for_is_told(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings(EVEN, gpus=2))
    train(layout, [InjectedFault(kind="slow", seconds=0.4, rank=1)])
    told = events(layout, "rank_timings")
    assert told
    assert all(len(event.data["busy_s"]) == 2 for event in told)
    for event in told:
        first, second = event.data["busy_s"]
        assert first + 0.3 * event.data["steps"] < second <= event.data["seconds"]
    steps = {event.data["step"]: event.data["step_s"] for event in events(layout, "step")}
    last = told[0].data["step"]
    assert told[0].data["seconds"] == pytest.approx(sum(seconds for step, seconds in steps.items() if step <= last))
    (ready,) = events(layout, "worker_ready")
    assert len(ready.data["hosts"]) == 2
    assert len(set(ready.data["hosts"])) == 1
    assert ready.data["peak_flops_per_s"] is None  # there is no data sheet for a CPU
    assert ready.data["flops_per_token"] > 0
