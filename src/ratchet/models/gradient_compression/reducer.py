"""Sums gradients over ranks once per step with the method of train.gradient_compression, and restores its state.

The state can be restored with another number of ranks without losing unsent parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ratchet.config.train import GradientCompressionSettings
from ratchet.errors import DamagedFileError
from ratchet.models.gradient_compression.compressors import (
    Int8Compressor,
    PowerSgdCompressor,
    TopKCompressor,
    rank_share_size,
)
from ratchet.models.gradient_compression.methods import (
    Bf16AllReduce,
    CompressionMethod,
    Fp16AllReduce,
    Fp32AllReduce,
    GradientBucket,
    Memory,
    build_buckets,
    owned_residual_name,
    residual_name,
    right_factor_name,
)

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
