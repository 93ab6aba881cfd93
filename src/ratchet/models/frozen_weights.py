"""The frozen weight of a layer as ordinary numbers, however it is held."""

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
"""Layers that store their weight as [inputs, outputs]; the inputs of an embedding are the tokens."""


def dense_weight(module: Any) -> Tensor:
    """The frozen weight of a layer, with or without an adapter around it, in float32 as [outputs, inputs].

    A 4-bit weight is dequantised as bitsandbytes' kernel does it for each matrix product: to the type of the product,
    whatever it was quantised from. What PiSSA has taken off a weight is in it. One in float32 already is not copied.
    One that ranks share is gathered: all of them have to ask for it.

    Raises:
        BaseModelError: the weight is quantised in a way that is not known here.
    """
    layer = unwrap_to_base(module)
    if isinstance(layer, Linear4bit):
        state = copy.copy(getattr(layer.weight, "quant_state", layer.quant_state))
        state.dtype = layer.compute_dtype or state.dtype
        return dequantize_4bit(gather_full_weight(layer.weight.data), state).float()
    if not layer.weight.is_floating_point() or layer.weight.itemsize < torch.float16.itemsize:
        raise BaseModelError(
            f"the weight of a {type(layer).__name__} is stored as {layer.weight.dtype}, and only bitsandbytes' 4 bits "
            "can be turned back into numbers here; use the model before it was quantised"
        )
    stored = gather_full_weight(layer.weight.detach()).float()
    weight = stored.T if isinstance(layer, TRANSPOSED) else stored
    taken = adapter_format.pissa_offset(module) if isinstance(module, LoraLayer) else None
    return weight if taken is None else weight + taken.to(weight.device)


def gather_full_weight(weight: Any) -> Tensor:
    """A weight of which ranks may have shares, whole; all of them have to ask for it then."""
    found: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return found


def unwrap_to_base(module: Any) -> Any:
    """The module of the base below all adapters."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def wrapped_module(module: Any) -> Any:
    """What an adapter is wrapped around; None for a module of the base."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    return module.base_layer if isinstance(module, BaseTunerLayer) else None
