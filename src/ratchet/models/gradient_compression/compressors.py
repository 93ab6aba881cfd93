"""Gradient compressors with error feedback: the rounding error of a step is added to the next step's gradient.

Int8: each rank sums one share of the bucket. First every rank sends each other rank its share in 8 bits (all-to-all),
then each sends its sum, again in 8 bits, to all (all-gather): 2 (W - 1) / W of the bucket, as in a ring all-reduce, but
one byte per number and four per block. The more common method of gathering all ranks' numbers everywhere sends W / 2
times as much. Both rounding errors are remembered: the first by the rank that rounded (`error`), the second by the rank
that summed (`owned`). Two-sided error feedback: Tang et al. 2019 (DoubleSqueeze), Tang et al. 2021 (1-bit Adam,
section 5).
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

INT8_MAX = 127
MIN_SCALE = torch.finfo(torch.float32).tiny


class Int8Compressor:
    """Sums gradients in 8 bits."""

    def __init__(self, group: Any, block: int) -> None:
        self.group = group
        self.block = block
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, world = bucket.buffer(), self.group.size()
        error, owned_error = residual_name(bucket.index()), owned_residual_name(bucket.index())
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
        if owned_error in self.memory:
            total += self.memory[owned_error]
        packed_sum = quantize_blocks(total, self.block)
        self.memory[owned_error] = (total - dequantize_blocks(packed_sum, self.block))[0]

        parts = [torch.empty_like(packed_sum) for _ in range(world)]
        yield dist.all_gather(parts, packed_sum, group=self.group, async_op=True)
        buffer.copy_(dequantize_blocks(torch.cat(parts), self.block).view(-1)[: buffer.numel()])

    def sent_bytes(self, bucket: GradientBucket) -> int:
        world = self.group.size()
        share = rank_share_size(bucket.buffer().numel(), world, self.block)
        packed = share + share // self.block * FLOAT_BYTES
        return all_to_all_bytes(world, world * packed) + all_gather_bytes(world, packed)


def rank_share_size(count: int, world: int, block: int) -> int:
    """Return how many numbers each rank sums: whole blocks, so the last share may extend beyond the bucket."""
    blocks = -(-count // block)
    return -(-blocks // world) * block


def quantize_blocks(values: Tensor, block: int) -> Tensor:
    """Quantize to integers from -127 to 127 and one scale per block, as bytes: first a row's scales, then its numbers.

    Args:
        values: float32 [rows, count]; count is a multiple of `block`.
        block: numbers that share a scale, which is their largest magnitude / 127.

    Returns:
        uint8 [rows, count + 4 count / block].
    """
    rows, count = values.shape
    blocks = values.view(rows, -1, block)
    scales = (blocks.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(MIN_SCALE)
    numbers = (blocks / scales).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), numbers.view(rows, count).view(torch.uint8)], dim=1)


def dequantize_blocks(packed: Tensor, block: int) -> Tensor:
    """Convert the result of `quantize_blocks` to float32 [rows, count].

    A block that held NaN or infinity contains no finite number.
    """
    rows, width = packed.shape
    scale_bytes = width // (block + FLOAT_BYTES) * FLOAT_BYTES
    scales = packed[:, :scale_bytes].clone().view(torch.float32)
    numbers = packed[:, scale_bytes:].view(torch.int8).float()
    return (numbers.view(rows, -1, block) * scales.unsqueeze(-1)).view(rows, -1)


# Top-k: sends only the largest numbers of a gradient; unsent parts accumulate until they are large enough.
#
# Each rank sends all others the numbers with the largest magnitude in its bucket as bfloat16, and their places as one
# bit per number of the bucket. Rounding errors stay in the unsent part, so they are not lost. Error feedback is used
# without the momentum corrections of Lin et al. 2018 (DGC), which are defined for SGD, while the optimizer here is
# Adam. (Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018.)

BITS_PER_BYTE = 8


class TopKCompressor:
    """Sums the largest numbers of each rank. NaN counts as larger than everything, so it is sent."""

    def __init__(self, group: Any, share: float) -> None:
        self.group = group
        self.share = share
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, error = bucket.buffer(), residual_name(bucket.index())
        values = buffer.clone()
        if error in self.memory:
            values.add_(self.memory[error])
        indices = values.abs().topk(self.count_sent(values.numel()), sorted=False).indices.sort().values
        selected = values[indices].to(torch.bfloat16)
        values[indices] -= selected
        self.memory[error] = values
        mask = torch.zeros_like(values, dtype=torch.bool)
        mask[indices] = True
        sent = torch.cat([pack_bits(mask), selected.view(torch.uint8)])

        parts = [torch.empty_like(sent) for _ in range(self.group.size())]
        yield dist.all_gather(parts, sent, group=self.group, async_op=True)
        buffer.zero_()
        for part in parts:  # in the order of ranks: the same bits on every rank
            bits, selected = part.split(
                [packed_bits_size(buffer.numel()), part.numel() - packed_bits_size(buffer.numel())]
            )
            mask = unpack_bits(bits)[: buffer.numel()]
            buffer += torch.zeros_like(buffer).masked_scatter_(mask, selected.clone().view(torch.bfloat16).float())

    def sent_bytes(self, bucket: GradientBucket) -> int:
        count = bucket.buffer().numel()
        return all_gather_bytes(self.group.size(), packed_bits_size(count) + HALF_BYTES * self.count_sent(count))

    def count_sent(self, count: int) -> int:
        """Return how many of `count` numbers are sent; at least one."""
        return math.ceil(self.share * count)


def packed_bits_size(count: int) -> int:
    """Return the bytes of `count` packed bits."""
    return -(-count // BITS_PER_BYTE)


def pack_bits(flags: Tensor) -> Tensor:
    """Pack booleans into bits, [count] to uint8 [packed_bytes]: the first of eight is the lowest bit."""
    padded = torch.nn.functional.pad(
        flags.to(torch.uint8), (0, packed_bits_size(len(flags)) * BITS_PER_BYTE - len(flags))
    )
    return (padded.view(-1, BITS_PER_BYTE) << _bit_positions(flags)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpack bits to booleans; up to seven more than were packed, all False."""
    return ((bits.unsqueeze(1) >> _bit_positions(bits)) & 1).view(-1).bool()


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=like.device)


