"""Snapshots of a training: the only time for which a checkpoint holds training up."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ratchet.model import adapter
from ratchet.model.device import Model
from ratchet.training import optimizer as optimizers
from ratchet.training.state import Snapshot, State


def take(state: State, model: Model, optimizer: optimizers.Optimizer) -> Snapshot:
    """Copy weights, optimizer and what else the adapter needs to the CPU's memory.

    Copies on purpose: on a CPU `.cpu()` is the tensor itself.
    """
    own, rest = optimizers.flatten(optimizer)
    weights = _copied({name: parameter.detach() for name, parameter in adapter.trainable(model)})
    tensors = _copied(own)
    extra = _copied(adapter.extra_tensors(model))
    if any(tensor.is_cuda for tensor in own.values()) or model.device.type == "cuda":
        torch.cuda.synchronize()  # the copies below are only under way until then
    return Snapshot(state, weights, tensors, rest, extra)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    # All copies run at once into pinned memory, which torch keeps and gives out again at the next snapshot.
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no value of any floating-point tensor is NaN or infinite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
