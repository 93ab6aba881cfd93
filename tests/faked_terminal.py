"""A terminal in memory, which may be gone."""

import io


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
