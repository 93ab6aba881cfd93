"""The workers of one `ratchet sweep`: started, started again when they die, asked to stop. Imports no torch."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ratchet.config.schema import Machine
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InputError, RunFailedError

WORKER = (sys.executable, "-m", "ratchet.tuning.worker")
AGAIN_S = 1.0
"""Before a worker that died is started again."""
QUICK_S = 20.0
QUICK_DEATHS = 5
"""So many deaths in a row, each of a worker that lived no longer than QUICK_S, are our fault or the machine's."""
KILL_WAIT_S = 30.0
"""Beyond machine.grace_s."""
GONE_S = 60.0
"""For a process that was killed to be gone."""


def divide_threads(machine: Machine, workers: int) -> Machine:
    """The machine as each of so many workers may use it: its cores divided, unless a number of threads is set.

    Threads beyond the cores make everything slower; two trainings on two cores with two threads each ran at a sixth.
    """
    if workers == 1 or machine.threads:
        return machine
    return machine.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // workers)})


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; asked without loading CUDA."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in named.split(",") if name)
    there = Path("/proc/driver/nvidia/gpus")
    return tuple(str(number) for number in range(len(list(there.iterdir())))) if there.is_dir() else ()


class SweepWorkerProcess(Protocol):
    """A worker, wherever it runs."""

    lost: str
    """Why it ended through no fault of its own, once it has: `its node was lost (...)`."""

    def poll(self) -> int | None:
        """Its exit code, once it has one; negative: the signal that ended it."""

    def wait(self, timeout: float) -> int:
        """The exit code; raises subprocess.TimeoutExpired when it has none after so many seconds."""

    def terminate(self) -> None:
        """Ask it to seal what it has, and to end."""

    def kill(self) -> None:
        """End it now."""


class WorkerLauncher(Protocol):
    """Where workers are started."""

    losses: int
    """Workers lost with their nodes that are replaced in one place of the crew, at most."""

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Start the worker of this place; what it says is appended to the log."""

    def close(self) -> None:
        """Let go of whatever was opened; all workers have ended."""


class _LocalWorkerProcess(subprocess.Popen[bytes]):
    """A process of this machine is never lost: whoever would notice is gone with it."""

    lost = ""


class LocalWorkerLauncher:
    """Workers are processes of this machine, each with a GPU of its own as long as there are enough.

    Args:
        command: arguments of a worker.
    """

    losses = 0

    def __init__(self, command: list[str]) -> None:
        self._command, self._gpus = command, visible_gpus()

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Start one."""
        with log.open("ab") as stream:
            # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
            return _LocalWorkerProcess(
                [*WORKER, *self._command, str(os.getpid())],
                stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | self._gpu_of(number),
            )  # fmt: skip

    def _gpu_of(self, number: int) -> dict[str, str]:
        if len(self._gpus) < 2:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self._gpus[(number - 1) % len(self._gpus)]}

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class WorkerSlot:
    """One place in the crew, and the process that fills it."""

    number: int
    log: Path
    process: SweepWorkerProcess | None = None
    began_s: float = 0.0
    again_s: float = 0.0
    """When to start the next one; monotonic."""
    deaths: int = 0
    quick: int = 0
    """Deaths in a row, not on purpose, of a worker that had lived no longer than QUICK_S."""
    losses: int = 0
    """Workers that were lost with their nodes."""
    victim: bool = False
    """Killed on purpose."""
    over: bool = False

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.poll() is None


