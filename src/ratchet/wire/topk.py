"""The largest numbers of a gradient only, with error feedback: what is not sent adds up until it is large enough.

Each rank sends the numbers that are largest in magnitude in its bucket, and where they stand (int32), to all others.
Error feedback alone, without the corrections for momentum of Lin et al. 2018 (DGC): they are defined for SGD, and what
follows here is Adam. (Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018.)
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ratchet.wire.buckets import FLOAT_BYTES, Bucket
from ratchet.wire.method import Memory, error_name, of_all_gather


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
        places = values.abs().topk(self.kept(values.numel()), sorted=False).indices
        sent = torch.cat([values[places].view(torch.int32), places.to(torch.int32)])
        values[places] = 0
        self.memory[error] = values

        parts = [torch.empty_like(sent) for _ in range(self.group.size())]
        yield dist.all_gather(parts, sent, group=self.group, async_op=True)
        buffer.zero_()
        for part in parts:  # in the order of ranks, and no place twice in one: the same bits on every rank
            numbers, where = part.chunk(2)
            buffer.index_add_(0, where.long(), numbers.view(torch.float32))

    def sent_bytes(self, bucket: Bucket) -> int:
        return of_all_gather(self.group.size(), 2 * FLOAT_BYTES * self.kept(bucket.buffer().numel()))

    def kept(self, count: int) -> int:
        """How many of `count` numbers are sent; at least one."""
        return math.ceil(self.share * count)
