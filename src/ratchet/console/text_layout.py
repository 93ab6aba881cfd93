"""Lays out text for terminals: size and encoding, sparklines and bars, screen lines, word wrapping."""

import errno
import math
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ratchet.storage.html import escape_invisible

NARROWEST, LOWEST = 20, 4
"""Minimum numbers of columns and lines. Smaller sizes are raised to these numbers, because a terminal whose size is not
set reports 0."""
WIDE = 60
"""Minimum width in columns for full labels. Narrower screens use short labels."""
LABEL, SHORT_LABEL = 12, 7
"""Width in columns of full labels, and of short labels."""
_SHORT = {
    "validation": "valid", "learn rate": "lr", "gradient": "grad", "checkpoint": "ckpt", "attempts": "tries",
    "machine": "mach",
}  # fmt: skip

WARNING, GOOD, QUIET, BAD = "yellow", "green", "dim", "red"

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PARTS = re.compile(rf"{COLOUR.pattern}|.", re.DOTALL)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""Line that starts a code block. An equal or longer fence on its own line ends the block."""
_NOT_FIRST, _NOT_LAST = ("Pe", "Pf", "Po", "Lm", "Sk"), ("Ps", "Pi")
"""Unicode categories of letters that cannot start a line, and of letters that cannot end a line, in scripts without
blanks between words."""


class ScreenSize(NamedTuple):
    """Size and encoding of a screen."""

    width: int
    """Number of columns."""
    height: int
    """Number of lines."""
    encoding: str = "utf-8"
    """Encoding of the stream. Letters that the encoding lacks are replaced by simpler ones."""


def is_live_terminal(stream: TextIO) -> bool:
    """Return whether the stream is an interactive terminal that can move its cursor."""
    is_dumb = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return stream.isatty() and not is_dumb and not os.environ.get("CI")


class TerminalConsole(Console):
    """A Rich console that ignores markup in external text, and raises an error instead of exiting the process."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Raise an error, because Rich would exit the process."""
        raise BrokenPipeError(errno.EPIPE, "the terminal is closed")

    def extent(self) -> ScreenSize:
        """Return the current size."""
        size = self.size
        return ScreenSize(max(NARROWEST, size.width), max(LOWEST, size.height), self.encoding)


def encode_safely(text: str, encoding: str) -> str:
    """Replace letters that the encoding lacks by question marks."""
    return text.encode(encoding, errors="replace").decode(encoding)


def terminal_columns(stream: IO[str]) -> int:
    """Return the current width of the terminal, or 0 if the stream is not a terminal or its size is not set."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


# Sparklines and bars, in ASCII if the encoding requires it.


@dataclass(frozen=True)
class GlyphSet:
    """Letters for sparklines and bars."""

    levels: str
    """Letters of a sparkline, from the lowest to the highest."""
    full: str
    """Full cell of a bar."""
    parts: str
    """Letters for the partly filled cell of a bar, from nearly empty to nearly full."""
    rest: str
    """Empty cell of a bar."""
    mark: str
    """Mark on a bar."""
    cut: str
    """Letter at the end of a cut text."""


UNICODE = GlyphSet("▁▂▃▄▅▆▇█", "█", "▏▎▍▌▋▊▉", "·", "┃", "…")
ASCII = GlyphSet("_.,-~=+*#", "#", "", ".", "|", "~")


def choose_glyphs(encoding: str) -> GlyphSet:
    """Return the best glyphs of this encoding."""
    try:
        "".join((UNICODE.levels, UNICODE.full, UNICODE.parts, UNICODE.rest, UNICODE.mark, UNICODE.cut)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def draw_sparkline(
    points: Sequence[tuple[int, float]],
    span: tuple[int, int],
    scale: tuple[float, float],
    width: int,
    letters: GlyphSet,
) -> str:
    """Draw a curve in one line. Each letter shows the mean of its points; a letter without points is a blank.

    Args:
        points: Steps and values in ascending order of steps.
        span: First and last step of the line.
        scale: Values of the lowest and of the highest letter.
        width: Number of letters.
        letters: Glyphs to use.
    """
    first, last = span
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        index = (step - first) * width // max(1, last - first + 1)
        if 0 <= index < width:
            cells[index].append(value)
    return "".join(_sparkline_level(sum(cell) / len(cell), scale, letters) if cell else " " for cell in cells)


def _sparkline_level(value: float, scale: tuple[float, float], letters: GlyphSet) -> str:
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.0
    return letters.levels[min(len(letters.levels) - 1, max(0, int(share * len(letters.levels))))]


def sparkline_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest value of a sparkline's scale.

    The highest 5 % of the values are clipped, so that one spike does not flatten the curve.
    """
    ordered = sorted(values)
    return ordered[0], ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]


