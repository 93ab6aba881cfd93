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

from ratchet.config import Machine
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InputError, RunFailedError

WORKER = (sys.executable, "-m", "ratchet.sweeping.worker")
AGAIN_S = 1.0
"""Before a worker that died is started again."""
QUICK_S = 20.0
QUICK_DEATHS = 5
"""So many deaths in a row, each of a worker that lived no longer than QUICK_S, are our fault or the machine's."""
KILL_WAIT_S = 30.0
"""Beyond machine.grace_s."""


def shared_out(machine: Machine, workers: int) -> Machine:
    """The machine as each of so many workers may use it: its cores divided, unless a number of threads is set.

    Threads beyond the cores make everything slower; two trainings on two cores with two threads each ran at a sixth.
    """
    if workers == 1 or machine.threads:
        return machine
    return machine.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // workers)})


def gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; asked without loading CUDA."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in named.split(",") if name)
    there = Path("/proc/driver/nvidia/gpus")
    return tuple(str(number) for number in range(len(list(there.iterdir())))) if there.is_dir() else ()


@dataclass
class Member:
    """One place in the crew, and the process that fills it."""

    number: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    began_s: float = 0.0
    again_s: float = 0.0
    """When to start the next one; monotonic."""
    deaths: int = 0
    quick: int = 0
    """Deaths in a row, not on purpose, of a worker that had lived no longer than QUICK_S."""
    victim: bool = False
    """Killed on purpose."""
    over: bool = False

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.poll() is None


@dataclass
class Kills:
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

    def maybe(self, members: list[Member]) -> Member | None:
        """The worker to be killed now, if it is time for one."""
        alive = [member for member in members if member.alive and time.monotonic() - member.began_s > self.gap_s[0] / 2]
        if len(self.done) >= self.wanted or time.monotonic() < self._next_s or not alive:
            return None
        self._next_s = time.monotonic() + self._draw.uniform(*self.gap_s)
        self.done.append(time.time())
        return self._draw.choice(alive)


class Crew:
    """Worker processes that share the study; each carries out one trial at a time.

    Args:
        command: arguments of a worker.
        count: workers at once.
        logs: folder of their output.
        kills: to be carried out; None: nobody is killed.
        say: told what happens.
    """

    def __init__(
        self, command: list[str], count: int, logs: Path, kills: Kills | None, say: Callable[[str], None]
    ) -> None:
        self._command, self._kills, self._say = command, kills, say
        self._gpus = gpus()
        self.members = [Member(number, logs / f"worker-{number}.log") for number in range(1, count + 1)]

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
            RunFailedError: workers die as soon as they are started.
        """
        for member in self.members:
            if not member.over:
                self._tend(member)
        if self._kills and (victim := self._kills.maybe(self.members)) and victim.process:
            self._say(f"worker {victim.number} is killed on purpose ({self.killed} of {self._kills.wanted})")
            victim.victim = True
            victim.process.kill()
        return not all(member.over for member in self.members)

    def _tend(self, member: Member) -> None:
        if member.process is None:
            if time.monotonic() >= member.again_s:
                self._start(member)
            return
        exit_code = member.process.poll()
        if exit_code is None:
            return
        member.process = None
        if exit_code in (EXIT_OK, EXIT_INTERRUPTED):
            member.over = exit_code == EXIT_OK
            member.again_s = time.monotonic() + AGAIN_S
            return
        if exit_code == InputError.exit_code:
            raise InputError(f"worker {member.number}: {_last_words(member.log)}")
        lived_s = time.monotonic() - member.began_s
        member.deaths += 1
        member.quick = member.quick + 1 if lived_s < QUICK_S and not member.victim else 0
        member.victim = False
        if member.quick >= QUICK_DEATHS:
            raise RunFailedError(
                f"worker {member.number} died {member.quick} times in a row within {QUICK_S:g} s: "
                f"{_last_words(member.log)} (all of it: {member.log})"
            )
        how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        self._say(f"worker {member.number} died ({how}); another takes its place, trials go on from their checkpoints")
        member.again_s = time.monotonic() + AGAIN_S * (1 + member.quick)

    def _start(self, member: Member) -> None:
        with member.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
            member.process = subprocess.Popen(
                [*WORKER, *self._command, str(os.getpid())],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | self._gpu_of(member),
            )  # fmt: skip
        member.began_s = time.monotonic()

    def _gpu_of(self, member: Member) -> dict[str, str]:
        """Each worker has a GPU of its own, as long as there are enough."""
        if len(self._gpus) < 2:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self._gpus[(member.number - 1) % len(self._gpus)]}

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
                member.process.wait()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