# PowerSGD: sends matrices of low rank instead of gradients (Vogels, Karimireddy and Jaggi 2019), with error feedback.
#
# A gradient M [n, m] becomes P Q^T: P = M Q is summed over ranks and orthonormalized, Q = M^T P is summed and is the
# initial Q of the next step. So r (n + m) numbers are sent instead of n m, and the columns of Q turn towards the
# dominant directions of M. They are sent as bfloat16: P only selects directions, and Q's rounding error is fed back
# with the rest.
#
# torch's PowerSGD hook is not used. It draws its first Q from a generator that a checkpoint would have to hold, and
# does not recover from a gradient that was zero, as the first gradient of every LoRA A is, because B is zero: with rank
# 1 or 2 the result is NaN, or with its epsilon zero for good. Here columns of Q that are zero are drawn again, seeded
# with the bucket's number. Tensors that are sent whole leave no error; torch's hook keeps their differences between
# ranks.


@dataclass(frozen=True)
class _SameShapeGradients:
    """Gradients of one shape that are compressed together."""

    members: tuple[int, ...]
    """Indices in the bucket."""
    rows: int
    columns: int
    rank: int

    @property
    def left_shape(self) -> tuple[int, int, int]:
        """Shape of all P of the group."""
        return len(self.members), self.rows, self.rank

    @property
    def right_shape(self) -> tuple[int, int, int]:
        """Shape of all Q of the group."""
        return len(self.members), self.columns, self.rank


