"""What every way of sending gradients has, and what it costs on the wire."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.wire.buckets import Bucket

HALF_BYTES = 2
"""Of a number in 16 bits."""
Memory = dict[str, Tensor]
"""What a rank remembers from one sum to the next, by name: `error.0` is what bucket 0 has left unsent. Its tensors are
never written again: each sum makes new ones, so what was before a sum can be gone back to."""


class Method(Protocol):
    """One way of adding up a bucket over ranks, with what it remembers."""

    memory: Memory
    group: Any
    """torch's process group."""

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        """Make the bucket's buffer the sum over ranks.

        Yields:
            Operations of torch that are under way (its `Work`); each has to be completed before the next is asked for.
        """

    def sent_bytes(self, bucket: Bucket) -> int:
        """What one `reduce` of this bucket makes a rank send; the first and the hundredth send alike."""


def communication_hook(method: Method, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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


def of_all_reduce(world: int, size_bytes: int) -> int:
    """Sent by each rank, on a ring: a share to add, a share to tell, world - 1 times each (Patarasuk and Yuan 2009)."""
    return 2 * (world - 1) * size_bytes // world


def of_all_gather(world: int, size_bytes: int) -> int:
    """Sent by each rank, whose own part has `size_bytes`, on a ring: every other rank's part but one passes through."""
    return (world - 1) * size_bytes


def of_all_to_all(world: int, size_bytes: int) -> int:
    """Sent by each rank of a tensor of `size_bytes`: all of it but its own share."""
    return (world - 1) * size_bytes // world


def error_name(number: int) -> str:
    """Of what bucket `number` has left unsent on this rank: as many numbers as the bucket has."""
    return f"error.{number}"


def owned_name(number: int) -> str:
    """Of what this rank has left unsent of the share of bucket `number` that it adds up (int8)."""
    return f"owned.{number}"


def factor_name(number: int) -> str:
    """Of the right-hand matrices of bucket `number`, the same on every rank (PowerSGD)."""
    return f"q.{number}"
