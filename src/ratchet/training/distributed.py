"""The processes that train one run together: who they are, and what they tell each other.

Every rank holds the same weights, optimizer and state; each computes some micro-batches of a step, and the gradients
are summed once a step. So ranks need to agree on little: the sum, the loss, and what none of them can know alone (one
is asked to stop, one has no room for its micro-batch). They agree over gloo, on the CPU, whatever carries gradients.

A rank that waits gives signs of life: only the one that it waits for falls silent, and is found by its own supervisor.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ratchet.errors import PeersLostError, SettingsError
from ratchet.runs import replication_protocol
from ratchet.runs.directory import CHECKPOINT, RunPaths
from ratchet.runs.journal import Journal, RunDecisions
from ratchet.storage import digests, files
from ratchet.training.checkpoint import read_metadata
from ratchet.training.consistency_check import NEEDED, describe_difference

T = TypeVar("T")
POLL_S = 0.0005
BEAT_S = 0.25
NEVER = timedelta(days=7)
"""We look at the clock ourselves, and beat meanwhile."""
PIECE_BYTES = 2**26


@dataclass(frozen=True)
class RankEnvironment:
    """Where a rank stands, as torch's elastic agent tells its children in their environment."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def of_environment(cls) -> "RankEnvironment":
        """That of this process; alone where no agent has started it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(*(int(os.environ[name]) for name in names))

    @property
    def writes(self) -> bool:
        """Whether this rank writes its machine's run directory: one a machine does, for each keeps the whole run."""
        return self.local_rank == 0


class RankGroup:
    """All ranks of an attempt. Every method but the properties has to be called by all of them, in the same order."""

    def __init__(self, place: RankEnvironment, device: torch.device, beat: Callable[[], None], wait_s: float) -> None:
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
                f"rank {place.rank} of {place.world} did not meet the others: {_first_error_line(error)}"
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
            raise PeersLostError(f"rank {self.place.rank} lost another one: {_first_error_line(error)}") from None

    def settle(self, device: torch.device) -> None:
        """Until a GPU has done what it was given, with signs of life: it may wait for another rank."""
        if device.type == "cuda":
            self.wait(_CudaWork())

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
            raise PeersLostError(f"rank {self.place.rank} lost another one: {_first_error_line(error)}") from None


class _CudaWork:
    """All that the current GPU has been given so far, as something to wait for."""

    def __init__(self) -> None:
        self._end = torch.cuda.Event()
        self._end.record()

    def is_completed(self) -> bool:
        found: bool = self._end.query()
        return found

    def wait(self) -> None:
        self._end.synchronize()


def _first_error_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]


def assign_shares(pieces: Sequence[Sequence[int]], padded: Sequence[int], world: int) -> list[list[int]]:
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


# How ranks begin: they make sure that they train the same thing, and from the same checkpoint.
#
# Every machine keeps the whole run. One that was away, or is new, gets the newest checkpoint from one that has it: no
# shared disk is needed, and whichever machines are left can go on.


def require_consistent(ranks: RankGroup, told: dict[str, Any]) -> None:
    """Raise SettingsError, on every rank, unless all say the same about what they train with, and with what.

    Args:
        ranks: all of them.
        told: JSON, as `alike.difference` takes it.
    """
    everybody = ranks.gather_json({"host": socket.gethostname(), "told": told})
    first = everybody[0]
    for rank, other in enumerate(everybody):
        if found := describe_difference(first["told"], other["told"]):
            raise SettingsError(
                f"ranks 0 (on {first['host']}) and {rank} (on {other['host']}) would train different things: {found}. "
                f"{NEEDED}"
            )


def agree_on_checkpoint(ranks: RankGroup, paths: RunPaths, own: Path | None) -> Path | None:
    """The checkpoint that all go on from: the newest that any of them has; None when there is none.

    It then lies in every machine's run directory, with those that its state refers to.

    Args:
        ranks: all of them.
        paths: the run, on this machine.
        own: the newest valid checkpoint here.
    """
    if ranks.alone:
        return own
    sealed = read_metadata(own) if own else None
    mine = [sealed.state.step, files.read_manifest(own).digest] if own and sealed else [0, ""]
    there = ranks.gather_json(mine)
    newest = max(step for step, _ in there)
    if not newest:
        return None
    source = next(rank for rank, (step, _) in enumerate(there) if step == newest)
    if any(one != there[source] for one in there):
        wanted = [newest, *sorted(sealed.state.refers_to)] if sealed and ranks.place.rank == source else []
        lacks = ranks.place.writes and mine != there[source]
        for step in ranks.gather_json(wanted)[source]:
            _copy_sealed_directory(ranks, source, paths.checkpoint(step), lacks)
    return paths.checkpoint(newest)