def draw_bar(share: float, width: int, letters: GlyphSet, mark: float | None = None) -> str:
    """Draw a bar of which `share` is filled (1: the full bar), with an optional mark at the share `mark`.

    Shares above 1 fill the bar.
    """
    share = min(1.0, max(0.0, share))
    filled = int(share * width)
    cells = [letters.full] * filled + [letters.rest] * (width - filled)
    eighth = int((share * width - filled) * (len(letters.parts) + 1))
    if filled < width and eighth > 0:
        cells[filled] = letters.parts[eighth - 1]
    if mark is not None and 0.0 <= mark <= 1.0:
        cells[min(width - 1, int(mark * width))] = letters.mark
    return "".join(cells)


# Lines of a screen. Clauses that do not fit are omitted, starting with the last one.


@dataclass(frozen=True)
class ScreenLine:
    """A line of a screen."""

    text: Text
    weight: int
    """Lines with the greatest weight are omitted first."""


class LineFormatter:
    """Formatter of lines for a screen of this size."""

    def __init__(self, size: ScreenSize) -> None:
        self.size = size
        self.letters: GlyphSet = choose_glyphs(size.encoding)
        self.label = LABEL if size.width >= WIDE else SHORT_LABEL
        self.room = size.width - self.label
        """Width in columns of the text after a label."""

    def row(self, weight: int, label: str, clauses: Sequence[str | Text], separator: str = ", ") -> ScreenLine:
        """Format a label and its clauses. The first clause is cut if it does not fit."""
        name = label if self.label == LABEL else _SHORT.get(label, label)
        text = Text().append(name.ljust(self.label)[: self.label], QUIET)  # only the label is dim
        return ScreenLine(text.append_text(self.fit(clauses, self.room, separator)), weight)

    def line(self, weight: int, clauses: Sequence[str | Text], separator: str = ", ") -> ScreenLine:
        """Format a line without a label."""
        return ScreenLine(self.fit(clauses, self.size.width, separator), weight)

    def fit(self, clauses: Sequence[str | Text], room: int, separator: str = ", ") -> Text:
        """Join the clauses that fit. The first clause is cut if it does not fit."""
        text = Text()
        for index, clause in enumerate(clauses):
            printable = self.safe(clause)
            if index == 0:
                text = Text.assemble(self.cut(printable, room))
            elif text.cell_len + len(separator) + printable.cell_len <= room:
                text = Text.assemble(text, separator, printable)
        return text

    def safe(self, clause: str | Text) -> Text:
        """Make external text printable on one line in the screen's encoding."""
        text = clause if isinstance(clause, Text) else Text(clause)
        plain = encode_safely(escape_invisible(text.plain.replace("\n", " ").replace("\t", " ")), self.size.encoding)
        return text if plain == text.plain else Text(plain, text.style)

    def cut(self, text: Text, room: int) -> Text:
        """Cut text to this number of columns."""
        if text.cell_len <= room:
            return text
        text_start = set_cell_size(text.plain, max(0, room - 1)).rstrip()
        result = text.copy()
        result.right_crop(len(result) - len(text_start))  # also shortens the styles of the text
        return result.append(self.letters.cut)

    def padded(self, text: str, columns: int, right: bool = False) -> str:
        """Pad or cut text to this number of columns."""
        if right:
            return " " * max(0, columns - cell_len(text)) + text
        return set_cell_size(text, columns)


def select_lines(lines: Sequence[ScreenLine], height: int) -> list[Text]:
    """Return the lines that fit, in order."""
    selected = sorted(range(len(lines)), key=lambda index: (lines[index].weight, index))[: max(1, height)]
    return [lines[index].text for index in sorted(selected)]


# Streaming word wrap: a word that would cross the edge moves to the next line, even if it arrives in pieces. Text that
# is already written is never erased, because terminals disagree on the width of some letters. So a word is buffered
# until it is complete, or until it is too long for the line and starts the next one. The first word of a line is
# written immediately.


