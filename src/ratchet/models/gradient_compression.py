"""Sums gradients over ranks, once per optimizer step, with the method of train.gradient_compression.

Gradients are summed in buckets that depend only on the parameters and the bucket size. So the next attempt of a
training can use the state of each bucket, unlike with DistributedDataParallel, which reorders its buckets after the
first step.

Int8 and PowerSGD use error feedback: the error that compression makes in one step is added to the gradient of the next
step. These errors (the unsent parts) are the state of a method, with PowerSGD's right-hand matrices. A checkpoint
stores the state; it can be restored with another number of ranks, and no unsent part is lost. The measurements are
in docs/evidence_compression.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratchet.config.train import GradientCompressionSettings
from ratchet.errors import DamagedFileError

FLOAT_BYTES, HALF_BYTES = 4, 2
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
"""State of a method between two sums. Names contain the number of a bucket, n: `error.n` is the unsent part of this
rank, as long as the bucket; `owned.n` is the unsent part of the sum of this rank's share (int8); `q.n` are the
right-hand matrices, equal on all ranks (PowerSGD). Tensors are never modified in place, so that the state before a sum
can be restored."""
State = Mapping[str, Tensor]
"""State of one rank in a checkpoint: its memory, and the number of completed sums under SUMS_KEY."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of consecutive parameters in one flat tensor."""

    number: int
    """Number of this bucket, from 0."""
    members: tuple[nn.Parameter, ...]
    flat: Tensor
    """Gradients of `members` in order, into which methods write the result: float32, on their device."""

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer in the parameters' shapes; a scalar has the shape (1,)."""
        pieces = self.flat.split([parameter.numel() for parameter in self.members])
        return [piece.view(parameter.shape or (1,)) for piece, parameter in zip(pieces, self.members, strict=True)]

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
    """Build all buckets of these parameters. The buckets share one buffer, so use only one of them at a time.

    Args:
        parameters: parameters in the same order on every rank and in every attempt.
        bucket_bytes: maximum size of a bucket; a larger parameter gets its own bucket.
    """
    groups: list[list[nn.Parameter]] = []
    sizes: list[int] = []
    for parameter in parameters:
        if groups and (sizes[-1] + parameter.numel()) * FLOAT_BYTES <= bucket_bytes:
            groups[-1].append(parameter)
            sizes[-1] += parameter.numel()
        else:
            groups.append([parameter])
            sizes.append(parameter.numel())
    if not groups:
        return []
    flat = torch.empty(max(sizes), dtype=torch.float32, device=parameters[0].device)
    return [
        GradientBucket(number, tuple(group), flat[:size])
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True))
    ]


