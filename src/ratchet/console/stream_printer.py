"""Prints answers while they are generated: with dim reasoning on a terminal, as plain text elsewhere."""

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
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream

DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
BEGIN, END = "(reasoning) ", "(answer) "
"""Marks before the reasoning, and before the answer that follows the reasoning, on streams without styles."""
HARMLESS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Characters that are kept in addition to printable characters. Persian words and many emoji use joiners."""


def supports_colour(out: IO[str]) -> bool:
    """Return whether the stream is a terminal with colours, and the user has not disabled them (no-color.org)."""
    is_dumb = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return out.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


@dataclass
class PartialAnswer:
    """The received part of an answer, which may be interrupted."""

    pieces: list[str] = field(default_factory=list)
    """Pieces of the answer without its reasoning."""
    end: AnswerEnd | None = None
    """End of the answer. None: the answer was interrupted."""
    seconds: float = 0.0
    """Seconds from the first piece to the last one."""

    @property
    def answer(self) -> str:
        """The answer without surrounding white space."""
        return "".join(self.pieces).strip()


class StreamPrinter:
    """Printer of answers. On a terminal, lines break between words.

    Args:
        out: A terminal or a file.
        reasons: Whether reasoning is shown.
    """

    def __init__(self, out: IO[str], *, reasons: bool = True) -> None:
        self._out, self._shows_reasoning = out, reasons
        self._coloured = supports_colour(out)
        self._wrapper = self._create_wrapper()
        self._is_first = True
        """Whether no text of this answer or of its reasoning was written yet."""

    def head(self, text: str) -> None:
        """Write a heading above an answer."""
        self._write_line(text, BOLD)

    def note(self, text: str) -> None:
        """Write a note on its own line."""
        self._write_line(text, DIM)

    def gap(self) -> None:
        """Write an empty line."""
        self.end_line()
        self._write("\n")

    def answer(self, pieces: AnswerStream, received: PartialAnswer) -> None:
        """Write an answer while it arrives, until its end or an error. `received` collects the answer."""
        start_s: float | None = None
        in_reasoning, self._is_first = False, True
        try:
            with closing(pieces):
                for piece in pieces:
                    start_s = time.monotonic() if start_s is None else start_s
                    received.seconds = time.monotonic() - start_s
                    if isinstance(piece, AnswerEnd):
                        received.end = piece
                        break
                    if not piece.is_reasoning:
                        received.pieces.append(piece.text)
                    if self._shows_reasoning or not piece.is_reasoning:
                        in_reasoning = self._write_piece(in_reasoning, piece)
        finally:
            self.end_line(restore=in_reasoning)

    def end_line(self, *, restore: bool = False) -> None:
        """End the line, so that the next text starts on a new line without styles."""
        rest = self._wrapper.close() + (PLAIN if restore and self._coloured else "")
        self._write(rest + ("\n" if self._wrapper.column else ""))
        self._wrapper = self._create_wrapper()

    def _create_wrapper(self) -> StreamingTextWrapper:
        return StreamingTextWrapper(lambda: terminal_columns(self._out))

    def _write_piece(self, in_reasoning: bool, piece: AnswerChunk) -> bool:
        text = sanitize_text(piece.text)
        if piece.is_reasoning != in_reasoning:
            self._switch(piece.is_reasoning)
            text = text.lstrip()
        elif self._is_first:
            text = text.lstrip("\n")
        self._is_first = self._is_first and not text
        self._write(self._wrapper.feed(text))
        return piece.is_reasoning

    def _switch(self, reasoning: bool) -> None:
        """Switch between answer and reasoning, on a new line."""
        self._is_first = True
        mark = (DIM if reasoning else PLAIN) if self._coloured else ""
        self._write(self._wrapper.close() + mark)
        if not reasoning:
            self.end_line()
        if not self._coloured:
            self._write(self._wrapper.feed(BEGIN if reasoning else END))

    def _write_line(self, text: str, style: str) -> None:
        self.end_line()
        line = wrap_text(sanitize_text(text), terminal_columns(self._out))
        self._write(f"{style}{line}{PLAIN}\n" if self._coloured else f"{line}\n")

    def _write(self, text: str) -> None:
        """Write text.

        Raises:
            InterruptedRunError: The reader has closed the output (`| head`, a closed terminal).
            StorageError: The disk is full or fails.
        """
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            name = "standard output" if self._out is sys.stdout else getattr(self._out, "name", "the output")
            null_stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
            if self._out is sys.stdout:
                sys.stdout = null_stream
            self._out = null_stream
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise StorageError(
                    f"{name}: {error.strerror}; free space, or redirect the output to another disk"
                ) from None
            raise InterruptedRunError("the reader has closed the output") from None


def sanitize_text(text: str) -> str:
    """Replace the control characters in a model's text, which could move the cursor or change colours."""
    return "".join(c if c.isprintable() or c in HARMLESS or _is_blank(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_blank(letter: str) -> bool:
    """Return whether a letter is a blank of any width. French uses a narrow blank before colons, and Chinese uses a
    blank as wide as a letter."""
    return unicodedata.category(letter) == "Zs"
