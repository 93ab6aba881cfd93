"""A picture that is drawn over itself at the end of a terminal's text; what others print goes above it.

Between two frames the cursor rests where the picture begins, and the terminal breaks no line of it. So where it was
resized, and has broken its lines anew, no rows are to be counted: not by us, who may hear of its width later (tmux
tells it after up to 250 ms). rich.live counts, and leaves pieces.
"""

import atexit
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rich.console import RenderableType

from ratchet.console.text_layout import COLOUR, ScreenSize, TerminalConsole, encode_safely, wrap_text
from ratchet.storage.html import escape_invisible

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
CUT, BREAK = "\x1b[?7l", "\x1b[?7h"
"""What the terminal does with a line that is too long."""
TO_LINE_END, TO_END = "\x1b[K", "\x1b[J"
AFRESH = "\x1b[2K\r\n\x1b[J\x1b[A"
"""Erase all from here on: the line by itself, for tmux keeps the text of a screen that is erased as a whole. Only what
is erased like this is forgotten to have been one line, broken; else it is one again when the terminal becomes wider."""


class LiveRegion:
    """The picture. Any thread may draw, or print; errors of the terminal are raised to whoever draws.

    Args:
        stream: the terminal. Standard output and standard error are led above the picture where they are this terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, TerminalConsole(stream)
        self._mutex = threading.RLock()
        self._lines: list[str] = []
        """Of the picture as it stands there."""
        self._drawn_size: ScreenSize | None = None
        self._led: list[tuple[str, _LiveRegionStream]] = []
        self._open = False

    def size(self) -> ScreenSize:
        """What a picture may take of the terminal as it is now: a line is left for what comes after it, and a column,
        for what is erased behind the text of a full line is its last letter."""
        found = self._terminal.extent()
        return found._replace(width=found.width - 1, height=found.height - 1)

    def open(self) -> None:
        """Take the terminal. Raises OSError, ValueError."""
        with self._mutex:
            if not self._open:
                self._open = True
                atexit.register(self.close)  # whatever ends the process: nobody wants a shell without a cursor
                self._stream.write(HIDE)
                self._stream.flush()
                self._lead()

    def draw(self, picture: Callable[[ScreenSize], RenderableType]) -> None:
        """Draw it in the place of the last one. Raises OSError, ValueError."""
        with self._mutex:
            if self._open:
                size = self.size()
                self._lines = self._rendered(picture(size))
                self._put(above="" if size == self._drawn_size else AFRESH)
                self._drawn_size = size

    def say(self, text: str) -> None:
        """A line above the picture, broken between words, which stays; after the end, an ordinary one. Raises OSError,
        ValueError."""
        with self._mutex:
            line = encode_safely(_keep_colours_only(text), self._terminal.encoding)
            if self._open:
                lines = wrap_text(line, self._terminal.extent().width)
                self._put(above=AFRESH + lines.replace("\n", "\r\n") + "\r\n")
            else:
                self._stream.write(line + "\n")
                self._stream.flush()

    def close(self) -> None:
        """Leave the picture as it is, and give the terminal back. One that is gone takes nothing more."""
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
        with terminal.capture() as taken:
            terminal.print(picture, width=size.width, no_wrap=True, overflow="crop", crop=True, end="")
        return taken.get().rstrip("\n").split("\n")[: size.height]

    def _put(self, above: str = "", after: str | None = None) -> None:
        """Draw the picture, in one write.

        Args:
            above: goes before it, and stays.
            after: what ends the show; None: it goes on, the cursor returns to where the picture begins.
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
        """Whether the picture is there."""
        return self._open


class _LiveRegionStream(io.TextIOBase):
    """Stands in the place of standard output or error: whole lines go above the picture."""

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
        if not self._canvas.is_open:  # somebody has kept this stream: a handler of logging
            return self.real.write(text)
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        if lines:
            with suppress(OSError, ValueError):  # who prints is not to suffer; who draws will meet it too, and tell
                # Of a line that was written over itself, as progress bars are, the last state stays.
                self._canvas.say("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return len(text)

    def flush(self) -> None:
        if not self._canvas.is_open:
            self.real.flush()

    def flush_rest(self) -> None:
        """What had no end of line yet."""
        rest, self._rest = self._rest, ""
        if rest:
            self.real.write(rest + "\n")


def _keep_colours_only(text: str) -> str:
    """Text that may have colours, and moves no cursor."""
    parts = COLOUR.split(text)
    found = [escape_invisible(part) for part in parts]
    for place, colour in enumerate(COLOUR.findall(text)):
        found[place] += colour
    return "".join(found)


def _is_same_terminal(one: TextIO, other: TextIO) -> bool:
    try:
        return one.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return False
