"""Starts, restarts and stops the workers of `ratchet sweep` (sweep_worker.py)."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.config.machine import Machine
from ratchet.config.units import format_exit_code
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InputError, RunFailedError
from ratchet.runs.fork_server import ForkServer, Program
from ratchet.runs.gpus import list_visible_gpus

WORKER_MODULE = "ratchet.tuning.sweep_worker"

RESTART_DELAY_S = 1.0
"""Seconds before a worker that was interrupted is started again. A worker that died is replaced at once, but after
short-lived workers in a row, the delay is multiplied by their number."""

SHORT_LIFE_S = 20.0
"""A worker that dies within this number of seconds after its start counts as short-lived."""

MAX_SHORT_LIVES = 5
"""Number of short-lived workers in a row that ends the sweep."""

KILL_WAIT_S = 30.0
"""Seconds, in addition to machine.grace_period_s, after which a worker that does not end is killed."""

GONE_S = 60.0
"""Maximum number of seconds to wait for a killed process to end."""


def divide_threads(machine: Machine, workers: int) -> Machine:
    """Return the machine settings of each worker: the cores are divided among workers, unless `threads` is set.

    More threads than cores make everything slow: two trainings on two cores with two threads each ran at a sixth of the
    speed.
    """
    if workers == 1 or machine.threads:
        return machine
    return machine.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // workers)})


class SweepWorkerProcess(Protocol):
    """A worker process, on this or another machine."""

    @property
    def lost(self) -> str:
        """Reason why the process was lost with its node; empty if the process was not lost."""

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs. A negative code is the signal that ended it."""

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired if it still runs after `timeout` seconds."""

    def terminate(self) -> None:
        """Ask the worker to seal its checkpoint and end."""

    def kill(self) -> None:
        """Kill the worker."""


class WorkerLauncher(Protocol):
    """Launcher of workers."""

    max_losses: int
    """Maximum number of lost workers that are replaced in a slot. A worker is lost if its node is lost."""

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Start the worker of a slot; its output is appended to the log."""

    def close(self) -> None:
        """Close all resources; all workers have ended."""


class LocalWorkerLauncher:
    """Launcher of worker processes on this machine; each process gets its own GPU if there are enough.

    The workers are forks of one server, so a worker that replaces another one does not import the libraries again.
    """

    max_losses = 0

    def __init__(self, arguments: Sequence[str], group: tuple[str, str] | None = None) -> None:
        """Begin without workers.

        Args:
            arguments: project and settings of the workers.
            group: number of the worker whose group trains their trials, and socket of the group; None: no group.
        """
        self._arguments, self._group = arguments, group
        self._gpus, self._server = list_visible_gpus(), ForkServer()

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Start a worker."""
        gpus = self._gpus
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[(number - 1) % len(gpus)]} if len(gpus) > 1 else {}
        with log.open("ab") as stream:
            # The worker has its own session, so that Ctrl-C reaches only this process. It asks workers to end once.
            arguments = (*self._arguments, None, *(self._group or [str(number)]))
            return self._server.start(Program(WORKER_MODULE, arguments, os.environ | gpu), stream.fileno())

    def close(self) -> None:
        """End the server."""
        self._server.close()


@dataclass
class WorkerSlot:
    """Slot of the pool, with its current process."""

    number: int
    log: Path
    process: SweepWorkerProcess | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    """Monotonic time at which to start the next process."""
    deaths: int = 0
    short_lives: int = 0
    """Number of short-lived workers in a row, without those killed on purpose."""
    losses: int = 0
    """Number of workers that were lost with their nodes."""
    is_victim: bool = False
    """Whether the process was killed on purpose."""
    is_done: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None


@dataclass
class WorkerKillInjector:
    """Choice of workers to kill on purpose, to test fault tolerance (`ratchet sweep --chaos N`)."""

    count: int
    seed: int
    gap_s: tuple[float, float]
    """Shortest and longest time between two kills, in seconds."""
    kills: int = 0
    """Number of kills so far."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._next_s = time.monotonic() + self._draw.uniform(*self.gap_s)

    def choose_victim(self, slots: list[WorkerSlot]) -> WorkerSlot | None:
        """Return the worker to kill now; None if no kill is due."""
        now = time.monotonic()
        # A worker that was killed may still be alive for a moment; killing it again would count one death twice.
        alive = [slot for slot in slots if slot.is_alive and not slot.is_victim]
        settled = [slot for slot in alive if now - slot.started_s > self.gap_s[0] / 2]
        if self.kills >= self.count or now < self._next_s or not settled:
            return None
        self._next_s = time.monotonic() + self._draw.uniform(*self.gap_s)
        self.kills += 1
        return self._draw.choice(settled)


