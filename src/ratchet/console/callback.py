"""A training or generation in a terminal: an observer of the journal. One screen that is drawn over itself; lines where
none can be."""

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
"""Of one CPU, so much may go into drawing: where it takes long, it is drawn less often."""
SPECIAL = {"forecast", "notice", "alert", "skipped", "repeated", "spike", "budget", "scale"}
"""Events that also get a line above the screen, which stays when the screen has changed."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class ConsoleCallback:
    """Shows a run to whoever started it. A terminal that breaks ends the show, and nothing else.

    Args:
        run: its directory; None: only what the journal says is shown.
        stream: the terminal, or what stands in its place; standard output where none is given.
    """

    name = "console"

    def __init__(self, run: RunPaths | None = None, stream: TextIO | None = None) -> None:
        self._vitals = ProgressView() if run is None else create_view(run)
        self._begun = False
        self._view: _RunPanelView | _RunLogView = _RunLogView(stream)
        if is_live_terminal(stream or sys.stdout):
            self._view = _RunPanelView(run, stream or sys.stdout, self._vitals)

    def see(self, events: Sequence[JournalEvent]) -> None:
        """See `RunCallback`. Raises what has ended the show, once: the terminal is gone, say."""
        live_from = self._first_live(events)
        with self._view.mutex:
            for event in events:
                self._vitals.see(event)
        self._view.show(self._vitals, [event for number, event in enumerate(events) if number >= live_from])

    def _first_live(self, events: Sequence[JournalEvent]) -> int:
        """Where news begins: what an earlier supervisor saw, and comes first, needs no second line."""
        if self._begun:
            return 0
        self._begun = True
        own = [n for n, e in enumerate(events) if e.kind == "attempt" and e.data.get("pid") == os.getpid()]
        return own[-1] if own else len(events)

    def finish(self, status: Status) -> None:
        """See `RunCallback`."""
        self._view.close(self._vitals)


class _RunLogView:
    """A line every few seconds, and one for everything out of the ordinary."""

    def __init__(self, stream: TextIO | None) -> None:
        self.mutex = threading.Lock()
        self._stream = stream
        self._telling = RunEventFormatter(self._say)
        self._said_s = time.monotonic()

    def show(self, vitals: ProgressView, news: Sequence[JournalEvent]) -> None:
        for event in news:
            self._telling.event(event)
        if time.monotonic() - self._said_s >= LINE_EVERY_S and vitals.has_figures:
            self._said_s = time.monotonic()
            self._telling.figures(vitals, vitals.progress.last_t)

    def close(self, vitals: ProgressView) -> None:
        self._telling.figures(vitals, vitals.progress.last_t)

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class _RunPanelView:
    """The run's panel, drawn twice a second by a thread of its own: ages and the time left move without events."""

    def __init__(self, run: RunPaths | None, stream: TextIO, vitals: ProgressView) -> None:
        self.mutex = threading.Lock()
        """Held while the vitals change, and while they are drawn."""
        self._run, self._vitals = run, vitals
        self._canvas = LiveRegion(stream)
        self._telling = RunEventFormatter(self._canvas.say, unit=step_unit(vitals))
        self._ended = threading.Event()
        self._painter: threading.Thread | None = None
        self._broken: Exception | None = None
        self._reported = False

    def show(self, vitals: ProgressView, news: Sequence[JournalEvent]) -> None:
        """Begin to draw as soon as there is an attempt of ours. Raises what has ended the show, once."""
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
                self._telling.event(event)

    def close(self, vitals: ProgressView) -> None:
        """Leave the last state on the screen. Raises what has ended the show, if that was not raised before."""
        self._ended.set()
        if self._painter is not None:
            self._painter.join()
            self._guarded(self._draw)
        self._canvas.close()
        self._report()

    def _paint(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            begun_s = time.thread_time()
            self._guarded(self._draw)
            wait_s = max(DRAW_EVERY_S, (time.thread_time() - begun_s) / SHARE)

    def _draw(self) -> None:
        known = run_source.SidecarState(running=True) if self._run is None else run_source.read_sidecar_state(self._run)
        kind = "generation" if self._vitals.answering else "run"
        name = kind if self._run is None else f"{kind} {self._run.root.name}"
        with self.mutex:
            self._canvas.draw(lambda size: render_panel(name, self._vitals, known, time.time(), size))

    def _guarded(self, work: Callable[[], None]) -> None:
        """The terminal may be gone: then nobody looks any more, and standard output and error are given back."""
        if self._broken is not None:
            return
        try:
            work()
        except Exception as error:  # whatever it is must not become the run's, nor leave its output led astray
            self._broken = error
            self._ended.set()
            with suppress(Exception):  # it is broken, and that is what will be told
                self._canvas.close()

    def _report(self) -> None:
        if self._broken is not None and not self._reported:
            self._reported = True
            raise self._broken
