"""The terminal: its Rich console, a display that is redrawn in place, and tables that fit."""

import atexit
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import IO, ClassVar, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from ratchet.redaction import redact_stderr
from ratchet.storage.html import escape_invisible
from ratchet.storage.progress import clear_progress

WARNING, GOOD, QUIET, BAD = "yellow", "green", "dim", "red"

WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
"""Disable and enable the wrapping of long lines in the terminal."""
ERASE_LINE_END, ERASE_BELOW = "\x1b[K", "\x1b[J"
ERASE_REGION = "\x1b[2K\r\n\x1b[J\x1b[A"
"""Erase everything after the cursor. The line is erased separately, because tmux keeps the text of a screen that is
erased as a whole. Only lines that are erased like this are not joined again when the terminal becomes wider."""
GAP = 2
"""Number of blanks between the columns of a table."""
MIN_CUT_WIDTH = 16
"""Minimum width in columns of a cut column of a table. With less space, the column is omitted."""

THEME = Theme({"bar.back": "dim"})
"""Style of the rest of a bar. Rich's own grey is almost black, also on a light terminal."""


class TerminalConsole(Console):
    """A Rich console that ignores markup in external text, and raises an error instead of exiting the process."""

    def on_broken_pipe(self) -> None:
        """Raise an error, because Rich would exit the process."""
        raise BrokenPipeError(errno.EPIPE, "the terminal is closed")


def create_console(stream: IO[str]) -> Console:
    """Create the console of a stream. Letters that the stream's encoding lacks are written as question marks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return TerminalConsole(
        file=stream, markup=False, highlight=False, emoji=False, theme=THEME,
        color_system="auto" if is_capable_terminal() else None,
    )  # fmt: skip


def is_capable_terminal() -> bool:
    """Return whether the terminal, if there is one, has styles and can move its cursor."""
    return os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def is_live_terminal(stream: TextIO) -> bool:
    """Return whether the stream is an interactive terminal that can move its cursor."""
    return stream.isatty() and is_capable_terminal() and not os.environ.get("CI")


def clean_text(text: str) -> str:
    """Make external text safe for one line of a terminal: no control characters, tabs or line ends."""
    return escape_invisible(text.replace("\n", " ").replace("\t", " "))


class LiveDisplay(Live):
    """A display at the end of the terminal's text that is redrawn in place. Other output goes above it.

    Between two frames, the cursor is at the start of the display, and the terminal wraps no line of the display. So
    the rows of the last frame need not be counted. `rich.live` counts rows, and leaves fragments after a resize,
    because the terminal may wrap lines again before the process receives the new width (tmux reports it after up to
    250 ms).

    An error of the terminal or of `render` ends the display and restores standard output and error. `error` keeps it.

    Args:
        stream: The terminal. Standard output and error are printed above the display if they are this terminal.
        render: Returns the next frame for the width and height in its argument.
        frames_per_s: Number of frames that a thread draws per second. 0: only `refresh` draws.
    """

    active: ClassVar[set["LiveDisplay"]] = set()
    """Displays that use a terminal now. Progress bars are not drawn meanwhile."""

    def __init__(
        self, stream: TextIO, render: Callable[[ConsoleOptions], RenderableType], frames_per_s: float = 0.0
    ) -> None:
        self._is_stderr = is_same_terminal(sys.stderr, stream)
        super().__init__(
            console=create_console(stream), auto_refresh=frames_per_s > 0, refresh_per_second=frames_per_s or 1.0,
            redirect_stdout=is_same_terminal(sys.stdout, stream), redirect_stderr=self._is_stderr,
        )  # fmt: skip
        self._render = render
        self._lines: list[list[Segment]] = []
        """Lines of the last frame."""
        self._drawn_size: tuple[int, int] | None = None
        """Size of the terminal at the last frame."""
        self._redaction = ExitStack()
        self.error: Exception | None = None

    def start(self, refresh: bool = True) -> None:
        """Start to use the terminal."""
        if self.is_started or self.error is not None:
            return
        atexit.register(self.stop)  # the shell needs its cursor, however the process ends
        self.active.add(self)
        clear_progress()
        with self._ended_by_errors():
            super().start()
            if self._is_stderr:
                self._redaction.enter_context(redact_stderr())  # Rich writes redirected lines to the terminal itself
            if refresh:
                self.refresh()

    def refresh(self) -> None:
        """Draw the next frame."""
        if self.error is not None:
            return
        with self._ended_by_errors():
            # One line is reserved for the text after the display. One column is reserved, because erasing the rest of
            # a line that fills all columns would erase its last letter.
            size = self.console.size
            options = self.console.options.update(width=max(1, size.width - 1))
            options.max_height = max(1, size.height - 1)
            self._lines = self.console.render_lines(self._render(options), options, pad=False)[: options.max_height]
            super().refresh()

    def print_line(self, line: str) -> None:
        """Print a permanent line above the display."""
        if self.error is None:
            with self._ended_by_errors():
                self.console.print(Text(clean_text(line)))

    def stop(self) -> None:
        """Leave the last frame on the screen and restore the terminal."""
        atexit.unregister(self.stop)
        self.active.discard(self)
        self._redaction.close()
        try:
            if self.is_started and self.error is None:
                sys.stdout.flush()  # prints a last line without its end
                sys.stderr.flush()
        except (OSError, ValueError) as error:
            self.error = error
        try:
            super().stop()
        except Exception as error:  # no error of the terminal may stop the command
            self.error = self.error or error

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the display after an error: no error of the terminal may stop the command or leave output redirected."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            self.stop()
            # A logger that still has the redirected stream must not raise the error again.
            self.console.quiet = isinstance(error, OSError)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put the frame after the text that is printed. Rich writes both at once."""
        above = [item for item in renderables if not isinstance(item, Control)]
        size, lines = self.console.size, self._lines  # another thread may replace the lines meanwhile
        erase = ERASE_REGION if above or size != self._drawn_size else ""
        self._drawn_size = size
        frame = [_control(WRAP_OFF)]
        for number, line in enumerate(lines):
            frame += [*([Segment.line()] if number else []), *line, _control(ERASE_LINE_END)]
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        frame.append(_control(ERASE_BELOW + WRAP_ON + (f"\r{up}" if self.is_started else "\r\n")))
        return [Segments([_control("\r" + erase)]), *above, Segments(frame)]


