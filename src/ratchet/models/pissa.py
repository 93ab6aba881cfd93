"""PiSSA: adapters that begin as the principal singular vectors of the weights (Meng et al. 2024, arXiv 2404.02948).

What an adapter begins as is taken off the weight it stands beside, so that the sum does not change; the base in memory
is then no longer the one on disk. A0 and B0 are kept: they are part of every checkpoint, and of the update that is
saved, which is relative to the base on disk.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft.utils.other import transpose
from torch import Tensor

from ratchet.errors import DamagedError
from ratchet.models.device import Model
from ratchet.models.lora_weights import ADAPTER, adapted_layers, first_factors, product

EXACT_UP_TO = 512
"""Smaller side of a weight up to which all singular values are computed. Above, the first are approximated (Halko et
al. 2011) with the 16 rounds of subspace iteration that the paper found enough: 13 times as fast at 1024 x 1024 on one
core, and what it takes off random weights, the hardest case, has singular values at most 2 % too small."""


def begin(model: Model, dtype: torch.dtype) -> None:
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
        _put(layer, transpose(whole.float(), layer.fan_in_fan_out) - product(layer, a.detach(), b.detach()))


def _put(layer: Any, residual: Tensor) -> None:
    """Make `residual`, [outputs, inputs] in float32, the weight of the base below the adapter."""
    weight = layer.get_base_layer().weight
    weight.data = transpose(residual.to(weight.dtype), layer.fan_in_fan_out).contiguous()


def tensors(model: Model) -> dict[str, Tensor]:
    """A0 and B0 of every layer, for a checkpoint; nothing for other adapters."""
    found = {}
    for name, layer in adapted_layers(model):
        if (first := first_factors(layer)) is not None:
            found[f"first/{name}/a"], found[f"first/{name}/b"] = first
    return found


def restore(model: Model, saved: Mapping[str, Tensor]) -> None:
    """Put the base right for the A0 and B0 of a checkpoint.

    On the machine that wrote it they are those that we have, and nothing changes. Another one may have found other
    signs, or other vectors for singular values that are nearly equal.

    Raises:
        DamagedError: they are of other layers than this model adapts.
    """
    own, shapes = tensors(model), {name: tensor.shape for name, tensor in saved.items()}
    odd = own.keys() ^ shapes.keys() | {name for name in own.keys() & shapes.keys() if own[name].shape != shapes[name]}
    if odd:
        raise DamagedError(f"holds first matrices of other layers than this model adapts, e.g. {min(odd)}")
    for name, layer in adapted_layers(model) if own else ():
        before, first = (tuple(found[f"first/{name}/{x}"] for x in "ab") for found in (own, saved))
        if all(map(torch.equal, before, first)):
            continue
        residual = transpose(layer.get_base_layer().weight.data.float(), layer.fan_in_fan_out)
        layer.first_factors = tuple(tensor.clone() for tensor in first)
        _put(layer, residual + product(layer, *before) - product(layer, *first))
