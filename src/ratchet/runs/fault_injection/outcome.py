"""Outcome of a training with faults: a fingerprint for exact comparison, and a timeline of its recoveries."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.runs.journal import JournalEvent, JournalReader, ReplayFilter
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout

MAX_SHOWN = 5
"""Maximum number of differences of a kind that are listed; the others are only counted."""

SERIES_FIELDS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "grad_norm", "learning_rate", "trained_tokens", "input_tokens", "batch"),
    "step_skipped": ("step", "action", "rows", "rollback_step", "learning_rate_scale"),
    "validation": ("step", "loss", "tokens", "improved"),
}
"""Events and fields of the metric series, which do not depend on time or machine."""

MARKED = ("step_repeated", "step_skipped", "microbatch_budget", "gradient_spike", "alert", "notice")
"""Journal events that the picture of a trial marks."""


@dataclass(frozen=True)
class TrainingFingerprint:
    """Digests of everything that must be equal in a training with faults and in its reference."""

    files: dict[str, str]
    """SHA-256 of each output file of stage train: adapter, report, and the checkpoints best and last."""
    series: tuple[str, ...] = field(repr=False)
    """Metric series as readers of the journal see it: a line per event, to list differences."""
    contradictions: tuple[str, ...] = ()
    """Steps and validations that were repeated with different numbers, or are missing."""

    @classmethod
    def from_project(cls, layout: ProjectLayout) -> "TrainingFingerprint":
        """Compute the fingerprint of a finished training. Raises DataError unless its project has exactly one run."""
        paths = sorted(path for path in layout.train.rglob("*") if path.is_file())
        contents = {path.relative_to(layout.train).as_posix(): digests.hash_file(path) for path in paths}
        events = list(JournalReader(find_journal(layout)).read())
        replay = ReplayFilter()
        first_events = (event for event in events if event.kind in SERIES_FIELDS and replay.is_new(event))
        series = tuple(map(_format_event, first_events))
        return cls(contents, series, tuple(_find_contradictions(events)))


def find_journal(layout: ProjectLayout) -> Path:
    """Return the journal of the only run in experiments/runs of a project. RATCHET_RUNS does not apply. Raises
    DataError if there is none, or more than one."""
    runs = layout.experiments / "runs"
    journals = sorted(runs.glob("*/journal.jsonl"))
    if len(journals) != 1:
        raise DataError(f"{runs}: found {len(journals)} runs; expected one")
    return journals[0]


def find_differences(expected: TrainingFingerprint, found: TrainingFingerprint) -> list[str]:
    """Describe the differences; empty if both are equal and `found` does not contradict itself."""
    texts = []
    for name in sorted(expected.files.keys() | found.files.keys()):
        if name not in expected.files:
            texts.append(f"{name}: missing in the reference")
        elif expected.files[name] != found.files.get(name):
            texts.append(f"{name}: {'different content' if name in found.files else 'missing'}")
    texts = _shorten(texts, "files")
    if expected.series != found.series:
        differing = [f"{b} instead of {a}" for a, b in zip(expected.series, found.series, strict=False) if a != b]
        if len(expected.series) != len(found.series):
            differing.append(f"{len(found.series)} events instead of {len(expected.series)}")
        texts += _shorten(differing, "events of the metric series")
    return texts + _shorten(list(found.contradictions), "contradictions")


def _format_event(event: JournalEvent) -> str:
    fields: dict[str, Any] = {name: event.data[name] for name in SERIES_FIELDS[event.kind] if name in event.data}
    return digests.canonical_json({"event": event.kind, **fields})


def _find_contradictions(events: Iterable[JournalEvent]) -> Iterable[str]:
    """Find steps and validations that were repeated with another outcome or other numbers, and missing steps."""
    first_lines: dict[tuple[bool, int], str] = {}
    for event in events:
        if event.kind not in SERIES_FIELDS or not isinstance(step := event.data.get("step"), int):
            continue
        line = _format_event(event)
        first_line = first_lines.setdefault((event.kind == "validation", step), line)
        if first_line != line:
            yield f"attempt {event.attempt} repeated step {step} differently: {line}, before {first_line}"
    steps = {step for is_validation, step in first_lines if not is_validation}
    for missing in sorted(set(range(1, max(steps, default=0) + 1)) - steps):
        yield f"step {missing} is missing in the journal"


def _shorten(texts: list[str], kind: str) -> list[str]:
    return texts if len(texts) <= MAX_SHOWN else [*texts[:MAX_SHOWN], f"and {len(texts) - MAX_SHOWN} more {kind}"]


@dataclass
class FaultTrialTimeline:
    """Timeline of a trial, read from its journal while it runs.

    Times are in seconds since the start of the trial, by a monotonic clock. Recorded times are some hundredths of a
    second too late.
    """

    attempts: list[list[float]] = field(default_factory=list)
    """Start and end of each worker."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Time and name of injected faults and of unusual journal events."""
    finished_s: float | None = None
    recoveries_s: list[float] = field(default_factory=list)
    """Seconds of each recovery that no further fault interrupted. A recovery lasts from an external fault, or from the
    last event of a worker that failed without one, to the first step of the next worker or to the end of training."""
    lost_steps: list[int] = field(default_factory=list)
    """Number of steps that each restarted worker repeated because they were not saved."""
    stops_s: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of events of each kind. Failures are counted also as `worker_exited:CLASS`."""
    delivered: int = 0
    missed: int = 0
    """Number of external faults that were not injected, because training had already ended."""
    problems: list[str] = field(default_factory=list)
    """Violations of the contract, and manual interventions."""
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Properties of the first worker: device, compute_dtype, threads, torch, planned_steps."""
    worker_steps: int = 0
    """Number of steps that the current worker has done."""
    last_step: int = 0
    farthest_step: int = 0
    """Last step that any worker of the trial has done."""
    _fault_s: float | None = None
    _last_event_s: float = 0.0
    _reader: JournalReader | None = None

    @property
    def checkpoint_step(self) -> int:
        """Step of the newest checkpoint."""
        return self.checkpoints[-1][1] if self.checkpoints else 0

    def record_fault(self, now_s: float, action: str) -> None:
        """Record that an external fault was injected."""
        self.marks.append((now_s, action))
        self.delivered += 1
        self._fault_s = now_s

    def worker_started(self, now_s: float) -> None:
        """Record that a new worker was found."""
        self.worker_ended(now_s)
        self.attempts.append([now_s])

    def worker_ended(self, now_s: float) -> None:
        """Record that the worker is gone or was replaced."""
        if self.attempts and len(self.attempts[-1]) == 1:
            self.attempts[-1].append(now_s)

    def read(self, journal: Path, now_s: float) -> bool:
        """Add the new events of the journal. Return whether there were any."""
        if self._reader is None:
            self._reader = JournalReader(journal)
        events = list(self._reader.read())
        for event in events:
            self._add(event, now_s)
            self._last_event_s = now_s
        return bool(events)

    def skip_to_end(self, journal: Path) -> None:
        """Continue after the current end of a journal that a fault has changed or moved."""
        self._reader = JournalReader(journal)
        for _ in self._reader.read():
            pass

    def _add(self, event: JournalEvent, now_s: float) -> None:
        self.kinds[event.kind] += 1
        if event.kind in MARKED:
            self.marks.append((now_s, event.kind))
        if event.kind == "attempt_started":
            self.worker_steps = 0
        elif event.kind == "worker_ready":
            self._add_ready(event.data)
        elif event.kind in ("step", "step_skipped"):
            self.last_step = event.data["step"]
            self.steps.append((now_s, self.last_step))
            self.worker_steps += 1
            self.farthest_step = max(self.farthest_step, self.last_step)
            if self.worker_steps == 1:
                self._add_recovery(now_s)
        elif event.kind == "checkpoint_saved":
            self.checkpoints.append((now_s, event.data["step"]))
        elif event.kind == "worker_exited":
            failure = str(event.data["failure_class"])
            self.kinds[f"worker_exited:{failure}"] += 1
            if self._fault_s is None:  # no external fault: the last event shows when the worker last worked
                self._fault_s = self._last_event_s
                self.marks.append((now_s, f"died: {failure}"))
        elif event.kind == "finished":
            self.finished_s = now_s
            self._add_recovery(now_s)

    def _add_ready(self, data: dict[str, Any]) -> None:
        if not self.facts:
            names = ("device", "compute_dtype", "threads", "torch", "planned_steps")
            self.facts = {name: data[name] for name in names if name in data}
        start = int(data["start_step"])
        if self.kinds["worker_ready"] > 1:
            self.lost_steps.append(self.last_step - start)
        self.last_step = start

    def _add_recovery(self, now_s: float) -> None:
        if self._fault_s is not None:
            self.recoveries_s.append(now_s - self._fault_s)
            self._fault_s = None