@dataclass
class WorkerKillInjector:
    """Workers killed on purpose: `ratchet sweep --chaos N` shows that it does not matter."""

    wanted: int
    seed: int
    gap_s: tuple[float, float]
    """Bounds of the time between two kills."""
    done: list[float] = field(default_factory=list)
    """Unix times."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._next_s = time.monotonic() + self._draw.uniform(*self.gap_s)

    def maybe(self, members: list[WorkerSlot]) -> WorkerSlot | None:
        """The worker to be killed now, if it is time for one."""
        alive = [member for member in members if member.alive and time.monotonic() - member.began_s > self.gap_s[0] / 2]
        if len(self.done) >= self.wanted or time.monotonic() < self._next_s or not alive:
            return None
        self._next_s = time.monotonic() + self._draw.uniform(*self.gap_s)
        self.done.append(time.time())
        return self._draw.choice(alive)


class WorkerPool:
    """Worker processes that share the study; each carries out one trial at a time.

    Args:
        engine: starts them.
        count: workers at once.
        logs: folder of their output.
        kills: to be carried out; None: nobody is killed.
        say: told what happens.
    """

    def __init__(
        self,
        engine: WorkerLauncher,
        count: int,
        logs: Path,
        kills: WorkerKillInjector | None,
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._kills, self._say = engine, kills, say
        self.members = [WorkerSlot(number, logs / f"worker-{number}.log") for number in range(1, count + 1)]

    @property
    def alive(self) -> int:
        """Workers at work."""
        return sum(member.alive for member in self.members)

    @property
    def killed(self) -> int:
        """Workers killed on purpose until now."""
        return len(self._kills.done) if self._kills else 0

    def look(self) -> bool:
        """Start whoever is missing; returns whether somebody is still needed. To be called about once a second.

        Raises:
            InputError: a worker found settings, data or study unusable.
            RunFailedError: workers die as soon as they are started, or are lost more often than is put up with.
        """
        for member in self.members:
            if not member.over:
                self._tend(member)
        if self._kills and (victim := self._kills.maybe(self.members)) and victim.process:
            self._say(f"worker {victim.number} is killed on purpose ({self.killed} of {self._kills.wanted})")
            victim.victim = True
            victim.process.kill()
        return not all(member.over for member in self.members)

    def _tend(self, member: WorkerSlot) -> None:
        if member.process is None:
            if time.monotonic() >= member.again_s:
                self._start(member)
            return
        exit_code = member.process.poll()
        if exit_code is None:
            return
        lost, member.process = member.process.lost, None
        if exit_code in (EXIT_OK, EXIT_INTERRUPTED):
            member.over = exit_code == EXIT_OK
            member.again_s = time.monotonic() + AGAIN_S
            return
        if exit_code == InputError.exit_code:
            raise InputError(f"worker {member.number}: {_last_log_line(member.log)}")
        how = lost or (f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}")
        member.deaths += 1
        if lost:
            self._count_loss(member, lost)
        else:
            self._count_death(member)
        self._say(f"worker {member.number} died ({how}); another takes its place, trials go on from their checkpoints")
        member.again_s = time.monotonic() + AGAIN_S * (1 + member.quick)

    def _count_loss(self, member: WorkerSlot, lost: str) -> None:
        member.losses += 1
        if member.losses > self._engine.losses:
            raise RunFailedError(
                f"worker {member.number} was lost {member.losses} times, the last time because {lost}; more than "
                f"machine.ray.restarts ({self._engine.losses}). Repeat the command to go on"
            )

    def _count_death(self, member: WorkerSlot) -> None:
        lived_s = time.monotonic() - member.began_s
        member.quick = member.quick + 1 if lived_s < QUICK_S and not member.victim else 0
        member.victim = False
        if member.quick >= QUICK_DEATHS:
            raise RunFailedError(
                f"worker {member.number} died {member.quick} times in a row within {QUICK_S:g} s: "
                f"{_last_log_line(member.log)} (all of it: {member.log})"
            )

    def _start(self, member: WorkerSlot) -> None:
        member.process = self._engine.start(member.number, member.log)
        member.began_s = time.monotonic()

    def stop(self, grace_s: float) -> None:
        """Ask all to end, wait until they have sealed their checkpoints, and kill whoever has not."""
        for member in self.members:
            if member.alive and member.process:
                member.process.terminate()
        deadline_s = time.monotonic() + grace_s + KILL_WAIT_S
        for member in self.members:
            if member.process is None:
                continue
            try:
                member.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait(GONE_S)
        self._engine.close()


def _last_log_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
