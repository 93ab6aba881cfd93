"""Adapters on a frozen base model, through peft: attach, train, save, load.

Supports LoRA, rsLoRA, DoRA, PiSSA and AdaLoRA. Initial weights that need more than the model are in initialization.py.
Every saved adapter is a plain peft LoRA or DoRA.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import AdaLoraConfig, AdaLoraModel, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.bnb import Linear4bit, Linear8bitLt
from peft.tuners.lora.layer import Linear
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import transpose
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError
from ratchet.models import adapter_format, base_model, fused_operators, model_spec, targets
from ratchet.models.adapter_format import (
    ADAPTER,
    adapted_layers,
    initial_pissa_factors,
    iterate_factors,
    pissa_offset,
    save,
    scaled_product,
    token_rows,
)
from ratchet.models.device import Model
from ratchet.models.model_spec import LayerSpec
from ratchet.models.start_adapter import StartAdapter

__all__ = [
    "attach", "enable_activation_checkpointing", "extra_tensors", "iterate_factors", "load", "orthogonality_penalty",
    "pissa_offset", "restore_extra", "save", "start_from", "swap", "token_rows", "trainable_parameters",
    "update_rank_allocation", "uses_activation_checkpointing",
]  # fmt: skip

_TRAINABLE_NAME_PARTS = (
    "lora_A", "lora_B", "lora_E", "lora_embedding_", "lora_magnitude_vector", "trainable_tokens_delta",
)  # fmt: skip
"""Parts of parameter names: the name of every trainable parameter contains one of them."""
EXACT_SVD_MAX_SIZE = 512
"""Length of a weight's smaller side up to which PiSSA computes all singular values.

For larger weights, PiSSA approximates the largest singular values (Halko et al. 2011) with the 16 rounds of subspace
iteration that its paper found sufficient. The approximation is 13 times as fast at 1024 x 1024 on one core. For random
weights, the hardest case, the subtracted part has singular values that are at most 2 % too small."""

_PISSA_PREFIX = "pissa/"
"""Prefix of the names of PiSSA's initial matrices, A0 and B0, in a checkpoint."""


def attach(
    base: Model, settings: Train, base_digest: str, new_tokens: Sequence[int] = (), steps: int = 0
) -> Model:  # fmt: skip
    """Attach a new adapter to `base`, initialized from `settings.seed`, and freeze all other parameters.

    `loftq` and `eva` begin as `zero`; see initialization.py for the rest.

    Raises SettingsError if targets, ranks or tokens do not fit the model, or its layers do not support this adapter.

    Args:
        base: model without adapters, in 4 bits or not, on any device including meta; modified in place.
        base_digest: digest of the base model.
        new_tokens: token ids whose rows of the embedding and the head are trained too.
        steps: optimizer steps of the training; AdaLoRA's schedule depends on it.
    """
    chosen = targets.check_adapter(model_spec.describe(base), settings, bool(new_tokens))
    config = _lora_config(base, chosen, settings, steps)
    if new_tokens:
        config.trainable_token_indices = {name: list(new_tokens) for name in _token_layers(base)}
    config.base_model_name_or_path = base.name_or_path = base_digest
    torch.manual_seed(settings.seed)
    with suppress_peft_warnings():
        model = get_peft_model(base, config)
    model.base_digest = base_digest
    # peft replaces some names in models whose experts transformers 5 fuses (Mixtral, Qwen-MoE).
    adapted, expected = {name for name, _ in adapted_layers(model)}, {layer.name for layer in chosen}
    if mismatched := sorted(adapted ^ expected):
        raise SettingsError(
            f"train.target_modules: {mismatched[0]}: peft interprets this name as an expert of a "
            f"{model.config.model_type} model in the layout of transformers 4; remove it from the targets"
        )
    dtype = getattr(torch, settings.adapter_dtype)
    for name, parameter in model.named_parameters():
        # If weights have 16 bits, peft 0.21 also makes AdaLoRA's divisor `ranknum` trainable.
        parameter.requires_grad_(any(part in name for part in _TRAINABLE_NAME_PARTS))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    # peft initializes in the dtype of the base; initialize again in the dtype of the adapter.
    if settings.initialization == "orthogonal":
        _initialize_orthogonal(model, dtype)
    if settings.initialization == "pissa":
        _initialize_singular_vectors(model, dtype)
    if settings.adapter == "dora":
        _initialize_dora_magnitudes(model, dtype)
    for _, layer in adapted_layers(model):
        if _is_plain_lora(layer):
            layer.forward = MethodType(_fast_forward, layer)
    fused_operators.fuse(model)
    return model


