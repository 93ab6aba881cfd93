"""A training group as a real process, with real runs of a tiny project."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

import tiny_project
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import cpu_products
from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.runs.fork_server import Program
from ratchet.runs.group_connection import GroupConnection, GroupMemberProcess, listen
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalReader
from ratchet.runs.supervisor import supervise
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.training.group import MemberShutdown, TrainingGroup
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.training.worker import run_member

DEADLINE_S = 240.0


def until(done: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def trains(**changes: Sequence[object]) -> list[Train]:
    """Return settings that differ in these values, given as a list for each field."""
    count = len(next(iter(changes.values())))
    plain = tiny_project.TRAIN.model_copy(update={"quantization": "none"})
    return [
        Train.model_validate(plain.model_dump() | {name: values[k] for name, values in changes.items()})
        for k in range(count)
    ]


class RunInGroup:
    """A run with everything that its supervisor would have."""

    def __init__(self, layout: ProjectLayout, train: Train, machine: Machine = tiny_project.MACHINE) -> None:
        settings = tiny_project.SETTINGS.model_copy(update={"train": train, "machine": machine})
        spec = build_run_spec(layout, settings).model_copy(update={"is_grouped": True})
        self.directory = RunDirectory.open(layout.runs, spec)
        self.paths = self.directory.paths
        build_launch(layout, settings).save(self.paths.launch)
        self.attempt = 0
        self.process: GroupMemberProcess | None = None

    def start(self, group: GroupConnection) -> GroupMemberProcess:
        """Start the next attempt."""
        self.attempt += 1
        machine = tiny_project.MACHINE
        heartbeat = Heartbeat.create(machine.stall_timeout_s, machine.first_stall_timeout_s)
        arguments = (str(self.paths.root), str(self.attempt), None, heartbeat.fd)
        with self.paths.worker_log.open("ab") as log:
            program = Program("ratchet.training.worker_main", arguments, os.environ)
            self.process = group.start(program, log.fileno(), [self.directory.lock.fd])
        heartbeat.close()
        return self.process

    def wait(self) -> int:
        """Wait for the end of the attempt."""
        process = self.process
        assert process is not None
        until(lambda: process.wait_for(0.1) is not None, f"{self.paths.root}: {events_text(self.paths)[-3:]}")
        assert process.returncode is not None
        return process.returncode

    def steps(self) -> int:
        """Return the newest step of the journal."""
        return max([0, *(e.data["step"] for e in JournalReader(self.paths.journal).read() if e.kind == "step")])

    def close(self) -> None:
        self.directory.close()
        if self.process is not None:
            self.process._connection.close()


class Group:
    """The process of a group, and its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "s"
        self.listener = listen(self.socket)
        self.connection = GroupConnection(self.socket)
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with (self.folder / "group.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "ratchet.training.group_main", str(self.listener.fileno()), str(self.folder),
                    str(os.getpid()),
                ],
                stdout=log, stderr=log, pass_fds=[self.listener.fileno()], env=tiny_project.environment(),
            )  # fmt: skip

    def kill(self) -> None:
        """Kill the process and start another one."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        self.socket.unlink()


@contextmanager
def group(folder: Path) -> Iterator[Group]:
    """Run a group."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Group(folder)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def members(
    layout: ProjectLayout, settings: Sequence[Train], machines: Sequence[Machine] = ()
) -> Iterator[list[RunInGroup]]:
    """Open the runs of these settings."""
    with ExitStack() as stack:
        each = machines or [tiny_project.MACHINE] * len(settings)
        runs = [RunInGroup(layout, train, machine) for train, machine in zip(settings, each, strict=True)]
        for run in runs:
            stack.callback(run.close)
        yield runs


def train_together(layout: ProjectLayout, settings: Sequence[Train], folder: Path) -> list[RunPaths]:
    """Train these runs together, without faults."""
    with group(folder) as running, members(layout, settings) as runs:
        for run in runs:
            run.start(running.connection)
        assert [run.wait() for run in runs] == [0] * len(runs), (folder / "group.log").read_text()
        return [run.paths for run in runs]


def train_in_threads(
    runs: Sequence[RunInGroup], record: Path, shutdowns: Sequence[MemberShutdown] = (), attempt: int = 1
) -> list[int]:
    """Train these runs together in this process; return their exit codes."""
    cpu_products.use_onednn()  # as in a group's own process, so that losses have the same bits
    together, codes = TrainingGroup(record), dict[int, int]()

    def work(number: int, run: RunInGroup) -> None:
        shutdown = shutdowns[number] if shutdowns else MemberShutdown()
        codes[number] = run_member(run.paths, attempt, shutdown, Heartbeat(None, 0, 0), together)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), [events_text(run.paths)[-3:] for run in runs]
    return [codes[number] for number in range(len(runs))]


def check_kills(copy: Callable[[str], ProjectLayout], settings: Sequence[Train], folder: Path, kills: int) -> None:
    """Kill a group several times, and check that its results have the bytes of a group that was not killed. `copy`
    copies a prepared project."""
    undisturbed = train_together(copy("undisturbed"), settings, folder / "g1")
    with group(folder / "g2") as running, members(copy("killed"), settings) as runs:
        for run in runs:
            run.start(running.connection)
        for kill in range(1, kills + 1):
            until(lambda kill=kill: max(run.steps() for run in runs) >= 6 * kill, "no progress")  # type: ignore[misc]
            running.kill()
            killed = [run for run in runs if run.wait() == -signal.SIGKILL]
            assert len(killed) > 1
            for run in reversed(killed):
                run.start(running.connection)
        assert [run.wait() for run in runs] == [0] * len(runs)
        resumed = [run.paths for run in runs]
    for expected, found in zip(undisturbed, resumed, strict=True):
        assert result_bytes(found) == result_bytes(expected)


def train_alone(layout: ProjectLayout, train: Train) -> RunPaths:
    """Train a run as `ratchet train` does."""
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    run = RunDirectory.open(layout.runs, build_run_spec(layout, settings))
    try:
        supervise(run, build_launch(layout, settings), [], "test")
        return run.paths
    finally:
        run.close()


def result_bytes(paths: RunPaths) -> dict[str, str]:
    """Return the SHA-256 of each file of a result."""
    files = [path for path in sorted(paths.result.rglob("*")) if path.is_file()]
    return {path.relative_to(paths.result).as_posix(): digests.hash_file(path) for path in files}


def adapter(paths: RunPaths) -> dict[str, Tensor]:
    """Return the matrices of the adapter of a result."""
    return load_file(paths.result / "adapter" / "adapter_model.safetensors")


def validation_losses(paths: RunPaths) -> list[float]:
    """Return the validation losses in the journal."""
    return [e.data["loss"] for e in JournalReader(paths.journal).read() if e.kind == "validation"]


def events_text(paths: RunPaths) -> list[str]:
    """Return the events of the journal, without steps."""
    return [f"{e.kind} {e.data}" for e in JournalReader(paths.journal).read() if e.kind != "step"]
