"""Merge an adapter into its base: a plain model that needs neither peft nor bitsandbytes.

Which weights the adapter is added to matters: it was trained against the dequantised 4-bit base. In our probe the
logits of the merged model then differed by 2e-5 at most; added to the original weights, by .67. Sums are computed in
float32, one tensor at a time, and rounded once.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import initialization
from transformers.pytorch_utils import Conv1D

from ratchet.errors import BaseModelError, SettingsError
from ratchet.model import factors, prequantized, source, vocabulary
from ratchet.model.device import Model
from ratchet.model.quantized import load_plain

MergeBase = Literal["dequantized", "original"]

_TRANSPOSED = (Conv1D, nn.Embedding)
"""Layers that store their weight as [inputs, outputs]; the inputs of an embedding are the tokens."""


def weight_of(module: Any) -> Tensor:
    """The frozen weight of a layer, with or without an adapter around it, in float32 as [outputs, inputs].

    A 4-bit weight is dequantised as bitsandbytes does it for each matrix product: to the type that it was quantised
    from. What PiSSA has taken off a weight is in it. A weight that is in float32 already is not copied.

    Raises:
        BaseModelError: the weight is quantised in a way that is not known here.
    """
    layer = _below(module)
    if isinstance(layer, Linear4bit):
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    if not layer.weight.is_floating_point() or layer.weight.itemsize < torch.float16.itemsize:
        raise BaseModelError(
            f"the weight of a {type(layer).__name__} is stored as {layer.weight.dtype}, and only bitsandbytes' 4 bits "
            "can be turned back into numbers here; use the model before it was quantised"
        )
    stored: Tensor = layer.weight.detach().float()
    weight = stored.T if isinstance(layer, _TRANSPOSED) else stored
    taken = factors.taken_off(module) if isinstance(module, LoraLayer) else None
    return weight if taken is None else weight + taken.to(weight.device)


def merge(
    adapted: Model, base_path: Path, merge_base: MergeBase, dtype: torch.dtype, remote_code: bool = False
) -> Model:
    """A plain model on the CPU with the adapter's updates in its weights, in evaluation mode.

    With `dequantized` it holds the weights of `adapted`, wherever those were loaded from, and beside the result only
    one tensor at a time is held in float32. With `original` the base is loaded in float32 as well. A head that was
    tied to the embeddings stays tied unless the adapter has made one of them different.

    Args:
        adapted: the base as it was trained against, with the adapter attached; it is not changed.
        base_path: directory of the base.
        merge_base: weights that the updates are added to.
        dtype: type of the merged weights; sums are computed in float32 and rounded once.
        remote_code: whether Python code that the base brings along may run.

    Raises:
        SettingsError: the base is quantised in its own files, and has no original weights.
        BaseModelError: the base is quantised in a way that is not known here.
    """
    trained = adapted.get_base_model()
    fresh = merge_base == "dequantized"
    merged = _without_weights(trained, dtype) if fresh else _original(base_path, trained, remote_code)
    saved = merged.state_dict().keys()
    with torch.no_grad():
        for name, target, source in _pairs(merged, trained):
            _fill(target, source, fresh)
            if fresh:
                _fill_buffers(target, _below(source), {key.removeprefix(f"{name}.") for key in saved})
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(dtype)
    return merged.requires_grad_(False).eval()


def _without_weights(trained: Model, dtype: torch.dtype) -> Model:
    """A plain model of the same class; its parameters hold whatever lay in memory."""
    config = copy.deepcopy(trained.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if trained.get_output_embeddings() is not None:
        config.tie_word_embeddings = _stays_tied(trained)
    with initialization.no_init_weights():  # random numbers for all of a large model take minutes
        merged = type(trained)._from_config(config, dtype=dtype)  # the class is at hand, also one that came as code
    merged.tie_weights()
    merged.generation_config = copy.deepcopy(trained.generation_config)
    return merged


def _original(base_path: Path, trained: Model, remote_code: bool) -> Model:
    """The base as its files hold it, in float32, with a row for each token that `trained` has one for."""
    if prequantized.found(source.config_of(base_path), str(base_path)) is not None:
        raise SettingsError(
            f"export.merge_base: original, but {base_path} is quantised in its own files, so there are no other "
            "weights than those that were trained against; set export.merge_base: dequantized"
        )
    merged = load_plain(base_path, torch.float32, torch.device("cpu"), remote_code)
    rows = len(weight_of(trained.get_input_embeddings()).T)
    new = vocabulary.grow(merged, rows)
    with torch.no_grad():
        merged.get_input_embeddings().weight[new] = weight_of(trained.get_input_embeddings()).T[new].cpu()
        if merged.get_output_embeddings() is not None:
            merged.get_output_embeddings().weight[new] = weight_of(trained.get_output_embeddings())[new].cpu()
    if merged.get_output_embeddings() is not None and not _stays_tied(trained):
        head = merged.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        merged.config.tie_word_embeddings = False
    return merged


def _pairs(target: Any, source: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name and module of the plain model, and the same module of the adapted one, adapters around it included."""
    yield name, target, source
    below = _below(source)
    for child_name, child in target.named_children():
        yield from _pairs(child, getattr(below, child_name), f"{name}.{child_name}".lstrip("."))


