"""The processes (ranks) that train one run together: their positions, and how they exchange data.

Every rank has the same weights, optimizer and state. Each rank computes some micro-batches of a step, and gradients are
summed once per step. In addition, ranks exchange only the loss, and events that a single rank notices (a stop request,
out of memory). The loss and the events are exchanged over gloo, on the CPU, even if NCCL carries the gradients.

A waiting rank sends heartbeats. So only the rank for which the others wait is silent, and the supervisor of that rank
detects it.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ratchet.errors import PeersLostError, SettingsError
from ratchet.models import device as device_probe
from ratchet.runs.directory import CHECKPOINT, RunPaths
from ratchet.runs.journal import Journal, RunDecisions
from ratchet.runs.rendezvous import REQUIREMENT, describe_difference
from ratchet.storage import digests, files
from ratchet.training.checkpoint import read_metadata

T = TypeVar("T")
POLL_S = 0.0005
HEARTBEAT_S = 0.25
NEVER = timedelta(days=7)
"""Timeout that torch's own operations get, so long that it never applies: `RankGroup.wait` has a timeout of its own."""
NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""By default, a thread of torch's (ProcessGroupNCCL.cpp, watchdog) aborts the process within 0.1 s after an error of
NCCL or the GPU. With these values, the training thread has the time to report the error, which `Work.wait` raises."""
BLOCK_BYTES = 2**26
"""Maximum number of bytes of a checkpoint that are broadcast at once."""
REPORT_EVERY_S = 5.0
"""Shortest time in seconds between two events of the straggler monitor. Two events are also at least two steps
apart."""


@dataclass(frozen=True)
class RankEnvironment:
    """Position of a rank, as torch's elastic agent passes it in the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "RankEnvironment":
        """Return the position of this process. A process that no agent has started is a single rank."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(*(int(os.environ[name]) for name in names))

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run directory of its machine; one rank per machine does."""
        return self.local_rank == 0


