"""A terminal in memory, which may be gone; and what one is given."""

import io

from rich.console import RenderableType

from ratchet.terminal.stream import Size, Terminal


class Faked(io.StringIO):
    """Says that it is a terminal, counts writes to it, and may be gone."""

    writes = 0
    gone: Exception | None = None
    """What whoever writes meets then."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise self.gone
        self.writes += bool(text)
        return super().write(text)


def drawn(picture: RenderableType, size: Size) -> list[str]:
    """What a terminal of this size gets, line by line."""
    raw = io.BytesIO()
    terminal = Terminal(io.TextIOWrapper(raw, encoding=size.encoding))
    terminal.width = size.width
    terminal.print(picture, width=size.width, no_wrap=True, overflow="crop", end="")
    terminal.file.flush()
    return raw.getvalue().decode(size.encoding).split("\n")
