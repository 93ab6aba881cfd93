"""Shows a training or generation in a terminal, as a callback of its journal.

A live terminal shows one panel that is redrawn in place. Other streams, such as log files, get plain lines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import ConsoleOptions, RenderableType

from ratchet.config import units
from ratchet.config.units import format_count
from ratchet.console.run_screen import describe_state, describe_time_left, render_panel
from ratchet.console.terminal import LiveDisplay, is_live_terminal
from ratchet.runs import progress_view
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import DAMAGE, ProgressView, SidecarState, create_view, get_live_number

LINE_EVERY_S = 5.0
"""Minimum time in seconds between two progress lines."""
FRAMES_PER_S = 2.0
SPECIAL = {
    "memory_forecast", "notice", "alert", "step_skipped", "step_repeated", "gradient_spike", "microbatch_budget",
    "loss_scale",
}  # fmt: skip
"""Kinds of events that also get a permanent line above the panel."""


class RunEventFormatter:
    """Formatter of events and progress of a run as lines.

    Args:
        write_line: Receives a line without its end.
        before: Prefix of every line, for example the run's name.
        unit: Name of the run's steps: step or answer.
    """

    def __init__(self, write_line: Callable[[str], None], before: str = "  ", unit: str = "step") -> None:
        self._write_line, self._before, self._unit = write_line, before, unit
        self._last_step = 0

    def event(self, event: JournalEvent) -> None:
        """Write the lines of a notable event. A damaged event gives no line."""
        with suppress(*DAMAGE):  # `ratchet status` reports how many events are damaged
            for line in _format_event(event, self._unit):
                self._write_line(self._before + line)

    def figures(self, view: ProgressView, now: float) -> None:
        """Write the current progress, unless the step is unchanged or this attempt has no values yet.

        `now` is Unix time.
        """
        progress = view.progress
        figures = _format_figures(view)
        if not figures or progress.step == self._last_step:
            return
        self._last_step = progress.step
        time_left = view.eta.estimate(now)
        left_text = f", {time_left.describe()} left" if time_left and progress.step < progress.planned_steps else ""
        self._write_line(f"{self._before}{self._unit} {progress.step}/{progress.planned_steps}: {figures}{left_text}")


def summarize_run(view: ProgressView, sidecar: SidecarState, now: float) -> str:
    """Summarize the state of a run in one line. `now` is Unix time."""
    progress = view.progress
    clauses = [f"{describe_state(view, sidecar)}, {step_unit(view)} {progress.step}/{progress.planned_steps or '?'}"]
    if progress.loss is not None:
        clauses.append(f"loss {progress.loss:.4f}")
    if progress.validation_loss is not None:
        clauses.append(f"validation loss {progress.validation_loss:.4f}")
    if left := describe_time_left(view, sidecar, now):
        clauses.append(f"{left} left")
    return ", ".join(clauses)


def step_unit(view: ProgressView) -> str:
    """Return the name of a run's steps."""
    return "answer" if view.generation else "step"


def _format_figures(view: ProgressView) -> str:
    """Format the values of this attempt, or an empty string if it has none yet."""
    p, rate = view.progress, view.progress.tokens_per_s
    if view.generation:
        rate, answers = view.generation.tokens_per_s, view.generation.answers_per_s
        if rate is None or answers is None:
            return ""
        rows, free = (get_live_number(view.generation.live, name) for name in ("rows", "available_bytes"))
        batch = f", {format_count(rows, 'row')} per batch" if rows else ""
        batch += f", {units.format_bytes(free)} free" if free else ""
        return f"{answers:,.2f} answers/s, {rate:,.0f} tokens/s{batch}"
    return "" if p.loss is None or rate is None else f"loss {p.loss:.4f}, {rate:,.0f} tokens/s"


def _format_event(event: JournalEvent, unit: str) -> list[str]:
    data = event.data
    if event.kind == "worker_ready":
        return [progress_view.describe_start(event, unit)]
    if event.kind == "validation":
        better = " (best so far)" if data["improved"] else ""
        return [f"step {data['step']}: validation loss {data['loss']:.4f}{better}"]
    if event.kind == "memory_forecast":
        return [progress_view.describe_forecast(event), *(f"  {note}" for note in data["forecast"]["notes"])]
    if event.kind in ("notice", "alert", *progress_view.STEP_ANOMALIES):
        text = progress_view.describe_notable_event(event)
        return [text] if text else []
    return []


class ConsoleCallback:
    """Callback that shows a run to the user who started it. An error of the terminal ends the display, not the run.

    Args:
        run: The run directory. None shows only the content of the journal.
        stream: The terminal or its replacement. Defaults to standard output.
        write_line: Receives lines instead of the stream.
    """

    name = "console"
    poll_s = 0.1  # it draws twice a second

    def __init__(
        self,
        run: RunPaths | None = None,
        stream: TextIO | None = None,
        write_line: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._stream = run, stream
        self._view = ProgressView() if run is None else create_view(run)
        self._mutex = threading.Lock()
        """Locked while the progress changes and while it is drawn."""
        self._is_started, self._is_reported = False, False
        self._display: LiveDisplay | None = None
        if write_line is None and is_live_terminal(stream or sys.stdout):
            self._display = LiveDisplay(stream or sys.stdout, self._render, FRAMES_PER_S)
            write_line = self._display.print_line
        self._formatter = RunEventFormatter(write_line or self._print_line, unit=step_unit(self._view))
        self._printed_s = time.monotonic()

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """See `RunCallback`. If an error ended the display, such as a closed terminal, raise it, but only the first
        time."""
        live_from = self._first_live(events)
        with self._mutex:
            for event in events:
                self._view.update(event)
        news = events[live_from:]
        if self._display is not None:
            if news:
                self._display.start()
            for event in news:
                if event.kind in SPECIAL:
                    self._formatter.event(event)
            self._report(self._display)
            return
        for event in news:
            self._formatter.event(event)
        if time.monotonic() - self._printed_s >= LINE_EVERY_S and _format_figures(self._view):
            self._printed_s = time.monotonic()
            self._formatter.figures(self._view, self._view.progress.last_t)

    def on_end(self, status: Status) -> None:
        """See `RunCallback`. Leaves the last state on the screen."""
        if self._display is not None:
            self._display.stop()
            self._report(self._display)
        else:
            self._formatter.figures(self._view, self._view.progress.last_t)

    def _first_live(self, events: Sequence[JournalEvent]) -> int:
        """Return the index of the first event that this supervisor must show; earlier supervisors have shown the
        others."""
        if self._is_started:
            return 0
        self._is_started = True
        own = [n for n, e in enumerate(events) if e.kind == "attempt_started" and e.data.get("pid") == os.getpid()]
        return own[-1] if own else len(events)

    def _render(self, options: ConsoleOptions) -> RenderableType:
        sidecar = SidecarState(running=True) if self._run is None else progress_view.read_sidecar_state(self._run)
        kind = "generation" if self._view.generation else "run"
        name = kind if self._run is None else f"{kind} {self._run.root.name}"
        with self._mutex:
            return render_panel(name, self._view, sidecar, time.time(), options)

    def _print_line(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _report(self, display: LiveDisplay) -> None:
        if display.error is not None and not self._is_reported:
            self._is_reported = True
            raise display.error
