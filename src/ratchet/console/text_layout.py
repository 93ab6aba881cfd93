"""Where something is shown to people: can it be drawn there again and again, how large is it, what can it write?"""

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
"""Columns and lines; less is not believed (a terminal whose size nobody has set says 0)."""


class ScreenSize(NamedTuple):
    """Of a screen."""

    width: int
    """Columns."""
    height: int
    """Lines."""
    encoding: str = "utf-8"
    """What is written there; where it lacks a letter, plainer ones stand in."""


def is_live_terminal(stream: TextIO) -> bool:
    """Whether a picture can be drawn over and over there: a terminal that moves its cursor, with somebody before it."""
    dumb = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return stream.isatty() and not dumb and not os.environ.get("CI")


class TerminalConsole(Console):
    """Where it is drawn: nothing that others wrote is taken for an instruction, and its end is not the process's."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, "the terminal is gone")

    def extent(self) -> ScreenSize:
        """How large it is now."""
        found = self.size
        return ScreenSize(max(NARROWEST, found.width), max(LOWEST, found.height), self.encoding)


def encode_safely(text: str, encoding: str) -> str:
    """Text as this stream can write it, a question mark for what it cannot."""
    return text.encode(encoding, errors="replace").decode(encoding)


def terminal_columns(stream: IO[str]) -> int:
    """Of the terminal as it is now; 0: it is none, or nobody has set its size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


# Pictures made of letters: curves, bars; in ASCII where the terminal's encoding has no better.


@dataclass(frozen=True)
class GlyphSet:
    """The letters that pictures are made of."""

    levels: str
    """From the lowest to the highest."""
    full: str
    parts: str
    """Of a bar's last cell, from nearly empty to nearly full."""
    rest: str
    mark: str
    cut: str
    """Stands for what was cut off."""


UNICODE = GlyphSet("▁▂▃▄▅▆▇█", "█", "▏▎▍▌▋▊▉", "·", "┃", "…")
ASCII = GlyphSet("_.,-~=+*#", "#", "", ".", "|", "~")


def choose_glyphs(encoding: str) -> GlyphSet:
    """The best that this encoding can write."""
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
    """A curve in one line: a letter for the mean of the points below it, none where there are none.

    Args:
        points: step and value, ascending.
        span: first and last step of the line.
        scale: values of the lowest and of the highest letter.
        width: letters.
        letters: to draw with.
    """
    first, last = span
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        place = (step - first) * width // max(1, last - first + 1)
        if 0 <= place < width:
            cells[place].append(value)
    return "".join(_sparkline_level(sum(cell) / len(cell), scale, letters) if cell else " " for cell in cells)


def _sparkline_level(value: float, scale: tuple[float, float], letters: GlyphSet) -> str:
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.0
    return letters.levels[min(len(letters.levels) - 1, max(0, int(share * len(letters.levels))))]


