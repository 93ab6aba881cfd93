"""PiSSA: adapters that begin as the principal singular vectors of the weights (Meng et al. 2024, arXiv 2404.02948).

What an adapter begins as is taken off the weight it stands beside, so that the sum does not change; the base in memory
is then no longer the one on disk. A0 and B0 are kept: they are part of every checkpoint, and of the update that is
saved, which is relative to the base on disk.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, AdaLoraModel, LoraConfig, PeftModel, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import transpose
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError
from ratchet.models import adapter_format, fast_lora, targets
from ratchet.models.adapter_format import (
    ADAPTER,
    LoraFactors,
    adapted_layers,
    initial_pissa_factors,
    iterate_factors,
    layer_factors,
    pissa_offset,
    scaled_product,
    token_rows,
)
from ratchet.models.device import Model
from ratchet.models.model_spec import LayerSpec

EXACT_UP_TO = 512
"""Smaller side of a weight up to which all singular values are computed. Above, the first are approximated (Halko et
al. 2011) with the 16 rounds of subspace iteration that the paper found enough: 13 times as fast at 1024 x 1024 on one
core, and what it takes off random weights, the hardest case, has singular values at most 2 % too small."""


def initialize_singular_vectors(model: Model, dtype: torch.dtype) -> None:
    """Let every adapter of a freshly adapted model begin as singular vectors. Randomised ones draw from torch's stream.

    Args:
        model: with LoRA adapters beside weights that are not quantised; their sum stays as it is.
        dtype: of the adapters. The weights are reduced by the product of the *rounded* matrices.
    """
    for _, layer in adapted_layers(model):
        weight = layer.get_base_layer().weight
        if weight.is_meta:
            continue  # shapes are all there is
        whole = weight.data
        layer.pissa_init(ADAPTER, "pissa" if min(whole.shape) <= EXACT_UP_TO else "pissa_niter_16")
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        for matrix in (a, b):
            matrix.data = matrix.data.to(dtype).contiguous()
        layer.first_factors = (a.detach().clone().cpu(), b.detach().clone().cpu())
        _replace_base_weight(
            layer, transpose(whole.float(), layer.fan_in_fan_out) - scaled_product(layer, a.detach(), b.detach())
        )


def _replace_base_weight(layer: Any, residual: Tensor) -> None:
    """Make `residual`, [outputs, inputs] in float32, the weight of the base below the adapter."""
    weight = layer.get_base_layer().weight
    weight.data = transpose(residual.to(weight.dtype), layer.fan_in_fan_out).contiguous()


def pissa_tensors(model: Model) -> dict[str, Tensor]:
    """A0 and B0 of every layer, for a checkpoint; nothing for other adapters."""
    found = {}
    for name, layer in adapted_layers(model):
        if (first := initial_pissa_factors(layer)) is not None:
            found[f"first/{name}/a"], found[f"first/{name}/b"] = first
    return found


def restore_pissa(model: Model, saved: Mapping[str, Tensor]) -> None:
    """Put the base right for the A0 and B0 of a checkpoint.

    On the machine that wrote it they are those that we have, and nothing changes. Another one may have found other
    signs, or other vectors for singular values that are nearly equal.

    Raises:
        DamagedFileError: they are of other layers than this model adapts.
    """
    own, shapes = pissa_tensors(model), {name: tensor.shape for name, tensor in saved.items()}
    odd = own.keys() ^ shapes.keys() | {name for name in own.keys() & shapes.keys() if own[name].shape != shapes[name]}
    if odd:
        raise DamagedFileError(f"holds first matrices of other layers than this model adapts, e.g. {min(odd)}")
    for name, layer in adapted_layers(model) if own else ():
        before, first = (tuple(found[f"first/{name}/{x}"] for x in "ab") for found in (own, saved))
        if all(map(torch.equal, before, first)):
            continue
        residual = transpose(layer.get_base_layer().weight.data.float(), layer.fan_in_fan_out)
        layer.first_factors = tuple(tensor.clone() for tensor in first)
        _replace_base_weight(layer, residual + scaled_product(layer, *before) - scaled_product(layer, *first))


# AdaLoRA: ranks are shared out by importance while training (Zhang et al. 2023, arXiv 2303.10512), through peft.
#
# Every layer begins with train.rank directions; after `begin` of the steps the least important of all layers are cut
# every so many steps, along a cubic curve, until adalora.target_rank of a layer are left on average; then they stay.
# peft's allocator decides; here are its schedule, what a checkpoint must hold of it, and what it must be spared.


def adalora_schedule(settings: Train, steps: int) -> dict[str, Any]:
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


def _adalora_model(model: Model) -> AdaLoraModel | None:
    found = getattr(model, "base_model", None)
    return found if isinstance(found, AdaLoraModel) else None


def freeze_constants(model: Model) -> None:
    """Beside weights of 16 bits peft 0.21 makes a new parameter of the number that it divides by, which then learns."""
    if _adalora_model(model) is not None:
        for _, layer in adapted_layers(model):
            layer.ranknum[ADAPTER].requires_grad_(False)


def orthogonality_penalty(model: Model) -> Tensor | None:
    """How far the singular vectors are from orthogonal: the mean over all A and B of ||A A' - I|| (equation 4 without
    its weight gamma; a scalar that gradients flow through). None for other adapters.

    peft adds it only to a loss that the model computes itself.
    """
    if _adalora_model(model) is None:
        return None
    distances = []
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[ADAPTER].float(), layer.lora_B[ADAPTER].float()
        one = torch.eye(len(a), device=a.device)
        distances += [torch.linalg.matrix_norm(a @ a.T - one), torch.linalg.matrix_norm(b.T @ b - one)]
    return torch.stack(distances).mean()


def update_rank_allocation(model: Model, step: int, steps: int) -> None:
    """Weigh every direction by the step's gradient, and cut what is due; nothing for other adapters.

    Args:
        model: after optimizer step `step` (from 1), the gradient still in place.
        step: counts steps that were left out, too; the one at which ranks become final may be among them.
        steps: that the model was attached for.
    """
    tuner = _adalora_model(model)
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


def adalora_tensors(model: Model) -> dict[str, Tensor]:
    """What the allocator remembers, for a checkpoint; nothing for other adapters."""
    tuner = _adalora_model(model)
    if tuner is None:
        return {}
    allocator = tuner.rankallocator
    found = {f"sensitivity/{name}": tensor for name, tensor in allocator.exp_avg_ipt.items()}
    found |= {f"uncertainty/{name}": tensor for name, tensor in allocator.exp_avg_unc.items()}
    pattern = tuner.peft_config[ADAPTER].rank_pattern or {}
    return found | {f"kept/{name}": torch.tensor(kept) for name, kept in pattern.items()}


def restore_adalora(model: Model, saved: Mapping[str, Tensor]) -> None:
    """Let the allocator remember what it did when a checkpoint was written.

    Raises:
        DamagedFileError: it is of other matrices than this model trains.
    """
    tuner = _adalora_model(model)
    parameters = {} if tuner is None else {n: p for n, p in tuner.model.named_parameters() if p.requires_grad}
    parts: dict[str, dict[str, Tensor]] = {"sensitivity": {}, "uncertainty": {}, "kept": {}}
    for path, tensor in saved.items():
        part, _, name = path.partition("/")
        whole = parameters.get(name)
        fits = whole is not None and tensor.shape == (whole.shape[:1] if part == "kept" else whole.shape)
        if not fits or part not in parts:
            raise DamagedFileError(f"holds a rank allocation of other matrices than this model trains, e.g. {path}")
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


# Adapters on a frozen base, through peft: attach, train, save, load.
#
# LoRA, rsLoRA, DoRA, PiSSA (pissa.py) and AdaLoRA (allocation.py); what is saved is an ordinary LoRA or DoRA in any
# case.

__all__ = [
    "LoraFactors",
    "attach",
    "extra_tensors",
    "iterate_factors",
    "layer_factors",
    "load",
    "orthogonality_penalty",
    "pissa_offset",
    "restore_extra",
    "save",
    "swap",
    "token_rows",
    "trainable_parameters",
    "update_rank_allocation",
]  # fmt: skip

_ADAPTER_MARKS = ("lora_A", "lora_B", "lora_E", "lora_embedding_", "lora_magnitude_vector", "trainable_tokens_delta")
"""In the names of everything that may learn."""


def attach(
    base: Model, settings: Train, base_digest: str, new_tokens: Sequence[int] = (), steps: int = 0
) -> Model:  # fmt: skip
    """A fresh adapter on `base`, initialised from `settings.seed`; everything else is frozen.

    Args:
        base: without adapters, on any device, the meta device included; in 4 bits or not. It is changed in place.
        settings: section train.
        base_digest: of the base, noted in what is saved.
        new_tokens: ids whose rows of embedding and head learn, too.
        steps: optimizer steps that it will be trained for; AdaLoRA's schedule hangs on it.

    Raises:
        SettingsError: targets, ranks or tokens do not fit the model, or its layers not this kind of adapter.
    """
    chosen = targets.choose_for_adapter(base, settings, bool(new_tokens))
    config = _lora_config(base, chosen, settings, steps)
    if new_tokens:
        config.trainable_token_indices = {name: list(new_tokens) for name in _token_layers(base)}
    config.base_model_name_or_path = base.name_or_path = base_digest
    torch.manual_seed(settings.seed)
    with suppress_peft_warnings():
        model = get_peft_model(base, config)
    _require_adapters_on(model, chosen)
    freeze_constants(model)
    dtype = getattr(torch, settings.adapter_dtype)
    for _, parameter in trainable_parameters(model):
        parameter.data = parameter.data.to(dtype)
    _initialize_adapters(model, settings, dtype)
    _require_only_adapters_learn(model, dtype)
    fast_lora.install_fast_forward(model)
    return model


def trainable_parameters(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that learn, in a fixed order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def extra_tensors(model: Model) -> dict[str, Tensor]:
    """What a checkpoint must hold beside the trainable parameters; the model's own tensors. Empty for LoRA and DoRA."""
    return adalora_tensors(model) | pissa_tensors(model)


