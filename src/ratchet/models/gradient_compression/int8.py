"""Gradients in 8 bits with error feedback: what rounding takes off is added to the next step's gradient.

Each rank adds up one share of the bucket. First every rank sends each other one its share in 8 bits (all-to-all), then
each sends its sum, in 8 bits again, to all (all-gather): 2 (W - 1) / W of the bucket, as a ring all-reduce, but a byte
a number and four a block. Gathering all ranks' numbers everywhere, as is done more often, sends W / 2 times as much.
Both roundings are remembered: the first by the rank that rounded (`error`), the second by the one that added up
(`owned`). Two-sided error feedback: Tang et al. 2019 (DoubleSqueeze), Tang et al. 2021 (1-bit Adam, section 5).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.models.gradient_compression.buckets import FLOAT_BYTES, Bucket
from ratchet.models.gradient_compression.methods import Memory, error_name, of_all_gather, of_all_to_all, owned_name

LARGEST = 127
TINY = torch.finfo(torch.float32).tiny


class Int8:
    """Sums in 8 bits."""

    def __init__(self, group: Any, block: int) -> None:
        self.group = group
        self.block = block
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        buffer, world = bucket.buffer(), self.group.size()
        error, owned = error_name(bucket.index()), owned_name(bucket.index())
        values = buffer.new_zeros(world, share_of(buffer.numel(), world, self.block))
        flat = values.view(-1)[: buffer.numel()]
        flat.copy_(buffer)
        if error in self.memory:
            flat.add_(self.memory[error])
        sent = quantized(values, self.block)
        self.memory[error] = (values - restored(sent, self.block)).view(-1)[: buffer.numel()].clone()

        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        total = restored(received, self.block).sum(0, keepdim=True)
        if owned in self.memory:
            total += self.memory[owned]
        own = quantized(total, self.block)
        self.memory[owned] = (total - restored(own, self.block))[0]

        parts = [torch.empty_like(own) for _ in range(world)]
        yield dist.all_gather(parts, own, group=self.group, async_op=True)
        buffer.copy_(restored(torch.cat(parts), self.block).view(-1)[: buffer.numel()])

    def sent_bytes(self, bucket: Bucket) -> int:
        world = self.group.size()
        share = share_of(bucket.buffer().numel(), world, self.block)
        packed = share + share // self.block * FLOAT_BYTES
        return of_all_to_all(world, world * packed) + of_all_gather(world, packed)


def share_of(count: int, world: int, block: int) -> int:
    """Numbers that each rank adds up: whole blocks, so that the last share may reach beyond the bucket."""
    blocks = -(-count // block)
    return -(-blocks // world) * block


def quantized(values: Tensor, block: int) -> Tensor:
    """Whole numbers from -127 to 127 and a scale a block, as bytes: first a row's scales, then its numbers.

    Args:
        values: float32, (rows, count); count is a multiple of `block`.
        block: numbers that share a scale: their largest magnitude / 127.

    Returns:
        uint8, (rows, count + 4 count / block).
    """
    rows, count = values.shape
    blocks = values.view(rows, -1, block)
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(TINY)
    numbers = (blocks / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), numbers.view(rows, count).view(torch.uint8)], dim=1)


def restored(packed: Tensor, block: int) -> Tensor:
    """Float32 numbers, (rows, count), of what `quantized` gave. A block with NaN or infinity comes back without one
    finite number.
    """
    rows, width = packed.shape
    scale_bytes = width // (block + FLOAT_BYTES) * FLOAT_BYTES
    scales = packed[:, :scale_bytes].clone().view(torch.float32)
    numbers = packed[:, scale_bytes:].view(torch.int8).float()
    return (numbers.view(rows, -1, block) * scales.unsqueeze(-1)).view(rows, -1)
