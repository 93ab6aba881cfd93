"""What the figures of an analysis say: which modules barely moved, and what to try in the next run.

The thresholds are ours, chosen so that a healthy training gives little advice; the papers are cited for the relations
that they rest on. Every sentence holds its figures, so that a reader may disagree.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from ratchet.config.train import Train
from ratchet.errors import BaseModelError
from ratchet.models import adapters, frozen_weights, module_names
from ratchet.models.adapter_format import LoraFactors, name_in_base
from ratchet.models.loading import Model
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis
from ratchet.training.train_state import TrainState

STILL_FACTOR = 10.0
"""A module that barely moved did so at most by the median over this ..."""
STILL_DEVIATIONS = 3.5
"""... and lies, in logarithms, this many scaled median absolute deviations below it (Iglewicz and Hoaglin 1993)."""
NORMAL_MAD = 1.4826
"""Standard deviations in one median absolute deviation of a normal distribution."""

MOST = 0.75
"""Share of the modules that makes a rule."""
FAR_BELOW, NEAR = 0.5, 0.9
"""Of its rank, a module's effective rank."""
SPREAD = 10.0
"""Factor between kinds of modules, in the median of update over weight, that is told."""
LITTLE = 1e-3
"""Update over weight, in the median, below which a training has done next to nothing."""
GROWTH = 3.0
"""Factor by which gradients grew from the first third of the run to the last."""
FEWEST_STEPS = 12
"""Steps with gradient norms that tell a trend."""
NAMED = 4

Modules = Mapping[str, ModuleAnalysis]


def find_still_modules(modules: Modules) -> tuple[str, ...]:
    """Modules that barely moved, in order of their names: their update, beside their weights, is far below the median.

    Far: see STILL_FACTOR and STILL_DEVIATIONS, both of which must hold; in logarithms, for ratios are spread over
    orders of magnitude. Nothing is still when most modules are. Small gradients are no sign of it: Adam scales every
    update to about the learning rate.
    """
    return tuple(sorted(_names_far_below({name: one.update_ratio for name, one in modules.items()})))


def _names_far_below(found: Mapping[str, float]) -> set[str]:
    if not found or (median := statistics.median(found.values())) <= 0:
        return set()
    centre = math.log(median)
    known = {name: math.log(value) if value > 0 else -math.inf for name, value in found.items()}
    # With half or more of the modules alike the deviation is 0, and the factor decides alone.
    deviation = NORMAL_MAD * statistics.median(abs(value - centre) for value in known.values())
    limit = centre - max(math.log(STILL_FACTOR), STILL_DEVIATIONS * deviation)
    return {name for name, value in known.items() if value < limit}


def suggest_changes(modules: Modules, not_moved: Sequence[str], settings: Train) -> tuple[str, ...]:
    """Sentences about the next run, each with the figures that it rests on; none when nothing stands out."""
    if not modules:
        return ()
    if not any(one.update_norm for one in modules.values()):
        return ("Nothing was learned: no module's weights have changed. Look at the loss and at train.learning_rate.",)
    rules: tuple[Callable[[], str | None], ...] = (
        lambda: _suggest_on_small_updates(modules, settings),
        lambda: _suggest_on_rank(modules, settings),
        lambda: _suggest_on_still_modules(modules, not_moved),
        lambda: _suggest_on_spread(modules),
        lambda: _suggest_on_growth(modules, settings),
    )
    return tuple(said for rule in rules if (said := rule()))


def _suggest_on_small_updates(modules: Modules, settings: Train) -> str | None:
    typical = statistics.median(one.update_ratio for one in modules.values())
    if typical >= LITTLE:
        return None
    return (
        f"train.learning_rate: try {5 * settings.learning_rate:g}: the update is {typical:.2g} of a module's weights "
        "in the median, next to nothing; if the validation loss hardly fell, steps were too short or too few."
    )


