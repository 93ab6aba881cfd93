"""Shards the base: each rank stores a share of every decoder layer's frozen matrices.

torch's FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277) gathers a layer when its forward or backward pass
begins, and frees it when the pass ends. Only frozen weights are sharded. Trainable parameters are small, and every rank
has all of them. So gradients are summed, compressed and resumed as without sharding, and a checkpoint fits any number
of ranks. The gathered bytes equal the bytes of the base, so the adapter is the same, bit for bit, as without sharding.

Every rank also has the complete embedding, head and vectors, and the quantisation constants of each 4-bit matrix (1/8
of its bytes, 1/32 with double quantisation).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ratchet.errors import SettingsError
from ratchet.models import weights
from ratchet.models.device import Model
from ratchet.models.memory import forecast as rank_memory
from ratchet.models.model_spec import find_blocks
from ratchet.models.tiled_linear import TiledLinear4bit
from ratchet.training.distributed import RankGroup


def shard_base(model: Model, ranks: RankGroup, device: torch.device) -> None:
    """Keep this rank's share of the base on the rank's device, and gather each layer when it is needed.

    The model, in the host's memory, is changed in place: afterwards, all ranks must run the same passes together.
    Raises SettingsError if it has no list of separate layers.
    """
    name, layers = _find_layers(model)
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    all_gather = _GlooAllGather(ranks)
    for layer in layers:
        layer.to(device)
        for module in layer.modules():
            if isinstance(module, Linear4bit):
                # FSDP gathers plain parameters, so the quantisation constants move from the parameter to the layer.
                module.quant_state = module.weight.quant_state
                module.weight = nn.Parameter(module.weight.data.as_subclass(Tensor), requires_grad=False)
                module.__class__ = _ShardedLinear4bit
        unsharded = set(layer.parameters()) - set(rank_memory.iterate_shardable_matrices(layer))
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=unsharded)
        if device.type == "cpu":
            layer.set_custom_all_gather(all_gather)
        weights.trim_heap()  # otherwise the C library keeps the memory of the unsharded layer
    _move_outer_modules(model, layers, device)
    # The module that runs the layers has no shards of its own. As FSDP's root, this module gathers the next layers in
    # advance, in one stream.
    body = model.get_submodule(name.rpartition(".")[0])
    fully_shard(body, mesh=mesh, ignored_params=set(body.parameters()))


def _find_layers(model: Model) -> tuple[str, list[Any]]:
    name, blocks = find_blocks(model)
    layers = list(blocks)
    count = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    if layers and max(count.values()) == 1:
        return name, layers
    reason = "its layers share matrices" if layers else "its layers are not one list of modules"
    name = type(model.get_base_model()).__name__
    raise SettingsError(f"machine.shard_base: a {name} cannot be sharded: {reason}; set it to false")


def _move_outer_modules(model: Model, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Move the modules outside of the layers to the device."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)


class _ShardedLinear4bit(TiledLinear4bit):
    """A 4-bit layer whose packed weights FSDP gathers and frees; its quantisation constants stay in memory."""

    @property
    def packed(self) -> Tensor:
        """The gathered weights."""
        packed: Tensor = self.weight
        return packed

    @property
    def constants(self) -> QuantState:
        """Constants of the unsharded weights."""
        return self.quant_state


class _GlooAllGather:
    """Gathers a layer over gloo. A rank sends heartbeats while it waits, so that only a stopped rank is silent. A GPU
    needs none of it: FSDP only starts the operation, and the GPU's stream waits for its end."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._gathered_bytes = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for the gathered layer, as FSDP does by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather a layer."""
        self._ranks.wait(dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True))
        # glibc does not reuse a freed block for a request of the same size (models/memory/trace.py), so it would keep
        # the memory of every layer that was ever gathered. A layer counts twice, because it was in memory twice.
        self._gathered_bytes += 2 * output_tensor.nbytes
        if self._gathered_bytes > weights.TRIM_EVERY_BYTES:
            self._gathered_bytes = 0
            weights.trim_heap()