class StreamingTextWrapper:
    """Word wrap of one text that arrives in pieces. Lines of code blocks are not wrapped.

    Args:
        width: Returns the number of columns of the terminal. It is called for each piece, because the terminal may be
            resized. If it returns 0, lines stay unchanged.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self.column = 0
        """Column of the cursor."""
        self._blanks, self._word = "", ""
        """Buffered blanks after the last word, and the buffered word."""
        self._has_word, self._is_direct = False, False
        """Whether the line has a word, and whether its last word is written immediately, because its position is
        final."""
        self._last = ""
        """Last written letter."""
        self._line, self._fence = "", ""
        """The input line so far, and the fence of the current code block."""

    def feed(self, text: str) -> str:
        """Return the text that can be written now."""
        width = self._width()
        return "".join(self._feed_part(part, width) for part in _PARTS.findall(text))

    def close(self) -> str:
        """Return the buffered text without trailing blanks."""
        rest, self._blanks = self._flush_word(self._width()), ""
        return rest

    def _feed_part(self, part: str, width: int) -> str:
        if part == "\n":
            return self._end_line(width)
        self._line += part
        if not width or self._fence or _FENCE.fullmatch(self._line):
            completed, self._blanks = self._flush_word(width) + self._blanks, ""
            return completed + self._track(part, width)
        if part in " \t":
            return self._feed_blank(part, width)
        completed = self._flush_word(width) if self._may_break_before(part) else ""
        if self._is_direct or not self._has_word:
            self._has_word = self._is_direct = True
            return completed + self._track(part, width)
        self._word += part
        return completed if self._fits(width) else completed + self._move_word(width)

    def _feed_blank(self, part: str, width: int) -> str:
        if not self._has_word:  # indentation stays unchanged
            return self._track(part, width)
        completed = self._flush_word(width)
        self._blanks += part
        return completed

    def _may_break_before(self, part: str) -> bool:
        before = self._word[-1:] or (self._last if self._is_direct else "")
        return bool(before) and not COLOUR.match(part) and _may_break(before, part)

    def _flush_word(self, width: int) -> str:
        """Return the buffered word, which is complete, with the blanks before it."""
        self._is_direct = False
        if not self._word:
            return ""
        if not self._fits(width):  # the terminal may have been resized
            text = self._move_word(width)
            self._is_direct = False
            return text
        text = self._blanks + self._word
        self._blanks = self._word = ""
        return self._track(text, width)

    def _fits(self, width: int) -> bool:
        return not width or self._column_after_blanks() + cell_len(COLOUR.sub("", self._word)) <= width

    def _column_after_blanks(self) -> int:
        return len((" " * self.column + self._blanks).expandtabs())

    def _move_word(self, width: int) -> str:
        """Move the word to the next line. The rest of the word is written immediately."""
        text, self._blanks, self._word = self._word, "", ""
        self.column, self._last, self._is_direct = 0, "", True
        return "\n" + self._track(text, width)

    def _end_line(self, width: int) -> str:
        text = self._flush_word(width)
        if self._blanks and self._column_after_blanks() <= width:
            text += self._blanks
        if not self._fence:
            fence = _FENCE.fullmatch(self._line)
            self._fence = fence[1] if fence else ""
        elif self._line.strip().startswith(self._fence) and not self._line.strip().strip(self._fence[0]):
            self._fence = ""
        self.column, self._last, self._line, self._blanks = 0, "", "", ""
        self._has_word = self._is_direct = False
        return text + "\n"

    def _track(self, text: str, width: int) -> str:
        """Update the column for text that is written now, and return the text."""
        for part in _PARTS.findall(text):
            if part == "\t":
                self.column = len((" " * self.column + part).expandtabs())
            elif not COLOUR.match(part):
                # Some letters change the width of the previous one.
                cells = cell_len(self._last + part) - cell_len(self._last)
                # A letter that crosses the edge is at the start of the next row. But if the terminal became narrower
                # than the current row, the column is unknown: it keeps growing, and the next word moves to a new line.
                is_broken = self.column <= width < self.column + cells
                self.column = cells if width and is_broken else self.column + cells
                self._last = part
        return text


@lru_cache(maxsize=4096)
def _may_break(before: str, after: str) -> bool:
    """Return whether a line may break between two letters without a blank.

    At least one of the letters must be of a script without blanks between words, and the two letters must not belong
    together, as a letter and its accent, bracket or full stop do.
    """
    if not (_is_ideograph(before) or _is_ideograph(after)):
        return False
    joined = cell_len(after) == 0 or before == "\N{ZERO WIDTH JOINER}"
    ends = unicodedata.category(after) in _NOT_FIRST
    return not (joined or ends or unicodedata.category(before) in _NOT_LAST)


def _is_ideograph(letter: str) -> bool:
    """Return whether a letter is wide and not Korean, because Korean has blanks between words."""
    return cell_len(letter) == 2 and "HANGUL" not in unicodedata.name(letter, "")


def wrap_text(text: str, width: int) -> str:
    """Wrap lines between words and keep their indentation. `width` is in columns; 0 leaves lines unchanged."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if not width or cell_len(line) <= width:
        return line
    inner = line.lstrip(" ")
    indent = line[: len(line) - len(inner)]
    if not 0 < len(indent) <= width // 2:
        inner, indent = line, ""
    wrapper = StreamingTextWrapper(lambda: width - len(indent))
    return indent + (wrapper.feed(inner) + wrapper.close()).replace("\n", f"\n{indent}")