def restore_extra(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `extra_tensors` gave; the tensors are copied.

    Raises:
        DamagedFileError: they are of another adapter.
    """
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("first/")}
    restore_pissa(model, first)
    restore_adalora(model, {name: tensor for name, tensor in tensors.items() if name not in first})


def save(model: Model, directory: Path, base_digest: str) -> None:
    """Write the adapter in peft's own format, as a LoRA or DoRA that fits the base as it is on disk.

    PiSSA becomes a LoRA of twice the rank, AdaLoRA one with a rank for each module; modules that it cut to nothing are
    left out. The same weights give the same bytes, on any machine.
    """
    adapter_format.write(model, directory, base_digest)


def load(base: Model, directory: Path) -> Model:
    """The saved adapter on a base that was loaded as in training; frozen, in evaluation mode.

    Raises:
        BaseModelError: the adapter does not fit this base.
        DamagedFileError: its file cannot be read.
    """
    try:
        saved = adapter_format.read(directory)
        with suppress_peft_warnings():
            model = PeftModel.from_pretrained(base, str(directory), is_trainable=False)
    except DamagedFileError:
        raise
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:300]
        raise BaseModelError(f"{directory}: the adapter does not fit this base model: {text}") from None
    dtype = next(iter(saved.values())).dtype  # peft has made it that of the base, or float32
    for name, parameter in model.named_parameters():
        if any(mark in name for mark in _ADAPTER_MARKS):
            parameter.data = parameter.data.to(dtype)
    own, loaded = dict(model.named_parameters(remove_duplicate=False)), adapter_format.collect_tensors(model)
    loaded |= {name: own[name] for name in saved.keys() - loaded.keys() if name in own}  # peft saves embeddings whole
    # peft only warns of what is missing, says nothing of what is too much, and rewrites names for some models.
    if odd := sorted(
        name for name in saved.keys() | loaded.keys() if not _is_same_tensor(saved.get(name), loaded.get(name))
    ):
        raise BaseModelError(f"{directory}: the adapter does not fit this base model: {odd[0]} has no place in it")
    return model.eval()


def swap(model: Model, directory: Path) -> Model:
    """Another saved adapter in the place of a model's own, on the same base in memory, which is not read again.

    What comes back computes what `load` on a freshly loaded base would, to the last bit: peft's layers are taken out of
    the base, whose own tensors they never change. `model` is no longer to be used.

    Raises:
        BaseModelError: the adapter is of another base; then `model` is as it was. Or it does not fit this one.
        DamagedFileError: its files cannot be read.
    """
    own, other = model.peft_config[ADAPTER].base_model_name_or_path, _base_digest(directory)
    if own != other:
        raise BaseModelError(
            f"{directory}: the adapter is of base model {str(other)[:12]}, the one that is loaded is {str(own)[:12]}; "
            "load its own base"
        )
    adapter_format.read(directory)  # before anything is taken out
    return load(model.unload(), directory)


def _base_digest(directory: Path) -> str:
    """Of the base that a saved adapter was trained on. Raises DamagedFileError when its settings cannot be read."""
    path = directory / adapter_format.CONFIG
    try:
        return str(json.loads(path.read_bytes())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); train again") from None


def _is_same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b.cpu())


# ----------------------------------------------------------------------------------------------------- how peft is told


def _lora_config(base: Model, chosen: Sequence[LayerSpec], settings: Train, steps: int) -> LoraConfig:
    """peft's words for section train. Full names, and a rank or alpha of its own for each layer that has one."""
    experts = [layer.name for layer in chosen if layer.kind == "experts"]
    shared: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "lora_alpha": settings.alpha,  # peft says int, and takes any number
        "lora_dropout": settings.dropout,
        "target_modules": [layer.name for layer in chosen if layer.kind != "experts"],
        "fan_in_fan_out": any(isinstance(base.get_submodule(layer.name), Conv1D) for layer in chosen if not experts),
    }
    if settings.adapter == "adalora":
        return AdaLoraConfig(**shared, **adalora_schedule(settings, steps))
    ranks = {layer.name: targets.layer_rank(layer, settings) for layer in chosen}
    alphas = {layer.name: targets.layer_alpha(layer, settings) for layer in chosen}
    return LoraConfig(
        **shared,
        r=settings.rank,
        use_rslora=settings.rank_stabilized,
        use_dora=settings.adapter == "dora",
        rank_pattern=adapter_format.exact_name_pattern(
            {name: rank for name, rank in ranks.items() if rank != settings.rank}
        ),
        alpha_pattern=adapter_format.exact_name_pattern(
            {name: alpha for name, alpha in alphas.items() if alpha != settings.alpha}
        ),
        target_parameters=experts or None,
    )


