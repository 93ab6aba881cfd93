"""Proves rows R9, R14 and R19 for a base that ranks share: nothing but memory changes by sharing it."""

import signal
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from rank_projects import (
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
)
from ratchet.config_train import Train
from ratchet.faults.injection import Fault
from ratchet.layout import Layout

PACKAGES = ("training", "model")
PLAIN = tiny_project.TRAIN.model_copy(update={"quantization": "none"})


def shared(train: Train = tiny_project.TRAIN, **machine: Any) -> Any:
    return settings(train, gpus=2, shard_base=True, **machine)


def whole(prepared: Path, root: Path, chosen: Train, **machine: Any) -> Layout:
    """The same training by two ranks that have all of the base, each."""
    layout = project(prepared, root, settings(chosen, gpus=2, shard_base=False, **machine))
    train(layout)
    return layout


@pytest.fixture(scope="module")
def pair(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return whole(prepared, tmp_path_factory.mktemp("pair") / "project", tiny_project.TRAIN)


@pytest.mark.parametrize(
    ("chosen", "machine"),
    [
        (tiny_project.TRAIN, {}),
        (PLAIN, {"activation_checkpointing": True}),
        # Five rows a step on two ranks, two at a time: one of them has more to do than the other.
        (tiny_project.TRAIN.model_copy(update={"batch_rows": 5}), {"micro_batch_rows": 2}),
        (PLAIN.model_copy(update={"adapter": "dora"}), {}),
        (PLAIN.model_copy(update={"initialization": "pissa"}), {}),
    ],
)
def test_the_adapter_is_the_same_bit_for_bit(
    prepared: Path, tmp_path: Path, chosen: Train, machine: dict[str, Any]
) -> None:
    apart = whole(prepared, tmp_path / "apart", chosen, **machine)
    layout = project(prepared, tmp_path / "shared", shared(chosen, **machine))
    assert "2 ranks, which share the base" in train(layout)
    assert events(layout, "ready")[-1].data["shares_base"] is True
    assert events(apart, "ready")[-1].data["shares_base"] is False
    assert report(layout).adapter_digest == report(apart).adapter_digest
    assert report(layout).validation_loss == report(apart).validation_loss
    assert (layout.train / "analysis.json").read_bytes() == (apart.train / "analysis.json").read_bytes()


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_a_rank_that_is_killed_or_stopped_in_the_middle_costs_nothing_but_time(
    prepared: Path, tmp_path: Path, pair: Layout, kind: Any
) -> None:
    layout = project(prepared, tmp_path / "project", shared(stall_s=3, checkpoint_every=4))
    train(layout, [Fault(kind=kind, step=9, rank=1, mark=str(tmp_path / "struck"))])
    assert (tmp_path / "struck").exists()
    assert report(layout).adapter_digest == report(pair).adapter_digest
    assert [event.data["class"] for event in events(layout, "died")] == ["killed" if kind == "die" else "stalled"]


def test_memory_that_one_rank_lacks_begins_the_step_again_on_all(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", shared())
    train(layout, [Fault(kind="memory", step=5, steps=1, tokens=60, rank=1)])
    told = [event.data for event in events(layout, "budget") if event.data["action"] == "shrink"]
    assert {one["step"] for one in told} == {5}
    assert told[0]["rank"] == 1
    assert events(layout, "ready")[-1].data["start_step"] == 4, "what was done is sealed before all begin again"
    assert report(layout).steps == STEPS


def test_a_run_goes_on_with_another_number_of_ranks(prepared: Path, tmp_path: Path, pair: Layout) -> None:
    """Two that share, then one that has all of it, then three that share: a checkpoint knows of none of that."""
    layout = project(prepared, tmp_path / "project", shared(checkpoint_every=1000))
    for machine in ({"gpus": 1}, {"gpus": 3, "shard_base": True}):
        begun = len(events(layout, "step"))
        process = start(layout, [SLOW])
        wait_until(lambda: len(events(layout, "step")) > begun + 3, process)  # noqa: B023 (called at once)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == 75, said
        tiny_project.save(layout, settings(tiny_project.TRAIN, **machine))
    train(layout)
    assert [event.data["ranks"] for event in events(layout, "ready")] == [2, 1, 3]
    assert batches(layout) == batches(pair)
    assert report(layout).steps == STEPS
    assert report(layout).validation_loss == pytest.approx(report(pair).validation_loss, rel=2e-2)
