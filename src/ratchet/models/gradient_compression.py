"""Sums gradients over ranks, once per optimizer step, with the method of train.gradient_compression.

Gradients are summed in buckets. Which gradients a bucket contains depends only on the parameters and the bucket size.
So the buckets are the same in every attempt of a training, and the next attempt can use the state of each bucket.
DistributedDataParallel, in contrast, reorders its buckets after the first step by when gradients became ready; the next
attempt could not use the state of such a bucket.

Int8 and PowerSGD use error feedback: the error that compression makes in one step is added to the gradient of
the next step. These errors (the unsent parts) are the state of a method; that of PowerSGD also contains its right-hand
matrices. A checkpoint stores the state. It can be restored with another number of ranks, and no unsent part is lost.

Measured with two ranks at 100 Mbit/s (docs/compression.md): bf16 and fp16 send half the bytes of a sum, int8 a quarter,
without a measurable loss. Top-k was removed: it sent as little as int8 and took more time than sending everything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratchet.config.train import GradientCompressionSettings
from ratchet.errors import DamagedFileError

FLOAT_BYTES, HALF_BYTES = 4, 2
"""Bytes of a 32-bit and of a 16-bit number."""

MAX_EXPONENT = 15
"""Exponent of the limit for float16: the largest number of a bucket is scaled to less than 2^15."""
MIN_EXPONENT = -110
"""Smallest exponent from which a scale for float16 is computed. It limits scales to 2^125, which float32 can represent.
A bucket without numbers of at least 2^-111 therefore stays smaller than other buckets after scaling."""

INT8_MAX = 127
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale of a block of int8 numbers; this limit prevents a division by zero."""

SUMS_KEY = "sums"
"""Key of the number of completed sums (int64) in a state."""

Memory = dict[str, Tensor]
"""State of a method between two sums, by name: `error.0` is the unsent part of bucket 0. Its tensors are never modified
in place: each sum creates new tensors, so that the state before a sum can be restored."""
State = Mapping[str, Tensor]
"""State of one rank in a checkpoint: its memory, and the number of completed sums under SUMS_KEY."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of consecutive parameters in one flat tensor, with the interface of torch.distributed.GradBucket."""

    number: int
    members: tuple[nn.Parameter, ...]
    flat: Tensor
    """Gradients of `members` in order: float32, on their device."""
    is_last_bucket: bool

    def index(self) -> int:
        """Return the number of this bucket, from 0."""
        return self.number

    def buffer(self) -> Tensor:
        """Return all numbers as one flat tensor, into which methods write the result."""
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


class CompressionMethod(Protocol):
    """Method that sums a bucket over ranks, together with the state of the method."""

    memory: Memory
    group: Any
    """torch's process group."""

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        """Replace the bucket's buffer by the sum over ranks.

        Yields:
            Pending torch operations (`Work`); the caller completes each operation before it requests the next.
        """

    def sent_bytes(self, bucket: GradientBucket) -> int:
        """Return the bytes that a rank sends in one `reduce` of this bucket; constant over calls."""


class PendingCollective(Protocol):
    """Pending collective operation of torch (`Work`)."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class GradientReducer:
    """Sum of all gradients over ranks, one bucket at a time. All ranks must call `sum`."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: Any,
        settings: GradientCompressionSettings,
        wait: Callable[[PendingCollective], None] = lambda work: work.wait(),
        uncompressed_sums: int = 0,
    ) -> None:
        """Build the buckets.

        Args:
            parameters: all trainable parameters, in the same order on every rank and in every attempt.
            group: torch process group for the gradients; None: there is one rank.
            settings: section train.gradient_compression.
            wait: function that returns when its argument is completed; it may send heartbeats while it waits.
            uncompressed_sums: number of initial sums that are sent uncompressed.
        """
        self.settings = settings
        self._group = group
        self._world = 1 if group is None else int(group.size())
        self._rank = 0 if group is None else int(group.rank())
        self.sent_bytes = 0
        """Bytes sent by this rank: the payloads (`sent_bytes` of the methods), without TCP overhead (3 to 5 %)."""
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
        """Warning about settings that have no effect, or with which ranks send more; empty if there is none."""
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
                f"{compressed_bytes / uncompressed_bytes:.2f} times as much as without it; set int8"
            )
        return ""

    def sum(self) -> None:
        """Replace every gradient by the sum over ranks, bit-identical on all ranks; a missing gradient counts as zeros.

        Gradients must be unscaled, because unsent parts are added to the gradients of the next step, and must not be
        clipped yet. A sum that is not finite leaves the state unchanged, as after `undo`.

        Raises:
            RuntimeError: another rank is lost (raised by `wait`).
        """
        self._previous = (self._sums, dict(self._method.memory))
        method: CompressionMethod = self._uncompressed if self._sums < self._uncompressed_sums else self._method
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for bucket in self._buckets:
            bucket.fill()
            if self._world == 1:
                self._add_residuals(bucket)
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

    def _add_residuals(self, bucket: GradientBucket) -> None:
        """Add the unsent parts that an attempt with several ranks left; call this if there is one rank now."""
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
        """Restore the states of a group of ranks; if the number of ranks has changed, divide the unsent parts again.

        Args:
            states: states of all ranks of the group, in order; if there are none or all are empty, nothing is restored.

        Raises:
            DamagedFileError: the states belong to other parameters or another method.
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
        """Return how many numbers each tensor of a state has if the group has `world` ranks."""
        sizes = {SUMS_KEY: 1}
        for bucket in self._buckets:
            count, number = bucket.buffer().numel(), bucket.index()
            if self.settings.method in ("int8", "powersgd"):
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
        case "none":
            return Fp32AllReduce(group)


# Buckets.


def build_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[GradientBucket]:
    """Build all buckets of these parameters. The buckets share one buffer, so use only one of them at a time.

    Args:
        parameters: parameters in the same order on every rank and in every attempt.
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


