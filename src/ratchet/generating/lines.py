"""A generation as lines in a terminal or a log: an observer of its journal."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ratchet import sizes
from ratchet.markup import counted
from ratchet.run.journal import Event
from ratchet.run.observers import Status
from ratchet.run.status import Progress, duration
from ratchet.run.telling import computing

LINE_EVERY_S = 5.0
WINDOW = 60
"""Tellings, about a second each, over which the speed is averaged."""


class Lines:
    """Says how far it is every few seconds, and everything out of the ordinary.

    Args:
        say: takes a line.
    """

    name = "console"

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._progress = Progress()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """Answers, tokens and seconds between two tellings."""
        self._said_s = time.monotonic()
        self._last: Event | None = None
        self._live = False

    def see(self, events: Sequence[Event]) -> None:
        """See Observer."""
        for event in events:
            before = self._progress.step
            self._progress.see(event)
            # What an earlier supervisor saw needs no second line.
            self._live = self._live or (event.kind == "attempt" and event.data.get("pid") == os.getpid())
            if self._live:
                with suppress(KeyError, TypeError, ValueError):  # damage in the journal
                    self._tell(event, before)
        if self._last and time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._line()

    def finish(self, status: Status) -> None:
        """See Observer."""
        if self._last:
            self._line()

    def _tell(self, event: Event, before: int) -> None:
        data = event.data
        if event.kind == "ready":
            start, planned = data["start_step"], data["planned_steps"]
            all_of = counted(planned, "answer")
            begun = f"going on after {start:,} of {all_of}" if start else f"{all_of} to give"
            where = computing(data["device"], data["compute_dtype"])
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
        left = f", about {duration(left_s)} left" if left_s else ""
        rows = f", {counted(data['rows'], 'row')} at once" if data.get("rows") else ""
        free = f", {sizes.written(data['available_bytes'])} free" if data.get("available_bytes") else ""
        self._say(f"{p.step:,}/{p.planned_steps:,} answered{rate}{rows}{free}{left}")