class GradientReducer:
    """Sum of all gradients over ranks, one bucket at a time. All ranks must call `sum`."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: Any,
        settings: GradientCompressionSettings,
        wait: Callable[[Any], None] = lambda work: work.wait(),
        uncompressed_sums: int = 0,
    ) -> None:
        """Build the buckets.

        Args:
            parameters: all trainable parameters, in the same order on every rank and in every attempt.
            wait: returns when its argument, a pending operation of torch, is completed; may send heartbeats meanwhile.
        """
        self.settings = settings
        self._world = 1 if group is None else int(group.size())
        self._rank = 0 if group is None else int(group.rank())
        self.sent_bytes = 0
        """Bytes sent by this rank: the payloads (`sent_bytes` of the methods), without TCP overhead (3 to 5 %)."""
        self._wait = wait
        self._buckets = build_buckets([parameter for _, parameter in parameters], settings.bucket_bytes)
        self._device = self._buckets[0].flat.device if self._buckets else torch.device("cpu")
        self._uncompressed = AllReduce(group, torch.float32)
        self._uncompressed_sums = uncompressed_sums
        self._method: CompressionMethod
        match settings.method:
            case "none":
                self._method = self._uncompressed
            case "int8":
                self._method = Int8Compressor(group, settings.block_size)
            case "powersgd":
                self._method = PowerSgdCompressor(group, settings.rank)
            case "bf16" | "fp16":
                self._method = AllReduce(group, torch.bfloat16 if settings.method == "bf16" else torch.float16)
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
        share = sum(map(self._method.sent_bytes, self._buckets)) / sum(
            map(self._uncompressed.sent_bytes, self._buckets)
        )
        if share >= 1:
            return (
                f"train.gradient_compression.method: {name}: {self._world} ranks send {share:.2f} times as much as "
                "without it; set int8"
            )
        return ""

    def sum(self) -> None:
        """Replace every gradient by the sum over ranks, bit-identical on all ranks; a missing gradient counts as zeros.

        Gradients must be unscaled, because unsent parts are added to the gradients of the next step, and must not be
        clipped yet. A sum that is not finite leaves the state unchanged, as after `undo`. Raises RuntimeError if
        another rank is lost (raised by `wait`).
        """
        self._previous = (self._sums, dict(self._method.memory))
        method: CompressionMethod = self._uncompressed if self._sums < self._uncompressed_sums else self._method
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for bucket in self._buckets:
            bucket.fill()
            if self._world == 1:  # add the unsent parts that an attempt with several ranks left
                for name in (f"error.{bucket.number}", f"owned.{bucket.number}"):
                    if name in self._method.memory:
                        bucket.flat.add_(self._method.memory.pop(name)[: bucket.flat.numel()])
            else:
                for work in method.reduce(bucket):
                    self._wait(work)
                self.sent_bytes += method.sent_bytes(bucket)
            finite &= bucket.flat.isfinite().all()
            bucket.write_back()
        self._sums += 1
        if not bool(finite):
            self.undo()

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

        Raises DamagedFileError if the states belong to other parameters or another method.

        Args:
            states: states of all ranks of the group, in order; if there are none or all are empty, nothing is restored.
        """
        if not any(states):
            return
        self._validate(states)
        if len(states) == self._world:
            memory: Memory = {name: tensor for name, tensor in states[self._rank].items() if name != SUMS_KEY}
        else:
            memory = self._reshard(states)
        self._sums = int(states[0][SUMS_KEY])
        self._method.memory = {name: tensor.to(self._device) for name, tensor in memory.items()}
        self._previous = (self._sums, dict(self._method.memory))

    def _validate(self, states: Sequence[State]) -> None:
        sizes = {SUMS_KEY: 1}
        for bucket in self._buckets:
            count = bucket.flat.numel()
            if self.settings.method in ("int8", "powersgd"):
                sizes[f"error.{bucket.number}"] = count
            if isinstance(self._method, Int8Compressor):
                sizes[f"owned.{bucket.number}"] = rank_share_size(count, len(states), self.settings.block_size)
            if isinstance(self._method, PowerSgdCompressor):
                sizes[f"q.{bucket.number}"] = self._method.factor_count(bucket)
        for rank, state in enumerate(states):
            place = f"state of gradient compression ({self.settings.method}), rank {rank} of {len(states)}"
            for name, tensor in state.items():
                if sizes.get(name) != tensor.numel():
                    raise DamagedFileError(
                        f"{place}: {name} has {tensor.numel()} numbers, expected {sizes.get(name, 'no such tensor')}; "
                        "it belongs to other settings or parameters"
                    )
            if missing := {SUMS_KEY, *states[0]} - state.keys():
                raise DamagedFileError(f"{place}: {', '.join(sorted(missing))} is missing")

    def _reshard(self, states: Sequence[State]) -> Memory:
        """Return this rank's memory, given the states of another number of ranks.

        The error of old rank s is added to that of the new rank s modulo the number of ranks. The errors of shares
        (int8) are joined and divided again. The right-hand matrices (PowerSGD) are copied.
        """
        memory: Memory = {}
        for bucket in self._buckets:
            error, owned, factors = (f"{name}.{bucket.number}" for name in ("error", "owned", "q"))
            if error in states[0]:
                errors = [state[error] for state in states[self._rank :: self._world]]
                memory[error] = torch.stack([torch.zeros_like(states[0][error]), *errors]).sum(0)
            if owned in states[0]:
                count = bucket.flat.numel()
                size = rank_share_size(count, self._world, self.settings.block_size)
                joined = torch.cat([state[owned] for state in states])[:count]
                part = joined[self._rank * size : (self._rank + 1) * size]
                memory[owned] = torch.cat([part, part.new_zeros(size - part.numel())])
            if factors in states[0]:
                memory[factors] = states[0][factors]
        return memory


# Methods. Each has its state (`memory`) and two functions: `reduce` replaces a bucket's buffer by the sum over ranks,
# and yields pending torch operations, each of which the caller completes before it requests the next; `sent_bytes`
# returns the bytes that a rank sends in one `reduce` of a bucket, which are constant.


