"""A frozen base that ranks share: every matrix of a decoder layer is split among them, and a layer's matrices are
gathered from all ranks when it is computed, forward and backward (FSDP2: training/sharding.py).

Whole on every rank stay embedding, head and final norm, vectors, constants of quantisation, and what learns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ratchet.config.schema import Machine
from ratchet.config.train import GradientCompressionSettings
from ratchet.models.device import Model
from ratchet.models.gradient_compression.reducer import GradientReducer
from ratchet.models.memory.meta_model import ExtrapolatedMetaModel
from ratchet.models.memory.trace import AllocationTrace, BatchShape, Device
from ratchet.models.model_spec import find_blocks

GATHERED = 3
"""Layers whose matrices are there at a time: the one at work, the next one, and the flat buffer they arrive in."""
PASSES = 2
"""How often a layer is gathered for a micro-batch: forward and backward."""


@dataclass(frozen=True)
class BaseShardSizes:
    """What of the base is split, in bytes."""

    whole_bytes: int
    """All matrices that are split."""
    own_bytes: int
    """What a rank keeps of them, with what fills up the last share."""
    layer_bytes: int
    """Matrices of the largest layer, when they are gathered."""

    @property
    def elsewhere_bytes(self) -> int:
        """What a rank does not keep."""
        return self.whole_bytes - self.own_bytes


def is_base_sharded(machine: Machine, ranks: int) -> bool:
    """Whether so many ranks share the base; `machine.shard_base: auto` is taken for false."""
    return machine.shard_base is True and ranks > 1


def compute_shard_sizes(replica: ExtrapolatedMetaModel, ranks: int, granule_bytes: int) -> BaseShardSizes:
    """For so many ranks, with an allocator that gives multiples of `granule_bytes`."""

    def rounded(count: int) -> int:
        return -(-count // granule_bytes) * granule_bytes

    def total(figure: Callable[[Tensor], int]) -> int:
        def of_model(model: Model) -> int:
            return sum(
                rounded(figure(one)) for block in find_blocks(model)[1] for one in iterate_shardable_matrices(block)
            )

        return replica.sum_of(of_model)

    layers = (block for model in replica.models for block in find_blocks(model)[1])
    largest = max(
        (sum(ranks * _share_bytes(one, ranks) for one in iterate_shardable_matrices(layer)) for layer in layers),
        default=0,
    )
    return BaseShardSizes(total(lambda one: one.nbytes), total(lambda one: _share_bytes(one, ranks)), largest)


def iterate_shardable_matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    """What of a decoder layer is split: what has two dimensions or more and does not learn."""
    return (one for one in layer.parameters() if not one.requires_grad and one.dim() >= 2)


def _share_bytes(matrix: Tensor, ranks: int) -> int:
    """Of a matrix split by its first dimension: the first share is the largest, and all have its size."""
    rows = int(matrix.shape[0])
    return -(-rows // ranks) * (int(matrix.nbytes) // rows)


# What ranks hold to add up their gradients: the code that will do it adds up tensors without data, and a ledger keeps
# account of them (as trace.py does with the step).

_OPERATIONS = (dist.all_reduce, dist.all_gather, dist.all_to_all_single)


@dataclass(frozen=True)
class CommunicationMemory:
    """Memory of a rank's Wire, in bytes."""

    buffer_bytes: int = 0
    """What it begins with: the flat buffer."""
    held_bytes: int = 0
    """Between two sums: also what was left unsent by the last one, and by the one before, which may be gone back to."""
    peak_bytes: int = 0
    """The most during a sum: also what is gathered from other ranks, and temporary tensors."""
    unsent_bytes: int = 0
    """What one sum leaves unsent on this rank; snapshots take that of all ranks."""


def measure_communication_memory(
    parameters: Sequence[nn.Parameter], settings: GradientCompressionSettings, ranks: int, device: Device
) -> CommunicationMemory:
    """Of one of so many ranks, with these parameters, on the meta device, that learn; nothing where there is no Wire.

    Args:
        parameters: all that learn, in the order in which they are sent.
        settings: section train.compression. Sums that are sent whole need no more than those after it.
        ranks: all of the run.
        device: that trains.
    """
    if not parameters or (ranks == 1 and settings.method == "none"):
        return CommunicationMemory()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    gradients = (nn.Parameter(one.grad) for one in parameters if one.grad is not None)
    own = nn.ParameterList([*parameters, *gradients])
    ledger = AllocationTrace(own, BatchShape(1, 1, 1, packed=False, device=device), learning=False)
    try:
        with _MetaCollectives(), ledger:
            group = _MetaProcessGroup(ranks) if ranks > 1 else None
            wire = GradientReducer([("", parameter) for parameter in parameters], group, settings, lambda _: None)
            buffer = ledger.total_bytes()
            for _ in range(2):
                wire.sum()
            held = ledger.total_bytes()
        peak = max(one.total_bytes for one in ledger.peaks.values())
        unsent = sum(tensor.nbytes for tensor in wire.state().values())
    finally:
        for parameter in parameters:
            parameter.grad = None
    return CommunicationMemory(buffer, held, peak, unsent if ranks > 1 else 0)


@dataclass(frozen=True)
class _MetaProcessGroup:
    """What the Wire asks of torch's process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class _MetaCollectives(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Nothing travels: what would arrive has its place already. torch.distributed lets a mode answer for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATIONS:
            return None
        return func(*args, **(kwargs or {}))
