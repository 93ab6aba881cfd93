"""Where something is shown to people: can it be drawn there again and again, how large is it, what can it write?"""

import errno
import os
from typing import IO, NamedTuple, TextIO

from rich.console import Console

NARROWEST, LOWEST = 20, 4
"""Columns and lines; less is not believed (a terminal whose size nobody has set says 0)."""


class Size(NamedTuple):
    """Of a screen."""

    width: int
    """Columns."""
    height: int
    """Lines."""
    encoding: str = "utf-8"
    """What is written there; where it lacks a letter, plainer ones stand in."""


def is_live(stream: TextIO) -> bool:
    """Whether a picture can be drawn over and over there: a terminal that moves its cursor, with somebody before it."""
    dumb = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return stream.isatty() and not dumb and not os.environ.get("CI")


class Terminal(Console):
    """Where it is drawn: nothing that others wrote is taken for an instruction, and its end is not the process's."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, "the terminal is gone")

    def extent(self) -> Size:
        """How large it is now."""
        found = self.size
        return Size(max(NARROWEST, found.width), max(LOWEST, found.height), self.encoding)


def writable(text: str, encoding: str) -> str:
    """Text as this stream can write it, a question mark for what it cannot."""
    return text.encode(encoding, errors="replace").decode(encoding)


def columns(stream: IO[str]) -> int:
    """Of the terminal as it is now; 0: it is none, or nobody has set its size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0
