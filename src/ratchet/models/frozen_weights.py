"""Reads the frozen weight of a layer as a dense float32 tensor, whether quantized, sharded or wrapped by an adapter."""

import copy
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ratchet.errors import BaseModelError
from ratchet.models import adapter_format

TRANSPOSED = (Conv1D, nn.Embedding)
"""Layers that store their weight as [inputs, outputs]; the inputs of an embedding are tokens."""


def dense_weight(module: Any) -> Tensor:
    """Return the frozen weight of a layer, with or without an adapter around it, in float32 as [outputs, inputs].

    A 4-bit weight is dequantized as bitsandbytes' kernel does it for each matrix product: to the compute dtype,
    whatever dtype it was quantized from. The part that PiSSA subtracted is added back. A float32 weight is not copied.
    A sharded weight is gathered: every rank must make this call.

    Raises:
        BaseModelError: the weight is quantized by an unknown method.
    """
    layer = unwrap_to_base(module)
    if isinstance(layer, Linear4bit):
        state = copy.copy(getattr(layer.weight, "quant_state", layer.quant_state))
        state.dtype = layer.compute_dtype or state.dtype
        return dequantize_4bit(gather_full_weight(layer.weight.data), state).float()
    if not layer.weight.is_floating_point() or layer.weight.itemsize < torch.float16.itemsize:
        raise BaseModelError(
            f"weight of a {type(layer).__name__} layer: found {layer.weight.dtype}; only bitsandbytes 4-bit weights "
            "can be dequantized; use the model from before it was quantized"
        )
    stored = gather_full_weight(layer.weight.detach()).float()
    weight = stored.T if isinstance(layer, TRANSPOSED) else stored
    pissa_offset = adapter_format.pissa_offset(module) if isinstance(module, LoraLayer) else None
    return weight if pissa_offset is None else weight + pissa_offset.to(weight.device)


def gather_full_weight(weight: Any) -> Tensor:
    """Gather a weight that may be sharded across ranks; then every rank must make this call."""
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def unwrap_to_base(module: Any) -> Any:
    """Return the base model's module below all adapters."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def wrapped_module(module: Any) -> Any:
    """Return the module that an adapter wraps; None for a module of the base model."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    return module.base_layer if isinstance(module, BaseTunerLayer) else None
