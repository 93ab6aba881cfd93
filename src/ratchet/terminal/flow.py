"""Text that flows into a terminal: a word that would cross the edge goes to the next line, also of text in pieces.

Nothing that was written is taken back, for terminals do not agree on the width of every letter: a word is held until it
is whole, or is known to begin the next line. What begins a line is written as it comes.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from rich.cells import cell_len

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PARTS = re.compile(rf"{COLOUR.pattern}|.", re.DOTALL)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""A line that begins code; one of its fence alone, or a longer one, ends it."""
_NOT_FIRST, _NOT_LAST = ("Pe", "Pf", "Po", "Lm", "Sk"), ("Ps", "Pi")
"""Categories of letters that begin no line, and that end none, where there are no blanks between words."""


class Flow:
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


def wrapped(text: str, width: int) -> str:
    """Lines broken between words; what goes on stands as far in as its line. `width` in columns; 0: as they are."""
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    if not width or cell_len(line) <= width:
        return line
    inner = line.lstrip(" ")
    indent = line[: len(line) - len(inner)]
    if not 0 < len(indent) <= width // 2:
        inner, indent = line, ""
    flow = Flow(lambda: width - len(indent))
    return indent + (flow.feed(inner) + flow.close()).replace("\n", f"\n{indent}")