class PowerSgdCompressor:
    """Sums low-rank approximations; a gradient smaller than its two matrices is sent whole."""

    def __init__(self, group: Any, rank: int, sent_dtype: torch.dtype = torch.bfloat16) -> None:
        self.group = group
        self.rank = rank
        self.sent_dtype = sent_dtype
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, number = bucket.buffer(), bucket.index()
        if residual_name(number) in self.memory:
            buffer.add_(self.memory[residual_name(number)])
        groups, gradients = self._groups(bucket), bucket.gradients()
        compressed = {member for group in groups for member in group.members}
        uncompressed = [gradient for member, gradient in enumerate(gradients) if member not in compressed]
        stacks = [torch.stack([_as_matrix(gradients[member]) for member in group.members]) for group in groups]

        sums = _concatenate_flat(uncompressed, buffer)
        if uncompressed:
            yield dist.all_reduce(sums, group=self.group, async_op=True)
        q_of = zip(stacks, self._initial_right_factors(bucket, groups), strict=True)
        products = _concatenate_flat([torch.bmm(stack, _orthonormalize(q)) for stack, q in q_of], buffer).to(
            self.sent_dtype
        )
        yield dist.all_reduce(products, group=self.group, async_op=True)
        lefts = [
            _orthonormalize(p) for p in _split_into_views(products.float(), [group.left_shape for group in groups])
        ]

        rights = _concatenate_flat(
            [torch.bmm(m.transpose(1, 2), p) for m, p in zip(stacks, lefts, strict=True)], buffer
        )
        sent = rights.to(self.sent_dtype)
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        factors, before = sent.float(), buffer.clone()
        for group, p, q in zip(
            groups, lefts, _split_into_views(factors, [group.right_shape for group in groups]), strict=True
        ):
            for member, total in zip(group.members, torch.bmm(p, q.transpose(1, 2)), strict=True):
                _as_matrix(gradients[member]).copy_(total)
        error = before - buffer / self.group.size()
        totals = _split_into_views(sums, [gradient.shape for gradient in uncompressed])
        for gradient, total, residual in zip(
            uncompressed, totals, self._uncompressed_pieces(bucket, error, compressed), strict=True
        ):
            gradient.copy_(total)
            residual.zero_()
        self.memory |= {residual_name(number): error, right_factor_name(number): factors}

    def sent_bytes(self, bucket: GradientBucket) -> int:
        groups = self._groups(bucket)
        compressed = sum(len(group.members) * group.rows * group.columns for group in groups)
        lefts = sum(prod(group.left_shape) for group in groups)
        whole_bytes = FLOAT_BYTES * (bucket.buffer().numel() - compressed)
        sizes = whole_bytes, HALF_BYTES * lefts, HALF_BYTES * self.factor_count(bucket)
        return sum(all_reduce_bytes(self.group.size(), size) for size in sizes)

    def factor_count(self, bucket: GradientBucket) -> int:
        """Return how many numbers all Q of a bucket have; 0 if it is sent whole."""
        return sum(prod(group.right_shape) for group in self._groups(bucket))

    def _groups(self, bucket: GradientBucket) -> list[_SameShapeGradients]:
        shapes: dict[tuple[int, int], list[int]] = {}
        for member, gradient in enumerate(bucket.gradients()):
            n, m = _as_matrix(gradient).shape
            if (n + m) * min(n, m, self.rank) < n * m:
                shapes.setdefault((n, m), []).append(member)
        return [_SameShapeGradients(tuple(members), n, m, min(n, m, self.rank)) for (n, m), members in shapes.items()]

    def _initial_right_factors(self, bucket: GradientBucket, groups: Sequence[_SameShapeGradients]) -> Iterator[Tensor]:
        """Yield the initial Q of each group: the previous sum's, normalized, with random columns where it is zero."""
        number = bucket.index()
        previous = self.memory.get(right_factor_name(number), bucket.buffer().new_zeros(self.factor_count(bucket)))
        for q in _split_into_views(previous, [group.right_shape for group in groups]):
            lengths = q.norm(dim=1, keepdim=True)
            is_nonzero = lengths > 0
            if bool(is_nonzero.all()):
                yield q / lengths
            else:
                drawn = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).to(q)
                yield torch.where(is_nonzero, q / lengths, drawn)

    @staticmethod
    def _uncompressed_pieces(bucket: GradientBucket, flat: Tensor, compressed: set[int]) -> Iterator[Tensor]:
        """Yield the pieces of a tensor with the buffer's length that belong to gradients sent whole."""
        pieces = _split_into_views(flat, [gradient.shape for gradient in bucket.gradients()])
        return (piece for member, piece in enumerate(pieces) if member not in compressed)


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)


def _orthonormalize(matrices: Tensor) -> Tensor:
    """Return an orthonormal basis of each matrix's columns, [number, n, r]; unit vectors for a zero matrix."""
    return torch.linalg.qr(matrices).Q


def _concatenate_flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate all tensors flat; without tensors, return an empty one with the dtype and device of `like`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _split_into_views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return consecutive views of these shapes."""
    views, start = [], 0
    for shape in shapes:
        views.append(flat[start : start + prod(shape)].view(*shape))
        start += prod(shape)
    return views