def _token_layers(base: Model) -> list[str]:
    """Modules with a row for each token; peft finds those that share the embedding's tensor by itself."""
    wanted = [
        base.get_input_embeddings(),
        *([] if targets.has_tied_head(base) else [base.get_output_embeddings()]),
    ]
    return [name for name, module in base.named_modules() if any(module is one for one in wanted)]


@contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Without what peft says of things that we have seen to: it makes up for the first, and is wrong in the second."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # a model may have layers of both kinds
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")  # experts
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error of ours
        # The next two only of adapters made elsewhere. Merging refuses a bias that has no place, naming the layer; it
        # looks whether one of two tied tensors has changed, and then keeps both.
        warnings.filterwarnings("ignore", message="`lora_bias=True` was passed but the targeted layer")
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer is part")
        yield


def _initialize_adapters(model: Model, settings: Train, dtype: torch.dtype) -> None:
    """What peft begins with in the type of the base, begun again in that of the adapter."""
    if settings.initialization == "pissa":
        initialize_singular_vectors(model, dtype)
    if settings.adapter == "dora":
        for _, layer in adapted_layers(model):
            _initialize_dora_magnitude(layer, dtype)


def _initialize_dora_magnitude(layer: Any, dtype: torch.dtype) -> None:
    """DoRA's magnitudes as the forward pass computes the norms that it divides by, so that nothing changes at first.

    peft rounds them to the base's type: beside bfloat16 weights the model would begin up to 0.4 % off.
    """
    magnitude = layer.lora_magnitude_vector[ADAPTER]
    weight = dequantize_module_weight(layer.get_base_layer()).to(dtype)
    if not weight.is_meta:
        zero = torch.zeros((), dtype=dtype, device=weight.device)
        norms = magnitude.get_weight_norm(weight, zero, layer.scaling[ADAPTER])
        magnitude.weight.data = norms.detach().to(dtype)


def _require_adapters_on(model: Model, chosen: Sequence[LayerSpec]) -> None:
    """peft exchanges some names for others in models whose experts transformers has fused since (Mixtral, Qwen-MoE)."""
    found, wanted = {name for name, _ in adapted_layers(model)}, {layer.name for layer in chosen}
    if odd := sorted(found ^ wanted):
        raise SettingsError(
            f"train.targets: {odd[0]}: peft takes names such as this for the experts of a {model.config.model_type} "
            "model as it was in transformers 4; leave it out of the targets"
        )


def _require_only_adapters_learn(model: Model, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        adapts = any(mark in name for mark in _ADAPTER_MARKS)
        if parameter.requires_grad != adapts or (adapts and parameter.dtype != dtype):
            raise RuntimeError(
                f"{name}: requires_grad is {parameter.requires_grad} and dtype {parameter.dtype}; adapters learn in "
                f"{dtype}, and nothing else does"
            )
