"""A terminal in memory that may disconnect, and the text that was written to it."""

import io

from rich.cells import cell_len
from rich.console import RenderableType

from ratchet.console.text_layout import ScreenSize, TerminalConsole

T = 1_760_000_000.0
GIB = 2**30
SIZES = [(40, 10), (40, 24), (60, 15), (79, 23), (120, 40), (200, 60), (20, 4)]
"""Screen sizes: columns and rows."""


class Faked(io.StringIO):
    """A stream that reports that it is a terminal, counts writes, and may be disconnected."""

    writes = 0
    gone: Exception | None = None
    """Exception that `write` raises after the terminal has disconnected."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise self.gone
        self.writes += bool(text)
        return super().write(text)


def assert_fits(lines: list[str], width: int, height: int) -> None:
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert not [line for line in lines if "\x1b" in line]


def drawn(picture: RenderableType, size: ScreenSize) -> list[str]:
    """Return the lines that a terminal of this size receives."""
    raw = io.BytesIO()
    terminal = TerminalConsole(io.TextIOWrapper(raw, encoding=size.encoding))
    terminal.width = size.width
    terminal.print(picture, width=size.width, no_wrap=True, overflow="crop", end="")
    terminal.file.flush()
    return raw.getvalue().decode(size.encoding).split("\n")
