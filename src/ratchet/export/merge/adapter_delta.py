"""What one adapter does to one parameter of the base; sums are computed in float32."""

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

from ratchet.models import frozen_weights, lora_weights


@dataclass(frozen=True)
class Change:
    """What one adapter does to one parameter of the base."""

    module: str
    """Name by which it is chosen: of the module, or of the experts' parameter."""
    leaf: str
    """Name of the parameter in its module."""
    layers: tuple[Any, ...]
    """peft's, outermost first."""
    replacement: Tensor | None
    """The parameter itself, where the adapter holds it in full."""
    turned: bool
    """Whether the parameter is a weight that lies as [inputs, outputs]."""

    def applied(self, value: Tensor) -> Tensor:
        """The changed parameter.

        Args:
            value: as the base has it, in float32; it may be changed in place.
        """
        if self.replacement is not None:
            value = self.replacement.to(value.device, torch.float32, copy=True)
        value = value.T if self.turned else value
        for layer in self.layers:
            value = _adapted(layer, self.leaf, value)
        return value.T if self.turned else value

    def is_same(self, other: "Change") -> bool:
        """Whether it makes of the same tensor the same one: then tied parameters may stay tied."""
        return _tokens(self) is not None and _tokens(self) == _tokens(other)


def acts_on(layer: Any, leaf: str) -> bool:
    """Whether one of peft's layers changes this parameter of the module that it is around."""
    if isinstance(layer, ParamWrapper):
        return bool(leaf == layer.parameter_name)
    return leaf == "weight" or (leaf == "bias" and has_bias(layer))


def has_bias(layer: Any) -> bool:
    """Whether it adds something to the bias (lora_bias)."""
    if not isinstance(layer, LoraLayer) or lora_weights.ADAPTER not in layer.lora_B:
        return False
    return layer.lora_B[lora_weights.ADAPTER].bias is not None


def _adapted(layer: Any, leaf: str, value: Tensor) -> Tensor:
    """A parameter with the update of one of peft's layers, weights as [outputs, inputs]; changed in place."""
    if isinstance(layer, TrainableTokensLayer):
        return _with_tokens(layer, value) if leaf == "weight" else value
    if isinstance(layer, ParamWrapper):
        if leaf != layer.parameter_name:
            return value
        update = _on(lora_weights.of_layer("", layer), value.device).update()
        return value.add_(update.reshape(value.shape))
    if leaf == "bias":
        bias = layer.lora_B[lora_weights.ADAPTER].bias
        return value.add_(bias.detach().to(value.device, torch.float32), alpha=layer.scaling[lora_weights.ADAPTER])
    return _with_update(layer, value)


def _with_update(layer: Any, weight: Tensor) -> Tensor:
    """LoRA, W + s B A (Hu et al. 2021), or DoRA, m (W + s B A) / ||W + s B A|| row by row (Liu et al. 2024)."""
    found = _on(lora_weights.of_layer("", layer), weight.device)
    moved = weight.add_((found.b @ found.a).mul_(found.scale))
    if lora_weights.ADAPTER not in layer.lora_magnitude_vector:
        return moved
    magnitude = layer.lora_magnitude_vector[lora_weights.ADAPTER].weight.detach().to(weight.device, torch.float32)
    return moved.mul_((magnitude / torch.linalg.vector_norm(moved, dim=1)).unsqueeze(1))


def _with_tokens(layer: TrainableTokensLayer, weight: Tensor) -> Tensor:
    """The weight with the rows of the tokens that have learned."""
    ids = torch.tensor(layer.token_indices[lora_weights.ADAPTER], device=weight.device)
    rows = layer.trainable_tokens_delta[lora_weights.ADAPTER].detach().to(weight.device, torch.float32)
    if isinstance(frozen_weights.below(layer), nn.Embedding):
        return weight.index_copy_(1, ids, rows.T)
    return weight.index_copy_(0, ids, rows)


def _on(found: lora_weights.Factors, device: torch.device) -> lora_weights.Factors:
    return lora_weights.Factors(found.name, found.layer, found.a.to(device), found.b.to(device), found.scale)


def _tokens(change: Change) -> list[int] | None:
    """What stands for the rows that a change sets; None when it does anything else."""
    if change.replacement is not None or not all(isinstance(one, TrainableTokensLayer) for one in change.layers):
        return None
    return [id(layer.trainable_tokens_delta[lora_weights.ADAPTER]) for layer in change.layers]