@dataclass(frozen=True)
class BaselineTiming:
    """Timing of an undisturbed training, from which the times of external faults are computed."""

    first_step_s: float
    """Time from the start of the worker to its first step."""
    steps_s: dict[int, float]
    """Time from the start of the worker to each step."""
    finished_s: float

    @classmethod
    def from_timeline(cls, timeline: FaultTrialTimeline) -> "BaselineTiming":
        """Compute the timing of a training that finished in its first attempt."""
        begin = timeline.attempts[0][0]
        times = {step: at - begin for at, step in timeline.steps}
        finished = timeline.finished_s if timeline.finished_s is not None else timeline.steps[-1][0]
        return cls(min(times.values()), times, finished - begin)

    def find_moment(self, step: int, started: bool, fraction: float) -> "TrainingMoment":
        """Return the moment after this fraction (below 1) of the time left.

        `step` is the last step that was done. `started`: the worker has just been started, so that the time left
        includes its start-up.
        """
        now_s = self.steps_s.get(step, self.first_step_s)
        start_s = self.first_step_s if started else 0.0
        ahead_s = fraction * (self.finished_s - now_s + start_s)
        if ahead_s < start_s:
            return TrainingMoment(step, ahead_s, is_loading=True)
        moment_s = now_s + ahead_s - start_s
        steps_done = (number for number, at_s in self.steps_s.items() if step <= number and at_s <= moment_s)
        last_step = max(steps_done, default=step)
        return TrainingMoment(last_step, moment_s - self.steps_s.get(last_step, now_s))


@dataclass(frozen=True)
class TrainingMoment:
    """Moment of a training, defined by its progress instead of the clock, because the speed differs between trainings.

    The moment is `delay_s` after the end of `step`, or the end of the next step if that is earlier.
    """

    step: int
    delay_s: float
    is_loading: bool = False
    """Whether `delay_s` counts from the start of the worker instead."""
