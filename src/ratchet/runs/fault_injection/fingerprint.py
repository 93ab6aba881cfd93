"""What a training came to, as digests: two trainings are exact when nothing of it differs."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.runs.journal import Event, Reader, Replay
from ratchet.storage import digests
from ratchet.storage.layout import Layout

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
class Outcome:
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
    def of(cls, layout: Layout) -> "Outcome":
        """Of a finished training. Raises DataError when its project holds no single run."""
        paths = sorted(p for p in layout.train.rglob("*") if p.is_file())
        contents = {p.relative_to(layout.train).as_posix(): digests.of_file(p) for p in paths}
        events = list(Reader(journal_of(layout)).read())
        series = tuple(_line(event) for event in _first_tellings(events))
        return cls(contents, digests.of_json(series), series, tuple(_contradictions(events)))


def journal_of(layout: Layout) -> Path:
    """The journal of the one run inside a project, wherever else this process is told that runs are.

    Raises:
        DataError: there is none, or more than one.
    """
    runs = layout.experiments / "runs"
    found = sorted(runs.glob("*/journal.jsonl"))
    if len(found) != 1:
        raise DataError(f"{runs}: {len(found)} runs, expected one")
    return found[0]


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """What differs, for people; empty when the two are exact. `found` must not contradict itself either."""
    texts = []
    for name in sorted(expected.files.keys() | found.files.keys()):
        if expected.files.get(name) != found.files.get(name):
            texts.append(f"{name}: {_how(expected.files.get(name), found.files.get(name))}")
    texts = _shortened(texts, "files")
    if expected.series_digest != found.series_digest:
        texts += _shortened(_series_differences(expected.series, found.series), "events of the metric series")
    return texts + _shortened(list(found.contradictions), "contradictions")


def batches(outcome: Outcome) -> dict[int, str]:
    """The ledger of samples: for each step the digest of the rows that it learned from, told once."""
    told = map(json.loads, outcome.series)
    return {item["step"]: item[BATCH] for item in told if item["event"] == "step" and BATCH in item}


def _first_tellings(events: Iterable[Event]) -> Iterable[Event]:
    replay = Replay()
    return (event for event in events if event.kind in TOLD and replay.new(event))


def _line(event: Event) -> str:
    fields: dict[str, Any] = {name: event.data[name] for name in TOLD[event.kind] if name in event.data}
    return digests.canonical_json({"event": event.kind, **fields})


def _contradictions(events: Iterable[Event]) -> Iterable[str]:
    """Whether a step was done or skipped, and every number, is as at its first telling; none is left out."""
    first: dict[tuple[bool, int], str] = {}
    for event in events:
        if event.kind not in TOLD or not isinstance(step := event.data.get("step"), int):
            continue
        line = _line(event)
        before = first.setdefault((event.kind == "validation", step), line)
        if before != line:
            yield f"attempt {event.attempt} did step {step} again otherwise: {line}, before {before}"
    steps = {step for validation, step in first if not validation}
    for missing in sorted(set(range(1, max(steps, default=0) + 1)) - steps):
        yield f"step {missing} is nowhere in the journal"


def _how(expected: str | None, found: str | None) -> str:
    if expected is None:
        return "not there in the reference"
    return "not there" if found is None else "other content"


def _series_differences(expected: tuple[str, ...], found: tuple[str, ...]) -> list[str]:
    texts = [f"{b} instead of {a}" for a, b in zip(expected, found, strict=False) if a != b]
    if len(expected) != len(found):
        texts.append(f"{len(found)} events instead of {len(expected)}")
    return texts


def _shortened(texts: list[str], what: str) -> list[str]:
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN], f"and {len(texts) - SHOWN} more {what}"]
