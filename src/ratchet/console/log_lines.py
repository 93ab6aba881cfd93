"""A run as plain lines, for logs and for terminals that cannot draw: one every few seconds, and what is special."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ratchet.config import units
from ratchet.console.run_screen import describe_state, describe_time_left
from ratchet.runs import event_messages
from ratchet.runs.callbacks import Status
from ratchet.runs.event_messages import describe_device
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import DAMAGE, ProgressView
from ratchet.runs.run_source import SidecarState
from ratchet.runs.status import RunProgress, format_duration
from ratchet.storage.html import format_count

LINE_EVERY_S = 5.0


class RunEventFormatter:
    """What is to be said of a run, as lines.

    Args:
        say: takes a line, without its end.
        before: stands before every line; with several runs, their names.
        unit: what the run's steps are called: step, answer.
    """

    def __init__(self, say: Callable[[str], None], before: str = "  ", unit: str = "step") -> None:
        self._say, self._before, self._unit = say, before, unit
        self._said_step = 0

    def event(self, event: JournalEvent) -> None:
        """Say what an event tells, if it is out of the ordinary; one that is damaged says nothing."""
        with suppress(*DAMAGE):  # `status` counts them
            for line in _format_event(event, self._unit):
                self._say(self._before + line)

    def figures(self, vitals: ProgressView, now: float) -> None:
        """Say where it stands, unless nothing has changed since that was said last, or there is no figure of this
        attempt. `now` is Unix time."""
        p = vitals.progress
        said = _format_figures(vitals)
        if not said or p.step == self._said_step:
            return
        self._said_step = p.step
        found = vitals.outlook.left(now)
        left = f", {found.describe()} left" if found and p.step < p.planned_steps else ""
        self._say(f"{self._before}{self._unit} {p.step}/{p.planned_steps}: {said}{left}")


def summarize_run(vitals: ProgressView, aside: SidecarState, now: float) -> str:
    """Where a run stands, in one line. `now` is Unix time."""
    p = vitals.progress
    said = [f"{describe_state(vitals, aside)}, {step_unit(vitals)} {p.step}/{p.planned_steps or '?'}"]
    if p.loss is not None:
        said.append(f"loss {p.loss:.4f}")
    if p.validation_loss is not None:
        said.append(f"validation loss {p.validation_loss:.4f}")
    if left := describe_time_left(vitals, aside, now):
        said.append(f"{left} left")
    return ", ".join(said)


def step_unit(vitals: ProgressView) -> str:
    """What a run's steps are called."""
    return "answer" if vitals.answering else "step"


def _format_figures(vitals: ProgressView) -> str:
    """Of this attempt; empty: there are none yet."""
    p, rate = vitals.progress, vitals.input_tokens_per_s
    if vitals.answering:
        rate, answers = vitals.answering.tokens_per_s, vitals.answering.answers_per_s
        return "" if rate is None or answers is None else f"{answers:,.2f} answers/s, {rate:,.0f} tokens/s"
    return "" if p.loss is None or rate is None else f"loss {p.loss:.4f}, {rate:,.0f} tokens/s"


def _format_event(event: JournalEvent, unit: str) -> list[str]:
    data = event.data
    if event.kind == "ready":
        return [event_messages.describe_beginning(event, unit)]
    if event.kind == "validation":
        better = " (best so far)" if data["improved"] else ""
        return [f"step {data['step']}: validation loss {data['loss']:.4f}{better}"]
    if event.kind == "forecast":
        return [event_messages.describe_forecast(event), *(f"  {note}" for note in data["forecast"]["notes"])]
    if event.kind in ("notice", "alert", *event_messages.DOUBTS):
        found = event_messages.describe_notable_event(event)
        return [found] if found else []
    return []


# A generation as lines in a terminal or a log: an observer of its journal.

GENERATION_LINE_EVERY_S = 5.0
WINDOW = 60
"""Tellings, about a second each, over which the speed is averaged."""


class RunLogPrinter:
    """Says how far it is every few seconds, and everything out of the ordinary.

    Args:
        say: takes a line.
    """

    name = "console"

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._progress = RunProgress()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """Answers, tokens and seconds between two tellings."""
        self._said_s = time.monotonic()
        self._last: JournalEvent | None = None
        self._live = False

    def see(self, events: Sequence[JournalEvent]) -> None:
        """See Observer."""
        for event in events:
            before = self._progress.step
            self._progress.see(event)
            # What an earlier supervisor saw needs no second line.
            self._live = self._live or (event.kind == "attempt" and event.data.get("pid") == os.getpid())
            if self._live:
                with suppress(KeyError, TypeError, ValueError):  # damage in the journal
                    self._tell(event, before)
        if self._last and time.monotonic() - self._said_s >= GENERATION_LINE_EVERY_S:
            self._line()

    def finish(self, status: Status) -> None:
        """See Observer."""
        if self._last:
            self._line()

    def _tell(self, event: JournalEvent, before: int) -> None:
        data = event.data
        if event.kind == "ready":
            start, planned = data["start_step"], data["planned_steps"]
            all_of = format_count(planned, "answer")
            begun = f"going on after {start:,} of {all_of}" if start else f"{all_of} to give"
            where = describe_device(data["device"], data["compute_dtype"])
            self._say(f"{begun}{where and ', on '}{where}")
        elif event.kind in ("notice", "alert"):
            self._say(f"{event.kind}: {data['text']}")
        elif event.kind == "budget":
            why = f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "there is room"
            self._say(f"batches of at most {data['budget']['tokens']:,} padded tokens from now on: {why}")
        elif event.kind == "answered":
            self._last = event
            self._recent.append((data["step"] - before, data["tokens"], data["seconds"]))

    def _line(self) -> None:
        p, data = self._progress, self._last.data if self._last else {}
        self._said_s, self._last = time.monotonic(), None
        answers, tokens, seconds = (sum(one[i] for one in self._recent) for i in range(3))
        rate = f", {tokens / seconds:,.0f} tokens/s" if seconds else ""
        left_s = (p.planned_steps - p.step) * seconds / answers if answers else 0
        left = f", about {format_duration(left_s)} left" if left_s else ""
        rows = f", {format_count(data['rows'], 'row')} at once" if data.get("rows") else ""
        free = f", {units.format_bytes(data['available_bytes'])} free" if data.get("available_bytes") else ""
        self._say(f"{p.step:,}/{p.planned_steps:,} answered{rate}{rows}{free}{left}")