# State of the methods: names of its tensors, and a new number of ranks.


def residual_name(number: int) -> str:
    """Return the name of the unsent part of bucket `number` on this rank, which is as long as the bucket."""
    return f"error.{number}"


def owned_residual_name(number: int) -> str:
    """Return the name of the unsent part of the sum that this rank computes for its share of bucket `number` (int8)."""
    return f"owned.{number}"


def right_factor_name(number: int) -> str:
    """Return the name of the right-hand matrices of bucket `number`, which are equal on all ranks (PowerSGD)."""
    return f"q.{number}"


def reshard_residuals(states: Sequence[State], world: int, rank: int, sizes: Sequence[int], block: int) -> Memory:
    """Return the memory of one rank in a new group of ranks.

    The error of old rank s is added to that of new rank s modulo `world`. The errors of shares (int8) are joined and
    divided among the new ranks. The right-hand matrices (PowerSGD) are copied, because they are equal on all ranks.

    Args:
        states: states of all ranks of the old group, in order.
        world: number of ranks in the new group.
        rank: rank of this process in the new group.
        sizes: count of numbers in each bucket.
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
    """Return the rank's share of a bucket, padded with zeros where the share extends beyond the bucket."""
    part = values[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


# Bytes that each rank sends.


def all_reduce_bytes(world: int, size_bytes: int) -> int:
    """Return the bytes of a ring all-reduce (Patarasuk, Yuan 2009).

    Each rank sends world - 1 shares to be added, and then world - 1 shares of the sum.
    """
    return 2 * (world - 1) * size_bytes // world


def all_gather_bytes(world: int, size_bytes: int) -> int:
    """Return the bytes of a ring all-gather with `size_bytes` per rank: each rank forwards all parts but one."""
    return (world - 1) * size_bytes


def all_to_all_bytes(world: int, size_bytes: int) -> int:
    """Return the bytes of an all-to-all for a tensor of `size_bytes`: each rank sends all except its own share."""
    return (world - 1) * size_bytes // world


# All-reduce in 32 or 16 bits, without state.
#
# bfloat16 has the range of float32 and 8 bits of precision. float16 has 11 bits of precision, but no numbers below
# 6e-8, and the gradients of a mean over thousands of tokens are close to this limit. So Fp16AllReduce first multiplies
# each bucket by a power of two, which changes no significand, such that the bucket's largest number on any rank is
# between 2^14 and 2^15. Both methods divide by the number of ranks before sending, as torch's hooks do, so that no sum
# exceeds the largest number of float16, 65,504.


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
    """All-reduce in bfloat16, without error feedback."""

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
    """All-reduce in float16, after an all-reduce of the largest number, which determines the scale."""

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
    """Return the power of two that brings `largest` below 2^15; 1 if `largest` is zero or not finite."""
    exponent = torch.frexp(largest).exponent.clamp_min(MIN_EXPONENT)
    is_usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(is_usable, torch.ldexp(torch.ones_like(largest), MAX_EXPONENT - exponent), 1.0)


# Int8: every rank sums one share of each bucket.
#
# First, every rank sends each other rank its share of the bucket in 8 bits (all-to-all). Then each rank sends the sum
# of its share, again in 8 bits, to all others (all-gather). With W ranks, each rank sends 2 (W - 1) / W of the bucket,
# as in a ring all-reduce, but with one byte per number and four per block. The more common method, an all-gather of all
# ranks' numbers, sends W / 2 times as much. Both rounding errors are remembered: the first (`error`) by the rank whose
# numbers were rounded, the second (`owned`) by the rank that computed the sum. This two-sided error feedback is that of
# Tang et al. 2019 (DoubleSqueeze) and Tang et al. 2021 (1-bit Adam, section 5).


class Int8Compressor:
    """All-reduce in 8 bits, with error feedback."""

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
    """Return how many numbers each rank sums: its share of a bucket.

    A share consists of whole blocks, so the last share may extend beyond the bucket.
    """
    blocks = -(-count // block)
    return -(-blocks // world) * block


def quantize_blocks(values: Tensor, block: int) -> Tensor:
    """Quantize to integers from -127 to 127 with one scale per block; return the bytes of scales and integers.

    Args:
        values: float32 [rows, count]; count is a multiple of `block`.
        block: count of numbers that share a scale, which is their largest magnitude / 127.

    Returns:
        uint8 [rows, count + 4 count / block]: in each row first the scales, then the integers.
    """
    rows, count = values.shape
    blocks = values.view(rows, -1, block)
    scales = (blocks.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(MIN_SCALE)
    numbers = (blocks / scales).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), numbers.view(rows, count).view(torch.uint8)], dim=1)


def dequantize_blocks(packed: Tensor, block: int) -> Tensor:
    """Convert the result of `quantize_blocks` to float32 [rows, count].

    If a block contained NaN or infinity, none of its numbers are finite.
    """
    rows, width = packed.shape
    scale_bytes = width // (block + FLOAT_BYTES) * FLOAT_BYTES
    scales = packed[:, :scale_bytes].clone().view(torch.float32)
    numbers = packed[:, scale_bytes:].view(torch.int8).float()
    return (numbers.view(rows, -1, block) * scales.unsqueeze(-1)).view(rows, -1)


# PowerSGD sends matrices of low rank instead of gradients (Vogels, Karimireddy and Jaggi 2019), with error feedback.
#
# A gradient M [n, m] is approximated by P Q^T of rank r. P = M Q is summed over ranks and orthonormalized; Q = M^T P is
# then summed, and is the initial Q of the next step. So r (n + m) numbers are sent instead of n m, and over the steps
# the columns of Q turn towards the dominant directions of M. P and Q are sent as bfloat16: P only selects directions,
# and the rounding error of Q is part of the error that is fed back.
#
# torch's PowerSGD hook is not used, for three reasons:
#
# - The hook draws its first Q from a generator, whose state a checkpoint would have to store.
# - The hook does not recover from a zero gradient, and the first gradient of every LoRA A is zero, because B is zero.
#   With rank 1 or 2 the hook's result is NaN; with the hook's epsilon, it remains zero. The class below draws zero
#   columns of Q again, with the bucket's number as seed.
# - For tensors that are sent whole, the hook keeps an error, which is their difference between ranks. In the class
#   below, such tensors have no error.


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
    """Sum of low-rank approximations, with error feedback.

    A gradient that is not larger than its two matrices is sent whole.
    """

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
        factored = zip(stacks, self._initial_right_factors(bucket, groups), strict=True)
        products = _concatenate_flat([torch.bmm(stack, _orthonormalize(q)) for stack, q in factored], buffer).to(
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
        """Yield the initial Q of each group: the previous sum's Q, normalized, with zero columns drawn at random."""
        number = bucket.index()
        previous = self.memory.get(right_factor_name(number), bucket.buffer().new_zeros(self.factor_count(bucket)))
        for q in _split_into_views(previous, [group.right_shape for group in groups]):
            lengths = q.norm(dim=1, keepdim=True)
            is_nonzero = lengths > 0
            if bool(is_nonzero.all()):
                yield q / lengths
            else:
                random_columns = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).to(q)
                yield torch.where(is_nonzero, q / lengths, random_columns)

    @staticmethod
    def _uncompressed_pieces(bucket: GradientBucket, flat: Tensor, compressed: set[int]) -> Iterator[Tensor]:
        """Yield those pieces of `flat`, which is as long as the buffer, that belong to gradients sent whole."""
        pieces = _split_into_views(flat, [gradient.shape for gradient in bucket.gradients()])
        return (piece for member, piece in enumerate(pieces) if member not in compressed)


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)


def _orthonormalize(matrices: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of each matrix, [number, n, r]; unit vectors for a zero matrix."""
    return torch.linalg.qr(matrices).Q


def _concatenate_flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate all tensors, flattened; without tensors, return an empty one with the dtype and device of `like`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _split_into_views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return consecutive views of these shapes."""
    views, start = [], 0
    for shape in shapes:
        views.append(flat[start : start + prod(shape)].view(*shape))
        start += prod(shape)
    return views
