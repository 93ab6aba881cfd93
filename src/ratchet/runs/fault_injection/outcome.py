"""What a training came to, as digests: two trainings are exact when nothing of it differs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.runs.journal import JournalEvent, JournalReader, ReplayFilter
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout

SHOWN = 5
"""Differences of one kind that are named; the others are counted."""

TOLD: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "grad_norm", "learning_rate", "trained_tokens", "input_tokens", "batch"),
    "skipped": ("step", "action", "rows", "to_step", "rate_scale"),
    "validation": ("step", "loss", "tokens", "improved"),
}
"""What the metric series is made of: fields of events that do not depend on time or machine."""

BATCH = "batch"


@dataclass(frozen=True)
class TrainingFingerprint:
    """Everything that must be equal."""

    files: dict[str, str]
    """SHA-256 of every file of the stage's out: adapter, report; weights, optimizer, state of best and last."""
    series_digest: str
    """Of the metric series as readers of the journal see it."""
    series: tuple[str, ...] = field(repr=False)
    """The series itself, a line an event, to name what differs."""
    contradictions: tuple[str, ...] = ()
    """Steps and validations that were done again with other numbers than the first time, or left out."""

    @classmethod
    def of(cls, layout: ProjectLayout) -> "TrainingFingerprint":
        """Of a finished training. Raises DataError when its project holds no single run."""
        paths = sorted(p for p in layout.train.rglob("*") if p.is_file())
        contents = {p.relative_to(layout.train).as_posix(): digests.hash_file(p) for p in paths}
        events = list(JournalReader(find_journal(layout)).read())
        series = tuple(_format_event(event) for event in _first_occurrences(events))
        return cls(contents, digests.hash_json(series), series, tuple(_find_contradictions(events)))


def find_journal(layout: ProjectLayout) -> Path:
    """The journal of the one run inside a project, wherever else this process is told that runs are.

    Raises:
        DataError: there is none, or more than one.
    """
    runs = layout.experiments / "runs"
    found = sorted(runs.glob("*/journal.jsonl"))
    if len(found) != 1:
        raise DataError(f"{runs}: {len(found)} runs, expected one")
    return found[0]


def find_differences(expected: TrainingFingerprint, found: TrainingFingerprint) -> list[str]:
    """What differs, for people; empty when the two are exact. `found` must not contradict itself either."""
    texts = []
    for name in sorted(expected.files.keys() | found.files.keys()):
        if expected.files.get(name) != found.files.get(name):
            texts.append(f"{name}: {_describe_difference(expected.files.get(name), found.files.get(name))}")
    texts = _shorten(texts, "files")
    if expected.series_digest != found.series_digest:
        texts += _shorten(_find_series_differences(expected.series, found.series), "events of the metric series")
    return texts + _shorten(list(found.contradictions), "contradictions")


def collect_batch_digests(outcome: TrainingFingerprint) -> dict[int, str]:
    """The ledger of samples: for each step the digest of the rows that it learned from, told once."""
    told = map(json.loads, outcome.series)
    return {item["step"]: item[BATCH] for item in told if item["event"] == "step" and BATCH in item}


def _first_occurrences(events: Iterable[JournalEvent]) -> Iterable[JournalEvent]:
    replay = ReplayFilter()
    return (event for event in events if event.kind in TOLD and replay.new(event))


def _format_event(event: JournalEvent) -> str:
    fields: dict[str, Any] = {name: event.data[name] for name in TOLD[event.kind] if name in event.data}
    return digests.canonical_json({"event": event.kind, **fields})


def _find_contradictions(events: Iterable[JournalEvent]) -> Iterable[str]:
    """Whether a step was done or skipped, and every number, is as at its first telling; none is left out."""
    first: dict[tuple[bool, int], str] = {}
    for event in events:
        if event.kind not in TOLD or not isinstance(step := event.data.get("step"), int):
            continue
        line = _format_event(event)
        before = first.setdefault((event.kind == "validation", step), line)
        if before != line:
            yield f"attempt {event.attempt} did step {step} again otherwise: {line}, before {before}"
    steps = {step for validation, step in first if not validation}
    for missing in sorted(set(range(1, max(steps, default=0) + 1)) - steps):
        yield f"step {missing} is nowhere in the journal"


def _describe_difference(expected: str | None, found: str | None) -> str:
    if expected is None:
        return "not there in the reference"
    return "not there" if found is None else "other content"


def _find_series_differences(expected: tuple[str, ...], found: tuple[str, ...]) -> list[str]:
    texts = [f"{b} instead of {a}" for a, b in zip(expected, found, strict=False) if a != b]
    if len(expected) != len(found):
        texts.append(f"{len(found)} events instead of {len(expected)}")
    return texts


def _shorten(texts: list[str], what: str) -> list[str]:
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN], f"and {len(texts) - SHOWN} more {what}"]


# What was seen of one trial while it ran, read off its journal; in seconds since it began (monotonic clock).

MARKED = ("repeated", "skipped", "budget", "spike", "alert", "notice")
"""Journal events that show in the picture as something that happened to the training."""


@dataclass
class FaultTrialTimeline:
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
    _reader: JournalReader | None = None

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
            self._reader = JournalReader(journal)
        events = list(self._reader.read())
        for event in events:
            self._see(event, now_s)
            self._last_seen_s = now_s
        return bool(events)

    def reread(self, journal: Path) -> None:
        """The journal was changed or moved by us: go on behind what is in it now."""
        self._reader = JournalReader(journal)
        for _ in self._reader.read():
            pass

    def _see(self, event: JournalEvent, now_s: float) -> None:
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
class BaselineTiming:
    """How long an undisturbed training takes: what blows are timed by."""

    first_step_s: float
    """From the start of the worker to its first step."""
    steps_s: dict[int, float]
    """From the start of the worker to each step."""
    finished_s: float

    @classmethod
    def of(cls, seen: FaultTrialTimeline) -> "BaselineTiming":
        """Read off a training that finished at the first attempt."""
        begin = seen.attempts[0][0]
        times = {step: at - begin for at, step in seen.steps}
        finished = seen.finished_s if seen.finished_s is not None else seen.steps[-1][0]
        return cls(min(times.values()), times, finished - begin)

    def moment(self, step: int, started: bool, fraction: float) -> "TrainingMoment":
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
            return TrainingMoment(step, ahead_s, loading=True)
        there_s = here_s + ahead_s - start_s
        passed = max((done for done, at in self.steps_s.items() if step <= done and at <= there_s), default=step)
        return TrainingMoment(passed, there_s - self.steps_s.get(passed, here_s))


@dataclass(frozen=True)
class TrainingMoment:
    """A moment in a training by what is done in it, not by the clock alone: another time all may go twice as fast."""

    step: int
    """When this step has been done, and then"""
    delay_s: float
    """so much later, or when the next step has been done, if that is earlier."""
    loading: bool = False
    """Counted from the start of the worker instead."""
