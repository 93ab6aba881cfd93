"""Tests of loss scaling in float16: only micro-batches that overflow are computed again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.training import optimizer
from ratchet.training.train_state import TrainState
from small_loop import SMALL, loop_of, losses, trained_by

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scale", "loss", "norm", "again"),
    [
        (8.0, 1.0, INF, True),
        (8.0, 1.0, NAN, True),
        (8.0, 1.0, 2.0, False),
        (8.0, NAN, NAN, False),
        (1.0, 1.0, INF, False),
    ],
)
def test_only_an_overflow_that_a_smaller_scale_may_mend_is_computed_again(
    scale: float, loss: float, norm: float, again: bool
) -> None:
    assert optimizer.is_overflow(TrainState(loss_scale=scale), loss, norm) is again


def test_the_scale_halves_at_an_overflow_and_doubles_after_long() -> None:
    state = optimizer.reduce_loss_scale(TrainState(loss_scale=8.0, loss_scale_steps=5))
    assert (state.loss_scale, state.loss_scale_steps) == (4.0, 0)
    for _ in range(optimizer.GROW_AFTER_STEPS):
        assert state.loss_scale == 4.0
        state = optimizer.advance_loss_scale(state)
    assert (state.loss_scale, state.loss_scale_steps) == (8.0, 0)
    assert optimizer.advance_loss_scale(
        replace(state, loss_scale=optimizer.MAX_SCALE, loss_scale_steps=10**6)
    ).loss_scale == (optimizer.MAX_SCALE)


def test_without_float16_nothing_is_scaled() -> None:
    assert [optimizer.initial_loss_scale(t) for t in (torch.float32, torch.bfloat16)] == [1.0, 1.0]
    assert optimizer.advance_loss_scale(TrainState()) == TrainState()


@pytest.mark.parametrize("exponent", [10, 127])
def test_scale_changes_nothing_that_is_learned_and_is_halved_at_each_overflow(tmp_path: Path, exponent: int) -> None:
    """A scale of 2**127 certainly overflows float32. After enough halvings, the training equals the one without a
    scale."""
    plain, scaled = loop_of(tmp_path / "a", SMALL), loop_of(tmp_path / "b", SMALL, initial_loss_scale=2.0**exponent)
    plain.run()
    scaled.run()
    told = [e for e in JournalReader(RunPaths(tmp_path / "b").journal).read() if e.kind == "loss_scale"]
    assert bool(told) == (exponent == 127)
    assert all(event.data["step"] >= 1 for event in told)
    assert scaled.state.loss_scale == 2.0 ** (exponent - len(told))
    assert losses(RunPaths(tmp_path / "a")) == losses(RunPaths(tmp_path / "b"))
    for name, tensor in trained_by(plain).items():
        assert torch.equal(tensor, trained_by(scaled)[name]), name
