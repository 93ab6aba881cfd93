"""Optimizers, their state as plain tensors and JSON (no pickle), and the learning rate and seed of each step.

Learning rate and seed are pure functions of the step, so no checkpoint has to save them.

Training in float16 multiplies the loss by a scale, so that small gradients do not vanish in the type's narrow range. An
overflow of the gradient halves the scale, and GROW_AFTER_STEPS steps without overflow double it (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.2). Unlike in that paper, an overflow does not skip the step: the same step
is computed again. Powers of two scale floating-point numbers exactly, so the scale itself changes no result.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.models import adapters
from ratchet.models.device import Model
from ratchet.storage import digests
from ratchet.training.train_state import TrainState

INITIAL_SCALE = 2.0**16
MAX_SCALE = 2.0**24
GROW_AFTER_STEPS = 2000
"""Number of steps without overflow before the loss scale doubles."""

_MATRICES = ("lora_A", "lora_B", "lora_E", "lora_embedding_")
"""Parts of the names of an adapter's matrices. The other trainable parameters are DoRA's magnitudes and the rows of new
tokens."""

Optimizer = Any
"""torch.optim.Optimizer, or a subclass of bitsandbytes."""


def compute_learning_rate(step: int, steps: int, settings: Train) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`: linear warm-up, then the decay of `train.schedule`
    towards `train.final_learning_rate_share` of the peak, which the step after the last would have."""
    warmup = math.ceil(settings.warmup_ratio * steps) if settings.warmup_steps is None else settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    floor = settings.final_learning_rate_share
    progress = (step - warmup) / max(1, steps - warmup)
    match settings.schedule:
        case "constant":
            return settings.learning_rate
        case "exponential":
            return settings.learning_rate * math.pow(floor, progress)
        case "linear":
            share = 1.0 - progress
        case "polynomial":
            share = math.pow(1.0 - progress, settings.polynomial_power)
        case "warmup_stable_decay":
            cooldown = min(math.ceil(settings.cooldown_ratio * steps), max(1, steps - warmup))
            # 1 - sqrt is the best of the shapes that Hägele et al. 2024 (arXiv 2405.18392, section 3) compare.
            share = 1.0 - math.sqrt(max(0.0, step - (steps - cooldown)) / cooldown)
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    # Without a floor, no further rounding: the rates are those of versions without this setting.
    return settings.learning_rate * (share if floor == 0 else floor + (1.0 - floor) * share)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the seed of the random numbers (dropout) of one optimizer step of a rank.

    Each step has its own seed, so resuming needs no saved state of a random generator. Random numbers that are drawn
    between two steps, or by a repeated step, do not change the random numbers of later steps.
    """
    key = [seed, step, rank] if rank else [seed, step]
    return int(digests.hash_json(key)[:15], 16)


def build(model: Model, settings: Train, device: torch.device) -> Optimizer:
    """Return the optimizer of `train.optimizer` for the trainable parameters of `model`.

    The entry `loraplus_lr_ratio` of each parameter group is the factor of the group's learning rate. Raises
    SettingsError if a paged optimizer has no GPU, or the optimizer would compute in float16.
    """
    # At most three groups: matrices, matrices B with a higher rate (LoRA+: Hayou et al. 2024, arXiv 2402.12354), other
    # parameters. Only matrices have weight decay, which pulls an update towards "no change". Weight decay would pull
    # DoRA's magnitudes and the rows of new tokens towards zero.
    members: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in adapters.trainable_parameters(model):
        ratio = settings.loraplus_lr_ratio if "lora_B" in name else 1.0
        decay = settings.weight_decay if any(mark in name for mark in _MATRICES) else 0.0
        members.setdefault((ratio, decay), []).append(parameter)
    groups = [
        {"params": parameters, "lr": settings.learning_rate * ratio, "weight_decay": decay, "loraplus_lr_ratio": ratio}
        for (ratio, decay), parameters in members.items()
    ]
    if settings.optimizer == "adamw" and settings.adapter_dtype == "float16":
        raise SettingsError(
            "train.adapter_dtype: found float16, but adamw stores squared gradients in the adapter's dtype, where "
            "values below 6e-8 are zero and the first step would divide by zero; set float32, or train.optimizer: "
            "adamw_8bit"
        )
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, foreach=False)
    if settings.optimizer == "paged_adamw_8bit" and device.type != "cuda":
        raise SettingsError("train.optimizer: paged_adamw_8bit needs a GPU; set adamw_8bit or adamw")
    import bitsandbytes

    optimizer_class = (
        bitsandbytes.optim.PagedAdamW8bit if settings.optimizer.startswith("paged") else bitsandbytes.optim.AdamW8bit
    )
    return optimizer_class(groups, lr=settings.learning_rate)


def flatten_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state: tensors by path (`parameter/key/...`), not copied, and the other values as JSON."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values = {str(index): _extract_tensors(entries, str(index), tensors) for index, entries in state["state"].items()}
    return tensors, {"groups": state["param_groups"], "values": values}


def _extract_tensors(node: dict[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move the tensors of a dictionary (nested for bitsandbytes) into `tensors`; return the other values."""
    values: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Tensor):
            tensors[f"{path}/{key}"] = value.detach()
        else:
            values[key] = _extract_tensors(value, f"{path}/{key}", tensors) if isinstance(value, dict) else value
    return values


