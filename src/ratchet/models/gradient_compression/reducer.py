"""What ranks remember, handed over to another number of ranks: nothing that was left unsent is lost."""

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
    """What one rank of a new group remembers.

    Errors of rank s go to rank s modulo the new number of ranks; the shares that were added up are cut anew; factors
    were the same on all ranks.

    Args:
        states: of all ranks of the group that was, in its order.
        world: ranks of the new group.
        rank: of this process in it.
        sizes: numbers in each bucket.
        block: of int8.
    """
    found: Memory = {}
    for number, count in enumerate(sizes):
        if residual_name(number) in states[0]:
            errors = [one[residual_name(number)] for one in states[rank::world]]
            found[residual_name(number)] = torch.stack(
                [torch.zeros_like(states[0][residual_name(number)]), *errors]
            ).sum(0)
        if owned_residual_name(number) in states[0]:
            every = torch.cat([one[owned_residual_name(number)] for one in states])[:count]
            found[owned_residual_name(number)] = _take_rank_share(every, rank, rank_share_size(count, world, block))
        if right_factor_name(number) in states[0]:
            found[right_factor_name(number)] = states[0][right_factor_name(number)]
    return found


def _take_rank_share(every: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part of a bucket, zeros where it reaches beyond."""
    part = every[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


# The sum of all ranks' gradients, once a step, sent as train.compression says.

SUMS = "sums"
"""In a state: how many sums there were, int64."""


class PendingCollective(Protocol):
    """What is waited for: a collective operation of torch (Work)."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class GradientReducer:
    """Adds up gradients over ranks. `sum` is called by all ranks; one bucket is under way at a time."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: Any,
        settings: GradientCompressionSettings,
        wait: Callable[[PendingCollective], None] = lambda work: work.wait(),
        whole_sums: int = 0,
    ) -> None:
        """Lay out the buckets.

        Args:
            parameters: all that learn, in an order that is the same on every rank and in every attempt.
            group: torch's process group that the gradients travel over; None: this rank is alone.
            settings: section train.compression.
            wait: returns when its argument is completed, and may give signs of life meanwhile.
            whole_sums: so many are sent whole before anything is compressed.
        """
        self.settings = settings
        self._group = group
        self._world = 1 if group is None else int(group.size())
        self._rank = 0 if group is None else int(group.rank())
        self.sent_bytes = 0
        """By this rank, since it was made: payloads, by the formulas of method.py; not what TCP adds (3 to 5 %)."""
        self._wait = wait
        self._buckets = build_buckets([parameter for _, parameter in parameters], settings.bucket_bytes)
        self._device = self._buckets[0].buffer().device if self._buckets else torch.device("cpu")
        self._whole = Fp32AllReduce(group)
        self._whole_sums = whole_sums
        self._method = _build_method(settings, group)
        self._sums = 0
        self._before = (self._sums, dict(self._method.memory))

    @property
    def remark(self) -> str:
        """What the user should be told once, about settings that do nothing; empty when there is nothing."""
        name = self.settings.method
        if name == "none":
            return ""
        if self._world == 1:
            return f"train.compression.method: {name}: there is one rank, so nothing is sent and nothing compressed"
        if isinstance(self._method, PowerSgdCompressor) and not any(map(self._method.factor_count, self._buckets)):
            return (
                f"train.compression.rank: {self.settings.rank}: no gradient would be smaller as matrices of this rank, "
                "so all are sent whole; set it below train.rank"
            )
        whole, sent = (sum(map(one.sent_bytes, self._buckets)) for one in (self._whole, self._method))
        if sent >= whole:
            return (
                f"train.compression.method: {name}: {self._world} ranks send {sent / whole:.2f} times as much as "
                "without it (what each keeps goes to all others); set int8, or a smaller train.compression.share"
            )
        return ""

    def sum(self) -> None:
        """Make every gradient the sum over ranks, with the same bits on every rank; none on a rank counts as zeros.

        Gradients come as they are learned from, but for clipping: with no loss scale on them, for what is not sent in
        one step is added to the next. A sum that is not finite everywhere leaves nothing behind, as after `forget`.

        Raises:
            RuntimeError: another rank is gone (what `wait` makes of it).
        """
        self._before = (self._sums, dict(self._method.memory))
        method: CompressionMethod = self._whole if self._sums < self._whole_sums else self._method
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for bucket in self._buckets:
            bucket.fill()
            if self._world == 1:
                self._deliver(bucket)
            else:
                self._send(method, bucket)
            finite &= bucket.buffer().isfinite().all()
            bucket.empty()
        self._sums += 1
        if not bool(finite):
            self.forget()

    def _send(self, method: CompressionMethod, bucket: GradientBucket) -> None:
        for work in method.reduce(bucket):
            self._wait(work)
        self.sent_bytes += method.sent_bytes(bucket)

    def _deliver(self, bucket: GradientBucket) -> None:
        """Alone: add what was left unsent when there were more ranks."""
        for name in (residual_name(bucket.index()), owned_residual_name(bucket.index())):
            if name in self._method.memory:
                bucket.buffer().add_(self._method.memory.pop(name)[: bucket.buffer().numel()])

    def forget(self) -> None:
        """Take back what the last sum has left unsent: nothing is learned from it, or it is made again."""
        self._sums, self._method.memory = self._before[0], dict(self._before[1])

    def state(self) -> dict[str, Tensor]:
        """What this rank needs to go on exactly; tensors that are never written again. Nothing for `none`."""
        if self.settings.method == "none":
            return {}
        return {SUMS: torch.tensor([self._sums]), **self._method.memory}

    def restore(self, states: Sequence[State]) -> None:
        """Go on where a group of ranks was: exactly with as many ranks, with nothing lost with another number.

        Args:
            states: of all its ranks, in its order; none, or nothing in them: begin anew.

        Raises:
            DamagedFileError: they are of other parameters or another method.
        """
        if not any(states):
            return
        self._check(states)
        if len(states) == self._world:
            memory: Memory = {name: tensor for name, tensor in states[self._rank].items() if name != SUMS}
        else:
            sizes = [bucket.buffer().numel() for bucket in self._buckets]
            memory = reshard_residuals(states, self._world, self._rank, sizes, self.settings.block)
        self._remember(int(states[0][SUMS]), memory)

    def _remember(self, sums: int, memory: Memory) -> None:
        self._sums, self._method.memory = sums, {name: one.to(self._device) for name, one in memory.items()}
        self._before = (self._sums, dict(self._method.memory))

    def _check(self, states: Sequence[State]) -> None:
        expected = self._sizes(len(states))
        for rank, state in enumerate(states):
            for name, tensor in state.items():
                if expected.get(name) != tensor.numel():
                    raise DamagedFileError(
                        f"state of gradient compression ({self.settings.method}), rank {rank} of {len(states)}: {name} "
                        f"has {tensor.numel()} numbers, expected {expected.get(name, 'no such tensor')}; it is of "
                        "other settings or parameters"
                    )
            if missing := {SUMS, *states[0]} - state.keys():
                raise DamagedFileError(
                    f"state of gradient compression ({self.settings.method}), rank {rank} of {len(states)}: "
                    f"{', '.join(sorted(missing))} is missing"
                )

    def _sizes(self, world: int) -> dict[str, int]:
        """How many numbers each tensor of a state of such a group has."""
        found = {SUMS: 1}
        for bucket in self._buckets:
            count, number = bucket.buffer().numel(), bucket.index()
            if self.settings.method in ("int8", "powersgd", "topk"):
                found[residual_name(number)] = count
            if isinstance(self._method, Int8Compressor):
                found[owned_residual_name(number)] = rank_share_size(count, world, self.settings.block)
            if isinstance(self._method, PowerSgdCompressor):
                found[right_factor_name(number)] = self._method.factor_count(bucket)
        return found


def _build_method(settings: GradientCompressionSettings, group: Any) -> CompressionMethod:
    match settings.method:
        case "bf16":
            return Bf16AllReduce(group)
        case "fp16":
            return Fp16AllReduce(group)
        case "int8":
            return Int8Compressor(group, settings.block)
        case "powersgd":
            return PowerSgdCompressor(group, settings.rank)
        case "topk":
            return TopKCompressor(group, settings.share)
        case "none":
            return Fp32AllReduce(group)
