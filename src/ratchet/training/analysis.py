"""Analyses what training did to each module: gradient norms, updates, and advice for the next run.

The training state records gradient norms at a fixed grid of steps, so an interrupted run records the same norms.
The matrix scale·B·A of an update is never computed: with the QR decompositions B = Q₁R₁ and Aᵀ = Q₂R₂, its singular
values are those of the small matrix scale·R₁R₂ᵀ. Numbers are rounded to six digits, because further digits differ
between machines.

Effective rank: exponential of the Shannon entropy of the singular values divided by their sum (Roy and Vetterli, "The
effective rank: a measure of effective dimensionality", EUSIPCO 2007).

The thresholds of the advice are Ratchet's own, chosen so that a healthy training gets little advice. The cited papers
give the relations behind the thresholds. Every sentence of the advice contains its numbers, so that you can judge it
yourself.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from ratchet.config.train import Train
from ratchet.errors import BaseModelError
from ratchet.models import adapters, weights
from ratchet.models.adapter_format import LoraFactors, name_in_base
from ratchet.models.device import Model
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis, parse_module_name
from ratchet.training.train_state import TrainState

GRID_POINTS = 50
"""Maximum number of steps per run at which gradient norms of modules are recorded."""
DIGITS = 6
"""Significant digits of every number."""

STILL_FACTOR = 10.0
"""First condition for a module that barely moved: its ratio of update to weights is below the median ratio divided by
this factor."""
STILL_DEVIATIONS = 3.5
"""Second condition: the logarithm of the ratio is more than this number of scaled median absolute deviations below the
logarithm of the median (Iglewicz and Hoaglin 1993)."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""

MOST_MODULES = 0.75
"""Share of the modules that must have the same finding before advice is given."""
LOW_RANK_SHARE, HIGH_RANK_SHARE = 0.5, 0.9
"""Limits of the effective rank divided by the rank: below the first, advice suggests a smaller rank; from the second
on, a larger rank."""
MIN_UPDATE = 1e-3
"""Median ratio of update to weights below which a training has changed almost nothing."""
MAX_NAMES = 4
"""Maximum number of module names that a sentence lists."""

Modules = Mapping[str, ModuleAnalysis]


# Gradient norms during training.


def is_due(step: int, steps: int) -> bool:
    """Return whether module norms are recorded at optimizer step `step` (from 1) of `steps`.

    They are recorded at GRID_POINTS evenly spread steps, the first and the last included.
    """
    if steps <= GRID_POINTS or not 1 <= step <= steps:
        return 1 <= step <= steps
    gaps, length = GRID_POINTS - 1, steps - 1
    nearest = (2 * gaps * (step - 1) + length) // (2 * length)
    return step == 1 + (2 * nearest * length + gaps) // (2 * gaps)


def compute_module_norms(model: Model) -> dict[str, float]:
    """Return the L2 norm of the gradient of each module's trainable parameters, by name of the module in the base.

    Call this function when the gradient of the step is complete, before clipping. It waits for the device once.
    """
    gradients: list[tuple[str, Tensor]] = []
    for layer_name, layer in model.get_base_model().named_modules():
        if isinstance(layer, BaseTunerLayer) and (parameters := _own_parameters(layer)):
            name = name_in_base(layer_name, layer).removesuffix(".token_adapter")
            gradients += [(name, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for _, gradient in gradients])
    by_module: dict[str, list[float]] = {}
    for (name, _), norm in zip(gradients, norms.tolist(), strict=True):
        by_module.setdefault(name, []).append(norm)
    return {name: _round_value(math.hypot(*parts)) for name, parts in by_module.items()}


def record_norms(state: TrainState, step: int, norms: Mapping[str, float]) -> TrainState:
    """Return the state with the norms of a step added; without norms, the same state."""
    if not norms:
        return state
    earlier, missing = state.module_norms, (0.0,) * len(state.module_norm_steps)
    series = {name: (*earlier.get(name, missing), norms.get(name, 0.0)) for name in dict.fromkeys((*earlier, *norms))}
    return replace(state, module_norm_steps=(*state.module_norm_steps, step), module_norms=series)


