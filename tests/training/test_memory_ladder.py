"""Tests of reactions before memory runs out and when a GPU is too hot, with simulated readings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.config.machine import Machine
from ratchet.errors import InterruptedRunError
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.training import trainer
from ratchet.training.gpu_temperature import GpuThermometer
from ratchet.training.memory_ladder import MemoryLadder
from ratchet.training.trainer import TrainingLoop
from small_loop import SMALL, after_steps, loop_of, losses, steps

PLAIN = SMALL.model_copy(update={"dropout": 0.0, "validate_every_steps": 1000})


def test_each_rung_is_reached_once_until_the_share_was_well_below_it() -> None:
    ladder = MemoryLadder()
    assert ladder.climb(0.79) == []
    assert ladder.climb(0.80) == ["report"]
    assert ladder.climb(0.86) == ["shrink"]
    assert ladder.climb(0.81) == []
    assert ladder.climb(0.96) == ["free_caches", "checkpoint"]  # 81 % was not far enough below 85 %
    assert ladder.climb(0.84) == []
    assert ladder.climb(0.90) == ["free_caches"]
    assert ladder.climb(0.10) == []
    assert ladder.climb(1.00) == ["report", "shrink", "free_caches", "checkpoint"]


def make_loop(
    root: Path, monkeypatch: pytest.MonkeyPatch, shares: dict[int, float], stop: int | None = None
) -> TrainingLoop:
    """Create a loop with a memory ladder. `shares` are the readings after the steps; other readings are 50 %."""
    machine = Machine(device="cpu", micro_batch_size=4, checkpoint_every=1000, memory_ladder=True)
    monkeypatch.setattr("small_loop.Machine", lambda **_: machine)
    loop = loop_of(root, PLAIN) if stop is None else loop_of(root, PLAIN, after_steps(RunPaths(root), stop))
    monkeypatch.setattr(
        loop.context.memory_monitor, "read_used_share", lambda: shares.get(loop.state.step, 0.5), raising=True
    )
    return loop


def events(loop: TrainingLoop, kind: str) -> list[JournalEvent]:
    return [event for event in JournalReader(loop.context.paths.journal).read() if event.kind == kind]


@pytest.mark.long
def test_the_ladder_acts_before_memory_runs_out_and_a_resumed_run_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {2: 0.81, 3: 0.86, 4: 0.86, 5: 0.91, 6: 0.97}
    loop = make_loop(tmp_path / "whole", monkeypatch, shares)
    state = loop.run()
    notices = [event.data["text"] for event in events(loop, "notice")]
    assert [text for text in notices if text.startswith("memory:")] == [
        "memory: 81% of the device are in use after step 2",
        "memory: 86% of the device are in use after step 3; micro-batches are smaller",
        "memory: 91% of the device are in use after step 5; caches are freed",
        "memory: 97% of the device are in use after step 6; micro-batches are smaller, and a checkpoint is saved",
    ]
    budgets = [(event.data["step"], event.data["budget"]["tokens"]) for event in events(loop, "microbatch_budget")]
    largest = 4 * int(loop.context.train_rows.lengths.max())
    assert budgets == [(4, int(0.8 * largest)), (7, int(0.8 * largest) // 2)]
    assert all(event.data["is_early"] for event in events(loop, "microbatch_budget"))
    assert 6 in [event.data["step"] for event in events(loop, "checkpoint_saved")]
    # A process that finds enough memory repeats the steps with the same micro-batches.
    with pytest.raises(InterruptedRunError):
        make_loop(tmp_path / "stopped", monkeypatch, shares, stop=8).run()
    resumed = make_loop(tmp_path / "stopped", monkeypatch, {})
    for step in resumed.context.paths.checkpoint_steps():  # simulates a kill before the last checkpoint was sealed
        if step > 6:
            (resumed.context.paths.checkpoint(step) / "state.json").unlink()
    resumed = make_loop(tmp_path / "stopped", monkeypatch, {})
    assert resumed.state.step == 6
    assert resumed.run() == state
    assert losses(resumed.context.paths)[-1] == losses(loop.context.paths)[-1]


def test_without_the_setting_memory_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(tmp_path, PLAIN, after_steps(RunPaths(tmp_path), 3))

    def fail() -> float:
        raise AssertionError("read")

    monkeypatch.setattr(loop.context.memory_monitor, "read_used_share", fail)
    with pytest.raises(InterruptedRunError):
        loop.run()


@pytest.mark.long
def test_single_rows_cannot_be_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(tmp_path, monkeypatch, {step: 0.97 if step % 2 else 0.5 for step in range(1, 20)})
    loop.run()
    assert loop.state.budget.tokens is not None
    notices = [
        event.data["text"] for event in events(loop, "notice") if "micro-batches have one row" in event.data["text"]
    ]
    assert notices


def test_a_thermometer_has_hysteresis_and_reads_every_few_seconds() -> None:
    readings, now = iter([80, 86, 84, 81, 80, 85]), iter(range(0, 1000, 5))
    thermometer = GpuThermometer(85, lambda: next(readings), pytest.fail, lambda: float(next(now)))
    assert [thermometer.update() for _ in range(6)] == [False, True, True, True, False, False]
    times = iter([0.0, 0.0, 4.9, 5.0, 5.0])
    values = iter([90, 20])
    thermometer = GpuThermometer(85, lambda: next(values), pytest.fail, lambda: next(times))
    assert [thermometer.update() for _ in range(3)] == [True, True, False]
    assert not GpuThermometer(None, lambda: 1 // 0, pytest.fail).update()
    problems: list[str] = []
    lost = GpuThermometer(85, lambda: 1 // 0, problems.append)
    assert not lost.update()
    assert not lost.update()
    (problem,) = problems
    assert problem.startswith(
        "machine.max_gpu_celsius has no effect: the temperature of the GPU cannot be read (integer"
    )


def test_training_pauses_while_a_gpu_is_too_hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = loop_of(tmp_path / "clean", PLAIN)
    clean.run()
    monkeypatch.setattr(trainer, "PAUSE_S", 0.0)
    loop = loop_of(tmp_path / "hot", PLAIN)
    readings: Iterator[int] = iter([70, 70, 91, 88, 79, *[70] * 1000])
    clock = iter(range(0, 10**6, 5))
    loop.thermometer = GpuThermometer(84, lambda: next(readings), pytest.fail, lambda: float(next(clock)))
    assert loop.run() == clean.run()
    notices = [event.data["text"] for event in events(loop, "notice")]
    assert notices[0].startswith("paused after step 2: a GPU has 91 °C")
    assert notices[1].startswith("continues after a pause of")
    assert losses(loop.context.paths) == losses(clean.context.paths)


def test_a_pause_ends_at_a_request_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "PAUSE_S", 0.0)
    stop, checks = GracefulShutdown(), iter(range(1000))
    loop = loop_of(tmp_path, PLAIN, stop)

    def read() -> int:
        if next(checks) == 5:
            stop._is_requested = True
        return 95

    clock = iter(range(0, 10**6, 5))
    loop.thermometer = GpuThermometer(84, read, pytest.fail, lambda: float(next(clock)))
    with pytest.raises(InterruptedRunError):
        loop.run()
    assert steps(loop.context.paths) == []