def start_from(model: Model, start: StartAdapter) -> None:
    """Replace the weights of a new adapter by trained ones.

    Raises:
        SettingsError: the weights do not fit the adapter.
        DamagedFileError: the weights cannot be read.
    """
    if start.is_checkpoint:
        own = {name: parameter.detach() for name, parameter in trainable_parameters(model)}
    else:
        own = adapter_format.collect_tensors(model)
    path = start.weights
    saved = adapter_format.read_tensors(path)
    if empty := next((name for name, tensor in saved.items() if not tensor.numel()), None):
        raise SettingsError(
            f"train.init_adapter: {path}: {empty} has no values; DeepSpeed ZeRO-3 saves an adapter like this unless "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save is true; save it again with this setting"
        )
    for name in sorted(own.keys() | saved.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (own, saved)]
        if shapes[0] != shapes[1]:
            raise SettingsError(
                f"train.init_adapter: {path}: does not fit train.target_modules and the base: {name} has shape "
                f"{shapes[1] or 'none'}, expected {shapes[0] or 'none'}; set the targets of that training, or "
                "train.init_adapter: null"
            )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def trainable_parameters(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield names and parameters that are trained, in a fixed order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def extra_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint needs besides the trainable parameters; empty for LoRA and DoRA.

    Except for AdaLoRA's rank masks, they are the model's own tensors, not copies.
    """
    tensors = _pissa_tensors(model)
    if (tuner := _adalora_model(model)) is not None:
        allocator = tuner.rankallocator
        tensors |= {f"sensitivity/{name}": tensor for name, tensor in allocator.exp_avg_ipt.items()}
        tensors |= {f"uncertainty/{name}": tensor for name, tensor in allocator.exp_avg_unc.items()}
        pattern = tuner.peft_config[ADAPTER].rank_pattern or {}
        tensors |= {f"rank_mask/{name}": torch.tensor(mask) for name, mask in pattern.items()}
    return tensors


def restore_extra(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Restore a copy of the tensors returned by `extra_tensors`.

    Raises DamagedFileError if the tensors belong to another adapter.
    """
    pissa = {name: tensor for name, tensor in tensors.items() if name.startswith(_PISSA_PREFIX)}
    _restore_pissa(model, pissa)
    _restore_adalora(model, {name: tensor for name, tensor in tensors.items() if name not in pissa})


def load(base: Model, directory: Path) -> Model:
    """Load a saved adapter onto a base that was loaded as in training; return the model frozen, in evaluation mode.

    Raises:
        BaseModelError: the adapter does not fit this base.
        DamagedFileError: the adapter's file cannot be read.
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
    dtype = next(iter(saved.values())).dtype  # peft converts the tensors to the dtype of the base, or to float32
    for name, parameter in model.named_parameters():
        if any(part in name for part in _TRAINABLE_NAME_PARTS):
            parameter.data = parameter.data.to(dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = adapter_format.collect_tensors(model)
    # An adapter that peft saved may contain complete embeddings.
    loaded |= {name: parameters[name] for name in saved.keys() - loaded.keys() if name in parameters}
    # Compare all tensors, because peft only warns of missing tensors, ignores surplus tensors, and rewrites names for
    # some models.
    for name in sorted(saved.keys() | loaded.keys()):
        a, b = saved.get(name), loaded.get(name)
        if a is None or b is None or a.dtype != b.dtype or not torch.equal(a, b.cpu()):
            raise BaseModelError(
                f"{directory}: the adapter does not fit this base model: no matching tensor for {name}"
            )
    model.base_digest = base_model.read_base_digest(directory)  # for `swap`
    return model.eval()


def swap(model: Model, directory: Path) -> Model:
    """Replace a model's adapter by another saved one, without loading the base again.

    The layers of peft are removed, and they never change the base's own tensors. The result therefore computes the same
    bits as `load` on a freshly loaded base. Do not use `model` afterwards.

    Raises:
        BaseModelError: the adapter belongs to another base (then `model` is unchanged), or does not fit this base.
        DamagedFileError: the adapter's files cannot be read.
    """
    expected, current = base_model.read_base_digest(directory), model.base_digest
    if current != expected:
        raise BaseModelError(
            f"{directory}: the adapter belongs to base model {expected[:12]}, but base model {current[:12]} "
            "is loaded; load the adapter's own base"
        )
    adapter_format.read(directory)  # fail before anything is removed
    return load(model.unload(), directory)


def enable_activation_checkpointing(model: Model) -> None:
    """Recompute the activations of each block in the backward pass. Results are bit-identical, even with dropout."""
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})


def uses_activation_checkpointing(model: Model) -> bool:
    """Return True if activations are recomputed in the backward pass."""
    return bool(model.get_base_model().is_activation_checkpointing)


def _lora_config(base: Model, chosen: Sequence[LayerSpec], settings: Train, steps: int) -> LoraConfig:
    """Translate section train to a peft config with full module names and per-layer ranks and alphas."""
    experts = [layer.name for layer in chosen if layer.kind == "experts"]
    shared: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "lora_alpha": settings.alpha,  # peft's annotation is int, but it accepts any number
        "lora_dropout": settings.dropout,
        "target_modules": [layer.name for layer in chosen if layer.kind != "experts"],
        "fan_in_fan_out": any(isinstance(base.get_submodule(layer.name), Conv1D) for layer in chosen if not experts),
    }
    if settings.adapter == "adalora":
        schedule, total = settings.adalora, max(1, steps)
        return AdaLoraConfig(
            **shared, init_r=settings.rank, target_r=schedule.target_rank, total_step=total,
            tinit=int(schedule.warmup_ratio * total), tfinal=int(schedule.final_ratio * total),
            deltaT=schedule.every_steps, beta1=schedule.beta1, beta2=schedule.beta2,
            orth_reg_weight=schedule.orth_reg_weight,
        )  # fmt: skip
    ranks = {layer.name: targets.layer_rank(layer, settings) for layer in chosen}
    alphas = {layer.name: targets.layer_alpha(layer, settings) for layer in chosen}
    return LoraConfig(
        **shared,
        r=settings.rank,
        use_rslora=settings.use_rslora,
        use_dora=settings.adapter == "dora",
        init_lora_weights="gaussian" if settings.initialization == "gaussian" else True,
        rank_pattern=adapter_format.exact_name_pattern(
            {name: rank for name, rank in ranks.items() if rank != settings.rank}
        ),
        alpha_pattern=adapter_format.exact_name_pattern(
            {name: alpha for name, alpha in alphas.items() if alpha != settings.alpha}
        ),
        target_parameters=experts or None,
    )


def _token_layers(base: Model) -> list[str]:
    """Return the names of the modules with one row per token; peft itself finds modules tied to the embedding."""
    token_modules = {base.get_input_embeddings()}
    if not model_spec.has_tied_head(base):
        token_modules.add(base.get_output_embeddings())
    return [name for name, module in base.named_modules() if module in token_modules]


@contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Suppress peft warnings about conditions that Ratchet handles itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # a model may have layers of both kinds
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")  # experts
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # `load` raises an error for them
        # The next two warnings occur only for adapters made by other programs. exporters/merge raises an error for a
        # bias if the base's module has none; if one of two tied tensors has changed, it keeps both tensors.
        warnings.filterwarnings("ignore", message="`lora_bias=True` was passed but the targeted layer")
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer is part")
        yield


def _initialize_orthogonal(model: Model, dtype: torch.dtype) -> None:
    """Initialize A and B, with dtype `dtype`, by random matrices whose product is zero up to rounding, because they use
    orthogonal directions of the rank.

    These are the formulas of peft 0.21, whose own method converts the matrices to the dtype of the base's weight, even
    if that is the integer type of 4-bit weights.
    """
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if a.is_meta:
            continue
        rank = len(a)
        directions = torch.linalg.qr(torch.randn(rank, rank))[0]
        a.data = (directions[0::2].T @ torch.randn(rank // 2, a.shape[1]) / 10).to(a.device, dtype)
        b.data = (torch.randn(b.shape[0], rank // 2) @ directions[1::2] / 10).to(b.device, dtype)


def _initialize_dora_magnitudes(model: Model, dtype: torch.dtype) -> None:
    """Set DoRA's magnitudes to the norms that the forward pass divides by, so that the initial update is zero.

    peft rounds the magnitudes to the dtype of the base. With bfloat16 weights, the initial model would therefore
    deviate from the base by up to 0.4 %.
    """
    for _, layer in adapted_layers(model):
        weight = dequantize_module_weight(layer.get_base_layer()).to(dtype)
        if not weight.is_meta:
            magnitude = layer.lora_magnitude_vector[ADAPTER]
            zero = torch.zeros((), dtype=dtype, device=weight.device)
            norms = magnitude.get_weight_norm(weight, zero, layer.scaling[ADAPTER])
            magnitude.weight.data = norms.detach().to(dtype)


# A shorter forward pass for plain LoRA layers: less time per step, and less memory. peft 0.21 scales and adds the
# update in separate operators, copies the output of a 4-bit layer, and with 16-bit activations keeps a float32 copy of
# every layer's input. Below, one operator computes the second product, scales it and adds it to the base's output, and
# both products have the dtype of the activations, as under autocast in transformers' Trainer. Without dropout, plain
# layers, and 4-bit layers on a CPU, have a backward pass of their own too (fused_operators.py).


def _is_plain_lora(layer: Any) -> bool:
    """Return True if the layer only adds B A x: no DoRA, AdaLoRA, bias, convolution, embedding or experts."""
    return (
        type(layer) in {Linear, Linear4bit, Linear8bitLt}
        and ADAPTER not in layer.lora_variant
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
    )


def _fast_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs or layer.disable_adapters or layer.merged or layer.active_adapters != [ADAPTER]:
        peft_output: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return peft_output
    base, dropout = layer.base_layer, layer.lora_dropout[ADAPTER]
    if fused_operators.has_fused_backward(base, x) and not (layer.training and getattr(dropout, "p", 0.0)):
        a, b = (matrix[ADAPTER].weight.to(x.dtype) for matrix in (layer.lora_A, layer.lora_B))
        rows: Tensor = fused_operators.LowRankLinear.apply(x.flatten(0, -2), base, a, b, layer.scaling[ADAPTER])
        return rows.view(*x.shape[:-1], rows.shape[-1])
    base_output: Tensor = base(x)
    dtype = base_output.dtype
    a, b = layer.lora_A[ADAPTER].weight.to(dtype), layer.lora_B[ADAPTER].weight.to(dtype)
    low_rank = functional.linear(dropout(x.to(dtype)), a)
    output = torch.addmm(base_output.flatten(0, -2), low_rank.flatten(0, -2), b.t(), alpha=layer.scaling[ADAPTER])
    return output.view_as(base_output)


# PiSSA: adapters start as the principal singular vectors of the weights (Meng et al. 2024, arXiv 2404.02948).
#
# The product of the initial matrices A0 and B0 is subtracted from the weight, so that the sum of weight and update does
# not change. The base in memory therefore differs from the base on disk. Every checkpoint contains A0 and B0. The saved
# update contains them too, because it is relative to the base on disk.


def _initialize_singular_vectors(model: Model, dtype: torch.dtype) -> None:
    """Initialize every adapter, with dtype `dtype`, by singular vectors of its unquantized weight.

    The product of the *rounded* matrices is subtracted from the weight. The approximation for large weights draws from
    torch's random stream.
    """
    for _, layer in adapted_layers(model):
        weight = layer.get_base_layer().weight
        if weight.is_meta:
            continue
        original = weight.data
        layer.pissa_init(ADAPTER, "pissa" if min(original.shape) <= EXACT_SVD_MAX_SIZE else "pissa_niter_16")
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        for matrix in (a, b):
            matrix.data = matrix.data.to(dtype).contiguous()
        layer.initial_factors = (a.detach().clone().cpu(), b.detach().clone().cpu())
        _replace_base_weight(
            layer, transpose(original.float(), layer.fan_in_fan_out) - scaled_product(layer, a.detach(), b.detach())
        )


def _replace_base_weight(layer: Any, residual: Tensor) -> None:
    """Set the weight below the adapter to `residual`, [outputs, inputs] in float32."""
    weight = layer.get_base_layer().weight
    weight.data = transpose(residual.to(weight.dtype), layer.fan_in_fan_out).contiguous()


def _pissa_tensors(model: Model) -> dict[str, Tensor]:
    """Return A0 and B0 of every layer; empty for other adapters."""
    tensors = {}
    for name, layer in adapted_layers(model):
        if (initial := initial_pissa_factors(layer)) is not None:
            tensors[f"{_PISSA_PREFIX}{name}/a"], tensors[f"{_PISSA_PREFIX}{name}/b"] = initial
    return tensors


def _restore_pissa(model: Model, saved: Mapping[str, Tensor]) -> None:
    """Adjust the base weights to the A0 and B0 of a checkpoint.

    On the machine that wrote the checkpoint, the saved matrices equal the current ones, and nothing changes. Another
    machine may have computed other signs, or other vectors for singular values that are nearly equal.
    """
    current = _pissa_tensors(model)
    shapes, saved_shapes = ({(name, tensor.shape) for name, tensor in tensors.items()} for tensors in (current, saved))
    if mismatched := shapes ^ saved_shapes:
        name = min(mismatched)[0]
        raise DamagedFileError(f"PiSSA matrices belong to other layers than this model adapts, e.g. {name}")
    for name, layer in adapted_layers(model) if current else ():
        before, after = (
            tuple(tensors[f"{_PISSA_PREFIX}{name}/{matrix}"] for matrix in "ab") for tensors in (current, saved)
        )
        if all(map(torch.equal, before, after)):
            continue
        residual = transpose(layer.get_base_layer().weight.data.float(), layer.fan_in_fan_out)
        layer.initial_factors = tuple(tensor.clone() for tensor in after)
        _replace_base_weight(layer, residual + scaled_product(layer, *before) - scaled_product(layer, *after))


# AdaLoRA: ranks are allocated by importance during training (Zhang et al. 2023, arXiv 2303.10512), through peft.
#
# Every layer starts with train.rank directions. After `warmup_ratio` of the steps, peft's allocator prunes the least
# important directions of all layers, every `every_steps` steps and along a cubic curve, until each layer has
# `target_rank` directions on average. In the last `final_ratio` of the steps, ranks do not change.


def _adalora_model(model: Model) -> AdaLoraModel | None:
    base_model = getattr(model, "base_model", None)
    return base_model if isinstance(base_model, AdaLoraModel) else None


def orthogonality_penalty(model: Model) -> Tensor | None:
    """Compute AdaLoRA's orthogonality penalty; None for other adapters.

    The penalty is a differentiable scalar: the mean of ||A A' - I|| over all A and ||B' B - I|| over all B (equation 4
    without its weight gamma). peft adds the penalty only to a loss that the model computes itself.
    """
    if _adalora_model(model) is None:
        return None
    distances = []
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[ADAPTER].float(), layer.lora_B[ADAPTER].float()
        identity = torch.eye(len(a), device=a.device)
        distances += [torch.linalg.matrix_norm(a @ a.T - identity), torch.linalg.matrix_norm(b.T @ b - identity)]
    return torch.stack(distances).mean()


def update_rank_allocation(model: Model, step: int, steps: int) -> None:
    """Update AdaLoRA's importance scores from the gradients and prune directions; does nothing for other adapters.

    Args:
        model: model after optimizer step `step`, with its gradients.
        step: step number, from 1. Steps that the optimizer skipped count too, and no call is needed for them, not even
            for the step at which ranks become final.
    """
    tuner = _adalora_model(model)
    if tuner is None:
        return
    config, allocator = tuner.peft_config[ADAPTER], tuner.rankallocator
    if steps != config.total_step:
        raise RuntimeError(f"AdaLoRA was attached for {config.total_step} steps, but the training has {steps}")
    final = config.total_step - config.tfinal
    is_final = config.rank_pattern is not None and not allocator.exp_avg_ipt  # peft drops its scores at the end
    uses_gradients = step < final or is_final
    if uses_gradients or not allocator.exp_avg_ipt:  # there are no scores yet if the training has a single step
        for parameter in tuner.model.parameters():  # peft requires a gradient of every matrix, even of an unused one
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not uses_gradients:
            allocator.update_ipt(tuner.model)
    with _KthValueOnHost():
        tuner.update_and_allocate(step if uses_gradients else final)


class _KthValueOnHost(TorchFunctionMode):  # type: ignore[misc]
    """Computes `torch.kthvalue` on the CPU: CUDA has no deterministic kernel for it, because of its indices, and peft
    needs it to find the least important directions."""

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.kthvalue:
            arguments = (arguments[0].cpu(), *arguments[1:])
        return function(*arguments, **(options or {}))


def _restore_adalora(model: Model, saved: Mapping[str, Tensor]) -> None:
    tuner = _adalora_model(model)
    parameters = {} if tuner is None else dict(trainable_parameters(tuner.model))
    parts: dict[str, dict[str, Tensor]] = {"sensitivity": {}, "uncertainty": {}, "rank_mask": {}}
    for path, tensor in saved.items():
        part, _, name = path.partition("/")
        parameter = parameters.get(name)
        fits = parameter is not None and tensor.shape == (
            parameter.shape[:1] if part == "rank_mask" else parameter.shape
        )
        if not fits or part not in parts:
            raise DamagedFileError(f"rank allocation belongs to other matrices than this model trains, e.g. {path}")
        parts[part][name] = tensor
    if tuner is None:
        return
    allocator = tuner.rankallocator
    allocator.reset_ipt()
    for name, tensor in parts["sensitivity"].items():
        allocator.ipt[name] = torch.zeros_like(parameters[name])  # recomputed at each step, but the entry must exist
        allocator.exp_avg_ipt[name] = tensor.to(parameters[name].device, copy=True)
    for name, tensor in parts["uncertainty"].items():
        allocator.exp_avg_unc[name] = tensor.to(parameters[name].device, copy=True)
    pattern = {name: tensor.tolist() for name, tensor in parts["rank_mask"].items()}
    tuner.peft_config[ADAPTER].rank_pattern = pattern or None
