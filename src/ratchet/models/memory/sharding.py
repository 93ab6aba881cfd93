"""A frozen base that ranks share: every matrix of a decoder layer is split among them, and a layer's matrices are
gathered from all ranks when it is computed, forward and backward (FSDP2: training/sharding.py).

Whole on every rank stay embedding, head and final norm, vectors, constants of quantisation, and what learns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ratchet.config.schema import Machine
from ratchet.models.device import Model
from ratchet.models.memory.meta_model import Replica
from ratchet.models.model_spec import blocks_of

GATHERED = 3
"""Layers whose matrices are there at a time: the one at work, the next one, and the flat buffer they arrive in."""
PASSES = 2
"""How often a layer is gathered for a micro-batch: forward and backward."""


@dataclass(frozen=True)
class Shards:
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


def is_shared(machine: Machine, ranks: int) -> bool:
    """Whether so many ranks share the base; `machine.shard_base: auto` is taken for false."""
    return machine.shard_base is True and ranks > 1


def of(replica: Replica, ranks: int, granule_bytes: int) -> Shards:
    """For so many ranks, with an allocator that gives multiples of `granule_bytes`."""

    def rounded(count: int) -> int:
        return -(-count // granule_bytes) * granule_bytes

    def total(figure: Callable[[Tensor], int]) -> int:
        def of_model(model: Model) -> int:
            return sum(rounded(figure(one)) for block in blocks_of(model)[1] for one in matrices(block))

        return replica.sum_of(of_model)

    layers = (block for model in replica.models for block in blocks_of(model)[1])
    largest = max((sum(ranks * _share_bytes(one, ranks) for one in matrices(layer)) for layer in layers), default=0)
    return Shards(total(lambda one: one.nbytes), total(lambda one: _share_bytes(one, ranks)), largest)


def matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    """What of a decoder layer is split: what has two dimensions or more and does not learn."""
    return (one for one in layer.parameters() if not one.requires_grad and one.dim() >= 2)


def _share_bytes(matrix: Tensor, ranks: int) -> int:
    """Of a matrix split by its first dimension: the first share is the largest, and all have its size."""
    rows = int(matrix.shape[0])
    return -(-rows // ranks) * (int(matrix.nbytes) // rows)