def _copy_sealed_directory(ranks: RankGroup, source: int, folder: Path, lacks: bool) -> None:
    """A sealed directory of the source, sealed in the same place wherever it is lacking."""
    sends = ranks.place.rank == source
    own = {name: list(entry) for name, entry in files.read_manifest(folder).files.items()} if sends else {}
    entries = ranks.gather_json(own)[source]
    known = {name: (str(found), int(size)) for name, (found, size) in entries.items()}
    if not lacks:
        for name, (_, size) in known.items():
            for _ in _broadcast_blocks(ranks, source, folder / name if sends else None, size):
                pass  # others write it
        return
    if folder.exists():
        files.remove_sealed(folder)
    files.make_directory(folder.parent)
    with files.sealed_directory(folder, CHECKPOINT, known) as scratch:
        for name, (expected, size) in known.items():
            target = scratch / name
            files.write_blocks(target, ([block] for block in _broadcast_blocks(ranks, source, None, size)))
            if digests.hash_file(target) != expected:
                raise OSError(f"{folder.name}/{name}: not what rank {source} has: it was changed on its way")


def _broadcast_blocks(ranks: RankGroup, source: int, path: Path | None, size: int) -> Iterator[bytes]:
    stream = path.open("rb") if path else None
    try:
        for start in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - start)
            yield ranks.send_block(source, stream.read(length) if stream else None, length)
    finally:
        if stream:
            stream.close()


def list_machines(ranks: RankGroup, paths: RunPaths) -> list[str]:
    """The supervisors of all machines that keep a mirror, by the names under which they claim the run there.

    Args:
        ranks: all of them.
        paths: the run, on this machine.
    """
    noted = replication_protocol.read_replication_state(paths)
    return sorted({name for name in ranks.gather_json(noted.node if noted else "") if name})


def merge_decisions(ranks: RankGroup, own: RunDecisions) -> RunDecisions:
    """What the run has decided before, as the rank knows it that knows most: a new machine has no journal of it."""
    told = ranks.gather_json(
        {
            "budgets": [[phase, step, data] for (phase, step), data in own.budgets.items()],
            "skipped": [[step, data] for step, data in own.skipped.items()],
        }
    )
    most = max(told, key=lambda one: len(one["budgets"]) + len(one["skipped"]))
    budgets = {(phase, step): data for phase, step, data in most["budgets"]}
    return RunDecisions(budgets, dict(most["skipped"]))


# How fast ranks are beside each other, told now and then: one that others wait for slows all of them.

EVERY_S = 5.0
"""Between two events, and at least two steps."""


class StragglerMonitor:
    """Adds up what ranks did in steps, and tells it.

    Args:
        journal: told events `ranks`.
        clock: monotonic seconds.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._clock = journal, clock
        self._told_s = clock()
        self._steps, self._seconds = 0, 0.0
        self._busy_s: list[float] = []

    def add(self, step: int, seconds: float, busy_s: Sequence[float]) -> None:
        """A step is done.

        Args:
            step: its number.
            seconds: that it took.
            busy_s: of each rank, seconds that it spent on micro-batches of its own; nothing is told of a single one.
        """
        if len(busy_s) < 2:
            return
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        before = self._busy_s or [0.0] * len(busy_s)
        self._busy_s = [whole + one for whole, one in zip(before, busy_s, strict=True)]
        now_s = self._clock()
        if self._steps < 2 or now_s - self._told_s < EVERY_S:
            return
        self._journal.append(
            "ranks", step=step, steps=self._steps, seconds=round(self._seconds, 5),
            busy_s=[round(one, 5) for one in self._busy_s],
        )  # fmt: skip
        self._told_s, self._steps, self._seconds, self._busy_s = now_s, 0, 0.0, []
