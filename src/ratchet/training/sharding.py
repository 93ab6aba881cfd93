"""A base that no rank holds whole: each keeps a share of every decoder layer's frozen matrices.

torch's FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277) gathers a layer when its forward or backward pass
begins, and lets it go when that ends. Only what is frozen is shared. Whatever learns is small and whole on every rank,
so gradients are summed, compressed and resumed as ever, a checkpoint knows nothing of shares, and it fits any number
of ranks. Gathered bytes are those of the whole base: the adapter is the same, bit for bit, as without sharing.

Whole on every rank are also embedding, head and vectors, and of a 4-bit matrix the constants that it is read with
(1/8 of its bytes, 1/32 with double quantisation).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ratchet.errors import SettingsError
from ratchet.models import weights
from ratchet.models.device import Model
from ratchet.models.memory import ranks as sharding
from ratchet.models.model_spec import find_blocks
from ratchet.training.distributed import RankGroup


def shard_base(model: Model, ranks: RankGroup, device: torch.device) -> None:
    """Leave this rank its share of the base, on its device, and let layers travel when they are needed.

    Args:
        model: with its adapter, in the host's memory; everything but the adapter is frozen. Changed in place: every
            forward and backward pass is one of all ranks from now on, as many on each.
        ranks: two or more.
        device: where this rank computes.

    Raises:
        SettingsError: the model has no layers that could be told from each other.
    """
    name, layers = _find_layers(model)
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    gathering = _LayerAllGather(ranks, device)
    for layer in layers:
        layer.to(device)
        for module in layer.modules():
            if isinstance(module, Linear4bit):
                _shard_linear4bit(module)
        whole = set(layer.parameters()) - set(sharding.iterate_shardable_matrices(layer))
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        layer.set_custom_all_gather(gathering)
        weights.trim_heap()  # else the C library keeps the layer that was whole
    _move_others(model, layers, device)
    # The root of them all, which runs them: it has no share of its own, but layers are gathered ahead in one stream.
    body = model.get_submodule(name.rpartition(".")[0])
    fully_shard(body, mesh=mesh, ignored_params=set(body.parameters()))
    if device.type == "cuda":
        for earlier, later in pairwise(layers):
            later.set_modules_to_backward_prefetch([earlier])


def _find_layers(model: Model) -> tuple[str, list[Any]]:
    name, blocks = find_blocks(model)
    layers = list(blocks)
    count = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    if layers and max(count.values()) == 1:
        return name, layers
    flaw = "layers have matrices in common" if layers else "layers are not found as one list of modules"
    raise SettingsError(f"machine.shard_base: a {type(model.get_base_model()).__name__}'s {flaw}; set it to false")


def _move_others(model: Model, layers: Sequence[nn.Module], device: torch.device) -> None:
    """What lies outside of the layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)


class _ShardedLinear4bit(Linear4bit):  # type: ignore[misc]  # bitsandbytes has no types
    """A 4-bit layer whose packed numbers come and go; those that they are read with stay."""

    def forward(self, x: Tensor) -> Tensor:
        """As bitsandbytes computes it, with the same kernel. x: [..., inputs]; returns [..., outputs]."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        found: Tensor = bitsandbytes.matmul_4bit(x.to(dtype), self.weight, bias=bias, quant_state=self.quant_state)
        return found.to(x.dtype)


def _shard_linear4bit(layer: Linear4bit) -> None:
    """FSDP makes plain parameters of what it gathers, so the constants move from the parameter to the layer."""
    layer.quant_state = layer.weight.quant_state
    layer.weight = nn.Parameter(layer.weight.data.as_subclass(Tensor), requires_grad=False)
    layer.__class__ = _ShardedLinear4bit


class _LayerAllGather:
    """Gathers a layer: over gloo with signs of life, for whoever has stopped is found by its own supervisor."""

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        self._ranks, self._waits = ranks, device.type == "cpu"
        self._gathered_bytes = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole layer, as FSDP's own default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Begin, and wait unless `async_op`; on a GPU the stream waits, not the process."""
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=self._waits or async_op)
        if not self._waits:
            return work
        self._ranks.wait(work)
        self._give_back(output_tensor.nbytes)
        return None

    def _give_back(self, count: int) -> None:
        """Now and then what layers before have left, of which there were two copies. glibc serves no request with a
        freed block of the same size (heap.py), so it would keep all layers that were ever gathered."""
        self._gathered_bytes += 2 * count
        if self._gathered_bytes > weights.TRIM_EVERY_BYTES:
            self._gathered_bytes = 0
            weights.trim_heap()
