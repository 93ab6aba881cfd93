"""Gradients in 8 bits with error feedback: what rounding takes off is added to the next step's gradient.

Each rank adds up one share of the bucket. First every rank sends each other one its share in 8 bits (all-to-all), then
each sends its sum, in 8 bits again, to all (all-gather): 2 (W - 1) / W of the bucket, as a ring all-reduce, but a byte
a number and four a block. Gathering all ranks' numbers everywhere, as is done more often, sends W / 2 times as much.
Both roundings are remembered: the first by the rank that rounded (`error`), the second by the one that added up
(`owned`). Two-sided error feedback: Tang et al. 2019 (DoubleSqueeze), Tang et al. 2021 (1-bit Adam, section 5).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.models.gradient_compression.methods import (
    FLOAT_BYTES,
    HALF_BYTES,
    GradientBucket,
    Memory,
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    owned_residual_name,
    residual_name,
    right_factor_name,
)

LARGEST = 127
TINY = torch.finfo(torch.float32).tiny


class Int8Compressor:
    """Sums in 8 bits."""

    def __init__(self, group: Any, block: int) -> None:
        self.group = group
        self.block = block
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, world = bucket.buffer(), self.group.size()
        error, owned = residual_name(bucket.index()), owned_residual_name(bucket.index())
        values = buffer.new_zeros(world, rank_share_size(buffer.numel(), world, self.block))
        flat = values.view(-1)[: buffer.numel()]
        flat.copy_(buffer)
        if error in self.memory:
            flat.add_(self.memory[error])
        sent = quantize_blocks(values, self.block)
        self.memory[error] = (values - dequantize_blocks(sent, self.block)).view(-1)[: buffer.numel()].clone()

        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        total = dequantize_blocks(received, self.block).sum(0, keepdim=True)
        if owned in self.memory:
            total += self.memory[owned]
        own = quantize_blocks(total, self.block)
        self.memory[owned] = (total - dequantize_blocks(own, self.block))[0]

        parts = [torch.empty_like(own) for _ in range(world)]
        yield dist.all_gather(parts, own, group=self.group, async_op=True)
        buffer.copy_(dequantize_blocks(torch.cat(parts), self.block).view(-1)[: buffer.numel()])

    def sent_bytes(self, bucket: GradientBucket) -> int:
        world = self.group.size()
        share = rank_share_size(bucket.buffer().numel(), world, self.block)
        packed = share + share // self.block * FLOAT_BYTES
        return all_to_all_bytes(world, world * packed) + all_gather_bytes(world, packed)


def rank_share_size(count: int, world: int, block: int) -> int:
    """Numbers that each rank adds up: whole blocks, so that the last share may reach beyond the bucket."""
    blocks = -(-count // block)
    return -(-blocks // world) * block


def quantize_blocks(values: Tensor, block: int) -> Tensor:
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


def dequantize_blocks(packed: Tensor, block: int) -> Tensor:
    """Float32 numbers, (rows, count), of what `quantize_blocks` gave.

    A block with NaN or infinity comes back without one finite number.
    """
    rows, width = packed.shape
    scale_bytes = width // (block + FLOAT_BYTES) * FLOAT_BYTES
    scales = packed[:, :scale_bytes].clone().view(torch.float32)
    numbers = packed[:, scale_bytes:].view(torch.int8).float()
    return (numbers.view(rows, -1, block) * scales.unsqueeze(-1)).view(rows, -1)


# The largest numbers of a gradient only, with error feedback: what is not sent adds up until it is large enough.
#
# Each rank sends the numbers that are largest in magnitude in its bucket, as bfloat16, and where they stand, a bit for
# each number of the bucket, to all others. What rounding takes off is not sent either, and so not lost.
# Error feedback alone, without the corrections for momentum of Lin et al. 2018 (DGC): they are defined for SGD, and
# what
# follows here is Adam. (Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018.)

BITS = 8


class TopKCompressor:
    """Sums of what is largest on each rank. NaN counts as larger than everything, so it is sent."""

    def __init__(self, group: Any, share: float) -> None:
        self.group = group
        self.share = share
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, error = bucket.buffer(), residual_name(bucket.index())
        values = buffer.clone()
        if error in self.memory:
            values.add_(self.memory[error])
        places = values.abs().topk(self.kept(values.numel()), sorted=False).indices.sort().values
        numbers = values[places].to(torch.bfloat16)
        values[places] -= numbers
        self.memory[error] = values
        there = torch.zeros_like(values, dtype=torch.bool)
        there[places] = True
        sent = torch.cat([pack_bits(there), numbers.view(torch.uint8)])

        parts = [torch.empty_like(sent) for _ in range(self.group.size())]
        yield dist.all_gather(parts, sent, group=self.group, async_op=True)
        buffer.zero_()
        for part in parts:  # in the order of ranks: the same bits on every rank
            bits, numbers = part.split(
                [packed_bits_size(buffer.numel()), part.numel() - packed_bits_size(buffer.numel())]
            )
            there = unpack_bits(bits)[: buffer.numel()]
            buffer += torch.zeros_like(buffer).masked_scatter_(there, numbers.clone().view(torch.bfloat16).float())

    def sent_bytes(self, bucket: GradientBucket) -> int:
        count = bucket.buffer().numel()
        return all_gather_bytes(self.group.size(), packed_bits_size(count) + HALF_BYTES * self.kept(count))

    def kept(self, count: int) -> int:
        """How many of `count` numbers are sent; at least one."""
        return math.ceil(self.share * count)


def packed_bits_size(count: int) -> int:
    """Of so many bits."""
    return -(-count // BITS)


def pack_bits(flags: Tensor) -> Tensor:
    """Truth values as bits, (count,) to (packed_bytes,), uint8: the first of eight is the lowest bit."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, packed_bits_size(len(flags)) * BITS - len(flags)))
    return (padded.view(-1, BITS) << _bit_positions(flags)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """The other way round; up to seven more than there were, all false."""
    return ((bits.unsqueeze(1) >> _bit_positions(bits)) & 1).view(-1).bool()


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=like.device)


