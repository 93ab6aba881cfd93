"""Computes base + adapter with peft, independently of the merge code, as the reference for merges.

Several adapters with weights are combined from peft's own forward passes: a module's output is
base(x) + sum of w_i (adapter_i(x) - base(x)), which is correct for LoRA and DoRA alike.
"""

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import PeftConfig
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional

from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.merge.adapter_updates import is_linear_lora
from ratchet.exporters.merge.combination import combine_updates
from ratchet.exporters.merge.recipe import MergeBase, MergeRecipe, WeightedAdapter
from ratchet.models import adapter_format, adapters, loading
from ratchet.models.device import Model
from ratchet.models.weights import TRANSPOSED

_REPLACED = "_replaced_by_adapters"
"""Name of the attribute in which `load_adapted_model` stores the parameters of the base that adapters replaced."""

_ReplacedParameters = list[tuple[nn.Parameter, Tensor]]
"""Parameters with their values in the base."""


def load_adapted_model(recipe: MergeRecipe, base: MergeBase = "dequantized") -> Model:
    """Load the base with all adapters of a recipe, unmerged, frozen, in evaluation mode.

    Args:
        recipe: adapters, weights and modules.
        base: `dequantized`: the weights that the adapter was trained on, in the compute dtype of the training;
            `original`: the weights before quantization, in float32.

    Raises:
        BaseModelError, DamagedFileError: an adapter does not fit this base, or cannot be read.
        SettingsError: the base cannot be loaded with these settings, or adapters of this kind cannot be combined.
    """
    train = recipe.train
    if base == "original":
        train = train.model_copy(update={"quantization": "none", "compute_dtype": "float32"})
    model = loading.load(recipe.base, recipe.card, train, recipe.device)
    replaced = _copy_replaceable(model, recipe)
    first, *others = recipe.adapters
    model = adapters.load(model, first.adapter)
    weights = {adapter_format.ADAPTER: first.weight}
    changes = _extract_changes(replaced, first.weight)
    for number, part in enumerate(others, start=2):
        weights[f"part{number}"] = part.weight
        _load_further_adapter(model, part, f"part{number}")
        changes = [a + b for a, b in zip(changes, _extract_changes(replaced, part.weight), strict=True)]
    if others or first.weight != 1:
        _combine_adapters(model, weights, recipe)
    for (parameter, original), change in zip(replaced, changes, strict=True):
        parameter.data = (original.float() + change).to(original.dtype)
    setattr(model, _REPLACED, replaced)
    if recipe.modules:
        _disable_other_modules(model, recipe)
    return model.requires_grad_(False).eval()


@contextmanager
def disable_adapters(model: Model) -> Iterator[None]:
    """Make the model compute like the base alone within the context, with the base's own biases and embeddings."""
    replaced: _ReplacedParameters = getattr(model, _REPLACED, [])
    adapted_data = [parameter.data for parameter, _ in replaced]
    for parameter, original in replaced:
        parameter.data = original.to(parameter.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Careful, disabling adapter layers with bias")  # done above
            with model.disable_adapter():
                yield
    finally:
        for (parameter, _), data in zip(replaced, adapted_data, strict=True):
            parameter.data = data


def compute_in_float32(model: Model) -> Model:
    """Convert a model to float32 computation in place, so that bfloat16 rounding does not hide errors of a merge.

    4-bit weights stay 4-bit. For each product, they are first dequantized to the compute type of the training and then
    converted to float32, because the rounding to the compute type is part of the values that the adapter was trained
    on. Everything else becomes float32.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit) and module.compute_dtype not in (None, torch.float32):
            module.forward = functools.partial(_compute_dequantized, module)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.float())
    model.config.dtype = torch.float32
    return model


def _compute_dequantized(layer: Linear4bit, x: Tensor) -> Tensor:
    """Compute a 4-bit layer in float32, with weights rounded as in the layer's own forward pass."""
    state = copy.copy(layer.weight.quant_state)
    state.dtype = layer.compute_dtype
    weight = dequantize_4bit(layer.weight.data, state).float()
    return functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())


