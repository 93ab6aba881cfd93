"""Matrices of low rank instead of gradients: PowerSGD (Vogels, Karimireddy and Jaggi 2019), with error feedback.

A gradient M of n x m becomes P Q^T: P = M Q is summed over ranks and made orthonormal, Q = M^T P is summed, and begins
the next step. So r (n + m) numbers are sent for n m, and the columns of Q turn towards what is largest in M. They are
sent as bfloat16: P only says where to look, and what rounding takes off Q is fed back with all else that is left.

Ours, not torch's hook. That one draws its first Q from a generator that a checkpoint would have to hold, and does not
get over a gradient that was zero, as the first of every matrix A of a LoRA is, for B is zero: with rank 1 or 2 what
follows is NaN, or with its epsilon zero for good. Here columns of Q that are zero are drawn anew, from the bucket's
number. Tensors that are sent whole leave no error behind; torch's keeps their differences between ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.models.gradient_compression.buckets import FLOAT_BYTES, Bucket
from ratchet.models.gradient_compression.methods import HALF_BYTES, Memory, error_name, factor_name, of_all_reduce


@dataclass(frozen=True)
class _Alike:
    """Gradients of one shape that are made smaller together."""

    members: tuple[int, ...]
    """Which of the bucket's."""
    rows: int
    columns: int
    rank: int

    @property
    def left(self) -> tuple[int, int, int]:
        """Shape of all their P."""
        return len(self.members), self.rows, self.rank

    @property
    def right(self) -> tuple[int, int, int]:
        """Shape of all their Q."""
        return len(self.members), self.columns, self.rank


class PowerSgd:
    """Sums of low rank; what is smaller than the two matrices that would be sent for it is sent whole."""

    def __init__(self, group: Any, rank: int, sent_type: torch.dtype = torch.bfloat16) -> None:
        self.group = group
        self.rank = rank
        self.sent_type = sent_type
        self.memory: Memory = {}

    def reduce(self, bucket: Bucket) -> Iterator[Any]:
        buffer, number = bucket.buffer(), bucket.index()
        if error_name(number) in self.memory:
            buffer.add_(self.memory[error_name(number)])
        groups, gradients = self._groups(bucket), bucket.gradients()
        compressed = {member for group in groups for member in group.members}
        whole = [gradient for member, gradient in enumerate(gradients) if member not in compressed]
        stacks = [torch.stack([_matrix(gradients[member]) for member in group.members]) for group in groups]

        sums = _joined(whole, buffer)
        if whole:
            yield dist.all_reduce(sums, group=self.group, async_op=True)
        q_of = zip(stacks, self._begun(bucket, groups), strict=True)
        products = _joined([torch.bmm(stack, _orthonormal(q)) for stack, q in q_of], buffer).to(self.sent_type)
        yield dist.all_reduce(products, group=self.group, async_op=True)
        lefts = [_orthonormal(p) for p in _cut(products.float(), [group.left for group in groups])]

        rights = _joined([torch.bmm(m.transpose(1, 2), p) for m, p in zip(stacks, lefts, strict=True)], buffer)
        sent = rights.to(self.sent_type)
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        factors, before = sent.float(), buffer.clone()
        for group, p, q in zip(groups, lefts, _cut(factors, [group.right for group in groups]), strict=True):
            for member, total in zip(group.members, torch.bmm(p, q.transpose(1, 2)), strict=True):
                _matrix(gradients[member]).copy_(total)
        error = before - buffer / self.group.size()
        totals = _cut(sums, [one.shape for one in whole])
        for gradient, total, left in zip(whole, totals, self._parts(bucket, error, compressed), strict=True):
            gradient.copy_(total)
            left.zero_()
        self.memory |= {error_name(number): error, factor_name(number): factors}

    def sent_bytes(self, bucket: Bucket) -> int:
        groups = self._groups(bucket)
        compressed = sum(len(group.members) * group.rows * group.columns for group in groups)
        lefts = sum(prod(group.left) for group in groups)
        whole_bytes = FLOAT_BYTES * (bucket.buffer().numel() - compressed)
        sizes = whole_bytes, HALF_BYTES * lefts, HALF_BYTES * self.factor_count(bucket)
        return sum(of_all_reduce(self.group.size(), size) for size in sizes)

    def factor_count(self, bucket: Bucket) -> int:
        """Numbers of all Q of a bucket; 0 where it is sent whole."""
        return sum(prod(group.right) for group in self._groups(bucket))

    def _groups(self, bucket: Bucket) -> list[_Alike]:
        shapes: dict[tuple[int, int], list[int]] = {}
        for member, gradient in enumerate(bucket.gradients()):
            n, m = _matrix(gradient).shape
            if (n + m) * min(n, m, self.rank) < n * m:
                shapes.setdefault((n, m), []).append(member)
        return [_Alike(tuple(members), n, m, min(n, m, self.rank)) for (n, m), members in shapes.items()]

    def _begun(self, bucket: Bucket, groups: Sequence[_Alike]) -> Iterator[Tensor]:
        """All Q to begin with: those of the sum before, of length 1, and drawn ones for columns that are zero."""
        number = bucket.index()
        kept = self.memory.get(factor_name(number), bucket.buffer().new_zeros(self.factor_count(bucket)))
        for q in _cut(kept, [group.right for group in groups]):
            lengths = q.norm(dim=1, keepdim=True)
            there = lengths > 0
            if bool(there.all()):
                yield q / lengths
            else:
                drawn = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).to(q)
                yield torch.where(there, q / lengths, drawn)

    @staticmethod
    def _parts(bucket: Bucket, flat: Tensor, compressed: set[int]) -> Iterator[Tensor]:
        """The pieces of a tensor as long as the buffer that belong to what is sent whole."""
        pieces = _cut(flat, [gradient.shape for gradient in bucket.gradients()])
        return (piece for member, piece in enumerate(pieces) if member not in compressed)


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)


def _orthonormal(matrices: Tensor) -> Tensor:
    """An orthonormal basis of each matrix's columns, (number, n, r); of what is zero, unit vectors."""
    return torch.linalg.qr(matrices).Q


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All numbers in one flat tensor; of no tensors, an empty one such as `like`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of these shapes, one after the other from the beginning."""
    found, begin = [], 0
    for shape in shapes:
        found.append(flat[begin : begin + prod(shape)].view(*shape))
        begin += prod(shape)
    return found