def select_device(setting: Literal["auto", "cpu", "cuda"], environment: RankEnvironment) -> torch.device:
    """Return the device of a rank, and make it torch's current GPU. Raises SettingsError as `pick_device`, and if this
    machine has fewer GPUs than ranks."""
    device = device_probe.pick_device(setting)
    if device.type != "cuda" or environment.world_size == 1:
        return device
    count = torch.cuda.device_count()
    if environment.local_world_size > count:
        raise SettingsError(
            f"machine.gpus: found {environment.local_world_size}, but this machine has {count} usable GPUs "
            "(CUDA_VISIBLE_DEVICES limits them): set at most that, or auto"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


class RankGroup:
    """All ranks of an attempt. Every rank must call the same methods as the others, in the same order; properties may
    be read at any time."""

    def __init__(
        self, environment: RankEnvironment, device: torch.device, beat: Callable[[], None], timeout_s: float
    ) -> None:
        """Join the other ranks; with a single rank, do nothing. Raises PeersLostError if the others do not join.

        Args:
            environment: position of this process.
            device: the device of this rank.
            beat: sends a heartbeat; called while waiting.
            timeout_s: how long each operation waits for the other ranks before they count as lost.
        """
        self.environment = environment
        self._beat, self._timeout_s = beat, timeout_s
        self.group: Any = None
        if environment.world_size == 1:
            return
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise PeersLostError(
                f"rank {environment.rank} of {environment.world_size} could not join the other ranks: "
                f"{_first_error_line(error)}"
            ) from None
        self.group = dist.group.WORLD
        if device.type == "cuda":
            os.environ |= NCCL_VARIABLES
            self.group = dist.new_group(backend="nccl", timeout=NEVER)

    @property
    def is_single(self) -> bool:
        """Whether this is the only rank."""
        return self.environment.world_size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.rank == 0

    # Numbers.

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, in the order of ranks. All ranks pass the same number of values."""
        if self.is_single:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        by_rank = [torch.empty_like(own) for _ in range(self.environment.world_size)]
        self.wait(dist.all_gather(by_rank, own, async_op=True))
        return [tensor.tolist() for tensor in by_rank]

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is set."""
        return any(value for (value,) in self.gather([float(flag)]))

    # Bytes.

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_tensors(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Return the named tensors of every rank, on the CPU."""
        if self.is_single:
            return (tensors,)
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        return tuple(map(load, self.gather_bytes(data)))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank; their lengths may differ."""
        if self.is_single:
            return [data]
        sizes = [int(size) for (size,) in self.gather([len(data)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        by_rank = [torch.empty_like(own) for _ in sizes]
        self.wait(dist.all_gather(by_rank, own, async_op=True))
        return [bytes(tensor[:size].numpy().data) for tensor, size in zip(by_rank, sizes, strict=True)]

    def broadcast_file(self, source: int, path: Path | None, size: int) -> Iterator[bytes]:
        """Yield the blocks of a file of `size` bytes of rank `source`; the other ranks pass None as `path`."""
        with path.open("rb") if path else nullcontext() as stream:
            for start in range(0, size, BLOCK_BYTES):
                data = torch.empty(min(BLOCK_BYTES, size - start), dtype=torch.uint8)
                if stream:
                    data = torch.frombuffer(bytearray(stream.read(len(data))), dtype=torch.uint8)
                self.wait(dist.broadcast(data, source, async_op=True))
                yield bytes(data.numpy().data)

    # Waiting.

    def run_in_turns(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank of each machine at a time, because `work` takes much of the machine's memory."""
        if self.is_single:
            return work()
        group = dist.new_group(backend="gloo", timeout=NEVER)
        results: list[T] = []
        for turn in range(max(int(count) for (count,) in self.gather([self.environment.local_world_size]))):
            if turn == self.environment.local_rank:
                results.append(work())
            self.wait(dist.barrier(group, async_op=True), math.inf)
        return results[0]

    @contextmanager
    def collective_section(self, is_needed: bool) -> Iterator[None]:
        """Wrap work that exchanges data between ranks by itself, through DTensors. All ranks begin the work together.
        Raises PeersLostError if another rank was lost during the work."""
        if not is_needed:
            yield
            return
        self.any(False)
        try:
            yield
        except RuntimeError as error:
            if device_probe.is_device_error(error):
                raise
            raise self._lost_peer(error) from None

    def wait_for_device(self, device: torch.device) -> None:
        """Wait until a GPU has done its queued work, and send heartbeats, because the GPU may wait for another rank."""
        if device.type == "cuda":
            self.wait(_CudaWork())

    def wait(self, work: Any, timeout_s: float | None = None) -> None:
        """Wait until a collective operation is done, and send heartbeats. Raises PeersLostError if another rank has
        ended, or does not join the operation in time; errors of this rank's own GPU are raised as they are."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        started_s = beaten_s = time.monotonic()
        try:
            while not work.is_completed():
                time.sleep(POLL_S)
                now_s = time.monotonic()
                if now_s - beaten_s > HEARTBEAT_S:
                    self._beat()
                    beaten_s = now_s
                if now_s - started_s > timeout_s:
                    raise PeersLostError(
                        f"rank {self.environment.rank} waited {timeout_s:g} s for the other "
                        f"{self.environment.world_size - 1} ranks"
                    )
            work.wait()
        except RuntimeError as error:
            if device_probe.is_device_error(error):
                raise
            raise self._lost_peer(error) from None

    def _lost_peer(self, error: Exception) -> PeersLostError:
        return PeersLostError(f"rank {self.environment.rank} lost another rank: {_first_error_line(error)}")


class _CudaWork:
    """All work that is queued on the current GPU, with the interface of a collective operation."""

    def __init__(self) -> None:
        self._end = torch.cuda.Event()
        self._end.record()

    def is_completed(self) -> bool:
        is_completed: bool = self._end.query()
        return is_completed

    def wait(self) -> None:
        self._end.synchronize()


def _first_error_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]


def assign_shares(padded_tokens: Sequence[int], world_size: int) -> list[list[int]]:
    """Assign micro-batches to ranks: the largest first, each to the rank with the least work.

    Every rank gets the same result. With this rule (longest processing time first), the rank with the most work has at
    most 4/3 of the optimum (Graham 1969).

    Returns:
        For each rank the numbers of its micro-batches, ascending.
    """
    loads, shares = [0] * world_size, [list[int]() for _ in range(world_size)]
    for number in sorted(range(len(padded_tokens)), key=lambda k: (-padded_tokens[k], k)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += padded_tokens[number]
        shares[rank].append(number)
    return [sorted(numbers) for numbers in shares]


# Start of an attempt: ranks check that they train the same run, and agree on a checkpoint. Every machine has a complete
# run directory. A new or returning machine gets the newest checkpoint from a rank that has this checkpoint. So no
# shared disk is needed, and any of the machines can continue alone.


def require_consistent(ranks: RankGroup, properties: dict[str, Any]) -> None:
    """Raise SettingsError, on every rank, unless all ranks have the same properties (JSON objects as
    `rendezvous.describe_difference` takes them)."""
    by_rank = ranks.gather_json({"host": socket.gethostname(), "properties": properties})
    first = by_rank[0]
    for rank, description in enumerate(by_rank):
        if difference := describe_difference(first["properties"], description["properties"]):
            raise SettingsError(
                f"ranks 0 (on {first['host']}) and {rank} (on {description['host']}) would train different things: "
                f"{difference}. {REQUIREMENT}"
            )


def agree_on_checkpoint(ranks: RankGroup, paths: RunPaths, own: Path | None) -> Path | None:
    """Copy the newest checkpoint of all ranks to every machine, and return its path; None if no rank has one.

    The checkpoints that its state requires are copied, too. `own` is the newest valid checkpoint of this machine.
    """
    if ranks.is_single:
        return own
    metadata = read_metadata(own) if own else None
    own_newest = [metadata.state.step, files.read_manifest(own).digest] if own and metadata else [0, ""]
    by_rank = ranks.gather_json(own_newest)
    newest = max(step for step, _ in by_rank)
    if not newest:
        return None
    source = next(rank for rank, (step, _) in enumerate(by_rank) if step == newest)
    if any(newest_of_rank != by_rank[source] for newest_of_rank in by_rank):
        is_source = ranks.environment.rank == source
        steps = [newest, *sorted(metadata.state.required_steps)] if metadata and is_source else []
        is_missing = ranks.environment.is_writer and own_newest != by_rank[source]
        for step in ranks.gather_json(steps)[source]:
            _copy_sealed_directory(ranks, source, paths.checkpoint(step), is_missing)
    return paths.checkpoint(newest)


def _copy_sealed_directory(ranks: RankGroup, source: int, folder: Path, is_missing: bool) -> None:
    """Copy a sealed directory of rank `source` to the ranks with `is_missing`. All ranks take part in the transfer."""
    is_source = ranks.environment.rank == source
    manifest = {name: list(entry) for name, entry in files.read_manifest(folder).files.items()} if is_source else {}
    source_manifest = ranks.gather_json(manifest)[source]
    entries = {name: (str(digest), int(size)) for name, (digest, size) in source_manifest.items()}
    if not is_missing:
        for name, (_, size) in entries.items():
            for _ in ranks.broadcast_file(source, folder / name if is_source else None, size):
                pass  # only ranks without the directory write the blocks
        return
    if folder.exists():
        files.remove_sealed(folder)
    files.make_directory(folder.parent)
    with files.sealed_directory(folder, CHECKPOINT, entries) as scratch:
        for name, (expected, size) in entries.items():
            target = scratch / name
            files.write_blocks(target, ([block] for block in ranks.broadcast_file(source, None, size)))
            if digests.hash_file(target) != expected:
                raise OSError(f"{folder.name}/{name}: differs from the file of rank {source}: damaged in transit")


def merge_decisions(ranks: RankGroup, own: RunDecisions) -> RunDecisions:
    """Return the decisions of earlier attempts from the rank that has the most, because a new machine has no
    journal."""
    by_rank = ranks.gather_json([list(own.budgets.values()), list(own.skipped_steps.values())])
    budgets, skipped = max(by_rank, key=lambda decisions: sum(map(len, decisions)))
    return RunDecisions(
        {(data["phase"], data["step"]): data for data in budgets}, {data["step"]: data for data in skipped}
    )


class StragglerMonitor:
    """Reports in the journal how long each rank computes, because a slow rank slows all others."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._reported_s = time.monotonic()
        self._steps, self._seconds = 0, 0.0
        self._busy_s: list[float] = []

    def add(self, step: int, seconds: float, busy_s: Sequence[float]) -> None:
        """Add a completed step: number, duration, and the seconds that each rank spent on its own rows. A single
        rank is not reported."""
        if len(busy_s) < 2:
            return
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        totals = self._busy_s or [0.0] * len(busy_s)
        self._busy_s = [total_s + step_s for total_s, step_s in zip(totals, busy_s, strict=True)]
        now_s = time.monotonic()
        if self._steps < 2 or now_s - self._reported_s < REPORT_EVERY_S:
            return
        self._journal.append(
            "rank_timings", step=step, steps=self._steps, seconds=round(self._seconds, 5),
            busy_s=[round(total_s, 5) for total_s in self._busy_s],
        )  # fmt: skip
        self._reported_s, self._steps, self._seconds, self._busy_s = now_s, 0, 0.0, []
