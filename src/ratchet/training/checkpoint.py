"""Checkpoints: everything that the next step depends on, sealed; safetensors and JSON only.

    trainable.safetensors   the adapter's matrices, by parameter name
    optimizer.safetensors   the optimizer's tensors (see optimizer.py)
    state.json              step, best so far, validation history, counters, the optimizer's other values

Learning rate, order of rows and random streams are functions of the step (schedule.py, data/batches.py), and the base
is pinned by digest: there is nothing else to save.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ratchet import files
from ratchet.errors import DamagedError
from ratchet.model import adapter
from ratchet.model.quantized import Model
from ratchet.run.directory import CHECKPOINT, RunPaths
from ratchet.training import optimizer as optimizers


@dataclass(frozen=True)
class State:
    """Where training stands after `step` optimizer steps."""

    step: int = 0
    validation_loss: dict[int, float] = field(default_factory=dict)
    """By step, in nats per answer token."""
    best_step: int = 0
    bad_validations: int = 0
    """Validations since the best one."""
    train_loss: float = 0.0
    """Of the last step."""
    trained_tokens: int = 0
    input_tokens: int = 0

    @property
    def best_loss(self) -> float | None:
        """Validation loss at `best_step`."""
        return self.validation_loss.get(self.best_step)


def save(paths: RunPaths, state: State, model: Model, optimizer: torch.optim.Optimizer, compute_dtype: str) -> int:
    """Seal a checkpoint; returns its size in bytes. Nothing is left behind when it fails."""
    tensors, rest = optimizers.flatten(optimizer)
    with files.sealed_directory(paths.checkpoint(state.step), CHECKPOINT) as scratch:
        weights = {name: parameter.detach().cpu().contiguous() for name, parameter in adapter.trainable(model)}
        save_file(weights, scratch / "trainable.safetensors")
        save_file(tensors, scratch / "optimizer.safetensors")
        document = {"state": asdict(state), "optimizer": rest, "compute_dtype": compute_dtype}
        files.write_json(scratch / "state.json", document)
    return files.read_manifest(paths.checkpoint(state.step)).size_bytes


def newest_valid(paths: RunPaths, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is right; each damaged newer one is reported and passed over."""
    for step in reversed(paths.checkpoint_steps()):
        path = paths.checkpoint(step)
        try:
            files.verify(path, CHECKPOINT)
            best = read_state(path)[0].best_step
            if best not in (0, step):
                files.verify(paths.checkpoint(best), CHECKPOINT)  # the result may be made of it
        except DamagedError as error:
            notice(f"checkpoint of step {step} is passed over, it or its best one is damaged: {error}")
        else:
            return path
    return None


def read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """State, and the whole document, of a checkpoint."""
    document = json.loads((path / "state.json").read_text())
    raw = document["state"]
    raw["validation_loss"] = {int(step): loss for step, loss in raw["validation_loss"].items()}
    return State(**raw), document


def load(path: Path, model: Model, optimizer: torch.optim.Optimizer, device: torch.device) -> State:
    """Put model and optimizer into the state of a verified checkpoint.

    Raises:
        DamagedError: it holds other parameters than this model trains.
    """
    load_weights(path, model)
    state, document = read_state(path)
    optimizers.restore(optimizer, load_file(path / "optimizer.safetensors", device=str(device)), document["optimizer"])
    return state


def load_weights(path: Path, model: Model) -> None:
    """Put the adapter's matrices of a checkpoint into the model. Raises DamagedError when the names differ."""
    saved = load_file(path / "trainable.safetensors")
    wanted = dict(adapter.trainable(model))
    if saved.keys() != wanted.keys():
        differing = sorted(saved.keys() ^ wanted.keys())
        raise DamagedError(f"{path}: holds other parameters than this model trains, e.g. {differing[0]}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


def rotate(paths: RunPaths, keep: int, best_step: int) -> None:
    """Remove old checkpoints by step order, never the best, never one of the `keep` newest."""
    for step in paths.checkpoint_steps()[:-keep]:
        if step != best_step:
            files.remove_sealed(paths.checkpoint(step))
