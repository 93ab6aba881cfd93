"""Shows the progress of a command on standard error: a bar with the time left on a terminal, lines in a log.

Quick tasks are not shown at all. A thread draws, so that a task which reports nothing for a minute is shown as well.
Rich is imported when the first bar is drawn.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from ratchet.config.units import format_bytes, format_duration
from ratchet.storage.progress import ProgressReporter, Unit, use_reporter

if TYPE_CHECKING:
    from rich.progress import Progress

BAR_AFTER_S = 1.0
"""Age of a task in seconds at which its bar appears."""
FIRST_LINE_S = 2.0
"""Age of a task in seconds at which its first line is printed."""
MIN_LINE_GAP_S, MAX_LINE_GAP_S = 5.0, 60.0
"""Range of the seconds between two lines of a task. The gap grows with the age of the task, so that a task of hours
fills no log."""
FRAME_S = 0.25
"""Seconds between two frames."""


@dataclass
class ProgressTask:
    """A task that was reported."""

    name: str
    start_s: float
    first: int
    """Number of units that were complete at `start_s`, for example before the command was repeated."""
    done: int
    total: int | None
    unit: Unit = ""
    next_line_s: float = 0.0
    """Time of the next line."""
    has_line: bool = False

    def describe(self, now_s: float) -> str:
        """Describe what is done and the time left: `1,200 of 5,000, about 12 s left`."""
        done = self._format(self.done)
        age_s = now_s - self.start_s
        if self.total in (None, 1):
            return f"{done}, {format_duration(age_s)} so far" if self.done else f"{format_duration(age_s)} so far"
        text = f"{done} of {self._format(self.total)}"
        if not self.first < self.done < self.total:
            return text
        left_s = age_s * (self.total - self.done) / (self.done - self.first)
        return f"{text}, about {format_duration(max(1.0, left_s))} left"

    def describe_end(self, now_s: float) -> str:
        """Describe the finished task: `5,000 in 12 s`."""
        spent = f"in {format_duration(now_s - self.start_s)}"
        return f"{self._format(self.done)} {spent}" if self.done > 1 else f"done {spent}"

    def _format(self, count: int) -> str:
        return format_bytes(count) if self.unit == "bytes" else f"{count:,}"


class ProgressDisplay:
    """Shows the task that was reported last. An error of the terminal ends the display, not the command.

    Args:
        stream: Receives bars, if it is a live terminal, or lines.
        write_line: Receives lines instead of the stream, in the thread that reports.
        has_timings: Whether each finished task gets a line with its duration.
        clock: Returns seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        write_line: Callable[[str], None] | None = None,
        has_timings: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._write_line, self._has_timings, self._clock = stream, write_line, has_timings, clock
        self._mutex = threading.RLock()
        self._task: ProgressTask | None = None
        self._bar: Progress | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def report(self, task: str, done: int, total: int | None, unit: Unit) -> None:
        """See `report_progress`."""
        with self._mutex:
            current = self._task
            if current is None or current.name != task or done < current.done:
                self._end_task()
                if total is not None and done >= total and not self._has_timings:
                    return  # over before it was shown
                now_s = self._clock()
                current = self._task = ProgressTask(task, now_s, done, done, total, unit, now_s + FIRST_LINE_S)
            current.done, current.total = done, total
            if total is not None and done >= total:
                self._end_task()
        if self._write_line is not None:
            self.refresh()
        elif self._thread is None and not self._is_closed.is_set():
            self._thread = threading.Thread(target=self._draw_frames, name="progress", daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """See `clear_progress`."""
        with self._mutex:
            self._end_task()
            self._hide_bar()

    def refresh(self) -> None:
        """Draw the next frame, or print the line that is due."""
        with self._mutex:
            if self._is_closed.is_set():  # the stream may be closed by now
                return
            if self._write_line is None and self._is_live():
                self._draw_bar()
            elif (task := self._task) is not None and (now_s := self._clock()) >= task.next_line_s:
                task.has_line = True
                task.next_line_s = now_s + min(MAX_LINE_GAP_S, max(MIN_LINE_GAP_S, now_s - task.start_s))
                self._print(f"{task.name}: {task.describe(now_s)}")

    def close(self) -> None:
        """Remove the bar and stop the thread."""
        with self._mutex:
            self._is_closed.set()
            self.clear()

    def _draw_frames(self) -> None:
        while not self._is_closed.wait(FRAME_S):
            self.refresh()

    def _is_live(self) -> bool:
        if self._stream is None:
            return False
        if not self._stream.isatty():  # a log must not wait for the import of Rich
            return False
        from ratchet.console.terminal import is_live_terminal

        return is_live_terminal(self._stream)

    def _end_task(self) -> None:
        task, self._task = self._task, None
        if task is not None and (task.has_line or self._has_timings):
            self._print(f"{task.name}: {task.describe_end(self._clock())}")

    def _draw_bar(self) -> None:
        from ratchet.console.terminal import LiveDisplay

        task = self._task
        if task is None or LiveDisplay.active:  # another display has the terminal
            self._hide_bar()
            return
        now_s = self._clock()
        if self._bar is None and now_s - task.start_s < BAR_AFTER_S:
            return
        try:
            bar = self._bar or self._show_bar(task)
            # The only task of the bar is changed, because Rich would draw a new one below the old one for a moment.
            bar.update(
                bar.task_ids[0], description=task.name, completed=task.done,
                total=None if task.total == 1 else task.total,
                figures=task.describe(now_s),
            )  # fmt: skip
            bar.refresh()
        except (OSError, ValueError):  # the terminal is closed
            self._disconnect()

    def _show_bar(self, task: ProgressTask) -> "Progress":
        from rich.progress import BarColumn, Progress, TextColumn

        from ratchet.console.terminal import create_console, is_same_terminal

        assert self._stream is not None  # noqa: S101 (`_is_live`)
        bar = Progress(
            TextColumn("  {task.description}", markup=False), BarColumn(), TextColumn("{task.fields[figures]}"),
            console=create_console(self._stream), auto_refresh=False, transient=True,
            redirect_stdout=is_same_terminal(sys.stdout, self._stream), redirect_stderr=False,
        )  # fmt: skip
        bar.add_task(task.name, total=None, figures="")
        self._bar = bar
        bar.start()
        return bar

    def _hide_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            sys.stdout.flush()  # prints a last line without its end, while standard output is redirected
            bar.stop()
        except (OSError, ValueError):
            self._disconnect()

    def _print(self, text: str) -> None:
        try:
            if self._write_line is not None:
                self._write_line(text)
            elif self._bar is not None:
                self._bar.console.print(f"  {text}", soft_wrap=True)
            elif self._stream is not None:
                print(f"  {text}", file=self._stream, flush=True)
        except (OSError, ValueError):
            self._disconnect()

    def _disconnect(self) -> None:
        """Show nothing any more."""
        self._bar, self._stream = None, None
        self._is_closed.set()


@contextmanager
def show_progress(
    stream: TextIO | None = None, write_line: Callable[[str], None] | None = None, has_timings: bool = False
) -> Iterator[ProgressReporter]:
    """Show the progress that is reported in this context; see `ProgressDisplay`."""
    display = ProgressDisplay(stream, write_line, has_timings)
    try:
        with use_reporter(display):
            yield display
    finally:
        display.close()