# Matrices of low rank instead of gradients: PowerSGD (Vogels, Karimireddy and Jaggi 2019), with error feedback.
#
# A gradient M of n x m becomes P Q^T: P = M Q is summed over ranks and made orthonormal, Q = M^T P is summed, and
# begins
# the next step. So r (n + m) numbers are sent for n m, and the columns of Q turn towards what is largest in M. They
# are
# sent as bfloat16: P only says where to look, and what rounding takes off Q is fed back with all else that is left.
#
# Ours, not torch's hook. That one draws its first Q from a generator that a checkpoint would have to hold, and does
# not
# get over a gradient that was zero, as the first of every matrix A of a LoRA is, for B is zero: with rank 1 or 2 what
# follows is NaN, or with its epsilon zero for good. Here columns of Q that are zero are drawn anew, from the bucket's
# number. Tensors that are sent whole leave no error behind; torch's keeps their differences between ranks.


@dataclass(frozen=True)
class _SameShapeGradients:
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


class PowerSgdCompressor:
    """Sums of low rank; what is smaller than the two matrices that would be sent for it is sent whole."""

    def __init__(self, group: Any, rank: int, sent_type: torch.dtype = torch.bfloat16) -> None:
        self.group = group
        self.rank = rank
        self.sent_type = sent_type
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, number = bucket.buffer(), bucket.index()
        if residual_name(number) in self.memory:
            buffer.add_(self.memory[residual_name(number)])
        groups, gradients = self._groups(bucket), bucket.gradients()
        compressed = {member for group in groups for member in group.members}
        whole = [gradient for member, gradient in enumerate(gradients) if member not in compressed]
        stacks = [torch.stack([_as_matrix(gradients[member]) for member in group.members]) for group in groups]

        sums = _concatenate_flat(whole, buffer)
        if whole:
            yield dist.all_reduce(sums, group=self.group, async_op=True)
        q_of = zip(stacks, self._begun(bucket, groups), strict=True)
        products = _concatenate_flat([torch.bmm(stack, _orthonormalize(q)) for stack, q in q_of], buffer).to(
            self.sent_type
        )
        yield dist.all_reduce(products, group=self.group, async_op=True)
        lefts = [_orthonormalize(p) for p in _split_into_views(products.float(), [group.left for group in groups])]

        rights = _concatenate_flat(
            [torch.bmm(m.transpose(1, 2), p) for m, p in zip(stacks, lefts, strict=True)], buffer
        )
        sent = rights.to(self.sent_type)
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        factors, before = sent.float(), buffer.clone()
        for group, p, q in zip(
            groups, lefts, _split_into_views(factors, [group.right for group in groups]), strict=True
        ):
            for member, total in zip(group.members, torch.bmm(p, q.transpose(1, 2)), strict=True):
                _as_matrix(gradients[member]).copy_(total)
        error = before - buffer / self.group.size()
        totals = _split_into_views(sums, [one.shape for one in whole])
        for gradient, total, left in zip(whole, totals, self._parts(bucket, error, compressed), strict=True):
            gradient.copy_(total)
            left.zero_()
        self.memory |= {residual_name(number): error, right_factor_name(number): factors}

    def sent_bytes(self, bucket: GradientBucket) -> int:
        groups = self._groups(bucket)
        compressed = sum(len(group.members) * group.rows * group.columns for group in groups)
        lefts = sum(prod(group.left) for group in groups)
        whole_bytes = FLOAT_BYTES * (bucket.buffer().numel() - compressed)
        sizes = whole_bytes, HALF_BYTES * lefts, HALF_BYTES * self.factor_count(bucket)
        return sum(all_reduce_bytes(self.group.size(), size) for size in sizes)

    def factor_count(self, bucket: GradientBucket) -> int:
        """Numbers of all Q of a bucket; 0 where it is sent whole."""
        return sum(prod(group.right) for group in self._groups(bucket))

    def _groups(self, bucket: GradientBucket) -> list[_SameShapeGradients]:
        shapes: dict[tuple[int, int], list[int]] = {}
        for member, gradient in enumerate(bucket.gradients()):
            n, m = _as_matrix(gradient).shape
            if (n + m) * min(n, m, self.rank) < n * m:
                shapes.setdefault((n, m), []).append(member)
        return [_SameShapeGradients(tuple(members), n, m, min(n, m, self.rank)) for (n, m), members in shapes.items()]

    def _begun(self, bucket: GradientBucket, groups: Sequence[_SameShapeGradients]) -> Iterator[Tensor]:
        """All Q to begin with: those of the sum before, of length 1, and drawn ones for columns that are zero."""
        number = bucket.index()
        kept = self.memory.get(right_factor_name(number), bucket.buffer().new_zeros(self.factor_count(bucket)))
        for q in _split_into_views(kept, [group.right for group in groups]):
            lengths = q.norm(dim=1, keepdim=True)
            there = lengths > 0
            if bool(there.all()):
                yield q / lengths
            else:
                drawn = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).to(q)
                yield torch.where(there, q / lengths, drawn)

    @staticmethod
    def _parts(bucket: GradientBucket, flat: Tensor, compressed: set[int]) -> Iterator[Tensor]:
        """The pieces of a tensor as long as the buffer that belong to what is sent whole."""
        pieces = _split_into_views(flat, [gradient.shape for gradient in bucket.gradients()])
        return (piece for member, piece in enumerate(pieces) if member not in compressed)


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)


def _orthonormalize(matrices: Tensor) -> Tensor:
    """An orthonormal basis of each matrix's columns, (number, n, r); of what is zero, unit vectors."""
    return torch.linalg.qr(matrices).Q


def _concatenate_flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All numbers in one flat tensor; of no tensors, an empty one such as `like`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _split_into_views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of these shapes, one after the other from the beginning."""
    found, begin = [], 0
    for shape in shapes:
        found.append(flat[begin : begin + prod(shape)].view(*shape))
        begin += prod(shape)
    return found
