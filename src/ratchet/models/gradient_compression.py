"""Sums gradients over ranks once per step with the method of train.gradient_compression, and restores its state.

The state can be restored with another number of ranks without losing unsent parts.

Gradient buckets, the interface of compression methods, and uncompressed and 16-bit all-reduce.

A bucket's contents are a function of the parameters and the bucket size, and constant during a training.
DistributedDataParallel reorders its buckets after the first step by when gradients became ready, so the state of a
bucket would be meaningless to the next attempt. Here a bucket holds the same numbers in every attempt.

Gradient compressors with error feedback: the rounding error of a step is added to the next step's gradient.

Int8: each rank sums one share of the bucket. First every rank sends each other rank its share in 8 bits (all-to-all),
then each sends its sum, again in 8 bits, to all (all-gather): 2 (W - 1) / W of the bucket, as in a ring all-reduce, but
one byte per number and four per block. The more common method of gathering all ranks' numbers everywhere sends W / 2
times as much. Both rounding errors are remembered: the first by the rank that rounded (`error`), the second by the rank
that summed (`owned`). Two-sided error feedback: Tang et al. 2019 (DoubleSqueeze), Tang et al. 2021 (1-bit Adam,
section 5).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratchet.config.train import GradientCompressionSettings
from ratchet.errors import DamagedFileError

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


State = Mapping[str, Tensor]


def reshard_residuals(states: Sequence[State], world: int, rank: int, sizes: Sequence[int], block: int) -> Memory:
    """Return the memory of one rank of a new group.

    Errors of rank s go to rank s modulo the new number of ranks; shares of summed numbers are split again; factors are
    equal on all ranks.

    Args:
        states: states of all ranks of the old group, in order.
        world: ranks of the new group.
        rank: rank of this process in the new group.
        sizes: numbers in each bucket.
        block: block size of int8.
    """
    memory: Memory = {}
    for number, count in enumerate(sizes):
        if residual_name(number) in states[0]:
            errors = [state[residual_name(number)] for state in states[rank::world]]
            memory[residual_name(number)] = torch.stack(
                [torch.zeros_like(states[0][residual_name(number)]), *errors]
            ).sum(0)
        if owned_residual_name(number) in states[0]:
            owned = torch.cat([state[owned_residual_name(number)] for state in states])[:count]
            memory[owned_residual_name(number)] = _take_rank_share(owned, rank, rank_share_size(count, world, block))
        if right_factor_name(number) in states[0]:
            memory[right_factor_name(number)] = states[0][right_factor_name(number)]
    return memory


def _take_rank_share(values: Tensor, rank: int, size: int) -> Tensor:
    """Return the rank's part of a bucket, padded with zeros at the end of the bucket."""
    part = values[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


SUMS_KEY = "sums"
"""Key of the number of completed sums (int64) in a state."""


class PendingCollective(Protocol):
    """A pending collective operation of torch (Work)."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class GradientReducer:
    """Sums gradients over ranks. All ranks call `sum`; one bucket is processed at a time."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: Any,
        settings: GradientCompressionSettings,
        wait: Callable[[PendingCollective], None] = lambda work: work.wait(),
        uncompressed_sums: int = 0,
    ) -> None:
        """Lay out the buckets.

        Args:
            parameters: all trainable parameters, in the same order on every rank and in every attempt.
            group: torch process group for the gradients; None: there is one rank.
            settings: section train.gradient_compression.
            wait: returns when its argument is completed, and may send heartbeats meanwhile.
            uncompressed_sums: number of initial sums that are sent uncompressed.
        """
        self.settings = settings
        self._group = group
        self._world = 1 if group is None else int(group.size())
        self._rank = 0 if group is None else int(group.rank())
        self.sent_bytes = 0
        """Bytes sent by this rank: payloads by the formulas of methods.py, without TCP overhead (3 to 5 %)."""
        self._wait = wait
        self._buckets = build_buckets([parameter for _, parameter in parameters], settings.bucket_bytes)
        self._device = self._buckets[0].buffer().device if self._buckets else torch.device("cpu")
        self._uncompressed = Fp32AllReduce(group)
        self._uncompressed_sums = uncompressed_sums
        self._method = _build_method(settings, group)
        self._sums = 0
        self._previous = (self._sums, dict(self._method.memory))

    @property
    def warning(self) -> str:
        """Warning about settings that have no effect; empty if there is none."""
        name = self.settings.method
        if name == "none":
            return ""
        if self._world == 1:
            return f"train.gradient_compression.method: {name} has no effect: there is one rank, so nothing is sent"
        if isinstance(self._method, PowerSgdCompressor) and not any(map(self._method.factor_count, self._buckets)):
            return (
                f"train.gradient_compression.rank: {self.settings.rank} has no effect: no gradient would be smaller as "
                "matrices of this rank, so all are sent whole; set it below train.rank"
            )
        uncompressed_bytes, compressed_bytes = (
            sum(map(method.sent_bytes, self._buckets)) for method in (self._uncompressed, self._method)
        )
        if compressed_bytes >= uncompressed_bytes:
            return (
                f"train.gradient_compression.method: {name}: {self._world} ranks send "
                f"{compressed_bytes / uncompressed_bytes:.2f} times as much as without it; set int8, or a smaller "
                "train.gradient_compression.topk_fraction"
            )
        return ""

    def sum(self) -> None:
        """Replace every gradient by the sum over ranks, bit-identical on all ranks; a missing gradient counts as zeros.

        Gradients must not carry a loss scale, because unsent parts are added to the next step; they are not yet
        clipped. A sum that is not finite leaves the state unchanged, as after `undo`.

        Raises:
            RuntimeError: another rank is lost (raised by `wait`).
        """
        self._previous = (self._sums, dict(self._method.memory))
        method: CompressionMethod = self._uncompressed if self._sums < self._uncompressed_sums else self._method
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for bucket in self._buckets:
            bucket.fill()
            if self._world == 1:
                self._add_leftovers(bucket)
            else:
                self._send(method, bucket)
            finite &= bucket.buffer().isfinite().all()
            bucket.write_back()
        self._sums += 1
        if not bool(finite):
            self.undo()

    def _send(self, method: CompressionMethod, bucket: GradientBucket) -> None:
        for work in method.reduce(bucket):
            self._wait(work)
        self.sent_bytes += method.sent_bytes(bucket)

    def _add_leftovers(self, bucket: GradientBucket) -> None:
        """With one rank: add what was left unsent when there were more ranks."""
        for name in (residual_name(bucket.index()), owned_residual_name(bucket.index())):
            if name in self._method.memory:
                bucket.buffer().add_(self._method.memory.pop(name)[: bucket.buffer().numel()])

    def undo(self) -> None:
        """Restore the state before the last sum, because its step is skipped or repeated."""
        self._sums, self._method.memory = self._previous[0], dict(self._previous[1])

    def state(self) -> dict[str, Tensor]:
        """Return the state of this rank for a checkpoint; its tensors are never modified. Empty for `none`."""
        if self.settings.method == "none":
            return {}
        return {SUMS_KEY: torch.tensor([self._sums]), **self._method.memory}

    def restore(self, states: Sequence[State]) -> None:
        """Restore the states of a group: exactly with as many ranks, without losing unsent parts with another number.

        Args:
            states: states of all its ranks, in order; if there are none or all are empty, nothing is restored.

        Raises:
            DamagedFileError: they belong to other parameters or another method.
        """
        if not any(states):
            return
        self._validate(states)
        if len(states) == self._world:
            memory: Memory = {name: tensor for name, tensor in states[self._rank].items() if name != SUMS_KEY}
        else:
            sizes = [bucket.buffer().numel() for bucket in self._buckets]
            memory = reshard_residuals(states, self._world, self._rank, sizes, self.settings.block_size)
        self._set_state(int(states[0][SUMS_KEY]), memory)

    def _set_state(self, sums: int, memory: Memory) -> None:
        self._sums, self._method.memory = sums, {name: tensor.to(self._device) for name, tensor in memory.items()}
        self._previous = (self._sums, dict(self._method.memory))

    def _validate(self, states: Sequence[State]) -> None:
        expected = self._expected_sizes(len(states))
        for rank, state in enumerate(states):
            for name, tensor in state.items():
                if expected.get(name) != tensor.numel():
                    raise DamagedFileError(
                        f"state of gradient compression ({self.settings.method}), rank {rank} of {len(states)}: {name} "
                        f"has {tensor.numel()} numbers, expected {expected.get(name, 'no such tensor')}; it belongs to "
                        "other settings or parameters"
                    )
            if missing := {SUMS_KEY, *states[0]} - state.keys():
                raise DamagedFileError(
                    f"state of gradient compression ({self.settings.method}), rank {rank} of {len(states)}: "
                    f"{', '.join(sorted(missing))} is missing"
                )

    def _expected_sizes(self, world: int) -> dict[str, int]:
        """Return how many numbers each tensor has in a state of a group of this size."""
        sizes = {SUMS_KEY: 1}
        for bucket in self._buckets:
            count, number = bucket.buffer().numel(), bucket.index()
            if self.settings.method in ("int8", "powersgd", "topk"):
                sizes[residual_name(number)] = count
            if isinstance(self._method, Int8Compressor):
                sizes[owned_residual_name(number)] = rank_share_size(count, world, self.settings.block_size)
            if isinstance(self._method, PowerSgdCompressor):
                sizes[right_factor_name(number)] = self._method.factor_count(bucket)
        return sizes


def _build_method(settings: GradientCompressionSettings, group: Any) -> CompressionMethod:
    match settings.method:
        case "bf16":
            return Bf16AllReduce(group)
        case "fp16":
            return Fp16AllReduce(group)
        case "int8":
            return Int8Compressor(group, settings.block_size)
        case "powersgd":
            return PowerSgdCompressor(group, settings.rank)
        case "topk":
            return TopKCompressor(group, settings.topk_fraction)
        case "none":
            return Fp32AllReduce(group)
