"""A reference merge in memory. It processes a loaded model with an attached adapter, module by module.

It shares no code with the streaming merger: peft's loaded layers provide the update of the adapter, and the loaded
model provides the weights of the base.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from ratchet.models import adapter_format, weights
from ratchet.models.device import Model


def merged(adapted: Model, base: Model | None = None) -> dict[str, Tensor]:
    """Return each parameter of the merged model in float32, by name.

    Args:
        adapted: the base in the form used for training, with the adapter attached.
        base: a plain model to whose weights the updates are added; None: the weights of `adapted`.
    """
    trained = adapted.get_base_model()
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, source, plain in _modules(trained, base):
            own = {leaf.removesuffix("_original") for leaf, _ in _below(source).named_parameters(recurse=False)}
            for leaf in own:
                found[f"{name}.{leaf}".lstrip(".")] = _value(source, plain, leaf)
    return found


def _modules(source: Any, base: Any, name: str = "") -> Any:
    yield name, source, base if base is not None else _below(source)
    for child, _ in _below(source).named_children():
        inner = None if base is None else getattr(base, child)
        yield from _modules(getattr(_below(source), child), inner, f"{name}.{child}".lstrip("."))


def _value(source: Any, plain: Any, leaf: str) -> Tensor:
    turned = leaf == "weight" and isinstance(plain, weights.TRANSPOSED)
    value = weights.dense_weight(plain).clone() if leaf == "weight" else getattr(plain, leaf).detach().float().clone()
    module = source
    while (inner := _inside(module)) is not None:
        if isinstance(module, BaseTunerLayer):
            value = _adapted(module, leaf, value)
        module = inner
    # A Conv1D in 4 bits has the shape [outputs, inputs]; in the files, the order is reversed.
    if turned or (leaf == "weight" and getattr(_below(source), "source_cls", nn.Linear).__name__ == "Conv1D"):
        value = value.T
    return value


def _adapted(layer: Any, leaf: str, value: Tensor) -> Tensor:
    if isinstance(layer, TrainableTokensLayer):
        ids = torch.tensor(layer.token_indices["default"])
        rows = layer.trainable_tokens_delta["default"].float()
        if leaf != "weight":
            return value
        return (
            value.index_copy(1, ids, rows.T)
            if isinstance(_below(layer), nn.Embedding)
            else value.index_copy(0, ids, rows)
        )
    if isinstance(layer, ParamWrapper):
        return value + layer.get_delta_weight("default").float() if leaf == layer.parameter_name else value
    if leaf != "weight" or not isinstance(layer, LoraLayer):
        return value
    found = adapter_format.layer_factors("", layer)
    moved = value + found.scale * (found.b @ found.a)
    if "default" not in layer.lora_magnitude_vector:
        return moved
    magnitude = layer.lora_magnitude_vector["default"].weight.float()
    return moved * (magnitude / torch.linalg.vector_norm(moved, dim=1)).unsqueeze(1)


def _below(module: Any) -> Any:
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def _inside(module: Any) -> Any:
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    return module.base_layer if isinstance(module, BaseTunerLayer) else None