def sparkline_range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest of what is drawn; the highest twentieth is cut off, so that one spike flattens no curve."""
    ordered = sorted(values)
    return ordered[0], ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]


def draw_bar(share: float, width: int, letters: GlyphSet, mark: float | None = None) -> str:
    """A part of a whole of 1, and perhaps a mark at another part. More than the whole fills it."""
    share = min(1.0, max(0.0, share))
    filled = int(share * width)
    cells = [letters.full] * filled + [letters.rest] * (width - filled)
    eighth = int((share * width - filled) * (len(letters.parts) + 1))
    if filled < width and eighth > 0:
        cells[filled] = letters.parts[eighth - 1]
    if mark is not None and 0.0 <= mark <= 1.0:
        cells[min(width - 1, int(mark * width))] = letters.mark
    return "".join(cells)


# Lines of a screen: what does not fit is left out clause by clause, the last one first.

WIDE = 60
"""Columns; on narrower screens names are short."""
LABEL, SHORT_LABEL = 12, 7
_SHORT = {
    "validation": "valid", "learn rate": "lr", "gradient": "grad", "checkpoint": "ckpt", "attempts": "tries",
    "machine": "mach",
}  # fmt: skip

WARNING, GOOD, QUIET, BAD = "yellow", "green", "dim", "red"


@dataclass(frozen=True)
class ScreenLine:
    """One line of a screen."""

    text: Text
    weight: int
    """Where there is no room for all, those with the greatest are left out."""


class LineFormatter:
    """Writes lines for a screen of this size."""

    def __init__(self, size: ScreenSize) -> None:
        self.size = size
        self.letters: GlyphSet = choose_glyphs(size.encoding)
        self.label = LABEL if size.width >= WIDE else SHORT_LABEL
        self.room = size.width - self.label
        """Columns beside the labels."""

    def row(self, weight: int, label: str, clauses: Sequence[str | Text], separator: str = ", ") -> ScreenLine:
        """A name, and what is said of it; the first clause is cut where even that is too long."""
        name = label if self.label == LABEL else _SHORT.get(label, label)
        text = Text().append(name.ljust(self.label)[: self.label], QUIET)  # the name alone is quiet
        return ScreenLine(text.append_text(self.fit(clauses, self.room, separator)), weight)

    def line(self, weight: int, clauses: Sequence[str | Text], separator: str = ", ") -> ScreenLine:
        """The same without a name."""
        return ScreenLine(self.fit(clauses, self.size.width, separator), weight)

    def fit(self, clauses: Sequence[str | Text], room: int, separator: str = ", ") -> Text:
        """As many clauses as there is room for."""
        text = Text()
        for place, clause in enumerate(clauses):
            one = self.safe(clause)
            if place == 0:
                text = Text.assemble(self.cut(one, room))
            elif text.cell_len + len(separator) + one.cell_len <= room:
                text = Text.assemble(text, separator, one)
        return text

    def safe(self, clause: str | Text) -> Text:
        """Text of others as it can be written here, in one line."""
        text = clause if isinstance(clause, Text) else Text(clause)
        plain = encode_safely(escape_invisible(text.plain.replace("\n", " ").replace("\t", " ")), self.size.encoding)
        return text if plain == text.plain else Text(plain, text.style)

    def cut(self, text: Text, room: int) -> Text:
        """Text of at most so many columns."""
        if text.cell_len <= room:
            return text
        kept = set_cell_size(text.plain, max(0, room - 1)).rstrip()
        found = text.copy()
        found.right_crop(len(found) - len(kept))  # with the ends of its styles
        return found.append(self.letters.cut)

    def padded(self, text: str, columns: int, right: bool = False) -> str:
        """Text that takes so many columns."""
        if right:
            return " " * max(0, columns - cell_len(text)) + text
        return set_cell_size(text, columns)


def select_lines(lines: Sequence[ScreenLine], height: int) -> list[Text]:
    """The lines that there is room for, in their order."""
    kept = sorted(range(len(lines)), key=lambda place: (lines[place].weight, place))[: max(1, height)]
    return [lines[place].text for place in sorted(kept)]


# Text that flows into a terminal: a word that would cross the edge goes to the next line, also of text in pieces.
#
# Nothing that was written is taken back, for terminals do not agree on the width of every letter: a word is held until
# it
# is whole, or is known to begin the next line. What begins a line is written as it comes.

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PARTS = re.compile(rf"{COLOUR.pattern}|.", re.DOTALL)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""A line that begins code; one of its fence alone, or a longer one, ends it."""
_NOT_FIRST, _NOT_LAST = ("Pe", "Pf", "Po", "Lm", "Sk"), ("Ps", "Pi")
"""Categories of letters that begin no line, and that end none, where there are no blanks between words."""


