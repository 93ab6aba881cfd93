"""Optimizers, and their whole state as plain tensors and JSON (no pickle)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ratchet.config_train import Train
from ratchet.errors import DamagedError, SettingsError

Optimizer = Any
"""torch.optim.Optimizer; bitsandbytes' are of that class too."""


def build(parameters: Iterator[torch.nn.Parameter], settings: Train, device: torch.device) -> Optimizer:
    """The optimizer of `train.optimizer`. Raises SettingsError for a paged one without a GPU."""
    arguments: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(list(parameters), foreach=False, **arguments)
    if settings.optimizer == "paged_adamw_8bit" and device.type != "cuda":
        raise SettingsError("train.optimizer: paged_adamw_8bit needs a GPU to page from; use adamw_8bit or adamw here")
    import bitsandbytes

    kind = bitsandbytes.optim.PagedAdamW8bit if settings.optimizer.startswith("paged") else bitsandbytes.optim.AdamW8bit
    return kind(list(parameters), **arguments)


def flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State as (tensors by path `parameter/key/...`, everything else as JSON). Tensors are the optimizer's own."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values = {str(index): _take_tensors(entries, str(index), tensors) for index, entries in state["state"].items()}
    return tensors, {"groups": state["param_groups"], "values": values}


def _take_tensors(node: dict[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What is left of a (nested: bitsandbytes) dictionary when its tensors have moved into `tensors`."""
    rest: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Tensor):
            tensors[f"{path}/{key}"] = value.detach()
        else:
            rest[key] = _take_tensors(value, f"{path}/{key}", tensors) if isinstance(value, dict) else value
    return rest


def restore(optimizer: Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Put back what `flatten` took out.

    Raises:
        DamagedError: it belongs to another optimizer or other parameters.
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
        raise DamagedError(f"optimizer state does not fit these settings: {error}") from None