def all_reduce_bytes(world: int, size_bytes: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce (Patarasuk, Yuan 2009).

    Each rank sends world - 1 shares to be added, and then world - 1 shares of the sum.
    """
    return 2 * (world - 1) * size_bytes // world


class AllReduce:
    """All-reduce in 32 or 16 bits, without state.

    bfloat16 has the range of float32 and 8 bits of precision. float16 has 11 bits of precision, but no numbers below
    6e-8, and the gradients of a mean over thousands of tokens are close to this limit. So for float16, each bucket is
    first multiplied by a power of two, which changes no significand, such that the bucket's largest number on any rank
    is between 2^14 and 2^15. With 16 bits, numbers are divided by the number of ranks before sending, as in torch's
    hooks, so that no sum exceeds the largest number of float16, 65,504.
    """

    def __init__(self, group: Any, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, world = bucket.flat, self.group.size()
        if self.dtype == torch.float32:
            yield dist.all_reduce(buffer, group=self.group, async_op=True)
            return
        scale: Tensor | float = 1.0
        if self.dtype == torch.float16:
            largest = buffer.abs().max().reshape(1)
            yield dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            exponent = torch.frexp(largest).exponent.clamp_min(MIN_EXPONENT)
            is_usable = torch.isfinite(largest) & (largest > 0)
            scale = torch.where(is_usable, torch.ldexp(torch.ones_like(largest), MAX_EXPONENT - exponent), 1.0)
        half = (buffer * scale).to(self.dtype).div_(world)
        yield dist.all_reduce(half, group=self.group, async_op=True)
        buffer.copy_(half).mul_(world).div_(scale)

    def sent_bytes(self, bucket: GradientBucket) -> int:
        world = self.group.size()
        scale_bytes = all_reduce_bytes(world, FLOAT_BYTES) if self.dtype == torch.float16 else 0
        return all_reduce_bytes(world, int(self.dtype.itemsize) * bucket.flat.numel()) + scale_bytes


class Int8Compressor:
    """All-reduce in 8 bits, with error feedback. Every rank sums one share of each bucket.

    First, every rank sends each other rank its share of the bucket in 8 bits (all-to-all). Then each rank sends the sum
    of its share, again in 8 bits, to all others (all-gather). So a rank sends as many numbers as in a ring all-reduce,
    with one byte per number and four per block; gathering all ranks' numbers would send W / 2 times as much. The first
    rounding error (`error`) is remembered by the rank whose numbers were rounded, the second (`owned`) by the rank that
    computed the sum (Tang et al. 2019, DoubleSqueeze; Tang et al. 2021, 1-bit Adam, section 5).
    """

    def __init__(self, group: Any, block: int) -> None:
        self.group, self.block = group, block
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, world = bucket.flat, self.group.size()
        error, owned_error = f"error.{bucket.number}", f"owned.{bucket.number}"
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
        share = rank_share_size(bucket.flat.numel(), world, self.block)
        # Each rank sends all shares but its own, and then the sum of its share to all others.
        return 2 * (int(world) - 1) * (share + share // self.block * FLOAT_BYTES)


def rank_share_size(count: int, world: int, block: int) -> int:
    """Return how many numbers each rank sums: its share of a bucket.

    A share consists of whole blocks, so the last share may extend beyond the bucket.
    """
    blocks = -(-count // block)
    return -(-blocks // world) * block


def quantize_blocks(values: Tensor, block: int) -> Tensor:
    """Quantize to integers from -127 to 127 with one scale per block; return the bytes of scales and integers.

    Returns uint8 [rows, count + 4 count / block]: in each row first the scales, then the integers.

    Args:
        values: float32 [rows, count]; count is a multiple of `block`.
        block: count of numbers that share a scale, which is their largest magnitude / 127.
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
    left_shape: tuple[int, int, int]
    """Shape of all P of the group: number of gradients, rows, rank."""
    right_shape: tuple[int, int, int]
    """Shape of all Q of the group: number of gradients, columns, rank."""


class PowerSgdCompressor:
    """Sum of low-rank approximations, with error feedback.

    A gradient that is not larger than its two matrices is sent whole.
    """

    def __init__(self, group: Any, rank: int, sent_dtype: torch.dtype = torch.bfloat16) -> None:
        self.group, self.rank, self.sent_dtype = group, rank, sent_dtype
        self.memory: Memory = {}

    def reduce(self, bucket: GradientBucket) -> Iterator[Any]:
        buffer, error_name, factors_name = bucket.flat, f"error.{bucket.number}", f"q.{bucket.number}"
        if error_name in self.memory:
            buffer.add_(self.memory[error_name])
        groups, gradients = self._groups(bucket), bucket.gradients()
        compressed = {member for group in groups for member in group.members}
        whole = [member for member in range(len(gradients)) if member not in compressed]
        stacks = [torch.stack([_as_matrix(gradients[member]) for member in group.members]) for group in groups]
        right_shapes = [group.right_shape for group in groups]

        sums = _concatenate_flat([gradients[member] for member in whole], buffer)
        if whole:
            yield dist.all_reduce(sums, group=self.group, async_op=True)
        # The initial Q is that of the previous sum, normalized; zero columns are drawn at random.
        previous = self.memory.get(factors_name, buffer.new_zeros(self.factor_count(bucket)))
        initial = [_normalize_columns(q, seed=bucket.number) for q in _split_into_views(previous, right_shapes)]
        products = [torch.bmm(stack, _orthonormalize(q)) for stack, q in zip(stacks, initial, strict=True)]
        sent = _concatenate_flat(products, buffer).to(self.sent_dtype)
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        lefts = [_orthonormalize(p) for p in _split_into_views(sent.float(), [group.left_shape for group in groups])]

        rights = [torch.bmm(m.transpose(1, 2), p) for m, p in zip(stacks, lefts, strict=True)]
        sent = _concatenate_flat(rights, buffer).to(self.sent_dtype)
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        factors, before = sent.float(), buffer.clone()
        for group, p, q in zip(groups, lefts, _split_into_views(factors, right_shapes), strict=True):
            for member, total in zip(group.members, torch.bmm(p, q.transpose(1, 2)), strict=True):
                _as_matrix(gradients[member]).copy_(total)
        error = before - buffer / self.group.size()
        residuals = _split_into_views(error, [gradient.shape for gradient in gradients])
        totals = _split_into_views(sums, [gradients[member].shape for member in whole])
        for member, total in zip(whole, totals, strict=True):
            gradients[member].copy_(total)
            residuals[member].zero_()
        self.memory |= {error_name: error, factors_name: factors}

    def sent_bytes(self, bucket: GradientBucket) -> int:
        groups = self._groups(bucket)
        compressed = sum(prod(group.left_shape[:2]) * group.right_shape[1] for group in groups)
        lefts = sum(prod(group.left_shape) for group in groups)
        whole_bytes = FLOAT_BYTES * (bucket.flat.numel() - compressed)
        sizes = whole_bytes, HALF_BYTES * lefts, HALF_BYTES * self.factor_count(bucket)
        return sum(all_reduce_bytes(self.group.size(), size) for size in sizes)

    def factor_count(self, bucket: GradientBucket) -> int:
        """Return how many numbers all Q of a bucket have; 0 if it is sent whole."""
        return sum(prod(group.right_shape) for group in self._groups(bucket))

    def _groups(self, bucket: GradientBucket) -> list[_SameShapeGradients]:
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for member, gradient in enumerate(bucket.gradients()):
            n, m = _as_matrix(gradient).shape
            rank = min(n, m, self.rank)
            if (n + m) * rank < n * m:
                shapes.setdefault((n, m, rank), []).append(member)
        return [
            _SameShapeGradients(tuple(members), (len(members), n, rank), (len(members), m, rank))
            for (n, m, rank), members in shapes.items()
        ]


CompressionMethod = AllReduce | Int8Compressor | PowerSgdCompressor


def _normalize_columns(matrices: Tensor, seed: int) -> Tensor:
    """Normalize the columns of matrices [number, m, r]; draw columns that are zero at random."""
    lengths = matrices.norm(dim=1, keepdim=True)
    is_nonzero = lengths > 0
    if bool(is_nonzero.all()):
        return matrices / lengths
    random_columns = torch.randn(matrices.shape, generator=torch.Generator().manual_seed(seed)).to(matrices)
    return torch.where(is_nonzero, matrices / lengths, random_columns)


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
