"""Splits generated text into reasoning and answer, for complete texts and for streams."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ReasoningParts(NamedTuple):
    """Reasoning and answer of a text, both stripped of outer white space."""

    reasoning: str | None
    """None if the text has no reasoning."""
    answer: str


class ReasoningSplitter:
    """Splits a stream of text into reasoning and answer; a tag may be divided between pieces.

    Args:
        tags: the tags that begin and end the reasoning.
        starts_in_reasoning: whether the prompt ends with the begin tag, so that the text begins with reasoning.
    """

    def __init__(self, tags: Sequence[str], starts_in_reasoning: bool = False) -> None:
        self._tags = tuple(tags)
        self.inside = starts_in_reasoning
        """Whether the next character belongs to the reasoning."""
        self._buffer = ""
        """Text that may be the beginning of a tag."""

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yield (is reasoning, text) without tags; text that may be the beginning of a tag is held back."""
        self._buffer += text
        while self._buffer:
            tag = self._tags[self.inside]
            at = self._buffer.find(tag)
            if at >= 0:
                piece, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
                if piece:
                    yield self.inside, piece
                self.inside = not self.inside
                continue
            longest = min(len(tag) - 1, len(self._buffer))
            kept = next(n for n in range(longest, -1, -1) if n == 0 or self._buffer.endswith(tag[:n]))
            piece, self._buffer = self._buffer[: len(self._buffer) - kept], self._buffer[len(self._buffer) - kept :]
            if piece:
                yield self.inside, piece
            return

    def close(self) -> Iterator[tuple[bool, str]]:
        """Yield the text that is still held back."""
        if self._buffer:
            yield self.inside, self._buffer
        self._buffer = ""


def split_reasoning(text: str, tags: Sequence[str], starts_in_reasoning: bool = False) -> ReasoningParts:
    """Split a complete text.

    If the reasoning never ends, the answer is empty. A text with an end tag but no begin tag before it begins with
    reasoning, even if `starts_in_reasoning` is false: some servers omit the begin tag.
    """
    begin, end = tags
    if not starts_in_reasoning and end in text and text.find(end) < (text.find(begin) if begin in text else len(text)):
        starts_in_reasoning = True
    splitter = ReasoningSplitter(tags, starts_in_reasoning)
    pieces = [*splitter.feed(text), *splitter.close()]
    has_reasoning = starts_in_reasoning or begin in text
    reasoning = "".join(piece for is_reasoning, piece in pieces if is_reasoning).strip()
    answer = "".join(piece for is_reasoning, piece in pieces if not is_reasoning).strip()
    return ReasoningParts(reasoning if has_reasoning else None, answer)
