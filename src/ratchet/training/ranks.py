"""The processes that train one run together: who they are, and what they tell each other.

Every rank holds the same weights, optimizer and state; each computes some micro-batches of a step, and the gradients
are summed once a step. So ranks need to agree on little: the sum, the loss, and what none of them can know alone (one
is asked to stop, one has no room for its micro-batch). They agree over gloo, on the CPU, whatever carries gradients.

A rank that waits gives signs of life: only the one that it waits for falls silent, and is found by its own supervisor.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ratchet.errors import PeersLostError

T = TypeVar("T")
POLL_S = 0.0005
BEAT_S = 0.25
NEVER = timedelta(days=7)
"""We look at the clock ourselves, and beat meanwhile."""
PIECE_BYTES = 2**26


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as torch's elastic agent tells its children in their environment."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def of_environment(cls) -> "Place":
        """That of this process; alone where no agent has started it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(*(int(os.environ[name]) for name in names))

    @property
    def writes(self) -> bool:
        """Whether this rank writes its machine's run directory: one a machine does, for each keeps the whole run."""
        return self.local_rank == 0


class Ranks:
    """All ranks of an attempt. Every method but the properties has to be called by all of them, in the same order."""

    def __init__(self, place: Place, device: torch.device, beat: Callable[[], None], wait_s: float) -> None:
        """Meet the others; alone, nothing happens.

        Args:
            place: of this process.
            device: where it computes.
            beat: a sign of life, given while waiting.
            wait_s: how long to wait for the others at one place; then they are lost.

        Raises:
            PeersLostError: they do not come.
        """
        self.place = place
        self._beat, self._wait_s = beat, wait_s
        self.group: Any = None
        """That of the gradients; None when alone."""
        if place.world == 1:
            return
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=wait_s))
        except (RuntimeError, ValueError) as error:
            raise PeersLostError(
                f"rank {place.rank} of {place.world} did not meet the others: {_said(error)}"
            ) from None
        self.group = dist.group.WORLD
        if device.type == "cuda":
            self.group = dist.new_group(backend="nccl", timeout=NEVER)

    @property
    def alone(self) -> bool:
        return self.place.world == 1

    @property
    def leads(self) -> bool:
        """Whether this is the first of all."""
        return self.place.rank == 0

    # ------------------------------------------------------------------------------------------------------- numbers

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in the order of ranks; as many of each."""
        if self.alone:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.place.world)]
        self.wait(dist.all_gather(found, own, async_op=True))
        return [one.tolist() for one in found]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, added in the order of ranks: the same bits everywhere."""
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(value for (value,) in self.gather([float(flag)]))

    # --------------------------------------------------------------------------------------------------------- bytes

    def gather_json(self, value: Any) -> list[Any]:
        """A value of every rank, as JSON."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_tensors(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Named tensors of every rank, on the CPU."""
        if self.alone:
            return (tensors,)
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        return tuple(load(one) for one in self.gather_bytes(data))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Bytes of every rank, of whatever length."""
        if self.alone:
            return [data]
        sizes = [int(size) for (size,) in self.gather([len(data)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in sizes]
        self.wait(dist.all_gather(found, own, async_op=True))
        return [bytes(one[:size].numpy().data) for one, size in zip(found, sizes, strict=True)]

    def send_block(self, source: int, block: bytes | None, size: int) -> bytes:
        """The source's block of `size` bytes, on every rank; None elsewhere."""
        data = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(size, dtype=torch.uint8)
        if size:
            self.wait(dist.broadcast(data, source, async_op=True))
        return bytes(data.numpy().data)

    # --------------------------------------------------------------------------------------------------------- waiting

    def in_turns(self, work: Callable[[], T]) -> T:
        """Do what takes much of a machine's memory on one of its ranks at a time, however long it takes there."""
        if self.alone:
            return work()
        group = dist.new_group(backend="gloo", timeout=NEVER)
        found: list[T] = []
        for turn in range(max(int(count) for (count,) in self.gather([self.place.local_world]))):
            if turn == self.place.local_rank:
                found.append(work())
            self.wait(dist.barrier(group, async_op=True), math.inf)
        return found[0]

    @contextmanager
    def in_concert(self, needed: bool) -> Iterator[None]:
        """For what talks to other ranks by itself, through DTensors: all begin it together, and may lose each other.

        Raises:
            PeersLostError: they did.
        """
        if not needed:
            yield
            return
        self.any(False)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise PeersLostError(f"rank {self.place.rank} lost another one: {_said(error)}") from None

    def settle(self, device: torch.device) -> None:
        """Until a GPU has done what it was given, with signs of life: it may wait for another rank."""
        if device.type == "cuda":
            self.wait(_Given())

    def wait(self, work: Any, wait_s: float | None = None) -> None:
        """Until a collective operation is done, with signs of life.

        Args:
            work: as torch gives it.
            wait_s: how long; None: as long as ranks wait for each other.

        Raises:
            PeersLostError: another rank is gone, or does not come.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        since = beaten = time.monotonic()
        try:
            while not work.is_completed():
                time.sleep(POLL_S)
                now = time.monotonic()
                if now - beaten > BEAT_S:
                    self._beat()
                    beaten = now
                if now - since > wait_s:
                    raise PeersLostError(
                        f"rank {self.place.rank} waited {wait_s:g} s for the other {self.place.world - 1} "
                        "(machine.peers_wait_s)"
                    )
            work.wait()
        except RuntimeError as error:
            raise PeersLostError(f"rank {self.place.rank} lost another one: {_said(error)}") from None


class _Given:
    """All that the current GPU has been given so far, as something to wait for."""

    def __init__(self) -> None:
        self._end = torch.cuda.Event()
        self._end.record()

    def is_completed(self) -> bool:
        found: bool = self._end.query()
        return found

    def wait(self) -> None:
        self._end.synchronize()


def _said(error: Exception) -> str:
    return str(error).splitlines()[0][:300]


def shares(pieces: Sequence[Sequence[int]], padded: Sequence[int], world: int) -> list[list[int]]:
    """Which pieces each rank computes: the largest first, to whoever has least; the same everywhere.

    Args:
        pieces: the micro-batches of a step.
        padded: tokens of each, padded.
        world: number of ranks.

    Returns:
        For each rank the numbers of its pieces, ascending. (Graham 1969: longest processing time first is within 4/3 of
        the shortest possible.)
    """
    loads, found = [0] * world, [list[int]() for _ in range(world)]
    for number in sorted(range(len(pieces)), key=lambda k: (-padded[k], k)):
        rank = min(range(world), key=lambda r: (loads[r], r))
        loads[rank] += padded[number]
        found[rank].append(number)
    return [sorted(numbers) for numbers in found]