class WorkerPool:
    """Pool of `count` worker processes that share a study; each runs one trial at a time.

    `logs` is the folder of their output; `on_progress` gets messages about workers.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        count: int,
        logs: Path,
        kills: WorkerKillInjector | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self._launcher, self._kills, self._on_progress = launcher, kills, on_progress
        self.slots = [WorkerSlot(number, logs / f"worker-{number}.log") for number in range(1, count + 1)]

    @property
    def alive_count(self) -> int:
        """Number of running workers."""
        return sum(slot.is_alive for slot in self.slots)

    @property
    def kill_count(self) -> int:
        """Number of workers killed on purpose so far."""
        return self._kills.kills if self._kills else 0

    def poll(self) -> bool:
        """Start missing workers, and return whether any worker is still needed. Call this about once a second.

        Raises:
            InputError: a worker cannot use the settings, the data or the study.
            RunFailedError: workers die right after their start, or are lost too often.
        """
        for slot in self.slots:
            if not slot.is_done:
                self._poll_slot(slot)
        if self._kills and (victim := self._kills.choose_victim(self.slots)) and victim.process:
            self._on_progress(f"killing worker {victim.number} on purpose ({self.kill_count} of {self._kills.count})")
            victim.is_victim = True
            victim.process.kill()
        return not all(slot.is_done for slot in self.slots)

    def _poll_slot(self, slot: WorkerSlot) -> None:
        if slot.process is None:
            if time.monotonic() >= slot.restart_at_s:
                slot.process = self._launcher.start(slot.number, slot.log)
                slot.started_s = time.monotonic()
            return
        exit_code = slot.process.poll()
        if exit_code is None:
            return
        lost, slot.process = slot.process.lost, None
        was_victim, slot.is_victim = slot.is_victim, False
        if exit_code in (EXIT_OK, EXIT_INTERRUPTED):
            slot.is_done = exit_code == EXIT_OK
            slot.restart_at_s = time.monotonic() + RESTART_DELAY_S
            return
        if exit_code == InputError.exit_code:
            raise InputError(f"worker {slot.number}: {_last_log_line(slot.log)}")
        reason = lost or format_exit_code(exit_code)
        slot.deaths += 1
        if lost:
            slot.losses += 1
            if slot.losses > self._launcher.max_losses:
                raise RunFailedError(
                    f"worker {slot.number} was lost {slot.losses} times, the last time because {lost}; it is "
                    f"replaced {self._launcher.max_losses} times at most. Run the same command again to resume"
                )
        else:
            is_short_lived = time.monotonic() - slot.started_s < SHORT_LIFE_S and not was_victim
            slot.short_lives = slot.short_lives + 1 if is_short_lived else 0
            if slot.short_lives >= MAX_SHORT_LIVES:
                raise RunFailedError(
                    f"worker {slot.number} died {slot.short_lives} times in a row within {SHORT_LIFE_S:g} s: "
                    f"{_last_log_line(slot.log)} (full log: {slot.log})"
                )
        self._on_progress(
            f"worker {slot.number} died ({reason}); starting another one, trials resume from their checkpoints"
        )
        slot.restart_at_s = time.monotonic() + RESTART_DELAY_S * slot.short_lives

    def stop(self, grace_s: float) -> None:
        """Ask all workers to end, wait until they have sealed their checkpoints, and kill those that have not."""
        try:
            self._stop_workers(grace_s)
        finally:
            self._launcher.close()

    def _stop_workers(self, grace_s: float) -> None:
        for slot in self.slots:
            if slot.is_alive and slot.process:
                slot.process.terminate()
        deadline_s = time.monotonic() + grace_s + KILL_WAIT_S
        for slot in self.slots:
            if slot.process is None:
                continue
            try:
                slot.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                slot.process.kill()
                slot.process.wait(GONE_S)


def _last_log_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "its log is empty"
