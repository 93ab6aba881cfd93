"""Proves row R9: a restarted process repeats the decisions of the process that ran out of memory, so the run stays
exact."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.config.train import Train
from ratchet.errors import InterruptedRunError
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import FaultInjector, InjectedFault
from ratchet.training.trainer import TrainingLoop
from small_loop import SMALL, after_steps, loop_of, trained_by

PACKAGES = ("training",)


def faulty(root: Path, *faults: dict[str, Any], train: Train = SMALL, **more: Any) -> TrainingLoop:
    return loop_of(root, train, faults=FaultInjector(tuple(map(InjectedFault.model_validate, faults))), **more)


def same_weights(a: TrainingLoop, b: TrainingLoop) -> bool:
    x, y = trained_by(a), trained_by(b)
    return all(torch.equal(x[name], y[name]) for name in x)


def memory(step: int, steps: int, tokens: int, phase: str = "train") -> dict[str, Any]:
    return {"kind": "memory", "step": step, "steps": steps, "tokens": tokens, "phase": phase}


@pytest.mark.parametrize("at", [3, 4, 5, 8])
def test_a_process_with_memory_enough_decides_again_as_the_one_before(tmp_path: Path, at: int) -> None:
    """The results are equal bit for bit. The size of micro-batches affects the rounding of sums and the random numbers
    of dropout."""
    whole = faulty(tmp_path / "whole", memory(4, 3, 50))
    state = whole.run()
    first = tmp_path / "killed"
    with pytest.raises(InterruptedRunError):
        faulty(first, memory(4, 3, 50), stop=after_steps(RunPaths(first), 9)).run()
    paths = RunPaths(first)
    for step in paths.checkpoint_steps():
        if step > at:
            (paths.checkpoint(step) / "state.json").unlink()
    healthy = faulty(first)
    assert healthy.state.step <= at
    assert healthy.run() == state
    assert same_weights(healthy, whole)
