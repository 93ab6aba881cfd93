"""Small training states for tests of checkpoints: they have each kind of optimizer tensor, but no model."""

from pathlib import Path
from typing import Any

import torch

from ratchet.config.train import Train
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.storage import digests, files
from ratchet.training import checkpoint
from ratchet.training.checkpoint import CheckpointWriteStats
from ratchet.training.train_state import TrainSnapshot, TrainState

SPEC = RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64)
ENVIRONMENT = {"torch": "2.13.0", "device": "cpu x86_64", "threads": "1"}


def identity(spec: RunSpec = SPEC, **environment: str) -> dict[str, Any]:
    return {"spec": spec.model_dump(mode="json"), "environment": ENVIRONMENT | environment}


def snapshot(step: int, best: int = 0, good: int = 0) -> TrainSnapshot:
    """Return the training state after this step. The step determines the state completely."""
    draw = torch.Generator().manual_seed(step)
    weights = {f"layer.{n}.lora_{x}": torch.randn(4, 6, generator=draw) for n in (0, 1) for x in "AB"}
    states: dict[str, torch.Tensor] = {}
    for number in range(len(weights)):
        states[f"{number}/step"] = torch.tensor(float(step))
        states[f"{number}/exp_avg"] = torch.randn(4, 6, generator=draw)
        states[f"{number}/state1"] = torch.randint(0, 256, (24,), generator=draw, dtype=torch.uint8)
        states[f"{number}/qmap1"] = torch.linspace(-1, 1, 16)
        states[f"{number}/qmap2"] = torch.linspace(0, 1, 16)
    rest = {"groups": [{"lr": 0.1 / step, "params": list(range(len(weights)))}], "values": {"0": {"step": step}}}
    losses = {n: 1.0 / n for n in range(1, step + 1)}
    state = TrainState(step, losses, best_step=best, rollback_step=good, train_loss=1.5 / step, grad_norms=(0.5, 1.5))
    return TrainSnapshot(state, weights, states, rest)


def save(paths: RunPaths, step: int, best: int = 0, good: int = 0) -> CheckpointWriteStats:
    """Seal the checkpoint of a step."""
    return checkpoint.write(paths, snapshot(step, best, good), identity(), lambda: None)


def equal(a: TrainSnapshot, b: TrainSnapshot) -> bool:
    """Return whether two training states are equal to the last bit."""

    def same(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> bool:
        return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)

    return (
        a.state == b.state
        and files.json_bytes(a.optimizer_values) == files.json_bytes(b.optimizer_values)
        and same(a.weights, b.weights)
        and same(a.optimizer_tensors, b.optimizer_tensors)
    )


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a directory."""
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
    return {name: digests.hash_file(folder / name) for name in names}


def newest(paths: RunPaths) -> tuple[int | None, list[str]]:
    """Return the step from which a run would resume, and the notices about other checkpoints."""
    notices: list[str] = []
    path = checkpoint.find_newest_valid(paths, SPEC, notices.append)
    return (None if path is None else checkpoint.read(path).state.step), notices
