"""Learning rate and random streams as pure functions of the step: nothing of either is saved in a checkpoint."""

import math
from typing import Any

import torch
from torch import Tensor

from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.models import adapters
from ratchet.models.device import Model
from ratchet.storage import digests


def compute_learning_rate(step: int, steps: int, settings: Train) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up to the peak, then the chosen decay to zero."""
    warmup = math.ceil(settings.warmup * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "linear":
        return settings.learning_rate * (1.0 - done)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Start the random stream (dropout) of one optimizer step, on every device of a rank.

    A stream a step, instead of one for the run: resuming needs no saved generator state, and nothing that draws
    numbers in between (validation, a retried step) can shift what later steps draw.
    """
    key = [seed, step, rank] if rank else [seed, step]
    torch.manual_seed(int(digests.hash_json(key)[:15], 16))


# Optimizers, and their whole state as plain tensors and JSON (no pickle).

Optimizer = Any
"""torch.optim.Optimizer; bitsandbytes' are of that class too."""


_MATRICES = ("lora_A", "lora_B", "lora_E", "lora_embedding_")
"""Of an adapter; the others that learn are values of their own, DoRA's magnitudes and rows of tokens."""


def build(model: Model, settings: Train, device: torch.device) -> Optimizer:
    """The optimizer of `train.optimizer` for what learns in `model`.

    Each of its groups says in `rate_ratio` by what the learning rate is multiplied for it.

    Raises:
        SettingsError: it is a paged one, and there is no GPU; or it would compute in float16.
    """
    groups = _build_groups(model, settings)
    if settings.optimizer == "adamw" and settings.adapter_dtype == "float16":
        raise SettingsError(
            "train.adapter_dtype: float16, but adamw keeps squares of gradients in the type of the adapter, and those "
            "below 6e-8 are zero there: the first step would divide by it; set float32, or optimizer: adamw_8bit"
        )
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, foreach=False)
    if settings.optimizer == "paged_adamw_8bit" and device.type != "cuda":
        raise SettingsError("train.optimizer: paged_adamw_8bit needs a GPU to page from; use adamw_8bit or adamw here")
    import bitsandbytes

    kind = bitsandbytes.optim.PagedAdamW8bit if settings.optimizer.startswith("paged") else bitsandbytes.optim.AdamW8bit
    return kind(groups, lr=settings.learning_rate)


def _build_groups(model: Model, settings: Train) -> list[dict[str, Any]]:
    """At most three: matrices; matrices B if they learn faster (LoRA+, Hayou et al. 2024, arXiv 2402.12354); the rest.

    Weight decay is for the matrices of an adapter, which it draws towards "no change". It would draw DoRA's magnitudes
    and the rows of new tokens towards zero, which is no such thing.
    """
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in adapters.trainable_parameters(model):
        ratio = settings.rate_ratio if "lora_B" in name else 1.0
        decay = settings.weight_decay if any(mark in name for mark in _MATRICES) else 0.0
        groups.setdefault((ratio, decay), []).append(parameter)
    return [
        {"params": found, "lr": settings.learning_rate * ratio, "weight_decay": decay, "rate_ratio": ratio}
        for (ratio, decay), found in groups.items()
    ]


def flatten_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State as (tensors by path `parameter/key/...`, everything else as JSON). Tensors are the optimizer's own."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values = {str(index): _extract_tensors(entries, str(index), tensors) for index, entries in state["state"].items()}
    return tensors, {"groups": state["param_groups"], "values": values}


def _extract_tensors(node: dict[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What is left of a (nested: bitsandbytes) dictionary when its tensors have moved into `tensors`."""
    rest: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Tensor):
            tensors[f"{path}/{key}"] = value.detach()
        else:
            rest[key] = _extract_tensors(value, f"{path}/{key}", tensors) if isinstance(value, dict) else value
    return rest


def restore(optimizer: Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Put back what `flatten_state` took out.

    Raises:
        DamagedFileError: it belongs to another optimizer or other parameters.
    """
    state = {int(index): entries for index, entries in rest["values"].items()}
    for path, tensor in tensors.items():
        index, *folders, key = path.split("/")
        node = state.setdefault(int(index), {})
        for folder in folders:
            node = node.setdefault(folder, {})
        node[key] = tensor
    try:
        optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
    except (ValueError, KeyError) as error:
        raise DamagedFileError(f"optimizer state does not fit these settings: {error}") from None
