"""Base + adapter as peft computes it: what a merge is held against, and no line of what merges has a part in it.

Several adapters, weights and a subset of modules are put together from peft's own forward passes: a module's output is
base(x) + sum of w_i (adapter_i(x) - base(x)), which holds for LoRA and DoRA alike.
"""

import copy
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
from ratchet.export.merge.recipe import MergeBase, MergeRecipe, WeightedAdapter
from ratchet.models import adapter_format, adapters, loading
from ratchet.models.device import Model

_REPLACED = "_replaced_by_adapters"
"""Attribute of a model that was made here: the base's own parameters that adapters have replaced, as they were."""

_Replaced = list[tuple[nn.Parameter, Tensor]]


def load_adapted_model(recipe: MergeRecipe, base: MergeBase = "dequantized") -> Model:
    """The base with what a recipe adds to it, unmerged, frozen, in evaluation mode.

    Args:
        recipe: which adapters, with which weights, on which modules.
        base: `dequantized` is what was trained against, in its own arithmetic; `original` the weights before they were
            quantised, in float32.

    Raises:
        BaseModelError, DamagedFileError: an adapter does not fit this base, or cannot be read.
        SettingsError: the base cannot be loaded so, or an adapter is of a kind that cannot be put beside another.
    """
    train = recipe.train
    if base == "original":
        train = train.model_copy(update={"quantization": "none", "compute_dtype": "float32"})
    model = loading.load(recipe.base, recipe.card, train, recipe.device)
    replaced = _copy_replaceable(model, recipe)
    first, *others = recipe.parts
    model = adapters.load(model, first.adapter)
    weights = {adapter_format.ADAPTER: first.weight}
    sums = _extract_changes(replaced, first.weight)
    for number, part in enumerate(others, start=2):
        weights[f"part{number}"] = part.weight
        _load_further_adapter(model, part, f"part{number}")
        sums = [a + b for a, b in zip(sums, _extract_changes(replaced, part.weight), strict=True)]
    if others or first.weight != 1:
        _combine_adapters(model, weights)
    for (parameter, was), change in zip(replaced, sums, strict=True):
        parameter.data = (was.float() + change).to(was.dtype)
    setattr(model, _REPLACED, replaced)
    if recipe.modules:
        _keep_named_modules(model, recipe)
    return model.requires_grad_(False).eval()


