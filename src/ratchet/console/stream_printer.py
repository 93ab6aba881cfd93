"""Answers where somebody reads them as they are given: on a terminal, with the reasoning dim; else as plain text."""

import errno
import os
import sys
import time
import unicodedata
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ratchet.console.text_layout import StreamingTextWrapper, terminal_columns, wrap_text
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, Speech

DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
BEGIN, END = "(reasoning) ", "(answer) "
"""Before reasoning, and before the answer that follows it, where nothing can be dim."""
HARMLESS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Beside what is printable. Persian words and many emoji are joined so."""


def supports_colour(out: IO[str]) -> bool:
    """Whether text there can be dim: a terminal that knows how, and nobody who wants no colours (no-color.org)."""
    dumb = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return out.isatty() and not dumb and not os.environ.get("NO_COLOR")


@dataclass
class PartialAnswer:
    """What has come of an answer, also of one that was broken off."""

    pieces: list[str] = field(default_factory=list)
    """Of the answer, without its reasoning."""
    ended: AnswerEnd | None = None
    """None: it was broken off."""
    seconds: float = 0.0
    """From the first piece to the last thing that came."""

    @property
    def answer(self) -> str:
        """Without white space at its ends."""
        return "".join(self.pieces).strip()


class StreamPrinter:
    """Writes answers; on a terminal with lines broken between words.

    Args:
        out: a terminal, or a file.
        reasons: whether reasoning is shown.
    """

    def __init__(self, out: IO[str], *, reasons: bool = True) -> None:
        self._out, self._reasons = out, reasons
        self._coloured = supports_colour(out)
        self._flow = self._begun()
        self._is_first = True
        """Whether nothing of this answer, or of its reasoning, was written yet."""

    def head(self, text: str) -> None:
        """A line above an answer."""
        self._line(text, BOLD)

    def note(self, text: str) -> None:
        """A line that is no answer, on a line of its own."""
        self._line(text, DIM)

    def gap(self) -> None:
        """An empty line."""
        self.end_line()
        self._put("\n")

    def answer(self, pieces: Speech, heard: PartialAnswer) -> None:
        """Write an answer as it comes, to its end or until something is raised: what came is in `heard`."""
        begun_s: float | None = None
        inside, self._is_first = False, True
        try:
            with closing(pieces):
                for piece in pieces:
                    begun_s = time.monotonic() if begun_s is None else begun_s
                    heard.seconds = time.monotonic() - begun_s
                    if isinstance(piece, AnswerEnd):
                        heard.ended = piece
                        break
                    if not piece.reasoning:
                        heard.pieces.append(piece.text)
                    if self._reasons or not piece.reasoning:
                        inside = self._piece(inside, piece)
        finally:
            self.end_line(restore=inside)

    def end_line(self, *, restore: bool = False) -> None:
        """What comes next stands on a line of its own, in plain letters."""
        rest = self._flow.close() + (PLAIN if restore and self._coloured else "")
        self._put(rest + ("\n" if self._flow.column else ""))
        self._flow = self._begun()

    def _begun(self) -> StreamingTextWrapper:
        return StreamingTextWrapper(lambda: terminal_columns(self._out))

    def _piece(self, inside: bool, piece: AnswerChunk) -> bool:
        text = sanitize_text(piece.text)
        if piece.reasoning != inside:
            self._turn(piece.reasoning)
            text = text.lstrip()
        elif self._is_first:
            text = text.lstrip("\n")
        self._is_first = self._is_first and not text
        self._put(self._flow.feed(text))
        return piece.reasoning

    def _turn(self, reasoning: bool) -> None:
        """From the answer to reasoning, or back, which begins a line."""
        self._is_first = True
        mark = (DIM if reasoning else PLAIN) if self._coloured else ""
        self._put(self._flow.close() + mark)
        if not reasoning:
            self.end_line()
        if not self._coloured:
            self._put(self._flow.feed(BEGIN if reasoning else END))

    def _line(self, text: str, style: str) -> None:
        self.end_line()
        line = wrap_text(sanitize_text(text), terminal_columns(self._out))
        self._put(f"{style}{line}{PLAIN}\n" if self._coloured else f"{line}\n")

    def _put(self, text: str) -> None:
        """Raises InterruptedRunError where nobody reads any more: `| head`, a closed terminal; StorageError where the
        disk takes nothing."""
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            name = "standard output" if self._out is sys.stdout else getattr(self._out, "name", "the output")
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
            if self._out is sys.stdout:
                sys.stdout = nowhere
            self._out = nowhere
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise StorageError(f"{name}: {error.strerror}; make room there, or let it lead elsewhere") from None
            raise InterruptedRunError("nobody reads any more: the output is closed") from None


def sanitize_text(text: str) -> str:
    """A text that cannot move the cursor, or colour anything: what a model writes is nobody's command."""
    return "".join(c if c.isprintable() or c in HARMLESS or _is_blank(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_blank(letter: str) -> bool:
    """Of any width: French has one before its colons, Chinese one as wide as a letter."""
    return unicodedata.category(letter) == "Zs"
