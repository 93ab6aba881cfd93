"""Gradient buckets, the interface of compression methods, and uncompressed and 16-bit all-reduce.

A bucket's contents are a function of the parameters and the bucket size, and constant during a training.
DistributedDataParallel reorders its buckets after the first step by when gradients became ready, so the state of a
bucket would be meaningless to the next attempt. Here a bucket holds the same numbers in every attempt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

FLOAT_BYTES = 4


@dataclass(frozen=True)
class GradientBucket:
    """Consecutive gradients in one flat tensor, with the interface of torch.distributed.GradBucket."""

    number: int
    members: tuple[nn.Parameter, ...]
    flat: Tensor
    """float32, on the device of the parameters: their gradients in order."""
    is_last_bucket: bool

    def index(self) -> int:
        """Return the number of this bucket, from 0."""
        return self.number

    def buffer(self) -> Tensor:
        """Return all numbers as a flat tensor; hooks write their result into it."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer in the parameters' shapes; a scalar has the shape (1,)."""
        pieces = self.flat.split([parameter.numel() for parameter in self.members])
        return [piece.view(parameter.shape or (1,)) for piece, parameter in zip(pieces, self.members, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.members)

    def is_last(self) -> bool:
        return self.is_last_bucket

    def fill(self) -> None:
        """Copy this rank's gradients into the buffer; a missing gradient counts as zeros."""
        for view, parameter in zip(self.gradients(), self.members, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.view_as(view))

    def write_back(self) -> None:
        """Copy the buffer into the parameters' gradients."""
        for view, parameter in zip(self.gradients(), self.members, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view.view_as(parameter))


def build_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[GradientBucket]:
    """Build all buckets of these parameters. They share one buffer, so only one can be in use at a time.

    Args:
        parameters: in the same order on every rank and in every attempt.
        bucket_bytes: maximum size of a bucket; a larger parameter gets its own bucket.
    """
    groups = list(_group_parameters(parameters, bucket_bytes))
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    if not sizes:
        return []
    flat = torch.empty(max(sizes), dtype=torch.float32, device=parameters[0].device)
    last = len(groups) - 1
    return [
        GradientBucket(number, group, flat[:size], number == last)
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True))
    ]


def _group_parameters(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[tuple[nn.Parameter, ...]]:
    group: list[nn.Parameter] = []
    group_bytes = 0
    for parameter in parameters:
        size = parameter.numel() * FLOAT_BYTES
        if group and group_bytes + size > bucket_bytes:
            yield tuple(group)
            group, group_bytes = [], 0
        group.append(parameter)
        group_bytes += size
    if group:
        yield tuple(group)


# Interface of compression methods, and their traffic.

HALF_BYTES = 2
"""Size of a 16-bit number."""
Memory = dict[str, Tensor]
"""State of a compressor between two sums, by name: `error.0` is the unsent part of bucket 0. Its tensors are never
modified in place: each sum makes new ones, so the state before a sum can be restored."""


class CompressionMethod(Protocol):
    """A way to sum a bucket over ranks, with its state."""

    memory: Memory
    group: Any
    """torch's process group."""

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        """Replace the bucket's buffer by the sum over ranks.

        Yields:
            Pending torch operations (its `Work`); the caller completes each before it requests the next.
        """

    def sent_bytes(self, bucket: GradientBucket) -> int:
        """Return the bytes that a rank sends in one `reduce` of this bucket; constant over calls."""


def communication_hook(method: CompressionMethod, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook for DistributedDataParallel.register_comm_hook whose state is the method; it leaves the mean.

    It blocks. Torch's own hooks continue in callbacks of futures, which run on threads of the process group: there a
    bucket's second operation starts at a different time on each rank, and a group whose last reference is released by
    such a thread ends the process (gloo: "Resource deadlock avoided").
    """
    for work in method.reduce(bucket):
        work.wait()
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().div_(method.group.size()))
    return future


def all_reduce_bytes(world: int, size_bytes: int) -> int:
    """Return bytes sent by each rank in a ring: world - 1 shares to add and world - 1 to spread (Patarasuk, Yuan
    2009)."""
    return 2 * (world - 1) * size_bytes // world


def all_gather_bytes(world: int, size_bytes: int) -> int:
    """Return bytes sent by each rank in a ring, with `size_bytes` per rank: all parts but one pass through it."""
    return (world - 1) * size_bytes


def all_to_all_bytes(world: int, size_bytes: int) -> int:
    """Return bytes sent by each rank for a tensor of `size_bytes`: all of it except its own share."""
    return (world - 1) * size_bytes // world


def residual_name(number: int) -> str:
    """Name of the unsent part of bucket `number` on this rank; as many numbers as the bucket has."""
    return f"error.{number}"


def owned_residual_name(number: int) -> str:
    """Name of the unsent part of the share of bucket `number` that this rank sums (int8)."""
    return f"owned.{number}"


def right_factor_name(number: int) -> str:
    """Name of the right-hand matrices of bucket `number`, equal on all ranks (PowerSGD)."""
    return f"q.{number}"


# All-reduce in 32 or 16 bits, without state.
#
# bfloat16 has the range of float32 and 8 bits of precision. float16 has 11, but nothing below 6e-8, and gradients of a
# loss that is a mean over thousands of tokens are near that. So each bucket is first multiplied by a power of two,
# which changes no bit of a number's significand, such that its largest number on any rank is between 2^14 and 2^15.
# Both dtypes are divided by the number of ranks before sending, as in torch's hooks, so no sum overflows (65,504).

MAX_EXPONENT = 15
MIN_EXPONENT = -110
"""Buckets whose numbers are all below 2^-110 stay small: 2^125 is the largest scale that fits into float32."""


class Fp32AllReduce:
    """All-reduce in float32."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        yield dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    def sent_bytes(self, bucket: GradientBucket) -> int:
        return all_reduce_bytes(self.group.size(), FLOAT_BYTES * bucket.buffer().numel())


class Bf16AllReduce:
    """All-reduce in bfloat16. Rounding errors are lost."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        half = bucket.buffer().to(torch.bfloat16).div_(self.group.size())
        yield dist.all_reduce(half, group=self.group, async_op=True)
        bucket.buffer().copy_(half).mul_(self.group.size())

    def sent_bytes(self, bucket: GradientBucket) -> int:
        return all_reduce_bytes(self.group.size(), HALF_BYTES * bucket.buffer().numel())


class Fp16AllReduce:
    """All-reduce in float16, after an all-reduce of the largest number."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer = bucket.buffer()
        largest = buffer.abs().max().reshape(1)
        yield dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        scale = _fp16_scale(largest)
        half = (buffer * scale).to(torch.float16).div_(self.group.size())
        yield dist.all_reduce(half, group=self.group, async_op=True)
        buffer.copy_(half).mul_(self.group.size()).div_(scale)

    def sent_bytes(self, bucket: GradientBucket) -> int:
        world = self.group.size()
        return all_reduce_bytes(world, HALF_BYTES * bucket.buffer().numel()) + all_reduce_bytes(world, FLOAT_BYTES)


def _fp16_scale(largest: Tensor) -> Tensor:
    """Return the power of two that brings the largest number below 2^15; 1 if it is zero or not finite."""
    exponent = torch.frexp(largest).exponent.clamp_min(MIN_EXPONENT)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), MAX_EXPONENT - exponent), 1.0)
