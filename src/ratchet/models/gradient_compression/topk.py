"""The largest numbers of a gradient only, with error feedback: what is not sent adds up until it is large enough.

Each rank sends the numbers that are largest in magnitude in its bucket, as bfloat16, and where they stand, a bit for
each number of the bucket, to all others. What rounding takes off is not sent either, and so not lost.
Error feedback alone, without the corrections for momentum of Lin et al. 2018 (DGC): they are defined for SGD, and what
follows here is Adam. (Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018.)
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.models.gradient_compression.buckets import Bucket
from ratchet.models.gradient_compression.methods import HALF_BYTES, Memory, error_name, of_all_gather

BITS = 8


class TopK:
    """Sums of what is largest on each rank. NaN counts as larger than everything, so it is sent."""

    def __init__(self, group: Any, share: float) -> None:
        self.group = group
        self.share = share
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        buffer, error = bucket.buffer(), error_name(bucket.index())
        values = buffer.clone()
        if error in self.memory:
            values.add_(self.memory[error])
        places = values.abs().topk(self.kept(values.numel()), sorted=False).indices.sort().values
        numbers = values[places].to(torch.bfloat16)
        values[places] -= numbers
        self.memory[error] = values
        there = torch.zeros_like(values, dtype=torch.bool)
        there[places] = True
        sent = torch.cat([packed(there), numbers.view(torch.uint8)])

        parts = [torch.empty_like(sent) for _ in range(self.group.size())]
        yield dist.all_gather(parts, sent, group=self.group, async_op=True)
        buffer.zero_()
        for part in parts:  # in the order of ranks: the same bits on every rank
            bits, numbers = part.split([packed_bytes(buffer.numel()), part.numel() - packed_bytes(buffer.numel())])
            there = unpacked(bits)[: buffer.numel()]
            buffer += torch.zeros_like(buffer).masked_scatter_(there, numbers.clone().view(torch.bfloat16).float())

    def sent_bytes(self, bucket: Bucket) -> int:
        count = bucket.buffer().numel()
        return of_all_gather(self.group.size(), packed_bytes(count) + HALF_BYTES * self.kept(count))

    def kept(self, count: int) -> int:
        """How many of `count` numbers are sent; at least one."""
        return math.ceil(self.share * count)


def packed_bytes(count: int) -> int:
    """Of so many bits."""
    return -(-count // BITS)


def packed(flags: Tensor) -> Tensor:
    """Truth values as bits, (count,) to (packed_bytes,), uint8: the first of eight is the lowest bit."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, packed_bytes(len(flags)) * BITS - len(flags)))
    return (padded.view(-1, BITS) << _places(flags)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor) -> Tensor:
    """The other way round; up to seven more than there were, all false."""
    return ((bits.unsqueeze(1) >> _places(bits)) & 1).view(-1).bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=like.device)