def _suggest_on_rank(modules: Modules, settings: Train) -> str | None:
    """How much of the rank is used.

    A few directions do most of the work of a low-rank update (Hu et al. 2021, section 7.2); where all are used alike,
    the rank may be what limits it.
    """
    moved = [one for one in modules.values() if one.singular_values and one.update_norm]
    if not moved or settings.adapter == "adalora":  # which finds its ranks itself
        return None
    used = [one.effective_rank / len(one.singular_values) for one in moved]
    below, near = (sum(map(test, used)) for test in (lambda share: share < FAR_BELOW, lambda share: share >= NEAR))
    typical = statistics.median(one.effective_rank for one in moved)
    most = statistics.median(len(one.singular_values) for one in moved)
    facts = f"effective rank {typical:.1f} of {most:g} in the median"
    if below >= MOST * len(used) and settings.rank > 1:
        return (
            f"train.rank: {settings.rank // 2} may do as well: {below} of {len(used)} modules use less than "
            f"{FAR_BELOW:.0%} of their rank ({facts}; Hu et al. 2021, section 7.2)."
        )
    if near >= MOST * len(used):
        stable = "" if settings.rank_stabilized else ", with rank_stabilized: true if it is large (Kalajdzievski 2023)"
        return (
            f"train.rank: {2 * settings.rank} may learn more{stable}: {near} of {len(used)} modules use at least "
            f"{NEAR:.0%} of their rank ({facts}). Compare the validation loss."
        )
    return None


def _suggest_on_still_modules(modules: Modules, not_moved: Sequence[str]) -> str | None:
    if not not_moved:
        return None
    saved = sum(modules[name].parameters for name in not_moved)
    share = saved / max(1, sum(one.parameters for one in modules.values()))
    kinds: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(module_names.parse_module_name(name).kind, []).append(name)
    whole = sorted(what for what, members in kinds.items() if set(members) <= set(not_moved))
    where = f"every {_join_names(whole)}" if whole else _join_names(not_moved)
    return (
        f"train.targets: leave out what barely moved, {len(not_moved)} of {len(modules)} modules ({where}), with "
        f"{share:.1%} of what is trained."
    )


def _suggest_on_spread(modules: Modules) -> str | None:
    """Modules of one kind are judged together: their place in the model differs, their task does not."""
    kinds: dict[str, list[float]] = {}
    for name, one in modules.items():
        kinds.setdefault(module_names.parse_module_name(name).kind, []).append(one.update_ratio)
    medians = {what: statistics.median(ratios) for what, ratios in kinds.items()}
    moved = {what: ratio for what, ratio in medians.items() if ratio > 0}
    if len(moved) < 2:
        return None
    most, least = max(moved, key=lambda what: moved[what]), min(moved, key=lambda what: moved[what])
    if moved[most] < SPREAD * moved[least]:
        return None
    return (
        f"train.rank_pattern, train.alpha_pattern: {most} changed by {moved[most]:.2%} of its weights in the median, "
        f"{least} by {moved[least]:.2%}; more rank or alpha for the one, less for the other, may even that out "
        "(budgets by importance: Zhang et al. 2023, AdaLoRA)."
    )


def _suggest_on_growth(modules: Modules, settings: Train) -> str | None:
    series = [one.gradient_norms for one in modules.values() if one.gradient_norms]
    if not series or len(series[0]) < FEWEST_STEPS:
        return None
    totals = [math.hypot(*step) for step in zip(*series, strict=True)]
    third = len(totals) // 3
    first, last = statistics.median(totals[:third]), statistics.median(totals[-third:])
    if first <= 0 or last < GROWTH * first:
        return None
    return (
        f"train.learning_rate: try {settings.learning_rate / 2:g}: the gradient norm grew from {first:.3g} in the "
        f"first third of the run to {last:.3g} in the last; steps may be too long."
    )


def _join_names(found: Sequence[str]) -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


# What training did to the model, module by module: gradients on the way, updates at the end, advice for the next run.
#
# Gradient norms are taken at a fixed grid of steps and kept in the training's state, so that an interrupted run has
# the
# same ones. The update scale·B·A is never formed: with the QR decompositions B = Q₁R₁ and Aᵀ = Q₂R₂ its singular
# values
# are those of the small matrix scale·R₁R₂ᵀ. Figures are rounded to six digits: what is beyond is noise of the machine.
#
# Effective rank: exponential of the Shannon entropy of the singular values divided by their sum (Roy and Vetterli,
# "The
# effective rank: a measure of effective dimensionality", EUSIPCO 2007).

