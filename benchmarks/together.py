"""Compares runs that are trained together (training/group.py) with the same runs one after the other.

    pip install -c constraints.txt -e .
    python benchmarks/together.py [--quick] [--json FILE]

All runs have the same base and rows and differ in rank and learning rate. The base has 60M parameters, so that it takes
more memory than the libraries; on a GPU it has 1.1B. Each run is trained alone, by a process that is forked from one
with the libraries, and in a group. Both ways take turns.

- **Memory**: on a CPU, the largest proportional set size of the process that trains, which divides pages that it shares
  with its server; on a GPU, the largest sum of torch's allocations.
- **Time**: from the start of the first run to the end of the last. A GPU has eight runs of rank 8 to 64, a CPU four.
- **Values**: the largest relative difference of a validation loss. It is only rounding.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import finish
from report_rows import Row, at_least, at_most, ratio, told
from small_project import SETTINGS, build, linked

from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.settings import Settings
from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.runs.fork_server import ForkServer, Program
from ratchet.runs.gpus import count_visible_gpus
from ratchet.runs.group_connection import GroupConnection, WorkerServer, listen
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalReader
from ratchet.runs.supervisor import WORKER_MODULE
from ratchet.runs.worker_process import WorkerProcess
from ratchet.storage.layout import ProjectLayout
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.tuning.group_worker import GROUP_MODULE

SAMPLE_S = 0.05
RANKS_CPU, RANKS_GPU = (8, 16, 32, 64), (8, 12, 16, 24, 32, 40, 48, 64)
LARGEST_DIFFERENCE = 1e-4
MEMORY_LIMIT, SPEED_LIMIT_GPU = 1.6, 4.0
BASE_CPU = TinyModelSettings(
    vocab_size=600, hidden_size=768, intermediate_size=2304, layers=8, heads=12, sequence_length=48, batch_size=8,
    steps=1,
)  # fmt: skip
BASE_GPU = TinyModelSettings(
    vocab_size=600, hidden_size=2048, intermediate_size=8192, layers=16, heads=32, sequence_length=48, batch_size=8,
    steps=1,
)  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """What a training, or several, took."""

    seconds: float
    peak_bytes: int
    losses: tuple[tuple[float, ...], ...]


class OpenRun:
    """A run without supervisor, which starts once."""

    def __init__(self, layout: ProjectLayout, settings: Settings, is_grouped: bool) -> None:
        spec = build_run_spec(layout, settings).model_copy(update={"is_grouped": is_grouped or None})
        self.directory = RunDirectory.open(layout.runs, spec)
        build_launch(layout, settings).save(self.directory.paths.launch)
        self._machine = settings.machine

    def start(self, server: WorkerServer) -> WorkerProcess:
        """Start the training."""
        paths: RunPaths = self.directory.paths
        heartbeat = Heartbeat.create(self._machine.stall_timeout_s, self._machine.first_stall_timeout_s)
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with paths.worker_log.open("ab") as log:
            program = Program(WORKER_MODULE, (str(paths.root), "1", None, heartbeat.fd), environment)
            process = server.start(program, log.fileno(), [self.directory.lock.fd])
        heartbeat.close()
        return process

    def read(self) -> tuple[tuple[float, ...], int]:
        """Return the validation losses, and the largest memory of the device that the run has reported."""
        events = list(JournalReader(self.directory.paths.journal).read())
        losses = tuple(event.data["loss"] for event in events if event.kind == "validation")
        peaks = [event.data["allocated_bytes"] for event in events if event.kind == "memory_peak"]
        return losses, max(peaks, default=0)


class PeakMemory(threading.Thread):
    """Largest proportional set size of a process, in bytes, sampled every SAMPLE_S."""

    def __init__(self, find_pid: Callable[[], int | None]) -> None:
        super().__init__(daemon=True)
        self._find_pid, self.peak_bytes = find_pid, 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            try:
                pid = self._find_pid()
                if pid is not None:
                    self.peak_bytes = max(self.peak_bytes, psutil.Process(pid).memory_full_info().pss)
            except psutil.Error:
                continue

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def __enter__(self) -> "PeakMemory":
        self.start()
        return self


def train(runs: Sequence[OpenRun], server: WorkerServer, count: int) -> Taken:
    """Train runs, `count` at a time."""
    started_s, current = time.monotonic(), list[WorkerProcess]()
    with PeakMemory(lambda: current[0].pid if current else None) as memory:
        for start in range(0, len(runs), count):
            current[:] = [run.start(server) for run in runs[start : start + count]]
            for process in current:
                while (code := process.wait_for(1.0)) is None:
                    pass
                if code:
                    raise SystemExit(f"a training ended with exit code {code}")
    seconds = time.monotonic() - started_s
    read = [run.read() for run in runs]
    peak_bytes = max(peak for _, peak in read) or memory.peak_bytes
    return Taken(seconds, peak_bytes, tuple(losses for losses, _ in read))


def train_alone(layout: ProjectLayout, settings: Sequence[Settings], server: ForkServer) -> Taken:
    """Train runs one after the other."""
    with ExitStack() as stack:
        runs = [OpenRun(layout, one, is_grouped=False) for one in settings]
        for run in runs:
            stack.callback(run.directory.close)
        return train(runs, server, 1)


def train_together(layout: ProjectLayout, settings: Sequence[Settings], server: ForkServer) -> Taken:
    """Train runs in a group of their own."""
    folder = layout.experiments / "group"
    folder.mkdir()
    with ExitStack() as stack:
        socket_folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(socket_folder) / "socket"
        listener = stack.enter_context(listen(path))
        runs = [OpenRun(layout, one, is_grouped=True) for one in settings]
        for run in runs:
            stack.callback(run.directory.close)
        with (folder / "group.log").open("ab") as log:
            arguments = (listener.fileno(), str(folder), None)
            environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            group = server.start(Program(GROUP_MODULE, arguments, environment), log.fileno())
        stack.callback(group.stop, 0.0)
        return train(runs, GroupConnection(path), len(runs))


def variants(ranks: Sequence[int], device: str, quick: bool) -> list[Settings]:
    """Return the settings of the runs."""
    machine = SETTINGS.machine.model_copy(
        update={"device": device, "threads": 0, "micro_batch_size": 4, "checkpoint_every": "1 min"}
    )
    update = {"batch_size": 8, "epochs": 0.12 if quick else 1.0, "validate_every_steps": 10, "dropout": 0.0}
    return [
        SETTINGS.model_copy(
            update={
                "base": Base(tiny=BASE_GPU if device == "cuda" else BASE_CPU),
                "train": SETTINGS.train.model_copy(
                    update=update
                    | {"quantization": "none", "rank": rank, "alpha": 2 * rank, "learning_rate": 1e-3 / (1 + k)}
                ),
                "machine": machine,
            }
        )
        for k, rank in enumerate(ranks)
    ]


def largest_difference(found: Taken, expected: Taken) -> float:
    """Return the largest relative difference of a validation loss."""
    pairs = zip(found.losses, expected.losses, strict=True)
    return max(abs(a - b) / abs(b) for one, other in pairs for a, b in zip(one, other, strict=True))


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    device = "cuda" if count_visible_gpus() else "cpu"
    settings = variants(RANKS_GPU if device == "cuda" else RANKS_CPU, device, quick)
    alone: list[Taken] = []
    together: list[Taken] = []
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        source = build(Path(folder) / "source", 300, settings[0])
        for repetition in range(1 if quick else 3):
            place = Path(folder) / str(repetition)
            alone.append(train_alone(linked(source, place / "alone", settings[0]), settings, server))
            together.append(train_together(linked(source, place / "together", settings[0]), settings, server))
            print(f"alone {alone[-1].seconds:.1f} s, together {together[-1].seconds:.1f} s", flush=True)
    count = len(settings)
    memory, memory_spread = ratio([one.peak_bytes for one in together], [one.peak_bytes for one in alone])
    speed, speed_spread = ratio([one.seconds for one in alone], [one.seconds for one in together])
    name = f"trainings per hour, {count} together / one after the other"
    return [
        at_most(f"memory, {count} together / the largest alone", memory, MEMORY_LIMIT, memory_spread),
        at_least(name, speed, SPEED_LIMIT_GPU, speed_spread) if device == "cuda" else told(name, speed, speed_spread),
        told("memory of the largest alone, MiB", max(one.peak_bytes for one in alone) / 2**20),
        at_most(
            "largest relative difference of a validation loss",
            max(largest_difference(found, expected) for found, expected in zip(together, alone, strict=True)),
            LARGEST_DIFFERENCE if device == "cpu" else 1e-2,
        ),
    ]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of an epoch, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    return finish(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
