"""Lines of a screen: what does not fit is left out clause by clause, the last one first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ratchet.markup import visible
from ratchet.terminal.glyphs import Glyphs, glyphs
from ratchet.terminal.stream import Size, writable

WIDE = 60
"""Columns; on narrower screens names are short."""
LABEL, SHORT_LABEL = 12, 7
_SHORT = {
    "validation": "valid", "learn rate": "lr", "gradient": "grad", "checkpoint": "ckpt", "attempts": "tries",
    "machine": "mach",
}  # fmt: skip

WARNING, GOOD, QUIET, BAD = "yellow", "green", "dim", "red"


@dataclass(frozen=True)
class Line:
    """One line of a screen."""

    text: Text
    weight: int
    """Where there is no room for all, those with the greatest are left out."""


class Pen:
    """Writes lines for a screen of this size."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.letters: Glyphs = glyphs(size.encoding)
        self.label = LABEL if size.width >= WIDE else SHORT_LABEL
        self.room = size.width - self.label
        """Columns beside the labels."""

    def row(self, weight: int, label: str, clauses: Sequence[str | Text], separator: str = ", ") -> Line:
        """A name, and what is said of it; the first clause is cut where even that is too long."""
        name = label if self.label == LABEL else _SHORT.get(label, label)
        text = Text().append(name.ljust(self.label)[: self.label], QUIET)  # the name alone is quiet
        return Line(text.append_text(self.fit(clauses, self.room, separator)), weight)

    def line(self, weight: int, clauses: Sequence[str | Text], separator: str = ", ") -> Line:
        """The same without a name."""
        return Line(self.fit(clauses, self.size.width, separator), weight)

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
        plain = writable(visible(text.plain.replace("\n", " ").replace("\t", " ")), self.size.encoding)
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


def chosen(lines: Sequence[Line], height: int) -> list[Text]:
    """The lines that there is room for, in their order."""
    kept = sorted(range(len(lines)), key=lambda place: (lines[place].weight, place))[: max(1, height)]
    return [lines[place].text for place in sorted(kept)]