GRID_POINTS = 50
"""Steps of a run at which gradients are taken apart, at most."""

DIGITS = 6
"""Of every figure."""


@lru_cache(maxsize=8)
def analysis_steps(steps: int) -> frozenset[int]:
    """Optimizer steps (from 1) of a run of `steps` at which gradients are taken apart: evenly spread, ends included."""
    if steps <= GRID_POINTS:
        return frozenset(range(1, steps + 1))
    gaps = GRID_POINTS - 1
    return frozenset(1 + (2 * k * (steps - 1) + gaps) // (2 * gaps) for k in range(GRID_POINTS))


def is_due(step: int, steps: int) -> bool:
    """Whether gradients are taken apart at optimizer step `step` (from 1) of the `steps` that are planned."""
    return step in analysis_steps(steps)


def compute_module_norms(model: Model) -> dict[str, float]:
    """L2 norm of each module's gradient, all that learns in it together, by the module's name in the base model.

    To be called with the whole step's gradient in place, before it is clipped. The device is waited for once.
    """
    owned = [
        (name, parameter.grad)
        for name, found in _trainable_by_module(model)
        for parameter in found
        if parameter.grad is not None
    ]
    if not owned:
        return {}
    each = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for _, gradient in owned]).tolist()
    together: dict[str, list[float]] = {}
    for (name, _), norm in zip(owned, each, strict=True):
        together.setdefault(name, []).append(norm)
    return {name: _round_value(math.hypot(*parts)) for name, parts in together.items()}


def record_norms(state: TrainState, step: int, found: Mapping[str, float]) -> TrainState:
    """The state with the norms of a step; unchanged when there are none."""
    if not found:
        return state
    before, missing = state.gradient_norms, (0.0,) * len(state.gradient_steps)
    series = {name: (*before.get(name, missing), found.get(name, 0.0)) for name in dict.fromkeys((*before, *found))}
    return replace(state, gradient_steps=(*state.gradient_steps, step), gradient_norms=series)


def _trainable_by_module(model: Model) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """What learns in each module of the base, and nowhere below another adapter."""
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, BaseTunerLayer) and (own := _own_parameters(layer)):
            yield name_in_base(name, layer).removesuffix(".token_adapter"), own


