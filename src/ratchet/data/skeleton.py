"""What a chat template writes around the messages: its output with every message's text replaced by a mark.

Conversations of the same structure (roles, fields that are there, tools) get the same text around their messages, so a
template is taken apart once for each structure. Walking along that skeleton, every character of a conversation's text
is known to be the template's or to be some message's; a template that treats a text in another way does not match, and
is found out.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.data.chat import OURS
from ratchet.data.conversation import Conversation, Message

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its reasoning, in the order in which transformers looks for them."""

_MARK = re.compile(r"slot7c1e(\d+)end")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Slot:
    """A place for one text of a conversation."""

    turn: int
    kind: Literal["content", "reasoning"]


@dataclass(frozen=True)
class Outline:
    """A conversation taken apart: its structure, and the texts that fill it."""

    messages: list[Message]
    """The messages with marks instead of texts."""
    slots: list[Slot]
    texts: list[str]


class _Marker:
    """Puts marks in place of texts, and keeps the texts. Blank texts stay: templates ask whether there is any text."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.texts: list[str] = []

    def mark(self, slot: Slot, text: str) -> str:
        if not text or text.isspace():
            return text
        self.slots.append(slot)
        self.texts.append(text)
        return f"slot7c1e{len(self.slots) - 1}end"

    def message(self, turn: int, message: Message) -> Message:
        marked = {key: value for key, value in message.items() if key not in OURS}
        thoughts = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if isinstance(thoughts, str):
            mark = self.mark(Slot(turn, "reasoning"), thoughts)
            marked |= {key: mark for key in REASONING if message.get(key) is not None}
        content = message.get("content")
        if isinstance(content, list):
            marked["content"] = [self._part(turn, part) for part in content]
        elif isinstance(content, str):
            marked["content"] = self._content(turn, content, message["role"])
        return marked

    def _part(self, turn: int, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self.mark(Slot(turn, "content"), part["text"])}
        return part

    def _content(self, turn: int, content: str, role: str) -> str:
        """Reasoning inside an answer is a text of its own: templates for reasoning models cut it off there."""
        head, closing, answer = content.partition("</think>")
        if role != "assistant" or not closing or closing in answer or "<think>" in answer:
            return self.mark(Slot(turn, "content"), content)
        before, opening, thoughts = head.rpartition("<think>")
        if before.strip():
            return self.mark(Slot(turn, "content"), content)
        marked = self.mark(Slot(turn, "reasoning"), thoughts)
        return before + opening + marked + closing + self.mark(Slot(turn, "content"), answer)


def outline(conversation: Conversation, only: frozenset[int] | None = None) -> Outline:
    """Take a conversation apart; with `only`, the texts of other turns stay part of the structure."""
    marker = _Marker()
    messages = [
        marker.message(turn, message) if only is None or turn in only else message
        for turn, message in enumerate(conversation.messages)
    ]
    return Outline(messages, marker.slots, marker.texts)


def structure(conversation: Conversation) -> tuple[tuple[str, ...], list[str]]:
    """What decides the skeleton of a conversation, and the texts in the order of `outline`; made to be fast."""
    key: list[str] = []
    texts: list[str] = []
    for turn, message in enumerate(conversation.messages):
        content = message.get("content")
        plain = isinstance(content, str) and content != "" and not content.isspace() and len(message) == 2
        if plain and not (message["role"] == "assistant" and "</think>" in str(content)):
            key.append(message["role"])
            texts.append(str(content))
        else:
            marker = _Marker()
            key.append(json.dumps(marker.message(turn, message), ensure_ascii=False))
            texts += marker.texts
    key.append(json.dumps(conversation.tools) if conversation.tools else "")
    return tuple(key), texts


@dataclass(frozen=True)
class Span:
    """What is learned of one turn, between the template's words. Places are (literal, characters into it)."""

    start: tuple[int, int]
    end: tuple[int, int]
    ender: str
    """The control token that ends the turn, the last thing in the span."""
    given: str = ""
    """What the prompt already says before the answer (`<think>`): not learned where the text begins with it too."""
    thinking: bool = False
    """The prompt and what precedes the answer in training differ by a thinking block."""


@dataclass(frozen=True)
class Anchor:
    """How to find a span among the tokens of a conversation, counted from the end of the span before it."""

    token: int | None
    """A control token before it; None: there is none."""
    skipped: int
    """Tokens like it that come first."""
    distance: int
    """Tokens from there to the span."""
    end: int
    """The token that ends it."""
    ends_inside: int
    """Tokens like that inside it."""


@dataclass
class Skeleton:
    """The template's words around the texts of one structure."""

    text: str
    literals: list[str]
    order: list[int]
    """The slot between each literal and the next: templates may move, repeat and leave out texts."""
    starts: list[int]
    """Where each literal begins in `text`."""
    spans: list[Span] = field(default_factory=list)
    """What is learned, in order."""
    anchors: list[Anchor] | None = None
    """How to find the spans among the tokens; None until a first row was measured."""
    ends_learned: bool = False
    """The last message is learned from."""
    right: int = 0
    wrong: int = 0
    """Rows in which the anchors held, and in which they did not."""

    @classmethod
    def of(cls, text: str) -> "Skeleton":
        """Take apart what the template wrote for an outline."""
        pieces = _MARK.split(text)
        starts = [0, *(match.end() for match in _MARK.finditer(text))]
        return cls(text, pieces[::2], [int(slot) for slot in pieces[1::2]], starts)

    @property
    def guessable(self) -> bool:
        """Whether counting tokens from the anchors is worth a try."""
        return self.anchors is not None and self.wrong <= 16 + self.right // 4

    def guessed(self, right: bool) -> None:
        """Keep count of how often the anchors hold."""
        self.right += right
        self.wrong += not right

    def align(self, text: str, texts: list[str]) -> list[int] | None:
        """Where each literal begins in the text of a conversation; None where it is not skeleton and texts alone.

        A text may have lost white space at either end, and nothing else.
        """
        at = len(self.literals[0])
        if not text.startswith(self.literals[0]):
            return None
        starts = [0]
        for slot, literal in zip(self.order, self.literals[1:], strict=True):
            filling = texts[slot]
            if text.startswith(filling, at) and text.startswith(literal, at + len(filling)):
                at += len(filling)
            elif (at := _trimmed_end(text, at, filling, literal)) < 0:
                return None
            starts.append(at)
            at += len(literal)
        return starts if at == len(text) else None


def _trimmed_end(text: str, at: int, filling: str, literal: str) -> int:
    """Where a filling that may have lost white space ends so that the literal follows; -1 where it is not there."""
    bare = filling.strip()
    lead = filling[: filling.index(bare)]
    trail = filling[len(lead) + len(bare) :]
    space = _SPACE.match(text, at)
    begin = space.end() if space else at
    if not lead.endswith(text[at:begin]) or not text.startswith(bare, begin):
        return -1
    end = begin + len(bare)
    kept = 0
    while kept < len(trail) and text[end + kept : end + kept + 1] == trail[kept]:
        kept += 1
    return next((end + k for k in range(kept, -1, -1) if text.startswith(literal, end + k)), -1)
