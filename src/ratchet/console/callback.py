"""Shows a training or generation in a terminal, as a callback of the journal.

A live terminal shows one panel that is redrawn in place. Other streams get plain lines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TextIO

from ratchet.console.live_region import LiveRegion
from ratchet.console.log_lines import LINE_EVERY_S, RunEventFormatter, step_unit
from ratchet.console.run_screen import render_panel
from ratchet.console.text_layout import is_live_terminal
from ratchet.runs import run_source
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import ProgressView, create_view

DRAW_EVERY_S = 0.5
SHARE = 0.005
"""Maximum share of one CPU for drawing. Where a frame takes long, frames are drawn less often."""
SPECIAL = {
    "memory_forecast",
    "notice",
    "alert",
    "step_skipped",
    "step_repeated",
    "gradient_spike",
    "microbatch_budget",
    "loss_scale",
}
"""Event kinds that also get a permanent line above the panel."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class ConsoleCallback:
    """Shows a run to the user who started it. An error of the terminal ends the display, not the run.

    Args:
        run: The run directory. None shows only the content of the journal.
        stream: The terminal or its replacement. Defaults to standard output.
    """

    name = "console"

    def __init__(self, run: RunPaths | None = None, stream: TextIO | None = None) -> None:
        self._vitals = ProgressView() if run is None else create_view(run)
        self._is_started = False
        self._view: _RunPanelView | _RunLogView = _RunLogView(stream)
        if is_live_terminal(stream or sys.stdout):
            self._view = _RunPanelView(run, stream or sys.stdout, self._vitals)

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """See `RunCallback`. Raises once the error that ended the display, for example of a closed terminal."""
        live_from = self._first_live(events)
        with self._view.mutex:
            for event in events:
                self._vitals.update(event)
        self._view.show(self._vitals, [event for number, event in enumerate(events) if number >= live_from])

    def _first_live(self, events: Sequence[JournalEvent]) -> int:
        """Return the index of the first new event. Events that an earlier supervisor already showed come before it."""
        if self._is_started:
            return 0
        self._is_started = True
        own = [n for n, e in enumerate(events) if e.kind == "attempt_started" and e.data.get("pid") == os.getpid()]
        return own[-1] if own else len(events)

    def on_end(self, status: Status) -> None:
        """See `RunCallback`."""
        self._view.close(self._vitals)


class _RunLogView:
    """Prints a line every few seconds, and one for every notable event."""

    def __init__(self, stream: TextIO | None) -> None:
        self.mutex = threading.Lock()
        self._stream = stream
        self._formatter = RunEventFormatter(self._say)
        self._said_s = time.monotonic()

    def show(self, view: ProgressView, news: Sequence[JournalEvent]) -> None:
        for event in news:
            self._formatter.event(event)
        if time.monotonic() - self._said_s >= LINE_EVERY_S and view.has_figures:
            self._said_s = time.monotonic()
            self._formatter.figures(view, view.progress.last_t)

    def close(self, view: ProgressView) -> None:
        self._formatter.figures(view, view.progress.last_t)

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class _RunPanelView:
    """Draws the panel of a run twice a second in its own thread, so that ages and time left advance without events."""

    def __init__(self, run: RunPaths | None, stream: TextIO, view: ProgressView) -> None:
        self.mutex = threading.Lock()
        """Held while the progress changes and while it is drawn."""
        self._run, self._vitals = run, view
        self._canvas = LiveRegion(stream)
        self._formatter = RunEventFormatter(self._canvas.print_line, unit=step_unit(view))
        self._ended = threading.Event()
        self._painter: threading.Thread | None = None
        self._broken: Exception | None = None
        self._reported = False

    def show(self, view: ProgressView, news: Sequence[JournalEvent]) -> None:
        """Start to draw once this supervisor has started an attempt. Raises once the error that ended the display."""
        if news:
            self._guarded(lambda: self._announced(news))
        self._report()

    def _announced(self, news: Sequence[JournalEvent]) -> None:
        if self._painter is None:
            self._canvas.open()
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
            self._guarded(self._draw)
        self._canvas.close()
        self._report()

    def _paint(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            start_s = time.thread_time()
            self._guarded(self._draw)
            wait_s = max(DRAW_EVERY_S, (time.thread_time() - start_s) / SHARE)

    def _draw(self) -> None:
        known = run_source.SidecarState(running=True) if self._run is None else run_source.read_sidecar_state(self._run)
        kind = "generation" if self._vitals.generation else "run"
        name = kind if self._run is None else f"{kind} {self._run.root.name}"
        with self.mutex:
            self._canvas.draw(lambda size: render_panel(name, self._vitals, known, time.time(), size))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`. If the terminal fails, stop drawing and restore standard output and error."""
        if self._broken is not None:
            return
        try:
            work()
        except Exception as error:  # no error of the terminal may stop the run, or leave its output redirected
            self._broken = error
            self._ended.set()
            with suppress(Exception):  # the terminal is broken, and the first error is reported
                self._canvas.close()

    def _report(self) -> None:
        if self._broken is not None and not self._reported:
            self._reported = True
            raise self._broken