def _own_parameters(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trainable parameters of a peft layer. Parameters of its base layer, which may have an adapter of its
    own, are left out."""
    inner = {id(parameter) for parameter in layer.base_layer.parameters()}
    return [parameter for parameter in layer.parameters() if parameter.requires_grad and id(parameter) not in inner]


# Updates, after training.


def analyse(model: Model, state: TrainState, settings: Train) -> AdapterAnalysis:
    """Analyse every module with an adapter.

    `update_norm` is the norm of the effective change of the weights; for DoRA it includes the magnitudes. Singular
    values and effective rank are those of scale·B·A alone. `rank` is the number of directions of the update: twice
    train.rank for PiSSA, the allocated rank for AdaLoRA. For fused experts, norms are over all experts, singular values
    are root mean squares over the experts, and the effective rank is the mean of the experts' effective ranks.
    `weight_norm` is 0 if the weights cannot be read. Rows of added tokens are left out: the state has their gradient
    norms, but they have no rank.
    """
    with torch.no_grad():
        modules = {factors.name: _analyse_module(factors, state) for factors in adapters.iterate_factors(model)}
    still = find_still_modules(modules)
    return AdapterAnalysis(
        steps=state.module_norm_steps,
        modules=modules,
        unchanged_modules=still,
        advice=suggest_changes(modules, still, settings),
    )


def _analyse_module(factors: LoraFactors, state: TrainState) -> ModuleAnalysis:
    values = compute_singular_values(factors)  # [experts, rank]; a layer is one expert
    weight = _read_frozen_weight(factors.layer)
    update_norm = math.hypot(*values.flatten().tolist())
    magnitudes = list((getattr(factors.layer, "lora_magnitude_vector", None) or {}).values())
    if magnitudes and weight is not None:
        update_norm = _dora_update_norm(weight, factors, magnitudes[0].weight.detach().double().cpu().flatten())
    spectrum = values.square().mean(dim=0).sqrt().tolist()
    return ModuleAnalysis(
        rank=factors.rank,
        parameters=sum(parameter.numel() for parameter in _own_parameters(factors.layer)),
        gradient_norms=state.module_norms.get(factors.name, ()),
        weight_norm=0.0 if weight is None else _round_value(float(_compute_row_norms(weight).norm())),
        update_norm=_round_value(update_norm),
        singular_values=tuple(map(_round_value, spectrum)),
        effective_rank=_round_value(statistics.fmean(map(compute_effective_rank, values.tolist()))),
    )


def compute_singular_values(factors: LoraFactors) -> Tensor:
    """Return the singular values of scale·B·A, [experts, rank] (a layer is one expert), descending, float64, CPU.

    The number of values is the rank, or the smaller side of the weights if this side is less than the rank.
    """
    a, b = (factor.double().cpu() for factor in (factors.a, factors.b))
    a, b = (factor if factor.ndim == 3 else factor.unsqueeze(0) for factor in (a, b))
    if not factors.rank:
        return torch.zeros(len(a), 0, dtype=torch.float64)
    r_a, r_b = (torch.linalg.qr(factor, mode="r").R for factor in (a.mT, b))
    return torch.linalg.svdvals(factors.scale * r_b @ r_a.mT)


def compute_effective_rank(values: Sequence[float]) -> float:
    """Return the exponential of the entropy of the values over their sum (Roy and Vetterli 2007); 0 if all are 0."""
    total = math.fsum(values)
    if total <= 0:
        return 0.0
    shares = [value / total for value in values if value > 0]
    return math.exp(-math.fsum(share * math.log(share) for share in shares))


def _read_frozen_weight(layer: torch.nn.Module) -> Tensor | None:
    """Return a layer's frozen weights in float32, [outputs, inputs] or [experts, ...]; None if they are unreadable."""
    if isinstance(layer, ParamWrapper):
        return weights.gather_full_weight(layer.get_param().detach()).float()
    try:
        return weights.dense_weight(layer)
    except BaseModelError:  # torch cannot dequantise this base; the rest of the analysis is possible
        return None


def _compute_row_norms(weight: Tensor) -> Tensor:
    """Return the L2 norm of each row in float64. The sums are in float32, because float64 would need a copy of the
    weight."""
    return torch.linalg.vector_norm(weight, dim=-1).double().cpu()


def _dora_update_norm(weight: Tensor, factors: LoraFactors, magnitude: Tensor) -> float:
    """Return ‖W' - W‖ of DoRA, W' = m (W + U) / ‖W + U‖ by rows (Liu et al. 2024, equation 5), with U = scale·B·A.

    With c = m / ‖W + U‖, a row has changed by (c - 1) W + c U. The square of this change needs only products with the
    thin matrices A and B.
    """
    a, b = factors.a.double().cpu(), factors.scale * factors.b.double().cpu()
    weight_squares = _compute_row_norms(weight).square()
    cross_terms = ((weight @ factors.a.T.to(weight.device)).double().cpu() * b).sum(dim=1)
    update_squares = ((b @ (a @ a.T)) * b).sum(dim=1)
    norms = (weight_squares + 2 * cross_terms + update_squares).clamp_min(0).sqrt()
    c = magnitude / norms.clamp_min(torch.finfo(torch.float64).tiny)
    squares = (c - 1).square() * weight_squares + 2 * c * (c - 1) * cross_terms + c.square() * update_squares
    return math.sqrt(max(0.0, float(squares.sum())))


def _round_value(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# Advice for the next run.


def find_still_modules(modules: Modules) -> tuple[str, ...]:
    """Return the names of modules that barely moved: their ratio of update to weights is far below the median ratio.

    The ratio must be below both limits, STILL_FACTOR and STILL_DEVIATIONS. Logarithms are compared, because ratios span
    orders of magnitude. If most modules barely moved, the median is small, too, and no module is returned. Gradients
    are not considered: a module with small gradients may still move, because Adam scales every update to about the
    learning rate.
    """
    ratios = {name: module.update_ratio for name, module in modules.items()}
    if not ratios or (median := statistics.median(ratios.values())) <= 0:
        return ()
    centre = math.log(median)
    logarithms = {name: math.log(value) if value > 0 else -math.inf for name, value in ratios.items()}
    # If half or more of the modules have the same ratio, the deviation is 0, and STILL_FACTOR alone decides.
    deviation = NORMAL_MAD * statistics.median(abs(value - centre) for value in logarithms.values())
    limit = centre - max(math.log(STILL_FACTOR), STILL_DEVIATIONS * deviation)
    return tuple(sorted(name for name, value in logarithms.items() if value < limit))


def suggest_changes(modules: Modules, still: Sequence[str], settings: Train) -> tuple[str, ...]:
    """Return advice for the next run, with the numbers behind it; empty if nothing is conspicuous."""
    if not modules:
        return ()
    if not any(module.update_norm for module in modules.values()):
        return ("Nothing was learned: no module's weights have changed. Look at the loss and at train.learning_rate.",)
    texts = [_suggest_on_rank(modules, settings), _suggest_on_still_modules(modules, still)]
    typical = statistics.median(module.update_ratio for module in modules.values())
    if typical < MIN_UPDATE:
        facts = f"the update is {typical:.2g} of a module's weights in the median, almost nothing"
        texts.insert(
            0,
            f"train.learning_rate: try {5 * settings.learning_rate:g}: {facts}; if the validation loss hardly fell, "
            "steps were too small or too few.",
        )
    return tuple(filter(None, texts))


def _suggest_on_rank(modules: Modules, settings: Train) -> str:
    """Suggest another rank if most modules use little of their rank, or almost all of it.

    A few directions do most of the work of a low-rank update (Hu et al. 2021, section 7.2). If an update uses all
    directions equally, the rank may limit the update.
    """
    moved = [module for module in modules.values() if module.singular_values and module.update_norm]
    if not moved or settings.adapter == "adalora":  # AdaLoRA allocates its ranks itself
        return ""
    shares = [module.effective_rank / len(module.singular_values) for module in moved]
    below = sum(share < LOW_RANK_SHARE for share in shares)
    near = sum(share >= HIGH_RANK_SHARE for share in shares)
    typical = statistics.median(module.effective_rank for module in moved)
    rank = statistics.median(len(module.singular_values) for module in moved)
    facts = f"effective rank {typical:.1f} of {rank:g} in the median"
    if below >= MOST_MODULES * len(shares) and settings.rank > 1:
        return (
            f"train.rank: {settings.rank // 2} may do as well: {below} of {len(shares)} modules use less than "
            f"{LOW_RANK_SHARE:.0%} of their rank ({facts}; Hu et al. 2021, section 7.2)."
        )
    if near >= MOST_MODULES * len(shares):
        stable = "" if settings.use_rslora else ", with use_rslora: true if it is large (Kalajdzievski 2023)"
        return (
            f"train.rank: {2 * settings.rank} may learn more{stable}: {near} of {len(shares)} modules use at least "
            f"{HIGH_RANK_SHARE:.0%} of their rank ({facts}). Compare the validation loss."
        )
    return ""


def _suggest_on_still_modules(modules: Modules, still: Sequence[str]) -> str:
    if not still:
        return ""
    parameters = sum(modules[name].parameters for name in still)
    share = parameters / max(1, sum(module.parameters for module in modules.values()))
    kinds: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(parse_module_name(name).kind, []).append(name)
    complete_kinds = sorted(kind for kind, members in kinds.items() if set(members) <= set(still))
    listed = complete_kinds or still
    rest = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    names = f"{'every ' if complete_kinds else ''}{', '.join(listed[:MAX_NAMES])}{rest}"
    return (
        f"train.target_modules: leave out the modules that barely moved, {len(still)} of {len(modules)} ({names}), "
        f"with {share:.1%} of the trainable parameters."
    )