# Several adapters.


def _load_further_adapter(model: Model, part: WeightedAdapter, name: str) -> None:
    """Load another adapter under a name, in its saved type, and check that all of its tensors were loaded."""
    saved = adapter_format.read(part.adapter)
    try:
        config = PeftConfig.from_pretrained(str(part.adapter))
        config.inference_mode, config.bias = True, "none"  # else peft rejects the adapter; biases are loaded anyway
        with adapters.suppress_peft_warnings():
            model.add_adapter(name, config)
            model.load_adapter(str(part.adapter), adapter_name=name, is_trainable=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:300]
        raise BaseModelError(f"{part.adapter}: the adapter cannot be combined with the first: {text}") from None
    loaded = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Embeddings may be saved under the names of the base.
    loaded |= {key: parameters[key] for key in saved.keys() - loaded.keys() if key in parameters}
    mismatched = sorted(saved.keys() ^ loaded.keys()) or sorted(k for k in saved if saved[k].shape != loaded[k].shape)
    if mismatched:
        raise BaseModelError(
            f"{part.adapter}: the adapter does not fit this base model: {mismatched[0]} is missing or has another shape"
        )
    by_address = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    for key, tensor in saved.items():
        parameter = by_address.get(loaded[key].data_ptr())
        if parameter is None:
            raise BaseModelError(f"{part.adapter}: peft did not load {key} into a parameter of the model")
        parameter.data = tensor.to(parameter.device)  # peft converted it to the base's type or to float32


def _copy_replaceable(base: Model, recipe: MergeRecipe) -> _ReplacedParameters:
    """Copy the parameters of the base that peft replaces (biases, complete embeddings), before adapters are loaded."""
    saved = {key.replace(".base_layer.", ".") for part in recipe.adapters for key in adapter_format.read(part.adapter)}
    named = base.named_parameters()
    return [(parameter, parameter.detach().clone()) for name, parameter in named if f"base_model.model.{name}" in saved]


def _extract_changes(replaced: _ReplacedParameters, weight: float) -> list[Tensor]:
    """Return the last loaded adapter's changes to these parameters, times its weight; restore the base's values."""
    changes = [weight * (parameter.detach().float() - original.float()) for parameter, original in replaced]
    for parameter, original in replaced:
        parameter.data = original.clone()
    return changes


def _combine_adapters(model: Model, weights: dict[str, float], recipe: MergeRecipe) -> None:
    """Change the forward passes of all adapted modules so that they use all adapters, each with its weight."""
    for path, module in list(model.get_base_model().named_modules()):
        if isinstance(module, ParamWrapper):  # experts are not linear in their parameter: outputs cannot be added
            names = [name for name in weights if name in module.lora_A]
            for name in names:
                module.scaling[name] *= weights[name]
            module.set_adapter(names, inference_mode=True)
        elif isinstance(module, LoraLayer):
            available = module.lora_A.keys() | module.lora_embedding_A.keys()
            own_weights = {name: weight for name, weight in weights.items() if name in available}
            if recipe.method != "linear" and is_linear_lora(module):
                matrix = f"{adapter_format.name_in_base(path, module)}.weight"
                module.forward = functools.partial(_apply_combination, module, own_weights, matrix, recipe)
            else:
                module.forward = functools.partial(_sum_adapters, module, own_weights)
        elif isinstance(module, TrainableTokensWrapper):
            _combine_token_rows(module, weights)
        elif isinstance(module, ModulesToSaveWrapper):
            _combine_saved_modules(module, weights)


