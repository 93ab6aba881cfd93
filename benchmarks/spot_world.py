"""Simulates the clock of a real training: machines come and go, and each step represents a longer one.

    python benchmarks/killed.py PROJECT     is the command on each machine: `ratchet train` without MLflow

One optimizer step of the small model stands for `step_s` seconds of a large model's step. All other work (imports,
loading, acquiring the lease, fetching the newest checkpoint, sealing, sending) takes the same time on the simulated
clock as on the real clock. So steps are made longer, and start-ups are not made shorter; otherwise start-ups would take
the whole day. Steps continue while a checkpoint is sent: a transfer of 0.3 s here stands for the simulated time of the
steps in these 0.3 s, which is 45 s if a step of 3 s takes 20 ms. The larger the scale, the older is the newest durable
checkpoint of a machine that vanishes.

The clock is corrected in two cases. After a machine vanished without a notice, the clock counts the default
`machine.lease_timeout_s`, although the training uses a shorter lease. In a replay, the clock counts the published
loading time instead of the real one.
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
"""Kinds of faults. worker: the worker is killed. notice: the machine is taken away with a notice. gone: the machine
vanishes with all its files."""
PATIENCE_S = 600.0
POLL_S = 0.005
LEASE_S = 10.0
"""Lease timeout of these trainings in seconds. With a shorter one, a replica on a busy machine seems not to answer: 2 s
were too few."""
CHARGED_LEASE_S = Machine().lease_timeout_s


@dataclass
class Cost:
    """Cost of a fault, in simulated seconds."""

    blow: Blow
    dealt_s: float
    regained_s: float | None = None
    """Time of the first step that no attempt had done before."""
    lost_steps: int | None = None
    """Number of steps that the next attempt has to do again."""


@dataclass
class World:
    """A run on many machines, with its simulated clock."""

    project: ProjectLayout
    folder: Path
    settings: Settings
    step_s: float
    """Simulated seconds of one optimizer step."""
    clock_s: float = 0.0
    best: int = 0
    """The last step that any attempt has done."""
    machines: int = 0
    done_again: int = 0
    """Number of steps that an earlier attempt had done."""
    costs: list[Cost] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """Seconds from sealed to durable of each checkpoint that arrived in the replica."""
    _sealed_s: dict[int, float] = field(default_factory=dict, init=False)

    def start(self) -> "Life":
        """Start the command on a new machine. Its disk is empty except for base and data."""
        self.machines += 1
        place = linked(self.project, self.folder / f"machine-{self.machines}", self.settings)
        return Life(self, place)

    def is_past(self, clock_s: float) -> bool:
        """Return whether this time has passed."""
        return self.clock_s >= clock_s

    def update(self, event: JournalEvent) -> None:
        """Update the figures with an event. The clock has already advanced to the event."""
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
    """The command on one machine, from start to end. Each call of `look` advances the clock of its world."""

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
        """Read the journal until a condition holds. Return False if the command ends first."""
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
                    continue  # an event of an earlier machine, from the replica's journal
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
        """Inject a fault, and wait for its immediate effects. A machine that is taken away or vanishes is closed."""
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
        self.look()  # steps from before the fault do not count as recovery
        if self.process.poll() == 0:
            return  # the training had finished
        world.costs.append(Cost(blow, dealt_s))
        if blow == "worker":
            return
        if blow == "notice" and self.process.returncode != EXIT_INTERRUPTED:
            raise SystemExit(f"a notice ended with exit code {self.process.returncode}\n{self.said()}")
        if blow == "gone":
            world.clock_s += CHARGED_LEASE_S - LEASE_S
        self.close(removed=True)

    def close(self, removed: bool) -> None:
        """Close the machine's log, and delete its files if `removed`."""
        self._output.close()
        if removed:
            shutil.rmtree(self.place.root)

    def goodput(self) -> Goodput:
        """Compute goodput from the journal on this machine, by wall-clock time."""
        account = Goodput()
        for path in self.place.runs.glob("*/journal.jsonl"):
            for event in JournalReader(path).read():
                account.update(event)
        return account

    def said(self) -> str:
        """Return the end of the command's output."""
        return (self.place.root / "output.log").read_text(errors="replace")[-3000:]
