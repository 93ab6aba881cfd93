"""Reasoning and answer of a text apart, whole or as it is written."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ReasoningParts(NamedTuple):
    """A text taken apart. Both without white space at their ends."""

    reasoning: str | None
    """None: the model has not reasoned."""
    answer: str


class ReasoningSplitter:
    """Tells reasoning from answer as text comes in, whatever the pieces are.

    Args:
        marks: what reasoning begins and ends with.
        opened: the prompt ends with the first of them, so that the text begins with reasoning.
    """

    def __init__(self, marks: Sequence[str], opened: bool = False) -> None:
        self._marks = tuple(marks)
        self.inside = opened
        """Whether the next character would be of the reasoning."""
        self._held = ""
        """What may be the beginning of a mark."""

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Pieces, each with whether it is reasoning. Marks are left out; what may become one is held back."""
        self._held += text
        while self._held:
            mark = self._marks[self.inside]
            at = self._held.find(mark)
            if at >= 0:
                piece, self._held = self._held[:at], self._held[at + len(mark) :]
                if piece:
                    yield self.inside, piece
                self.inside = not self.inside
                continue
            kept = next(n for n in range(min(len(mark) - 1, len(self._held)), -1, -1) if self._ends_like(mark, n))
            piece, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            if piece:
                yield self.inside, piece
            return

    def _ends_like(self, mark: str, count: int) -> bool:
        return count == 0 or self._held.endswith(mark[:count])

    def close(self) -> Iterator[tuple[bool, str]]:
        """What was held back after all."""
        if self._held:
            yield self.inside, self._held
        self._held = ""


def split_reasoning(text: str, marks: Sequence[str], opened: bool = False) -> ReasoningParts:
    """Reasoning and answer of a whole text.

    Reasoning that never ends leaves an empty answer. A text that has only the mark which ends reasoning was begun
    inside of it, whatever the prompt ended with: some servers leave the first mark out.
    """
    begin, end = marks
    if not opened and end in text and text.find(end) < (text.find(begin) if begin in text else len(text)):
        opened = True
    splitter = ReasoningSplitter(marks, opened)
    pieces = [*splitter.feed(text), *splitter.close()]
    reasoned = opened or begin in text
    parts = ["".join(piece for inside, piece in pieces if inside is wanted).strip() for wanted in (True, False)]
    return ReasoningParts(parts[0] if reasoned else None, parts[1])
