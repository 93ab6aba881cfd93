"""Draws a region at the end of a terminal's text repeatedly in place, and progress bars. Other output goes above.

Between two frames the cursor is at the start of the region, and the terminal wraps no line of it. So no rows need to
be counted after a resize, when the terminal may have wrapped lines again before the process receives the new width
(tmux reports it after up to 250 ms). rich.live counts rows, and leaves fragments.
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


def create_bar(what: str, unit: str, total: int | None = None) -> Any:
    """Create a bar on standard error that removes itself. `disable` is explicit because the environment may silence
    tqdm."""
    from tqdm import tqdm  # reads the environment at import, so only after the command line has changed it

    return tqdm(
        desc=what, unit=f" {unit}", unit_scale=True, total=total, delay=2, mininterval=0.5, leave=False,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


class ProgressBars:
    """Shows one bar at a time, a new one for each task."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the progress of `what`."""
        if what != self._what:
            self.close()
            self._what, self._bar = what, create_bar(f"{self._verb}: {what}", "", total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._what, self._bar = "", None


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
CUT, BREAK = "\x1b[?7l", "\x1b[?7h"
"""Disable and enable wrapping of long lines in the terminal."""
TO_LINE_END, TO_END = "\x1b[K", "\x1b[J"
AFRESH = "\x1b[2K\r\n\x1b[J\x1b[A"
"""Erase everything from the cursor on. The line is erased separately, because tmux keeps the text of a screen that is
erased as a whole. Only lines erased like this are not joined again when the terminal becomes wider.
"""


class LiveRegion:
    """A region that is redrawn in place. Any thread may draw or print. Terminal errors are raised to the drawing
    thread.

    Args:
        stream: The terminal. Standard output and error are redirected above the region if they are this terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, TerminalConsole(stream)
        self._mutex = threading.RLock()
        self._lines: list[str] = []
        """Lines of the region that are currently visible."""
        self._drawn_size: ScreenSize | None = None
        self._led: list[tuple[str, _LiveRegionStream]] = []
        self._open = False

    def size(self) -> ScreenSize:
        """Return the current size available to the region. One line is reserved for the text after it, and one column
        because
        erasing behind a full line would erase its last letter.
        """
        found = self._terminal.extent()
        return found._replace(width=found.width - 1, height=found.height - 1)

    def open(self) -> None:
        """Start to use the terminal. Raises OSError, ValueError."""
        with self._mutex:
            if not self._open:
                self._open = True
                atexit.register(self.close)  # the shell needs its cursor back however the process ends
                self._stream.write(HIDE)
                self._stream.flush()
                self._lead()

    def draw(self, picture: Callable[[ScreenSize], RenderableType]) -> None:
        """Draw the region in place of the last frame. Raises OSError, ValueError."""
        with self._mutex:
            if self._open:
                size = self.size()
                self._lines = self._rendered(picture(size))
                self._put(above="" if size == self._drawn_size else AFRESH)
                self._drawn_size = size

    def print_line(self, text: str) -> None:
        """Print a permanent line above the region, wrapped between words. After `close`, print it normally. Raises
        OSError,
        ValueError.
        """
        with self._mutex:
            line = encode_safely(_keep_colours_only(text), self._terminal.encoding)
            if self._open:
                lines = wrap_text(line, self._terminal.extent().width)
                self._put(above=AFRESH + lines.replace("\n", "\r\n") + "\r\n")
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
            for name, ours in self._led:
                if getattr(sys, name) is ours:
                    setattr(sys, name, ours.real)
            with suppress(OSError, ValueError):
                self._put(after="\r\n" if self._lines else "")
                for _, ours in self._led:
                    ours.flush_rest()

    def _rendered(self, picture: RenderableType) -> list[str]:
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
        picture = "\r\n".join(line + TO_LINE_END for line in self._lines)
        back = f"\x1b[{len(self._lines) - 1}A" if len(self._lines) > 1 else ""
        end = "\r" + back if after is None else after + SHOW
        self._stream.write("\r" + above + CUT + picture + TO_END + BREAK + end)
        self._stream.flush()

    def _lead(self) -> None:
        for name in ("stdout", "stderr"):
            real = getattr(sys, name)
            if real is self._stream or _is_same_terminal(real, self._stream):
                ours = _LiveRegionStream(real, self)
                self._led.append((name, ours))
                setattr(sys, name, ours)

    @property
    def is_open(self) -> bool:
        """Whether the region is open."""
        return self._open


class _LiveRegionStream(io.TextIOBase):
    """Replaces standard output or error: complete lines go above the region."""

    def __init__(self, real: TextIO, canvas: LiveRegion) -> None:
        self.real, self._canvas, self._rest = real, canvas, ""

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
        if not self._canvas.is_open:  # another object still holds this stream, for example a logging handler
            return self.real.write(text)
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        if lines:
            with suppress(
                OSError, ValueError
            ):  # printing must not fail; the drawing thread gets and reports the same error
                # Of a line that overwrote itself, like a progress bar, the last state remains.
                self._canvas.print_line("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return len(text)

    def flush(self) -> None:
        if not self._canvas.is_open:
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
    for place, colour in enumerate(COLOUR.findall(text)):
        parts_and_colours[place] += colour
    return "".join(parts_and_colours)


def _is_same_terminal(one: TextIO, other: TextIO) -> bool:
    try:
        return one.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return False