def _own_parameters(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What learns in a layer of peft; not what does in the layer below, which may have an adapter of its own."""
    below = {id(parameter) for parameter in layer.base_layer.parameters()}
    return [parameter for parameter in layer.parameters() if parameter.requires_grad and id(parameter) not in below]


# ------------------------------------------------------------------------------------------------- after training


def analyse(model: Model, state: TrainState, settings: Train) -> AdapterAnalysis:
    """What training did to every module with an adapter; the weights of `model` are those that are kept.

    `update_norm` holds what changed in the weights as they act: of DoRA its magnitudes too. Singular values and
    effective rank are those of scale·B·A alone; `rank` counts the directions of the update: twice train.rank for PiSSA,
    whatever is left for AdaLoRA. Of fused experts all norms are those of all experts together, singular values the root
    mean squares over the experts, effective ranks their mean. `weight_norm` is 0 where the weights cannot be read.
    Rows of added tokens have gradient norms in the state, but are no module with a rank, and are left out.

    Args:
        model: with its adapter; one layer's weights at a time are dequantised.
        state: of the last step.
        settings: that the run was made with.
    """
    with torch.no_grad():
        modules = {one.name: _analyse_module(one, state) for one in adapters.iterate_factors(model)}
    still = find_still_modules(modules)
    return AdapterAnalysis(
        steps=state.gradient_steps,
        modules=modules,
        still=still,
        advice=suggest_changes(modules, still, settings),
    )


def _analyse_module(found: LoraFactors, state: TrainState) -> ModuleAnalysis:
    values = compute_singular_values(found)  # [experts, rank]; a layer is one expert
    weight = _read_frozen_weight(found.layer)
    moved = math.hypot(*values.flatten().tolist())
    magnitude = _dora_magnitude(found.layer)
    if magnitude is not None and weight is not None:
        moved = _dora_update_norm(weight, found, magnitude)
    spectrum = values.square().mean(dim=0).sqrt().tolist()
    return ModuleAnalysis(
        rank=found.rank,
        parameters=sum(parameter.numel() for parameter in _own_parameters(found.layer)),
        gradient_norms=state.gradient_norms.get(found.name, ()),
        weight_norm=0.0 if weight is None else _round_value(float(_compute_row_norms(weight).norm())),
        update_norm=_round_value(moved),
        singular_values=tuple(map(_round_value, spectrum)),
        effective_rank=_round_value(statistics.fmean(compute_effective_rank(one) for one in values.tolist())),
    )


def compute_singular_values(found: LoraFactors) -> Tensor:
    """Of scale·B·A, [experts, rank] (a layer is one expert), descending, in float64 on the CPU.

    As many as the rank, or as the smaller side of the weights where that is less.
    """
    a, b = (one.double().cpu() for one in (found.a, found.b))
    a, b = (one if one.ndim == 3 else one.unsqueeze(0) for one in (a, b))
    if not found.rank:
        return torch.zeros(len(a), 0, dtype=torch.float64)
    of_a, of_b = (torch.linalg.qr(one, mode="r").R for one in (a.mT, b))
    return torch.linalg.svdvals(found.scale * of_b @ of_a.mT)


def compute_effective_rank(values: Sequence[float]) -> float:
    """Exponential of the entropy of the values over their sum (Roy and Vetterli 2007); 0 when all are 0."""
    total = math.fsum(values)
    if total <= 0:
        return 0.0
    shares = [value / total for value in values if value > 0]
    return math.exp(-math.fsum(share * math.log(share) for share in shares))


def _read_frozen_weight(layer: torch.nn.Module) -> Tensor | None:
    """Frozen weights in float32, [outputs, inputs], of experts one dimension more; None where they cannot be read."""
    if isinstance(layer, ParamWrapper):
        return frozen_weights.gather_full_weight(layer.get_param().detach()).float()
    try:
        return frozen_weights.dense_weight(layer)
    except BaseModelError:  # a base that was quantised in a way that torch cannot turn back: the rest is known
        return None


def _compute_row_norms(weight: Tensor) -> Tensor:
    """L2 norm of each output's weights, in float64; summed in float32 a row at a time, so that nothing is copied."""
    return torch.linalg.vector_norm(weight, dim=-1).double().cpu()


def _dora_magnitude(layer: torch.nn.Module) -> Tensor | None:
    """DoRA's magnitudes [outputs], in float64; None for other adapters."""
    held = getattr(layer, "lora_magnitude_vector", None)
    if not held:
        return None
    (vector,) = held.values()
    found: Tensor = vector.weight.detach().double().cpu().flatten()
    return found


def _dora_update_norm(weight: Tensor, found: LoraFactors, magnitude: Tensor) -> float:
    """‖W' - W‖ of DoRA, W' = m (W + U) / ‖W + U‖ by rows (Liu et al. 2024, equation 5), with U = scale·B·A.

    With c = m / ‖W + U‖ a row has changed by (c - 1) W + c U, whose square needs only products with the thin A and B.
    """
    a, b = found.a.double().cpu(), found.scale * found.b.double().cpu()
    of_weight = _compute_row_norms(weight).square()
    across = ((weight @ found.a.T.to(weight.device)).double().cpu() * b).sum(dim=1)
    of_update = ((b @ (a @ a.T)) * b).sum(dim=1)
    c = magnitude / (of_weight + 2 * across + of_update).clamp_min(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    squares = (c - 1).square() * of_weight + 2 * c * (c - 1) * across + c.square() * of_update
    return math.sqrt(max(0.0, float(squares.sum())))


def _round_value(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
