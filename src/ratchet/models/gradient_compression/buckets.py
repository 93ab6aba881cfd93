"""The pieces in which gradients are sent: a function of parameters and size, never changed while a training runs.

DistributedDataParallel orders its buckets anew after the first step, by when gradients became ready. Then what one
attempt remembers of a bucket means nothing to the next one. Here a bucket holds the same numbers in every attempt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Bucket:
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


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """All buckets of these parameters. They share one piece of memory: one of them is in use at a time.

    Args:
        parameters: in an order that is the same on every rank and in every attempt.
        bucket_bytes: most that a bucket holds; a parameter that is larger has one for itself.
    """
    groups = list(_groups(parameters, bucket_bytes))
    sizes = [sum(one.numel() for one in group) for group in groups]
    if not sizes:
        return []
    flat = torch.empty(max(sizes), dtype=torch.float32, device=parameters[0].device)
    last = len(groups) - 1
    return [
        Bucket(number, group, flat[:size], number == last)
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True))
    ]


def _groups(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[tuple[nn.Parameter, ...]]:
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
