"""A terminal in memory that may disconnect, and the text that was written to it."""

import io
from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
from rich.console import ConsoleOptions, RenderableType

from ratchet.console.terminal import create_console
from ratchet.runs.journal import JournalEvent

T = 1_760_000_000.0
GIB = 2**30
SIZES = [(40, 10), (40, 24), (60, 15), (79, 23), (120, 40), (200, 60), (20, 4)]
"""Screen sizes: columns and rows."""


class Events(list[JournalEvent]):
    """Journal events of a run."""

    def add(self, kind: str, t: float, attempt: int = 1, **data: Any) -> None:
        """Append an event, `t` seconds after T."""
        self.append(JournalEvent(kind, T + t, attempt, data))

    def add_killed(self, t: float) -> None:
        """Append the end of attempt 1 by a signal."""
        self.add("worker_exited", t, exit_code=-9, decision="Retry", text="killed by signal 9", failure_class="killed")


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


def drawn(
    render: Callable[[ConsoleOptions], RenderableType], width: int, height: int, encoding: str = "utf-8"
) -> list[str]:
    """Return the lines that a terminal of this size and encoding receives."""
    raw = io.BytesIO()
    console = create_console(io.TextIOWrapper(raw, encoding=encoding))
    console.size = width, height
    console.print(render(console.options))
    return raw.getvalue().decode(encoding).removesuffix("\n").split("\n")
