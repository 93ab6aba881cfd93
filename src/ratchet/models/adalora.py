"""AdaLoRA: ranks are shared out by importance while training (Zhang et al. 2023, arXiv 2303.10512), through peft.

Every layer begins with train.rank directions; after `begin` of the steps the least important of all layers are cut
every so many steps, along a cubic curve, until adalora.target_rank of a layer are left on average; then they stay.
peft's allocator decides; here are its schedule, what a checkpoint must hold of it, and what it must be spared.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft import AdaLoraModel
from torch import Tensor

from ratchet.config.train import Train
from ratchet.errors import DamagedError
from ratchet.models.device import Model
from ratchet.models.lora_weights import ADAPTER, adapted_layers


def schedule(settings: Train, steps: int) -> dict[str, Any]:
    """peft's words for section adalora, for a training of `steps` optimizer steps (0: not to be trained)."""
    plan, total = settings.adalora, max(1, steps)
    return {
        "init_r": settings.rank,
        "target_r": plan.target_rank,
        "total_step": total,
        "tinit": int(plan.begin * total),
        "tfinal": int(plan.end * total),
        "deltaT": plan.every_steps,
        "beta1": plan.sensitivity,
        "beta2": plan.uncertainty,
        "orth_reg_weight": plan.orthogonality,
    }


def _tuner(model: Model) -> AdaLoraModel | None:
    found = getattr(model, "base_model", None)
    return found if isinstance(found, AdaLoraModel) else None


def freeze_constants(model: Model) -> None:
    """Beside weights of 16 bits peft 0.21 makes a new parameter of the number that it divides by, which then learns."""
    if _tuner(model) is not None:
        for _, layer in adapted_layers(model):
            layer.ranknum[ADAPTER].requires_grad_(False)


def penalty(model: Model) -> Tensor | None:
    """How far the singular vectors are from orthogonal: the mean over all A and B of ||A A' - I|| (equation 4 without
    its weight gamma; a scalar that gradients flow through). None for other adapters.

    peft adds it only to a loss that the model computes itself.
    """
    if _tuner(model) is None:
        return None
    distances = []
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[ADAPTER].float(), layer.lora_B[ADAPTER].float()
        one = torch.eye(len(a), device=a.device)
        distances += [torch.linalg.matrix_norm(a @ a.T - one), torch.linalg.matrix_norm(b.T @ b - one)]
    return torch.stack(distances).mean()


def after_step(model: Model, step: int, steps: int) -> None:
    """Weigh every direction by the step's gradient, and cut what is due; nothing for other adapters.

    Args:
        model: after optimizer step `step` (from 1), the gradient still in place.
        step: counts steps that were left out, too; the one at which ranks become final may be among them.
        steps: that the model was attached for.
    """
    tuner = _tuner(model)
    if tuner is None:
        return
    config, allocator = tuner.peft_config[ADAPTER], tuner.rankallocator
    if steps != config.total_step:
        raise RuntimeError(f"attached for {config.total_step} steps, trained for {steps}")
    final = config.total_step - config.tfinal
    settled = config.rank_pattern is not None and not allocator.exp_avg_ipt  # peft forgets its weights in the end
    if step < final or settled:
        _complete_gradients(tuner)
        tuner.update_and_allocate(step)
        return
    if not allocator.exp_avg_ipt:  # nothing was weighed so far: a training of a single step
        _complete_gradients(tuner)
        allocator.update_ipt(tuner.model)
    tuner.update_and_allocate(final)


def _complete_gradients(tuner: AdaLoraModel) -> None:
    """A matrix that the step did not reach has no gradient, and peft does not ask."""
    for parameter in tuner.model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def tensors(model: Model) -> dict[str, Tensor]:
    """What the allocator remembers, for a checkpoint; nothing for other adapters."""
    tuner = _tuner(model)
    if tuner is None:
        return {}
    allocator = tuner.rankallocator
    found = {f"sensitivity/{name}": tensor for name, tensor in allocator.exp_avg_ipt.items()}
    found |= {f"uncertainty/{name}": tensor for name, tensor in allocator.exp_avg_unc.items()}
    pattern = tuner.peft_config[ADAPTER].rank_pattern or {}
    return found | {f"kept/{name}": torch.tensor(kept) for name, kept in pattern.items()}


def restore(model: Model, saved: Mapping[str, Tensor]) -> None:
    """Let the allocator remember what it did when a checkpoint was written.

    Raises:
        DamagedError: it is of other matrices than this model trains.
    """
    tuner = _tuner(model)
    parameters = {} if tuner is None else {n: p for n, p in tuner.model.named_parameters() if p.requires_grad}
    parts: dict[str, dict[str, Tensor]] = {"sensitivity": {}, "uncertainty": {}, "kept": {}}
    for path, tensor in saved.items():
        part, _, name = path.partition("/")
        whole = parameters.get(name)
        fits = whole is not None and tensor.shape == (whole.shape[:1] if part == "kept" else whole.shape)
        if not fits or part not in parts:
            raise DamagedError(f"holds a rank allocation of other matrices than this model trains, e.g. {path}")
        parts[part][name] = tensor
    if tuner is None:
        return
    allocator = tuner.rankallocator
    allocator.reset_ipt()
    for name, tensor in parts["sensitivity"].items():
        allocator.ipt[name] = torch.zeros_like(parameters[name])  # made anew at each step, but looked for
        allocator.exp_avg_ipt[name] = tensor.to(parameters[name].device, copy=True)
    for name, tensor in parts["uncertainty"].items():
        allocator.exp_avg_unc[name] = tensor.to(parameters[name].device, copy=True)
    pattern = {name: tensor.tolist() for name, tensor in parts["kept"].items()}
    tuner.peft_config[ADAPTER].rank_pattern = pattern or None
