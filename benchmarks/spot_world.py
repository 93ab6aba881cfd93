"""Simulates the clock of a real training: machines come and go, and each step represents a longer one.

python benchmarks/spot_world.py PROJECT     trains the project as `ratchet train` does, without MLflow

One optimizer step of the small model stands for `step_s` seconds of a large one's; everything else (imports, loading,
agreeing on who may write, fetching the newest checkpoint, sealing, sending) takes on the simulated clock what it takes
here. So start-ups are not made shorter, but steps longer; the other way round start-ups would be the whole day. While a
checkpoint is sent, steps run on: a transfer of .3 s here stands for all the simulated time that they take, for 45 s if
a step of 3 s takes 20 ms. The larger the scale, the older the newest durable checkpoint of a machine that vanishes.

Two things are charged that the clock does not show: a machine that vanished without a word is waited for as long as the
default `machine.lease_timeout_s` says, although a shorter lease is used here; and in a replay the published time for
loading is charged in the place of ours.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import killed
from small_project import linked

from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_INTERRUPTED
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.status import Goodput
from ratchet.storage.layout import ProjectLayout

Blow = Literal["worker", "notice", "gone"]
"""The worker is killed; the machine is taken away with a notice; it vanishes with everything on it."""
PATIENCE_S = 600.0
POLL_S = 0.005
LEASE_S = 10.0
"""Of these trainings. With a shorter one a replica on a busy machine seems not to answer: 2 s were too few."""
CHARGED_LEASE_S = Machine().lease_timeout_s


@dataclass
class Cost:
    """Cost of a fault, in simulated seconds."""

    blow: Blow
    dealt_s: float
    regained_s: float | None = None
    """When the first step was done that nobody had done before."""
    lost_steps: int | None = None
    """Steps that whoever went on had to do again."""


@dataclass
class World:
    """A run on many machines."""

    project: ProjectLayout
    folder: Path
    settings: Settings
    step_s: float
    """Simulated seconds of one optimizer step."""
    clock_s: float = 0.0
    best: int = 0
    """The furthest step that anybody has done."""
    machines: int = 0
    done_again: int = 0
    """Steps that somebody had done before."""
    costs: list[Cost] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """Of each checkpoint that arrived in the replica: from sealed to durable."""
    _sealed_s: dict[int, float] = field(default_factory=dict, init=False)

    def start(self) -> "Life":
        """A new machine, with an empty disk but for base and data, on which the command is given."""
        self.machines += 1
        place = linked(self.project, self.folder / f"machine-{self.machines}", self.settings)
        return Life(self, place)

    def is_past(self, clock_s: float) -> bool:
        """Return whether this time has passed."""
        return self.clock_s >= clock_s

    def update(self, event: JournalEvent) -> None:
        """Keep the account; the clock has come to this event."""
        step = event.data.get("step", 0)
        match event.kind:
            case "worker_ready":
                for cost in self.costs:
                    if cost.lost_steps is None:
                        cost.lost_steps = self.best - event.data["start_step"]
            case "step" if step <= self.best:
                self.done_again += 1
            case "step":
                self.best = step
                for cost in self.costs:
                    if cost.regained_s is None:
                        cost.regained_s = self.clock_s
            case "checkpoint_saved":
                self._sealed_s[step] = self.clock_s
            case "replicated" if event.data["artifact"] == "checkpoint" and step in self._sealed_s:
                self.lags_s.append(self.clock_s - self._sealed_s.pop(step))


class Life:
    """The command on one machine, from start to end. Each look advances the clock of its world."""

    def __init__(self, world: World, place: ProjectLayout) -> None:
        self._world, self.place = world, place
        self._output = (place.root / "output.log").open("wb")
        self._began_t, self._last_s = time.time(), time.monotonic()
        self._readers: dict[Path, JournalReader] = {}
        self._is_loaded = False
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        self.process = subprocess.Popen(
            [sys.executable, killed.__file__, str(place.root)], env=clean, stdout=self._output, stderr=self._output
        )

    def loaded(self) -> bool:
        """Return whether a worker has loaded everything."""
        return self._is_loaded

    def until(self, there: Callable[[], bool]) -> bool:
        """Look on until it is so; False when the command has ended before."""
        quiet_s = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            if self.look():
                quiet_s = time.monotonic()
            if there():
                return True
            if ended:
                return False
            if time.monotonic() - quiet_s > PATIENCE_S:
                self.process.kill()
                raise SystemExit(f"nothing in the journal for {PATIENCE_S:g} s\n{self.said()}")
            time.sleep(POLL_S)

    def look(self) -> bool:
        """Advance the clock by new events. Return whether the journal has new events."""
        world, now_s = self._world, time.monotonic()
        passed_s, self._last_s, news = now_s - self._last_s, now_s, False
        for path in self.place.runs.glob("*/journal.jsonl"):
            for event in self._readers.setdefault(path, JournalReader(path)).read():
                if event.t < self._began_t - 0.01:
                    continue  # what came with the replica's journal
                news = True
                self._is_loaded |= event.kind == "worker_ready"
                if event.kind == "step":
                    passed_s += world.step_s - event.data["step_s"]
                    world.clock_s += passed_s
                    passed_s = 0.0
                world.update(event)
        world.clock_s += passed_s
        return news

    def deal(self, blow: Blow) -> None:
        """Do it, and wait for what follows from it at once. A machine that it was dealt to is closed."""
        world, dealt_s = self._world, self._world.clock_s
        worker = find_worker(self.process.pid, self.place.root)
        if blow != "worker":
            self.process.send_signal(signal.SIGTERM if blow == "notice" else signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        elif worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        while worker is not None and Path("/proc", str(worker), "exe").exists():
            time.sleep(POLL_S)
        self.look()  # what was done before it was dead is no recovery
        if self.process.poll() == 0:
            return  # it had finished
        world.costs.append(Cost(blow, dealt_s))
        if blow == "worker":
            return
        if blow == "notice" and self.process.returncode != EXIT_INTERRUPTED:
            raise SystemExit(f"a notice ended with exit code {self.process.returncode}\n{self.said()}")
        if blow == "gone":
            world.clock_s += CHARGED_LEASE_S - LEASE_S
        self.close(removed=True)

    def close(self, removed: bool) -> None:
        """The machine is given back."""
        self._output.close()
        if removed:
            shutil.rmtree(self.place.root)

    def goodput(self) -> Goodput:
        """By the journal as it is on this machine, and by this machine's clock."""
        account = Goodput()
        for path in self.place.runs.glob("*/journal.jsonl"):
            for event in JournalReader(path).read():
                account.update(event)
        return account

    def said(self) -> str:
        """Return the end of the command's output."""
        return (self.place.root / "output.log").read_text(errors="replace")[-3000:]