def _fill(target: Any, source: Any, fresh: bool) -> None:
    """Set a module's own parameters to what the adapted one computes with.

    Args:
        target: of the plain model.
        source: of the adapted model, with the adapters around it.
        fresh: whether the frozen weights come from `source`; else they are those that `target` holds.
    """
    frozen = source if fresh else target
    for name, parameter in target.named_parameters(recurse=False):
        value = weight_of(frozen) if name == "weight" else getattr(_below(frozen), name).detach().float()
        for layer in _adapters(source):
            value = _adapted(layer, name, value)
        if name == "weight" and isinstance(target, _TRANSPOSED):
            value = value.T
        if value.shape != parameter.shape:  # copy_ would repeat a smaller one
            raise BaseModelError(f"{name} of a {type(target).__name__}: {value.shape}, not {parameter.shape}")
        parameter.copy_(value)


def _fill_buffers(target: nn.Module, source: nn.Module, saved: set[str]) -> None:
    """Copy buffers that are `saved` in the model's files, in their own type; others are computed from the config."""
    for name, _ in list(target.named_buffers(recurse=False)):
        if name in saved:
            setattr(target, name, source.get_buffer(name).detach().cpu().clone())


def _adapted(layer: Any, name: str, value: Tensor) -> Tensor:
    """A frozen parameter, weights as [outputs, inputs], with the update of one adapter around it, in float32."""
    if isinstance(layer, TrainableTokensLayer):
        return _with_tokens(layer, value) if name == "weight" else value
    if isinstance(layer, ParamWrapper):
        if name != layer.parameter_name:
            return value
        return value + factors.of_layer("", layer).update().to(value.device).reshape(value.shape)
    return _with_update(layer, value) if name == "weight" else value


def _with_update(layer: Any, weight: Tensor) -> Tensor:
    """LoRA, W + s B A (Hu et al. 2021), or DoRA, m (W + s B A) / ||W + s B A|| row by row (Liu et al. 2024)."""
    found = factors.of_layer("", layer)
    moved = weight + (found.scale * (found.b @ found.a)).to(weight.device)
    (adapter,) = layer.active_adapters
    if adapter not in layer.lora_magnitude_vector:
        return moved
    magnitude = layer.lora_magnitude_vector[adapter].weight.float().to(weight.device)
    return moved * (magnitude / torch.linalg.vector_norm(moved, dim=1)).unsqueeze(1)


def _with_tokens(layer: TrainableTokensLayer, weight: Tensor) -> Tensor:
    """The weight with the rows of the tokens that have learned."""
    (adapter,) = layer.active_adapters
    ids = torch.tensor(layer.token_indices[adapter], device=weight.device)
    rows = layer.trainable_tokens_delta[adapter].detach().float().to(weight.device)
    if isinstance(_below(layer), nn.Embedding):
        return weight.index_copy(1, ids, rows.T)
    return weight.index_copy(0, ids, rows)


def _stays_tied(trained: Model) -> bool:
    """Whether input and output embeddings are one tensor, and are changed by the adapter alike."""
    embedding, head = trained.get_input_embeddings(), trained.get_output_embeddings()
    if _below(embedding).weight is not _below(head).weight:
        return False
    ours, theirs = _adapters(embedding), _adapters(head)
    tokens = all(isinstance(layer, TrainableTokensLayer) for layer in ours + theirs)
    return tokens and [id(a.trainable_tokens_delta) for a in ours] == [id(a.trainable_tokens_delta) for a in theirs]


def _adapters(module: Any) -> list[Any]:
    """The adapters around a module, outermost first."""
    found = []
    while (inner := _inner(module)) is not None:
        if isinstance(module, BaseTunerLayer):
            found.append(module)
        module = inner
    return found


def _below(module: Any) -> Any:
    """The module of the base below all adapters."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: Any) -> Any:
    """What an adapter is wrapped around; None for a module of the base."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    return module.base_layer if isinstance(module, BaseTunerLayer) else None
