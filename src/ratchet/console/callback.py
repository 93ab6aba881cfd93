"""Shows a training or generation in a terminal, as a callback of its journal.

A live terminal shows one panel that is redrawn in place. Other streams, such as log files, get plain lines.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from ratchet.config import units
from ratchet.console.live_region import LiveRegion
from ratchet.console.run_screen import describe_state, describe_time_left, render_panel
from ratchet.console.text_layout import is_live_terminal
from ratchet.runs import progress_view
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import DAMAGE, ProgressView, SidecarState, create_view, describe_device
from ratchet.runs.status import RunProgress, format_duration
from ratchet.storage.html import format_count

LINE_EVERY_S = 5.0
"""Minimum time in seconds between two progress lines."""
WINDOW = 60
"""Number of progress events, about one per second, over which the speed of a generation is averaged."""
DRAW_EVERY_S = 0.5
SHARE = 0.005
"""Maximum share of the time of one CPU for drawing. If a frame takes long, frames are drawn less often."""
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
    p, rate = view.progress, view.input_tokens_per_s
    if view.generation:
        rate, answers = view.generation.tokens_per_s, view.generation.answers_per_s
        return "" if rate is None or answers is None else f"{answers:,.2f} answers/s, {rate:,.0f} tokens/s"
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


class RunLogPrinter:
    """Callback that prints lines about a generation: progress every few seconds, and all notable events.

    Args:
        write_line: Receives a line.
    """

    name = "console"

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line
        self._progress = RunProgress()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """Answers, tokens and seconds between two progress events."""
        self._last_line_s = time.monotonic()
        self._last: JournalEvent | None = None
        self._is_live = False
        """Whether this supervisor has started an attempt. Earlier supervisors have shown the events before this
        attempt."""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """See `RunCallback`."""
        for event in events:
            before = self._progress.step
            self._progress.update(event)
            self._is_live = self._is_live or (event.kind == "attempt_started" and event.data.get("pid") == os.getpid())
            if self._is_live:
                with suppress(KeyError, TypeError, ValueError):  # a damaged event is not shown
                    self._print_event(event, before)
        if self._last and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._print_progress()

    def on_end(self, status: Status) -> None:
        """See `RunCallback`."""
        if self._last:
            self._print_progress()

    def _print_event(self, event: JournalEvent, before: int) -> None:
        data = event.data
        if event.kind == "worker_ready":
            start, planned = data["start_step"], data["planned_steps"]
            answers = format_count(planned, "answer")
            start_text = f"resuming after {start:,} of {answers}" if start else f"{answers} to generate"
            device = describe_device(data["device"], data["compute_dtype"])
            self._write_line(f"{start_text}{device and ', on '}{device}")
        elif event.kind in ("notice", "alert"):
            self._write_line(f"{event.kind}: {data['text']}")
        elif event.kind == "microbatch_budget":
            reason = (
                f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "there is enough memory"
            )
            self._write_line(f"batches now have at most {data['budget']['tokens']:,} padded tokens: {reason}")
        elif event.kind == "generation_progress":
            self._last = event
            self._recent.append((data["step"] - before, data["tokens"], data["seconds"]))

    def _print_progress(self) -> None:
        p, data = self._progress, self._last.data if self._last else {}
        self._last_line_s, self._last = time.monotonic(), None
        answers, tokens, seconds = (sum(interval[i] for interval in self._recent) for i in range(3))
        rate = f", {tokens / seconds:,.0f} tokens/s" if seconds else ""
        left_s = (p.planned_steps - p.step) * seconds / answers if answers else 0
        left = f", about {format_duration(left_s)} left" if left_s else ""
        rows = f", {format_count(data['rows'], 'row')} per batch" if data.get("rows") else ""
        free = f", {units.format_bytes(data['available_bytes'])} free" if data.get("available_bytes") else ""
        self._write_line(f"{p.step:,}/{p.planned_steps:,} answered{rate}{rows}{free}{left}")


class ConsoleCallback:
    """Callback that shows a run to the user who started it. An error of the terminal ends the display, not the run.

    Args:
        run: The run directory. None shows only the content of the journal.
        stream: The terminal or its replacement. Defaults to standard output.
    """

    name = "console"

    def __init__(self, run: RunPaths | None = None, stream: TextIO | None = None) -> None:
        self._progress = ProgressView() if run is None else create_view(run)
        self._is_started = False
        self._view: _RunPanelView | _RunLogView = _RunLogView(stream)
        if is_live_terminal(stream or sys.stdout):
            self._view = _RunPanelView(run, stream or sys.stdout, self._progress)

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """See `RunCallback`. If an error ended the display, such as a closed terminal, raise it, but only the first
        time."""
        live_from = self._first_live(events)
        with self._view.mutex:
            for event in events:
                self._progress.update(event)
        self._view.show(self._progress, [event for number, event in enumerate(events) if number >= live_from])

    def _first_live(self, events: Sequence[JournalEvent]) -> int:
        """Return the index of the first event that this supervisor must show; earlier supervisors have shown the
        others."""
        if self._is_started:
            return 0
        self._is_started = True
        own = [n for n, e in enumerate(events) if e.kind == "attempt_started" and e.data.get("pid") == os.getpid()]
        return own[-1] if own else len(events)

    def on_end(self, status: Status) -> None:
        """See `RunCallback`."""
        self._view.close(self._progress)


class _RunLogView:
    """Lines for logs: one every few seconds, and one for every notable event."""

    def __init__(self, stream: TextIO | None) -> None:
        self.mutex = threading.Lock()
        self._stream = stream
        self._formatter = RunEventFormatter(self._print_line)
        self._printed_s = time.monotonic()

    def show(self, view: ProgressView, news: Sequence[JournalEvent]) -> None:
        for event in news:
            self._formatter.event(event)
        if time.monotonic() - self._printed_s >= LINE_EVERY_S and view.has_figures:
            self._printed_s = time.monotonic()
            self._formatter.figures(view, view.progress.last_t)

    def close(self, view: ProgressView) -> None:
        self._formatter.figures(view, view.progress.last_t)

    def _print_line(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class _RunPanelView:
    """Panel of a run. A thread draws it twice a second, so that ages and time left advance without events."""

    def __init__(self, run: RunPaths | None, stream: TextIO, view: ProgressView) -> None:
        self.mutex = threading.Lock()
        """Locked while the progress changes and while it is drawn."""
        self._run, self._progress = run, view
        self._region = LiveRegion(stream)
        self._formatter = RunEventFormatter(self._region.print_line, unit=step_unit(view))
        self._ended = threading.Event()
        self._painter: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_reported = False

    def show(self, view: ProgressView, news: Sequence[JournalEvent]) -> None:
        """Start to draw once this supervisor has started an attempt, and print lines of special events.

        If an error ended the display, raise it, but only the first time.
        """
        if news:
            self._run_guarded(lambda: self._show_events(news))
        self._report()

    def _show_events(self, news: Sequence[JournalEvent]) -> None:
        if self._painter is None:
            self._region.open()
            self._painter = threading.Thread(target=self._paint, name="console-painter", daemon=True)
            self._painter.start()
        for event in news:
            if event.kind in SPECIAL:
                self._formatter.event(event)

    def close(self, view: ProgressView) -> None:
        """Leave the last state on the screen. Raises the error that ended the display, unless it was raised before."""
        self._ended.set()
        if self._painter is not None:
            self._painter.join()
            self._run_guarded(self._draw)
        self._region.close()
        self._report()

    def _paint(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            start_s = time.thread_time()
            self._run_guarded(self._draw)
            wait_s = max(DRAW_EVERY_S, (time.thread_time() - start_s) / SHARE)

    def _draw(self) -> None:
        sidecar = SidecarState(running=True) if self._run is None else progress_view.read_sidecar_state(self._run)
        kind = "generation" if self._progress.generation else "run"
        name = kind if self._run is None else f"{kind} {self._run.root.name}"
        with self.mutex:
            self._region.draw(lambda size: render_panel(name, self._progress, sidecar, time.time(), size))

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run `work`. If the terminal fails, stop drawing and restore standard output and error."""
        if self._error is not None:
            return
        try:
            work()
        except Exception as error:  # no error of the terminal may stop the run, or leave its output redirected
            self._error = error
            self._ended.set()
            with suppress(Exception):  # the terminal is broken, and the first error is reported
                self._region.close()

    def _report(self) -> None:
        if self._error is not None and not self._is_reported:
            self._is_reported = True
            raise self._error