def _sum_adapters(layer: Any, weights: dict[str, float], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a peft layer with several adapters: base(x) + sum of w_i (adapter_i(x) - base(x))."""
    base: Tensor = layer.base_layer(x, *args, **kwargs)
    if layer.disable_adapters:
        return base
    total = base.clone()
    for name, weight in weights.items():
        layer._active_adapter = [name]
        total += weight * (type(layer).forward(layer, x, *args, **kwargs) - base)
    return total


def _apply_combination(
    layer: Any, weights: dict[str, float], matrix: str, recipe: MergeRecipe, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a peft layer with LoRA updates combined by TIES or DARE: base(x) + D x, in float32."""
    base: Tensor = layer.base_layer(x, *args, **kwargs)
    if layer.disable_adapters:
        return base
    updates = [
        (layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()) * layer.scaling[name]
        for name in weights
    ]
    # The same entries as in the merge are trimmed and drawn, so the update has the layout of the base's parameter.
    is_transposed = isinstance(layer.get_base_layer(), TRANSPOSED)
    updates = [update.T.contiguous() for update in updates] if is_transposed else updates
    combined = combine_updates(matrix, updates, list(weights.values()), recipe.method, recipe.density)
    combined = combined.T if is_transposed else combined
    return (base.float() + functional.linear(x.float(), combined)).to(base.dtype)


def _combine_token_rows(wrapper: Any, weights: dict[str, float]) -> None:
    """Combine trained token rows into one adapter; peft rejects several active adapters with the same tokens."""
    layer = wrapper.token_adapter
    names = [name for name in weights if name in layer.token_indices]
    wrapper.set_adapter(names[:1], inference_mode=True)
    if layer.tied_adapter is not None or not names:
        return
    frozen, changes = layer.get_base_layer().weight.detach().float(), dict[int, Tensor]()
    for name in names:
        rows = layer.trainable_tokens_delta[name].detach().float()
        for index, token_id in enumerate(layer.token_indices[name]):
            change = weights[name] * (rows[index] - frozen[token_id])
            changes[token_id] = changes[token_id] + change if token_id in changes else change
    ids = sorted(changes)
    layer.token_indices[names[0]] = ids
    dtype = layer.trainable_tokens_delta[names[0]].dtype
    combined = torch.stack([frozen[token_id] + changes[token_id] for token_id in ids]).to(dtype)
    layer.trainable_tokens_delta[names[0]] = nn.Parameter(combined, requires_grad=False)


def _combine_saved_modules(wrapper: Any, weights: dict[str, float]) -> None:
    """Combine fully trained modules: the base's values plus the weighted sum of all changes."""
    names = [name for name in weights if name in wrapper.modules_to_save]
    if not names:
        return
    for key, frozen in wrapper.original_module.named_parameters():
        trained = [wrapper.modules_to_save[name].get_parameter(key) for name in names]
        if not frozen.is_floating_point() or any(parameter.shape != frozen.shape for parameter in trained):
            raise SettingsError(
                f"export.additional_adapters: an adapter has a whole {type(wrapper.original_module).__name__} with "
                "another shape or type than the base's, so it cannot be weighted or combined; export it alone, with "
                "weight 1"
            )
        original = frozen.detach().float()
        change = sum(
            weights[name] * (parameter.detach().float() - original)
            for name, parameter in zip(names, trained, strict=True)
        )
        trained[0].data = (original + change).to(trained[0].dtype)
    wrapper.set_adapter(names[:1], inference_mode=True)


# A subset of the modules.


def _disable_other_modules(model: Model, recipe: MergeRecipe) -> None:
    """Bypass the adapters of every module that the recipe does not include."""
    for path, module in list(model.get_base_model().named_modules()):
        if isinstance(module, LoraLayer):
            name, base_module = adapter_format.name_in_base(path, module), module.base_layer
        elif isinstance(module, TrainableTokensWrapper):
            name, base_module = path, module.token_adapter.base_layer
        elif isinstance(module, ModulesToSaveWrapper):
            name, base_module = path, module.original_module
        else:
            continue
        if not recipe.includes(name):
            module.forward = base_module.__call__


def is_adapted(module: nn.Module) -> bool:
    """Return whether peft wraps this module."""
    return isinstance(module, BaseTunerLayer | TrainableTokensWrapper | ModulesToSaveWrapper)
