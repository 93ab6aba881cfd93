"""Prints answers while they are generated: with dim reasoning on a terminal, as plain text elsewhere."""

import errno
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.cells import cell_len

from ratchet.console.terminal import create_console
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream

DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
BEGIN, END = "(reasoning) ", "(answer) "
"""Marks before the reasoning, and before the answer that follows the reasoning, on streams without styles."""
HARMLESS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Characters that are kept in addition to printable characters and to blanks of any width, which French and Chinese
use. Persian words and many emoji use joiners."""


FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""Line that starts a code block. An equal or longer fence on its own line ends the block."""


class StreamingTextWrapper:
    """Word wrap of one text that arrives in pieces. Lines of code blocks are not wrapped.

    Text that is already written is never erased, because terminals disagree on the width of some letters. So a word is
    buffered until it is complete, or until it is too long for the line and starts the next one. The first word of a
    line is written immediately, and so are Chinese and Japanese letters: the terminal may break between any two.

    Args:
        width: Returns the number of columns of the terminal. It is called for each piece, because the terminal may be
            resized. If it returns 0, lines stay unchanged.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._row, self._blanks, self._word = "", "", ""
        """Written text of the current row; buffered blanks after it; buffered word after them."""
        self._line, self._fence = "", ""
        """The input line so far, and the fence of the current code block."""

    @property
    def is_in_row(self) -> bool:
        """Whether the cursor is after text."""
        return bool(self._row)

    def feed(self, text: str) -> str:
        """Return the text that can be written now."""
        width = self._width()
        return "".join(self._feed_letter(letter, width) for letter in text)

    def close(self) -> str:
        """Return the buffered text without trailing blanks."""
        rest, self._blanks = self._flush_word(self._width()), ""
        return rest

    def _feed_letter(self, letter: str, width: int) -> str:
        if letter == "\n":
            return self._end_line(width)
        self._line += letter
        if not width or self._fence or FENCE.fullmatch(self._line):
            completed, blanks, self._blanks = self._flush_word(width), self._blanks, ""
            return completed + self._put(blanks + letter, width)
        if letter in " \t":
            completed = self._flush_word(width)
            if not self._row.strip():  # indentation stays unchanged
                return completed + self._put(letter, width)
            self._blanks += letter
            return completed
        if not self._blanks and not self._word:  # a word that has begun in the row
            return self._put(letter, width)
        self._word += letter
        return "" if self._fits(width) and not _is_ideograph(letter) else self._flush_word(width)

    def _fits(self, width: int) -> bool:
        return not width or _count_columns(self._row + self._blanks + self._word) <= width

    def _flush_word(self, width: int) -> str:
        """Return the buffered word with the blanks before it; if it does not fit, it starts the next line."""
        if not self._word:
            return ""
        is_fitting, text, word = self._fits(width), self._blanks + self._word, self._word
        self._blanks, self._word = "", ""
        if is_fitting:
            return self._put(text, width)
        self._row = ""
        return "\n" + self._put(word, width)

    def _end_line(self, width: int) -> str:
        text = self._flush_word(width)
        if not self._fence:
            fence = FENCE.fullmatch(self._line)
            self._fence = fence[1] if fence else ""
        elif self._line.strip().startswith(self._fence) and not self._line.strip().strip(self._fence[0]):
            self._fence = ""
        self._row, self._line, self._blanks = "", "", ""
        return text + "\n"

    def _put(self, text: str, width: int) -> str:
        """Add text that is written now to the row, and return it."""
        for letter in text:
            # A letter that crosses the edge is at the start of the next row. But if the terminal became narrower than
            # the current row, the column is unknown: the row keeps growing, and the next word moves to a new line.
            is_broken = _count_columns(self._row) <= width < _count_columns(self._row + letter)
            self._row = letter if width and is_broken else self._row + letter
        return text


def _count_columns(text: str) -> int:
    return cell_len(text.expandtabs())


def _is_ideograph(letter: str) -> bool:
    """Return whether a letter is wide and not Korean, because Korean has blanks between words."""
    return cell_len(letter) == 2 and "HANGUL" not in unicodedata.name(letter, "")


def supports_styles(out: IO[str]) -> bool:
    """Return whether the stream is a terminal with styles, and the user has not disabled them (no-color.org)."""
    if not out.isatty():
        return False
    console = create_console(out)
    return console.color_system is not None and not console.no_color


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
        self._coloured = supports_styles(out)
        self._wrapper = StreamingTextWrapper(self._columns)
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
        self._write(rest + ("\n" if self._wrapper.is_in_row else ""))
        self._wrapper = StreamingTextWrapper(self._columns)

    def _columns(self) -> int:
        """Return the current width of the terminal, or 0 if the stream is not a terminal or its size is not set."""
        try:
            return os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            return 0

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
        line = self._wrapper.feed(sanitize_text(text)) + self._wrapper.close()
        self._wrapper = StreamingTextWrapper(self._columns)
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
    return "".join(
        c if c.isprintable() or c in HARMLESS or unicodedata.category(c) == "Zs" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
