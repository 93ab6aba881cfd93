"""What was seen of one trial while it ran, read off its journal; in seconds since it began (monotonic clock)."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.runs.journal import Event, Reader

MARKED = ("repeated", "skipped", "budget", "spike", "alert", "notice")
"""Journal events that show in the picture as something that happened to the training."""


@dataclass
class Chronicle:
    """One trial. Times are those at which we saw a thing, some hundredths of a second after it happened."""

    attempts: list[list[float]] = field(default_factory=list)
    """Begin and end of each worker."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Every telling of a step."""
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Blows, and what the journal says out of the ordinary."""
    finished_s: float | None = None
    recoveries_s: list[float] = field(default_factory=list)
    """From a blow, or the end of a worker, to the next new step; one for each that nothing else came in between."""
    lost_steps: list[int] = field(default_factory=list)
    """Steps that a worker did again because the one before it had not sealed them."""
    stops_s: list[float] = field(default_factory=list)
    """From a request to stop to the end of the command."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How many events of each kind; deaths as `died:CLASS` too."""
    delivered: int = 0
    """Blows that were dealt."""
    missed: int = 0
    """Blows that training had ended before."""
    problems: list[str] = field(default_factory=list)
    """What was not as the contract says, or needed a hand."""
    notes: list[str] = field(default_factory=list)
    """Which file or line was damaged, and how."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the first worker said about where it runs: device, compute_dtype, threads, torch."""

    own_steps: int = 0
    """New steps of the worker that is at work."""
    last_step: int = 0
    """Last step that the worker at work has told, or where it started."""
    farthest_step: int = 0
    _hurt_s: float | None = None
    _last_seen_s: float = 0.0
    _reader: Reader | None = None

    @property
    def checkpoint_step(self) -> int:
        """Newest one that was told of."""
        return self.checkpoints[-1][1] if self.checkpoints else 0

    def hurt(self, now_s: float, what: str) -> None:
        """A blow was dealt."""
        self.marks.append((now_s, what))
        self.delivered += 1
        self._hurt_s = now_s

    def begun(self, now_s: float) -> None:
        """A worker is there that was not there before."""
        self.ended(now_s)
        self.attempts.append([now_s])

    def ended(self, now_s: float) -> None:
        """There is no worker any more, or another one."""
        if self.attempts and len(self.attempts[-1]) == 1:
            self.attempts[-1].append(now_s)

    def read(self, journal: Path, now_s: float) -> bool:
        """Take in what is new in the journal; whether there was anything."""
        if self._reader is None:
            self._reader = Reader(journal)
        events = list(self._reader.read())
        for event in events:
            self._see(event, now_s)
            self._last_seen_s = now_s
        return bool(events)

    def reread(self, journal: Path) -> None:
        """The journal was changed or moved by us: go on behind what is in it now."""
        self._reader = Reader(journal)
        for _ in self._reader.read():
            pass

    def _see(self, event: Event, now_s: float) -> None:
        self.kinds[event.kind] += 1
        if event.kind in MARKED:
            self.marks.append((now_s, event.kind))
        if event.kind == "attempt":
            self.own_steps = 0
        elif event.kind == "ready":
            self._resumed(event.data)
        elif event.kind in ("step", "skipped"):
            self._stepped(event.data["step"], now_s)
        elif event.kind == "checkpoint":
            self.checkpoints.append((now_s, event.data["step"]))
        elif event.kind == "died":
            self._died(str(event.data["class"]), now_s)
        elif event.kind == "finished":
            self.finished_s = now_s
            self._recovered(now_s)

    def _resumed(self, data: dict[str, Any]) -> None:
        if not self.facts:
            names = ("device", "compute_dtype", "threads", "torch", "planned_steps")
            self.facts = {name: data[name] for name in names if name in data}
        start = int(data["start_step"])
        if self.kinds["ready"] > 1:
            self.lost_steps.append(self.last_step - start)
        self.last_step = start

    def _stepped(self, step: int, now_s: float) -> None:
        self.steps.append((now_s, step))
        self.own_steps += 1
        self.last_step = step
        self.farthest_step = max(self.farthest_step, step)
        if self.own_steps == 1:
            self._recovered(now_s)

    def _died(self, failure: str, now_s: float) -> None:
        self.kinds[f"died:{failure}"] += 1
        if self._hurt_s is None:  # nothing from outside: the worker was last well when it last said something
            self._hurt_s = self._last_seen_s
            self.marks.append((now_s, f"died: {failure}"))

    def _recovered(self, now_s: float) -> None:
        if self._hurt_s is not None:
            self.recoveries_s.append(now_s - self._hurt_s)
            self._hurt_s = None


@dataclass(frozen=True)
class Clock:
    """How long an undisturbed training takes: what blows are timed by."""

    first_step_s: float
    """From the start of the worker to its first step."""
    steps_s: dict[int, float]
    """From the start of the worker to each step."""
    finished_s: float

    @classmethod
    def of(cls, seen: Chronicle) -> "Clock":
        """Read off a training that finished at the first attempt."""
        begin = seen.attempts[0][0]
        times = {step: at - begin for at, step in seen.steps}
        finished = seen.finished_s if seen.finished_s is not None else seen.steps[-1][0]
        return cls(min(times.values()), times, finished - begin)

    def moment(self, step: int, started: bool, fraction: float) -> "Moment":
        """The moment after this fraction of the time that is left.

        Args:
            step: the last one that was done.
            started: the worker has only just been started, and start-up is part of the time that is left.
            fraction: below 1.
        """
        here_s = self.steps_s.get(step, self.first_step_s)
        start_s = self.first_step_s if started else 0.0
        ahead_s = fraction * (self.finished_s - here_s + start_s)
        if ahead_s < start_s:
            return Moment(step, ahead_s, loading=True)
        there_s = here_s + ahead_s - start_s
        passed = max((done for done, at in self.steps_s.items() if step <= done and at <= there_s), default=step)
        return Moment(passed, there_s - self.steps_s.get(passed, here_s))


@dataclass(frozen=True)
class Moment:
    """A moment in a training by what is done in it, not by the clock alone: another time all may go twice as fast."""

    step: int
    """When this step has been done, and then"""
    delay_s: float
    """so much later, or when the next step has been done, if that is earlier."""
    loading: bool = False
    """Counted from the start of the worker instead."""
