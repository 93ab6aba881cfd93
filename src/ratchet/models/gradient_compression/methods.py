"""The pieces in which gradients are sent: a function of parameters and size, never changed while a training runs.

DistributedDataParallel orders its buckets anew after the first step, by when gradients became ready. Then what one
attempt remembers of a bucket means nothing to the next one. Here a bucket holds the same numbers in every attempt.
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
    """Neighbouring gradients in one flat tensor; what hooks ask of torch.distributed.GradBucket, it answers."""

    number: int
    members: tuple[nn.Parameter, ...]
    flat: Tensor
    """float32, on the device of the parameters: their gradients one after the other."""
    last: bool

    def index(self) -> int:
        """Which of all buckets this is, from 0."""
        return self.number

    def buffer(self) -> Tensor:
        """All numbers, flat; hooks write what comes of them into it."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the parameters' shapes; a single number has the shape (1,)."""
        pieces = self.flat.split([one.numel() for one in self.members])
        return [piece.view(one.shape or (1,)) for piece, one in zip(pieces, self.members, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.members)

    def is_last(self) -> bool:
        return self.last

    def fill(self) -> None:
        """Take the gradients of this rank; one that it has none of counts as zeros."""
        for view, parameter in zip(self.gradients(), self.members, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.view_as(view))

    def empty(self) -> None:
        """Give the parameters what the buffer holds now."""
        for view, parameter in zip(self.gradients(), self.members, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view.view_as(parameter))


def build_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[GradientBucket]:
    """All buckets of these parameters. They share one piece of memory: one of them is in use at a time.

    Args:
        parameters: in an order that is the same on every rank and in every attempt.
        bucket_bytes: most that a bucket holds; a parameter that is larger has one for itself.
    """
    groups = list(_group_parameters(parameters, bucket_bytes))
    sizes = [sum(one.numel() for one in group) for group in groups]
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
    held = 0
    for parameter in parameters:
        size = parameter.numel() * FLOAT_BYTES
        if group and held + size > bucket_bytes:
            yield tuple(group)
            group, held = [], 0
        group.append(parameter)
        held += size
    if group:
        yield tuple(group)


# What every way of sending gradients has, and what it costs on the wire.

HALF_BYTES = 2
"""Of a number in 16 bits."""
Memory = dict[str, Tensor]
"""What a rank remembers from one sum to the next, by name: `error.0` is what bucket 0 has left unsent. Its tensors are
never written again: each sum makes new ones, so what was before a sum can be gone back to."""


class CompressionMethod(Protocol):
    """One way of adding up a bucket over ranks, with what it remembers."""

    memory: Memory
    group: Any
    """torch's process group."""

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        """Make the bucket's buffer the sum over ranks.

        Yields:
            Operations of torch that are under way (its `MemoryWorkload`); the caller completes each before it asks for
            the next.
        """

    def sent_bytes(self, bucket: GradientBucket) -> int:
        """What one `reduce` of this bucket makes a rank send; the first and the hundredth send alike."""


def communication_hook(method: CompressionMethod, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook for DistributedDataParallel.register_comm_hook, with the method as its state: leaves the mean.

    It waits where it stands. Torch's own hooks go on in callbacks of futures, which run on threads of the process
    group: there a bucket's second operation starts at another time on each rank, and a group whose last reference such
    a thread lets go of ends the process (gloo: "Resource deadlock avoided").
    """
    for work in method.reduce(bucket):
        work.wait()
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().div_(method.group.size()))
    return future


def all_reduce_bytes(world: int, size_bytes: int) -> int:
    """Sent by each rank, on a ring: a share to add, a share to tell, world - 1 times each (Patarasuk and Yuan 2009)."""
    return 2 * (world - 1) * size_bytes // world


def all_gather_bytes(world: int, size_bytes: int) -> int:
    """Sent by each rank, whose own part has `size_bytes`, on a ring: every other rank's part but one passes through."""
    return (world - 1) * size_bytes


def all_to_all_bytes(world: int, size_bytes: int) -> int:
    """Sent by each rank of a tensor of `size_bytes`: all of it but its own share."""
    return (world - 1) * size_bytes // world


def residual_name(number: int) -> str:
    """Of what bucket `number` has left unsent on this rank: as many numbers as the bucket has."""
    return f"error.{number}"


def owned_residual_name(number: int) -> str:
    """Of what this rank has left unsent of the share of bucket `number` that it adds up (int8)."""
    return f"owned.{number}"


def right_factor_name(number: int) -> str:
    """Of the right-hand matrices of bucket `number`, the same on every rank (PowerSGD)."""
    return f"q.{number}"


# Gradients in 32 or 16 bits, of which nothing is remembered.
#
# bfloat16 has the range of float32 and 8 bits of precision. float16 has 11, but nothing below 6e-8, and gradients of a
# loss that is a mean over thousands of tokens lie near that. So each bucket is multiplied by a power of two first,
# which
# changes no bit of a number, such that its largest number on any rank comes between 2^14 and 2^15. Both are divided by
# the number of ranks before they are sent, as torch's hooks do, so no sum overflows (65,504).

EXPONENT = 15
SMALLEST = -110
"""Numbers that are all below 2^-110 stay small: 2^125 is the largest scale that float32 has room for."""


class Fp32AllReduce:
    """An all-reduce of float32."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        yield dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    def sent_bytes(self, bucket: GradientBucket) -> int:
        return all_reduce_bytes(self.group.size(), FLOAT_BYTES * bucket.buffer().numel())


class Bf16AllReduce:
    """An all-reduce of bfloat16. What rounding takes off is lost."""

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
    """An all-reduce of float16, after one of the largest number."""

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
    """Power of two that brings the largest number below 2^15; 1 where there is none, or no finite one."""
    exponent = torch.frexp(largest).exponent.clamp_min(SMALLEST)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), EXPONENT - exponent), 1.0)