@contextmanager
def disable_adapters(model: Model) -> Iterator[None]:
    """Within: the base alone, with its own biases and embeddings in the place of those that an adapter has replaced."""
    replaced: _Replaced = getattr(model, _REPLACED, [])
    now = [parameter.data for parameter, _ in replaced]
    for parameter, was in replaced:
        parameter.data = was.to(parameter.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Careful, disabling adapter layers with bias")  # seen to above
            with model.disable_adapter():
                yield
    finally:
        for (parameter, _), data in zip(replaced, now, strict=True):
            parameter.data = data


def compute_in_float32(model: Model) -> Model:
    """The same numbers, computed with in float32: so that a merge is told from the rounding of bfloat16.

    Weights in 4 bits stay so, and are dequantised for each product as in training: to the type that was computed in,
    whose rounding is part of them. Everything else grows to float32. The model is changed, and given back.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit) and module.compute_dtype not in (None, torch.float32):
            module.forward = _DequantizedForward(module)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.float())
    model.config.dtype = torch.float32
    return model


class _DequantizedForward:
    """Forward pass of a layer in 4 bits, in float32, with weights as its own pass rounds them."""

    def __init__(self, layer: Linear4bit) -> None:
        self._layer = layer
        self._dtype = layer.compute_dtype

    def __call__(self, x: Tensor) -> Tensor:
        state = copy.copy(self._layer.weight.quant_state)
        state.dtype = self._dtype
        weight = dequantize_4bit(self._layer.weight.data, state).float()
        bias = self._layer.bias
        return functional.linear(x.float(), weight, None if bias is None else bias.float())


# ----------------------------------------------------------------------------------------------------- several adapters


def _load_further_adapter(model: Model, part: WeightedAdapter, name: str) -> None:
    """Load a further adapter under a name, in the type that it was saved in, and make sure that all of it is there."""
    saved = adapter_format.read(part.adapter)
    try:
        config = PeftConfig.from_pretrained(str(part.adapter))
        config.inference_mode, config.bias = True, "none"  # peft would refuse a second one with biases, and loads them
        with adapters.suppress_peft_warnings():
            model.add_adapter(name, config)
            model.load_adapter(str(part.adapter), adapter_name=name, is_trainable=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:300]
        raise BaseModelError(f"{part.adapter}: the adapter does not fit beside the first: {text}") from None
    loaded = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    whole = dict(model.named_parameters(remove_duplicate=False))
    loaded |= {key: whole[key] for key in saved.keys() - loaded.keys() if key in whole}  # embeddings, grown elsewhere
    if odd := sorted(saved.keys() ^ loaded.keys()) or sorted(k for k in saved if saved[k].shape != loaded[k].shape):
        raise BaseModelError(f"{part.adapter}: the adapter does not fit this base model: {odd[0]} has no place in it")
    own = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    for key, tensor in saved.items():
        parameter = own.get(loaded[key].data_ptr())
        if parameter is None:
            raise BaseModelError(f"{part.adapter}: {key} is no parameter of the model that it was loaded into")
        parameter.data = tensor.to(parameter.device)  # peft has made it that of the base, or float32


def _copy_replaceable(base: Model, recipe: MergeRecipe) -> _Replaced:
    """Parameters of the base that peft puts others in the place of (biases, whole embeddings), as they are before."""
    saved = {key.replace(".base_layer.", ".") for part in recipe.parts for key in adapter_format.read(part.adapter)}
    named = base.named_parameters()
    return [(one, one.detach().clone()) for name, one in named if f"base_model.model.{name}" in saved]


def _extract_changes(replaced: _Replaced, weight: float) -> list[Tensor]:
    """What an adapter that was just loaded made of the base's own parameters, times its weight; they are put back."""
    changes = [weight * (parameter.detach().float() - was.float()) for parameter, was in replaced]
    for parameter, was in replaced:
        parameter.data = was.clone()
    return changes


def _combine_adapters(model: Model, weights: dict[str, float]) -> None:
    """Make every adapted module of a model compute with all adapters, each by its weight."""
    for module in list(model.get_base_model().modules()):
        if isinstance(module, ParamWrapper):  # its parameter goes into what is no linear function of it
            names = [name for name in weights if name in module.lora_A]
            for name in names:
                module.scaling[name] *= weights[name]
            module.set_adapter(names, inference_mode=True)
        elif isinstance(module, LoraLayer):
            module.forward = _WeightedAdaptersForward(module, weights)
        elif isinstance(module, TrainableTokensWrapper):
            _add_token_rows(module, weights)
        elif isinstance(module, ModulesToSaveWrapper):
            _add_saved_modules(module, weights)


class _WeightedAdaptersForward:
    """Forward pass of one of peft's layers with several adapters: base(x) + sum of w_i (adapter_i(x) - base(x))."""

    def __init__(self, layer: Any, weights: dict[str, float]) -> None:
        self._layer = layer
        held = layer.lora_A.keys() | layer.lora_embedding_A.keys()
        self._weights = {name: weight for name, weight in weights.items() if name in held}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self._layer
        base: Tensor = layer.base_layer(x, *args, **kwargs)
        if layer.disable_adapters:
            return base
        total = base.clone()
        for name, weight in self._weights.items():
            layer._active_adapter = [name]
            total += weight * (type(layer).forward(layer, x, *args, **kwargs) - base)
        return total


def _add_token_rows(wrapper: Any, weights: dict[str, float]) -> None:
    """Rows of tokens: adapters may know the same ones, which peft refuses to have at once; so they become one's."""
    layer = wrapper.token_adapter
    names = [name for name in weights if name in layer.token_indices]
    wrapper.set_adapter(names[:1], inference_mode=True)
    if layer.tied_adapter is not None or not names:
        return
    frozen, changes = layer.get_base_layer().weight.detach().float(), dict[int, Tensor]()
    for name in names:
        rows = layer.trainable_tokens_delta[name].detach().float()
        for place, id_ in enumerate(layer.token_indices[name]):
            change = weights[name] * (rows[place] - frozen[id_])
            changes[id_] = changes[id_] + change if id_ in changes else change
    ids = sorted(changes)
    layer.token_indices[names[0]] = ids
    dtype = layer.trainable_tokens_delta[names[0]].dtype
    made = torch.stack([frozen[id_] + changes[id_] for id_ in ids]).to(dtype)
    layer.trainable_tokens_delta[names[0]] = nn.Parameter(made, requires_grad=False)


def _add_saved_modules(wrapper: Any, weights: dict[str, float]) -> None:
    """Modules that adapters hold in full: the base's numbers and the weighted sum of all changes."""
    names = [name for name in weights if name in wrapper.modules_to_save]
    if not names:
        return
    for key, frozen in wrapper.original_module.named_parameters():
        held = [wrapper.modules_to_save[name].get_parameter(key) for name in names]
        if not frozen.is_floating_point() or any(one.shape != frozen.shape for one in held):
            raise SettingsError(
                f"export.also: adapters that hold a whole {type(wrapper.original_module).__name__} of another shape or "
                "type than the base's cannot be weighted or put beside others"
            )
        was = frozen.detach().float()
        change = sum(weights[name] * (one.detach().float() - was) for name, one in zip(names, held, strict=True))
        held[0].data = (was + change).to(held[0].dtype)
    wrapper.set_adapter(names[:1], inference_mode=True)


# ------------------------------------------------------------------------------------------------------------- a subset


def _keep_named_modules(model: Model, recipe: MergeRecipe) -> None:
    """Take the adapters off every module that the recipe does not name."""
    for path, module in list(model.get_base_model().named_modules()):
        if isinstance(module, LoraLayer):
            name, below = adapter_format.name_in_base(path, module), module.base_layer
        elif isinstance(module, TrainableTokensWrapper):
            name, below = path, module.token_adapter.base_layer
        elif isinstance(module, ModulesToSaveWrapper):
            name, below = path, module.original_module
        else:
            continue
        if not recipe.takes(name):
            module.forward = below.__call__


def is_adapted(module: nn.Module) -> bool:
    """Whether peft has put something around a module of the base."""
    return isinstance(module, BaseTunerLayer | TrainableTokensWrapper | ModulesToSaveWrapper)