def restore(optimizer: Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Load a state from `flatten_state`. Raises DamagedFileError if the state belongs to another optimizer or other
    parameters."""
    state = {int(index): entries for index, entries in values["values"].items()}
    for path, tensor in tensors.items():
        index, *folders, key = path.split("/")
        node = state.setdefault(int(index), {})
        for folder in folders:
            node = node.setdefault(folder, {})
        node[key] = tensor
    earlier = dict(optimizer.state)
    try:
        optimizer.load_state_dict({"state": state, "param_groups": values["groups"]})
    except (ValueError, KeyError) as error:
        raise DamagedFileError(
            f"the saved optimizer state does not fit train.optimizer and the adapter: {error}"
        ) from None
    if getattr(optimizer, "is_paged", False):
        _page_states(optimizer, earlier)


def _page_states(optimizer: Optimizer, earlier: dict[Tensor, dict[str, Any]]) -> None:
    """Move the moments of a paged optimizer into paged memory, which bitsandbytes (0.50) uses for new moments only;
    otherwise a resumed training would need more memory of the GPU than one that was not interrupted. The paged memory
    of `earlier` moments is used again, because bitsandbytes never frees it."""
    for parameter, state in optimizer.state.items():
        for key in ("state1", "state2"):
            paged = earlier.get(parameter, {}).get(key)
            if paged is None:
                paged = optimizer.get_state_buffer(parameter, dtype=state[key].dtype)
            state[key] = paged.copy_(state[key])


# Dynamic loss scaling.


def initial_loss_scale(compute_dtype: torch.dtype) -> float:
    """Return the loss scale of the first step; 1 for bfloat16 and float32, whose range covers all gradients."""
    return INITIAL_SCALE if compute_dtype == torch.float16 else 1.0


def is_overflow(state: TrainState, loss: float, grad_norm: float) -> bool:
    """Return whether a smaller loss scale may help: the loss is finite, but its gradient is not."""
    return state.loss_scale > 1 and math.isfinite(loss) and not math.isfinite(grad_norm)


def reduce_loss_scale(state: TrainState) -> TrainState:
    """Return the state with half the loss scale, in which the same step is computed again."""
    return replace(state, loss_scale=state.loss_scale / 2, loss_scale_steps=0)


def advance_loss_scale(state: TrainState) -> TrainState:
    """Return the state after a step without overflow."""
    if state.loss_scale == 1:
        return state
    if state.loss_scale_steps + 1 < GROW_AFTER_STEPS:
        return replace(state, loss_scale_steps=state.loss_scale_steps + 1)
    return replace(state, loss_scale=min(MAX_SCALE, 2 * state.loss_scale), loss_scale_steps=0)
