"""Draws a region at the end of a terminal's text, again and again in place; other output goes above the region. Also
progress bars.

Between two frames, the cursor is at the start of the region, and the terminal wraps no line of the region. So the rows
of the last frame need not be counted. A count would be wrong after a resize, because the terminal may wrap lines again
before the process receives the new width (tmux reports it after up to 250 ms). rich.live counts rows, and leaves
fragments.
"""

import atexit
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from rich.console import RenderableType

from ratchet.console.text_layout import COLOUR, ScreenSize, TerminalConsole, encode_safely, wrap_text
from ratchet.storage.html import escape_invisible

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
"""Disable and enable the wrapping of long lines in the terminal."""
ERASE_LINE_END, ERASE_BELOW = "\x1b[K", "\x1b[J"
ERASE_REGION = "\x1b[2K\r\n\x1b[J\x1b[A"
"""Erase everything after the cursor. The line is erased separately, because tmux keeps the text of a screen that is
erased as a whole. Only lines that are erased like this are not joined again when the terminal becomes wider."""


def create_bar(what: str, unit: str, total: int | None = None) -> Any:
    """Create a bar on standard error that disappears when it is closed.

    `disable` is passed explicitly, because a variable of the environment may disable tqdm.
    """
    from tqdm import tqdm  # tqdm reads the environment at import, and the command line changes the environment before

    return tqdm(
        desc=what, unit=f" {unit}", unit_scale=True, total=total, delay=2, mininterval=0.5, leave=False,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


class ProgressBars:
    """Progress bar of several tasks in a row: one bar at a time, and a new bar for each task."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the progress of the task `what`."""
        if what != self._what:
            self.close()
            self._what, self._bar = what, create_bar(f"{self._verb}: {what}", "", total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._what, self._bar = "", None


class LiveRegion:
    """A region that is redrawn in place. Any thread may draw or print. Terminal errors are raised in the calling
    thread.

    Args:
        stream: The terminal. Standard output and error are redirected above the region if they are this terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, TerminalConsole(stream)
        self._mutex = threading.RLock()
        self._lines: list[str] = []
        """Visible lines of the region."""
        self._drawn_size: ScreenSize | None = None
        self._redirected: list[tuple[str, _LiveRegionStream]] = []
        self._open = False

    def size(self) -> ScreenSize:
        """Return the size that is available to the region.

        One line is reserved for the text after the region. One column is reserved, because erasing the rest of a line
        that fills all columns would erase its last letter.
        """
        extent = self._terminal.extent()
        return extent._replace(width=extent.width - 1, height=extent.height - 1)

    def open(self) -> None:
        """Start to use the terminal. Raises OSError or ValueError if the terminal is closed."""
        with self._mutex:
            if not self._open:
                self._open = True
                atexit.register(self.close)  # the shell needs its cursor, however the process ends
                self._stream.write(HIDE_CURSOR)
                self._stream.flush()
                self._redirect()

    def draw(self, picture: Callable[[ScreenSize], RenderableType]) -> None:
        """Draw the region in place of the last frame. Raises OSError, ValueError."""
        with self._mutex:
            if self._open:
                size = self.size()
                self._lines = self._render(picture(size))
                self._put(above="" if size == self._drawn_size else ERASE_REGION)
                self._drawn_size = size

    def print_line(self, text: str) -> None:
        """Print a permanent line above the region, wrapped between words. After `close`, print it normally.

        Raises OSError, ValueError.
        """
        with self._mutex:
            line = encode_safely(_keep_colours_only(text), self._terminal.encoding)
            if self._open:
                lines = wrap_text(line, self._terminal.extent().width)
                self._put(above=ERASE_REGION + lines.replace("\n", "\r\n") + "\r\n")
            else:
                self._stream.write(line + "\n")
                self._stream.flush()

    def close(self) -> None:
        """Leave the last frame on the screen and restore the terminal. Errors of a closed terminal are ignored."""
        with self._mutex:
            if not self._open:
                return
            self._open = False
            atexit.unregister(self.close)
            for name, replacement in self._redirected:
                if getattr(sys, name) is replacement:
                    setattr(sys, name, replacement.real)
            with suppress(OSError, ValueError):
                self._put(after="\r\n" if self._lines else "")
                for _, replacement in self._redirected:
                    replacement.flush_rest()

    def _render(self, picture: RenderableType) -> list[str]:
        terminal, size = self._terminal, self.size()
        with terminal.capture() as capture:
            terminal.print(picture, width=size.width, no_wrap=True, overflow="crop", crop=True, end="")
        return capture.get().rstrip("\n").split("\n")[: size.height]

    def _put(self, above: str = "", after: str | None = None) -> None:
        """Draw the region in one write.

        Args:
            above: Permanent text before the region.
            after: Text that ends the display. None: the display continues, and the cursor returns to the start of the
                region.
        """
        picture = "\r\n".join(line + ERASE_LINE_END for line in self._lines)
        back = f"\x1b[{len(self._lines) - 1}A" if len(self._lines) > 1 else ""
        end = "\r" + back if after is None else after + SHOW_CURSOR
        self._stream.write("\r" + above + WRAP_OFF + picture + ERASE_BELOW + WRAP_ON + end)
        self._stream.flush()

    def _redirect(self) -> None:
        for name in ("stdout", "stderr"):
            real = getattr(sys, name)
            if real is self._stream or _is_same_terminal(real, self._stream):
                replacement = _LiveRegionStream(real, self)
                self._redirected.append((name, replacement))
                setattr(sys, name, replacement)

    @property
    def is_open(self) -> bool:
        """Whether the region is open."""
        return self._open


class _LiveRegionStream(io.TextIOBase):
    """Replacement of standard output or error that prints complete lines above the region."""

    def __init__(self, real: TextIO, region: LiveRegion) -> None:
        self.real, self._region, self._rest = real, region, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.real.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.real.errors

    def fileno(self) -> int:
        return self.real.fileno()

    def isatty(self) -> bool:
        return self.real.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self._region.is_open:  # an object such as a logging handler still uses this stream
            return self.real.write(text)
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        if lines:
            # Printing must not fail: the drawing thread gets and reports the same error.
            with suppress(OSError, ValueError):
                # A line that overwrote itself, like a progress bar, is printed in its last state.
                self._region.print_line("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return len(text)

    def flush(self) -> None:
        if not self._region.is_open:
            self.real.flush()

    def flush_rest(self) -> None:
        """Write the last text without a line end."""
        rest, self._rest = self._rest, ""
        if rest:
            self.real.write(rest + "\n")


def _keep_colours_only(text: str) -> str:
    """Return text with colours but without cursor movements."""
    parts = COLOUR.split(text)
    parts_and_colours = [escape_invisible(part) for part in parts]
    for index, colour in enumerate(COLOUR.findall(text)):
        parts_and_colours[index] += colour
    return "".join(parts_and_colours)


def _is_same_terminal(first: TextIO, second: TextIO) -> bool:
    try:
        return first.isatty() and os.fstat(first.fileno()).st_rdev == os.fstat(second.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return False
