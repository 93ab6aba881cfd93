"""What ranks remember, handed over to another number of ranks: nothing that was left unsent is lost."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ratchet.models.gradient_compression.int8 import share_of
from ratchet.models.gradient_compression.methods import Memory, error_name, factor_name, owned_name

State = Mapping[str, Tensor]


def regrouped(states: Sequence[State], world: int, rank: int, sizes: Sequence[int], block: int) -> Memory:
    """What one rank of a new group remembers.

    Errors of rank s go to rank s modulo the new number of ranks; the shares that were added up are cut anew; factors
    were the same on all ranks.

    Args:
        states: of all ranks of the group that was, in its order.
        world: ranks of the new group.
        rank: of this process in it.
        sizes: numbers in each bucket.
        block: of int8.
    """
    found: Memory = {}
    for number, count in enumerate(sizes):
        if error_name(number) in states[0]:
            errors = [one[error_name(number)] for one in states[rank::world]]
            found[error_name(number)] = torch.stack([torch.zeros_like(states[0][error_name(number)]), *errors]).sum(0)
        if owned_name(number) in states[0]:
            every = torch.cat([one[owned_name(number)] for one in states])[:count]
            found[owned_name(number)] = _share(every, rank, share_of(count, world, block))
        if factor_name(number) in states[0]:
            found[factor_name(number)] = states[0][factor_name(number)]
    return found


def _share(every: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part of a bucket, zeros where it reaches beyond."""
    part = every[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - part.numel())])