class StreamingTextWrapper:
    """One text. Code between fences keeps its lines: the terminal breaks them where it must.

    Args:
        width: columns of the terminal, asked for with every piece, for it may be resized; 0: lines stay as they are.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self.column = 0
        """Of the cursor, in its row."""
        self._blanks, self._word = "", ""
        """Held: what follows the last word, and the word that has begun."""
        self._has_word, self._through = False, False
        """Of the line; and whether its last word is written as it comes, for it stands where it must."""
        self._last = ""
        """Letter that was written."""
        self._line, self._fence = "", ""
        """As it was given until now; and what the code in which it stands began with."""

    def feed(self, text: str) -> str:
        """What can be written now."""
        width = self._width()
        return "".join(self._take(part, width) for part in _PARTS.findall(text))

    def close(self) -> str:
        """What was held after all; blanks at the end are nothing."""
        rest, self._blanks = self._settled(self._width()), ""
        return rest

    def _take(self, part: str, width: int) -> str:
        if part == "\n":
            return self._end_line(width)
        self._line += part
        if not width or self._fence or _FENCE.fullmatch(self._line):
            whole, self._blanks = self._settled(width) + self._blanks, ""
            return whole + self._written(part, width)
        if part in " \t":
            return self._blank(part, width)
        whole = self._settled(width) if self._may_break_before(part) else ""
        if self._through or not self._has_word:
            self._has_word = self._through = True
            return whole + self._written(part, width)
        self._word += part
        return whole if self._fits(width) else whole + self._moved(width)

    def _blank(self, part: str, width: int) -> str:
        if not self._has_word:  # it stands as far in as it was meant to
            return self._written(part, width)
        whole = self._settled(width)
        self._blanks += part
        return whole

    def _may_break_before(self, part: str) -> bool:
        before = self._word[-1:] or (self._last if self._through else "")
        return bool(before) and not COLOUR.match(part) and _may_break(before, part)

    def _settled(self, width: int) -> str:
        """The word is whole."""
        self._through = False
        if not self._word:
            return ""
        if not self._fits(width):  # any more
            text = self._moved(width)
            self._through = False
            return text
        text = self._blanks + self._word
        self._blanks = self._word = ""
        return self._written(text, width)

    def _fits(self, width: int) -> bool:
        return not width or self._after_blanks() + cell_len(COLOUR.sub("", self._word)) <= width

    def _after_blanks(self) -> int:
        return len((" " * self.column + self._blanks).expandtabs())

    def _moved(self, width: int) -> str:
        """The word begins the next line. What more comes of it is written at once."""
        text, self._blanks, self._word = self._word, "", ""
        self.column, self._last, self._through = 0, "", True
        return "\n" + self._written(text, width)

    def _end_line(self, width: int) -> str:
        text = self._settled(width)
        if self._blanks and self._after_blanks() <= width:
            text += self._blanks
        if not self._fence:
            found = _FENCE.fullmatch(self._line)
            self._fence = found[1] if found else ""
        elif self._line.strip().startswith(self._fence) and not self._line.strip().strip(self._fence[0]):
            self._fence = ""
        self.column, self._last, self._line, self._blanks = 0, "", "", ""
        self._has_word = self._through = False
        return text + "\n"

    def _written(self, text: str, width: int) -> str:
        for part in _PARTS.findall(text):
            if part == "\t":
                self.column = len((" " * self.column + part).expandtabs())
            elif not COLOUR.match(part):
                cells = cell_len(self._last + part) - cell_len(self._last)  # some letters change the one before
                # In a row that has become narrower than what stood in it nobody knows the column: the next word moves.
                broken = self.column <= width < self.column + cells
                self.column = cells if width and broken else self.column + cells
                self._last = part
        return text


@lru_cache(maxsize=4096)
def _may_break(before: str, after: str) -> bool:
    """Whether a line may be broken between two letters that no blank divides: where one is of a script that writes none
    between words, and neither belongs to the other (accents, brackets, a full stop)."""
    if not (_is_ideograph(before) or _is_ideograph(after)):
        return False
    joined = cell_len(after) == 0 or before == "\N{ZERO WIDTH JOINER}"
    ends = unicodedata.category(after) in _NOT_FIRST
    return not (joined or ends or unicodedata.category(before) in _NOT_LAST)


def _is_ideograph(letter: str) -> bool:
    """Wide, and not of Korean, which has blanks."""
    return cell_len(letter) == 2 and "HANGUL" not in unicodedata.name(letter, "")


def wrap_text(text: str, width: int) -> str:
    """Lines broken between words; what goes on stands as far in as its line. `width` in columns; 0: as they are."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if not width or cell_len(line) <= width:
        return line
    inner = line.lstrip(" ")
    indent = line[: len(line) - len(inner)]
    if not 0 < len(indent) <= width // 2:
        inner, indent = line, ""
    flow = StreamingTextWrapper(lambda: width - len(indent))
    return indent + (flow.feed(inner) + flow.close()).replace("\n", f"\n{indent}")
