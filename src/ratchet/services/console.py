"""Training as lines in a terminal or a CI log: an observer of the journal."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from ratchet import sizes
from ratchet.run.journal import Event
from ratchet.run.status import Progress, among, duration

LINE_EVERY_S = 5.0


class Console:
    """Prints a line every few seconds, and one for everything out of the ordinary."""

    name = "console"

    def __init__(self) -> None:
        self._progress = Progress()
        self._printed = time.monotonic()
        self._printed_step = 0
        self._has_figures = False
        self._live = False

    def see(self, events: Sequence[Event]) -> None:
        live_from = self._first_live(events)
        for number, event in enumerate(events):
            self._progress.see(event)
            if event.kind in ("ready", "step"):  # a figure from before a restart belongs to a step that is done again
                self._has_figures = event.kind == "step" and self._progress.loss is not None
            if number >= live_from:
                with suppress(KeyError, TypeError, ValueError):  # damage in the journal: counted by `status`
                    self._out_of_the_ordinary(event)
        if time.monotonic() - self._printed >= LINE_EVERY_S and self._has_figures:
            self._printed = time.monotonic()
            self._line()

    def _first_live(self, events: Sequence[Event]) -> int:
        """Where news begins: what an earlier supervisor saw, and comes first, needs no second line."""
        if self._live:
            return 0
        self._live = True
        own = [n for n, e in enumerate(events) if e.kind == "attempt" and e.data.get("pid") == os.getpid()]
        return own[-1] if own else len(events)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        if self._has_figures and self._progress.step != self._printed_step:
            self._line()

    def _out_of_the_ordinary(self, event: Event) -> None:
        if event.kind == "ready":
            start, planned = event.data["start_step"], event.data["planned_steps"]
            resumed = f"going on from step {start}" if start else "starting"
            where = f"{event.data['device']} in {event.data['compute_dtype']}"
            print(f"  {resumed}, {planned} steps on {where}{among(event.data)}", flush=True)
        elif event.kind in ("notice", "alert"):
            print(f"  {event.kind}: {event.data['text']}", flush=True)
        elif event.kind == "validation":
            better = " (best so far)" if event.data["improved"] else ""
            print(f"  step {event.data['step']}: validation loss {event.data['loss']:.4f}{better}", flush=True)
        elif event.kind == "forecast":
            print(f"  {_foreseen(event)}", flush=True)
            for note in event.data["forecast"]["notes"]:
                print(f"    {note}", flush=True)
        elif event.kind in ("skipped", "repeated", "spike", "budget", "scale"):
            print(f"  step {event.data['step']}: {_doubt(event)}", flush=True)

    def _line(self) -> None:
        p = self._progress
        self._printed_step = p.step
        rate = f", {p.tokens_per_s:,.0f} tokens/s" if p.tokens_per_s else ""
        left = f", about {duration(p.remaining_s)} left" if p.remaining_s else ""
        print(f"  step {p.step}/{p.planned_steps}: loss {p.loss:.4f}{rate}{left}", flush=True)


def _foreseen(event: Event) -> str:
    """What the run will need."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    most = ", ".join(
        f"{name} {sizes.written(count)}" for name, count in sorted(peak.items(), key=lambda one: -one[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{sizes.written(sum(peak.values()))} of {sizes.written(event.data['available_bytes'])} at hand ({most})"
    )


def _doubt(event: Event) -> str:
    """What was wrong with a step, or had to be done about it."""
    data = event.data
    if event.kind == "skipped":
        back = "" if data["to_step"] is None else f", back to the weights of step {data['to_step']}"
        return f"left out{back}: {data['reason']}"
    if event.kind == "repeated":
        return f"computed once more: {data['reason']}"
    if event.kind == "spike":
        return (
            f"gradient norm {data['grad_norm']:.3g} is {data['deviations']:.1f} deviations above the median "
            f"{data['median']:.3g}; learned from all the same"
        )
    if event.kind == "scale":
        return f"gradient overflowed in float16; computed once more with the loss scaled by {data['loss_scale']:g}"
    tokens = data["budget"]["tokens"]
    limit = "has no limit of its own any more" if tokens is None else f"of at most {tokens:,} padded tokens"
    cause = f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "there was room for a while"
    return f"micro-batch of {data['phase']} {limit}: {cause}"
