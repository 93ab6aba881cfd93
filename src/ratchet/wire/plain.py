"""Gradients in 32 or 16 bits, of which nothing is remembered.

bfloat16 has the range of float32 and 8 bits of precision. float16 has 11, but nothing below 6e-8, and gradients of a
loss that is a mean over thousands of tokens lie near that. So each bucket is multiplied by a power of two first, which
changes no bit of a number, such that its largest number on any rank comes between 2^14 and 2^15. Both are divided by
the number of ranks before they are sent, as torch's hooks do, so no sum overflows (65,504).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.wire.buckets import FLOAT_BYTES, Bucket
from ratchet.wire.method import HALF_BYTES, Memory, of_all_reduce

EXPONENT = 15
SMALLEST = -110
"""Numbers that are all below 2^-110 stay small: 2^125 is the largest scale that float32 has room for."""


class Whole:
    """An all-reduce of float32."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        yield dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    def sent_bytes(self, bucket: Bucket) -> int:
        return of_all_reduce(self.group.size(), FLOAT_BYTES * bucket.buffer().numel())


class Bf16:
    """An all-reduce of bfloat16. What rounding takes off is lost."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        half = bucket.buffer().to(torch.bfloat16).div_(self.group.size())
        yield dist.all_reduce(half, group=self.group, async_op=True)
        bucket.buffer().copy_(half).mul_(self.group.size())

    def sent_bytes(self, bucket: Bucket) -> int:
        return of_all_reduce(self.group.size(), HALF_BYTES * bucket.buffer().numel())


class Fp16:
    """An all-reduce of float16, after one of the largest number."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        buffer = bucket.buffer()
        largest = buffer.abs().max().reshape(1)
        yield dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        scale = _scale(largest)
        half = (buffer * scale).to(torch.float16).div_(self.group.size())
        yield dist.all_reduce(half, group=self.group, async_op=True)
        buffer.copy_(half).mul_(self.group.size()).div_(scale)

    def sent_bytes(self, bucket: Bucket) -> int:
        world = self.group.size()
        return of_all_reduce(world, HALF_BYTES * bucket.buffer().numel()) + of_all_reduce(world, FLOAT_BYTES)


def _scale(largest: Tensor) -> Tensor:
    """Power of two that brings the largest number below 2^15; 1 where there is none, or no finite one."""
    exponent = torch.frexp(largest).exponent.clamp_min(SMALLEST)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), EXPONENT - exponent), 1.0)
