"""What a plain LoRA layer adds, computed in fewer operators and less memory than peft's layer does it (0.21).

peft scales the update and adds it in operators of their own, copies what a 4-bit layer gives, and with an adapter in
float32 beside activations in 16 bits makes, for every layer, a copy of its input in float32 that lives until the
backward pass. Here the second product adds to what the base gives and scales as it goes, and both are computed in the
type of the activations, as under autocast in Trainer; what learns keeps its own type, and so does its gradient.
Measured on a CPU in float32: 4 % of a step less (8 rows of 256 tokens, 30M parameters).
"""

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor
from torch.nn import functional

from ratchet.models.adapter_format import ADAPTER, adapted_layers
from ratchet.models.device import Model


def install_fast_forward(model: Model) -> None:
    """Give the plain LoRA layers of a model that is to be trained the shorter forward pass; others keep peft's."""
    for _, layer in adapted_layers(model):
        if _is_plain_lora(layer):
            layer.forward = MethodType(_fast_forward, layer)


def _is_plain_lora(layer: Any) -> bool:
    """Whether the layer adds B A x and nothing else: no DoRA, AdaLoRA, bias, convolution, embedding or experts."""
    from peft.tuners.lora.bnb import Linear4bit, Linear8bitLt  # loads bitsandbytes

    return (
        type(layer) in {Linear, Linear4bit, Linear8bitLt}
        and ADAPTER not in layer.lora_variant
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
    )


def _fast_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs or layer.disable_adapters or layer.merged or layer.active_adapters != [ADAPTER]:
        peft_result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return peft_result
    given: Tensor = layer.base_layer(x)
    down, up = layer.lora_A[ADAPTER].weight.to(given.dtype), layer.lora_B[ADAPTER].weight.to(given.dtype)
    inner = functional.linear(layer.lora_dropout[ADAPTER](x.to(given.dtype)), down)
    added = torch.addmm(given.flatten(0, -2), inner.flatten(0, -2), up.t(), alpha=layer.scaling[ADAPTER])
    return added.view_as(given)
