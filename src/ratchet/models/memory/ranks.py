"""Computes memory of multi-rank training: shards of the frozen base, and buffers of gradient reduction.

A sharded base splits every matrix of a decoder layer among the ranks and gathers a layer's matrices when it is
computed, forward and backward (FSDP2: training/sharding.py). Embedding, head, final norm, vectors, quantization
constants and trainable parameters stay whole on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ratchet.config.machine import Machine
from ratchet.config.train import GradientCompressionSettings
from ratchet.models.device import Model
from ratchet.models.gradient_compression.reducer import GradientReducer
from ratchet.models.memory.meta_model import ExtrapolatedMetaModel
from ratchet.models.memory.trace import AllocationTrace, BatchShape, Device
from ratchet.models.model_spec import find_blocks

GATHERED_LAYERS = 3
"""Layers whose matrices exist at a time: the current one, the next one, and the flat buffer that receives them."""
GATHERS_PER_MICRO_BATCH = 2
"""Gathers of a layer per micro-batch: forward and backward."""


@dataclass(frozen=True)
class BaseShardSizes:
    """Sizes of the sharded part of the base, in bytes."""

    whole_bytes: int
    """All sharded matrices."""
    local_bytes: int
    """This rank's shards, with padding."""
    layer_bytes: int
    """Gathered matrices of the largest layer."""

    @property
    def remote_bytes(self) -> int:
        """Bytes that this rank does not keep."""
        return self.whole_bytes - self.local_bytes


def is_base_sharded(machine: Machine, ranks: int) -> bool:
    """Return True if the ranks share the base; `machine.shard_base: auto` counts as false."""
    return machine.shard_base is True and ranks > 1


def compute_shard_sizes(meta_model: ExtrapolatedMetaModel, ranks: int, granule_bytes: int) -> BaseShardSizes:
    """Compute shard sizes with an allocator that rounds to multiples of `granule_bytes`."""

    def round_up(count: int) -> int:
        return -(-count // granule_bytes) * granule_bytes

    def sum_matrices(size: Callable[[Tensor], int]) -> int:
        def sum_over_model(model: Model) -> int:
            return sum(
                round_up(size(matrix))
                for block in find_blocks(model)[1]
                for matrix in iterate_shardable_matrices(block)
            )

        return meta_model.sum_over_blocks(sum_over_model)

    layers = (block for model in meta_model.models for block in find_blocks(model)[1])
    largest = max(
        (sum(ranks * _share_bytes(matrix, ranks) for matrix in iterate_shardable_matrices(layer)) for layer in layers),
        default=0,
    )
    return BaseShardSizes(
        sum_matrices(lambda matrix: matrix.nbytes), sum_matrices(lambda matrix: _share_bytes(matrix, ranks)), largest
    )


def iterate_shardable_matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a decoder layer that are sharded: frozen, with at least two dimensions."""
    return (parameter for parameter in layer.parameters() if not parameter.requires_grad and parameter.dim() >= 2)


def _share_bytes(matrix: Tensor, ranks: int) -> int:
    """Return the bytes of a shard of a matrix split by its first dimension; all have the size of the first, largest."""
    rows = int(matrix.shape[0])
    return -(-rows // ranks) * (int(matrix.nbytes) // rows)


# Memory of gradient reduction, measured by reducing tensors without data with the real code (as trace.py does).

_COLLECTIVES = (dist.all_reduce, dist.all_gather, dist.all_to_all_single)


@dataclass(frozen=True)
class CommunicationMemory:
    """Memory of a rank's GradientReducer, in bytes."""

    buffer_bytes: int = 0
    """Initially: the flat buffer."""
    held_bytes: int = 0
    """Between two sums: also the unsent parts of the last sum and of the one before, for `undo`."""
    peak_bytes: int = 0
    """Peak during a sum: also data gathered from other ranks, and temporary tensors."""
    unsent_bytes: int = 0
    """Unsent part of one sum on this rank; snapshots hold that of all ranks."""


def measure_communication_memory(
    parameters: Sequence[nn.Parameter], settings: GradientCompressionSettings, ranks: int, device: Device
) -> CommunicationMemory:
    """Measure one rank's memory for these trainable parameters on the meta device; zero if no reducer is needed.

    Args:
        parameters: all trainable parameters, in the order in which they are sent.
        settings: section train.gradient_compression. Initial uncompressed sums need no more than later sums.
        ranks: all ranks of the run.
        device: training device.
    """
    if not parameters or (ranks == 1 and settings.method == "none"):
        return CommunicationMemory()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    gradients = (nn.Parameter(parameter.grad) for parameter in parameters if parameter.grad is not None)
    tensors = nn.ParameterList([*parameters, *gradients])
    trace = AllocationTrace(tensors, BatchShape(1, 1, 1, packed=False, device=device), records_graph=False)
    try:
        with _MetaCollectives(), trace:
            group = _MetaProcessGroup(ranks) if ranks > 1 else None
            reducer = GradientReducer([("", parameter) for parameter in parameters], group, settings, lambda _: None)
            buffer = trace.total_bytes()
            for _ in range(2):
                reducer.sum()
            held = trace.total_bytes()
        peak = max(parameter.total_bytes for parameter in trace.peaks.values())
        unsent = sum(tensor.nbytes for tensor in reducer.state().values())
    finally:
        for parameter in parameters:
            parameter.grad = None
    return CommunicationMemory(buffer, held, peak, unsent if ranks > 1 else 0)


@dataclass(frozen=True)
class _MetaProcessGroup:
    """The part of torch's process group that the GradientReducer uses."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class _MetaCollectives(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Skips communication: received data already has its place. torch.distributed allows a mode to override it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COLLECTIVES:
            return None
        return func(*args, **(kwargs or {}))