def _control(codes: str) -> Segment:
    return Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])  # Rich does not measure or cut control segments


def is_same_terminal(first: TextIO, second: TextIO) -> bool:
    """Return whether two streams are the same terminal."""
    try:
        return first is second or (
            first.isatty() and os.fstat(first.fileno()).st_rdev == os.fstat(second.fileno()).st_rdev
        )
    except (OSError, ValueError, AttributeError):
        return False


@dataclass(frozen=True)
class TableColumn:
    """A column of a table that fits into the width of the terminal."""

    title: str
    cells: tuple[str, ...]
    weight: int
    """If not all columns fit, those with the greatest weight are omitted first."""
    justify: Literal["left", "right"] = "right"
    is_elastic: bool = False
    """Whether the column may be cut to the remaining width."""

    @property
    def width(self) -> int:
        """Width in columns of the longest cell."""
        return max(map(cell_len, (self.title, *self.cells)))


def fit_columns(columns: Sequence[TableColumn], width: int) -> list[tuple[TableColumn, int]]:
    """Return the columns that fit into `width`, each with its width, from left to right.

    The column of smallest weight is always included. An elastic column gets the remaining width.
    """
    free = width + GAP
    selected: dict[int, int] = {}
    for index in sorted(range(len(columns)), key=lambda index: columns[index].weight):
        column, taken = columns[index], columns[index].width
        if column.is_elastic and MIN_CUT_WIDTH <= free - GAP < taken:
            taken = free - GAP
        if not selected or taken + GAP <= free:
            free -= taken + GAP
            selected[index] = taken
    return [(columns[index], selected[index]) for index in sorted(selected)]


def build_table(columns: Sequence[TableColumn], styles: Sequence[str], options: ConsoleOptions) -> Table:
    """Build a table of the columns that have a value and fit. `styles` has the style of each row."""
    cleaned = [replace(column, cells=tuple(map(clean_text, column.cells))) for column in columns if any(column.cells)]
    fitting = fit_columns(cleaned, options.max_width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="underline")
    overflow = choose_overflow(options)
    for column, width in fitting:
        table.add_column(Text(column.title), justify=column.justify, no_wrap=True, overflow=overflow, width=width)
    for index, style in enumerate(styles):
        table.add_row(*(Text(column.cells[index]) for column, _ in fitting), style=style)
    return table


def choose_overflow(options: ConsoleOptions) -> Literal["crop", "ellipsis"]:
    """Return how to cut long lines: with an ellipsis, if the encoding has this letter."""
    return "crop" if options.ascii_only else "ellipsis"
