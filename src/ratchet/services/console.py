"""Training as lines in a terminal or a CI log: an observer of the journal."""

import time
from collections.abc import Sequence
from typing import Literal

from ratchet.run.journal import Event
from ratchet.run.status import Progress, duration

LINE_EVERY_S = 5.0


class Console:
    """Prints a line every few seconds, and one for everything out of the ordinary."""

    name = "console"

    def __init__(self) -> None:
        self._progress = Progress()
        self._printed = time.monotonic()
        self._printed_step = 0
        self._has_figures = False
        self._live_from = time.time()

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self._progress.see(event)
            if event.kind in ("ready", "step"):  # a figure from before a restart belongs to a step that is done again
                self._has_figures = event.kind == "step"
            if event.t >= self._live_from - 1:  # what an earlier supervisor saw needs no second line
                self._out_of_the_ordinary(event)
        if time.monotonic() - self._printed >= LINE_EVERY_S and self._has_figures:
            self._printed = time.monotonic()
            self._line()

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        if self._has_figures and self._progress.step != self._printed_step:
            self._line()

    def _out_of_the_ordinary(self, event: Event) -> None:
        if event.kind == "ready":
            start, planned = event.data["start_step"], event.data["planned_steps"]
            resumed = f"going on from step {start}" if start else "starting"
            print(
                f"  {resumed}, {planned} steps on {event.data['device']} in {event.data['compute_dtype']}", flush=True
            )
        elif event.kind == "notice":
            print(f"  notice: {event.data['text']}", flush=True)
        elif event.kind == "validation":
            better = " (best so far)" if event.data["improved"] else ""
            print(f"  step {event.data['step']}: validation loss {event.data['loss']:.4f}{better}", flush=True)

    def _line(self) -> None:
        p = self._progress
        self._printed_step = p.step
        rate = f", {p.tokens_per_s:,.0f} tokens/s" if p.tokens_per_s else ""
        left = f", about {duration(p.remaining_s)} left" if p.remaining_s else ""
        print(f"  step {p.step}/{p.planned_steps}: loss {p.loss:.4f}{rate}{left}", flush=True)
