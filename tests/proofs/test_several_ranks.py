"""Proves rows R9, R10, R14, R18 and R19: several ranks learn exactly the same as one rank, through kills, hangs, and
machines that join and leave."""

import signal
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from rank_projects import (
    EVEN,
    PATIENCE_S,
    STEPS,
    batches,
    events,
    project,
    report,
    settings,
    start,
    train,
    wait_until,
)
from ratchet.config.train import GradientCompressionSettings
from ratchet.runs.fault_injection.injection import InjectedFault
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("runs", "training", "models")


@pytest.fixture(scope="module")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Train on one rank without dropout."""
    layout = project(prepared, tmp_path_factory.mktemp("alone") / "project", settings(EVEN))
    train(layout)
    return layout


@pytest.fixture(scope="module")
def pair(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Train on two ranks with dropout and without interruption."""
    layout = project(prepared, tmp_path_factory.mktemp("pair") / "project", settings(gpus=2))
    train(layout)
    return layout


@pytest.mark.parametrize("count", [2, 3])
def test_more_ranks_learn_the_same(prepared: Path, tmp_path: Path, alone: ProjectLayout, count: int) -> None:
    layout = project(prepared, tmp_path / "project", settings(EVEN, gpus=count, micro_batch_size=3))
    train(layout)
    assert batches(layout) == batches(alone)
    one, several = (
        [(e.data["loss"], e.data["grad_norm"], e.data["trained_tokens"]) for e in events(at, "step")]
        for at in (alone, layout)
    )
    for ours, theirs in zip(several, one, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    losses = report(layout).validation_loss
    assert losses == pytest.approx(report(alone).validation_loss, rel=1e-4)
    assert report(layout).trained_tokens == report(alone).trained_tokens


def test_more_ranks_than_rows_learn_what_one_learns(prepared: Path, tmp_path: Path) -> None:
    few = EVEN.model_copy(update={"batch_size": 2, "epochs": 0.05, "validate_every_steps": 100})
    one, three = (project(prepared, tmp_path / str(count), settings(few, gpus=count)) for count in (1, 3))
    for layout in (one, three):
        train(layout)
    assert batches(three) == batches(one) != {}
    losses = [[event.data["loss"] for event in events(layout, "step")] for layout in (one, three)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert report(three).trained_tokens == report(one).trained_tokens


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_a_rank_that_is_killed_or_stopped_costs_nothing_but_time(
    prepared: Path, tmp_path: Path, pair: ProjectLayout, kind: Any
) -> None:
    layout = project(prepared, tmp_path / "project", settings(gpus=2, stall_timeout_s=3))
    said = train(layout, [InjectedFault(kind=kind, step=9, rank=1, mark=str(tmp_path / "struck"))])
    assert (tmp_path / "struck").exists()
    assert report(layout).adapter_digest == report(pair).adapter_digest
    assert batches(layout) == batches(pair)
    died = [event.data for event in events(layout, "worker_exited")]
    assert [one["failure_class"] for one in died] == ["killed" if kind == "die" else "stalled"], said
    if kind == "freeze":
        assert "rank 1 of this machine: no heartbeat" in died[0]["text"]
        assert "stopped by a signal" in died[0]["text"]


def test_a_request_to_stop_seals_and_the_same_command_goes_on(
    prepared: Path, tmp_path: Path, pair: ProjectLayout
) -> None:
    layout = project(prepared, tmp_path / "project", settings(gpus=2, checkpoint_every=1000))
    process = start(layout, [InjectedFault(kind="slow", seconds=0.2)])
    wait_until(lambda: len(events(layout, "step")) > 3, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 75, said
    stopped = events(layout, "interrupted")[-1].data["step"]
    assert stopped == events(layout, "step")[-1].data["step"] > 3
    train(layout)
    assert events(layout, "worker_ready")[-1].data["start_step"] == stopped
    assert report(layout).adapter_digest == report(pair).adapter_digest


@pytest.mark.parametrize("method", ["powersgd", "int8"])
def test_what_ranks_have_left_unsent_is_in_the_checkpoint(prepared: Path, tmp_path: Path, method: str) -> None:
    """A stopped and killed run gives the same bits as an undisturbed run, although each rank has its own unsent
    gradients."""
    compressed = tiny_project.TRAIN.model_copy(
        update={"gradient_compression": GradientCompressionSettings(method=method, rank=2)}  # type: ignore[arg-type]
    )
    chosen = settings(compressed, gpus=2, checkpoint_every=5)
    whole, stopped = (project(prepared, tmp_path / name, chosen) for name in ("whole", "stopped"))
    train(whole)
    process = start(stopped, [InjectedFault(kind="slow", seconds=0.2)])
    wait_until(lambda: len(events(stopped, "step")) > 7, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 75, said
    train(stopped, [InjectedFault(kind="die", step=18, rank=1, mark=str(tmp_path / "struck"))])
    assert (tmp_path / "struck").exists()
    assert batches(stopped) == batches(whole)
    assert report(stopped).adapter_digest == report(whole).adapter_digest


def test_memory_that_one_rank_lacks_makes_micro_batches_smaller_on_all(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings(gpus=2))
    train(layout, [InjectedFault(kind="memory", step=5, steps=1, tokens=60, rank=1)])
    shrunk = [event.data for event in events(layout, "microbatch_budget") if event.data["action"] == "shrink"]
    assert shrunk
    assert {one["step"] for one in shrunk} == {5}
    assert report(layout).steps == STEPS
