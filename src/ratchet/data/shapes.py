"""Records into conversations: what shape the records of a source have is settled once, from its first ones.

Conversations end with an assistant message. One without any gets an empty one, so that it is counted as an empty answer
rather than lost; one without a user message has an empty prompt. Messages behind the last answer train nothing and go.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from ratchet.config_data import Columns, Shape
from ratchet.data.conversation import Conversation, Fault, Message, Row
from ratchet.data.readers import Fields, type_name
from ratchet.errors import DataError

SAMPLE_RECORDS = 100
"""Records of a source that its shape is looked for in."""

PAIRS = (
    ("prompt", "response"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("input", "output"), ("prompt", "completion"), ("query", "response"), ("query", "answer"),
    ("question", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "completion"),
    ("input", "response"), ("input", "target"), ("inputs", "targets"), ("source", "target"), ("user", "assistant"),
    ("text", "label"), ("text", "category"), ("text", "intent"), ("sentence", "label"), ("utterance", "intent"),
    ("request", "intent"), ("request", "response"),
)  # fmt: skip
"""Usual names of the columns with prompt and response, the likeliest first."""

_CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_SYSTEMS = ("system", "system_prompt")
_CHOICES = ("mc1_targets", "choices")
_HOW = "set {setting}.columns.prompt and {setting}.columns.response, or {setting}.shape"

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),  # OpenAI's newer name; templates know the older one
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}


class _Unfit(Exception):
    """A record that is no example; becomes a Fault."""


@dataclass(frozen=True)
class Reading:
    """How the records of one source are read."""

    described: str
    """What they were taken for, in words."""
    _parts: Callable[[Fields], Iterator[tuple[str, Fields]]]
    _conversation: Callable[[Fields], Conversation]

    def rows(self, where: str, fields: Fields, source: int = 0) -> Iterator[Row | Fault]:
        """What a record holds: one row, or several where the shape has several examples in a record."""
        try:
            parts = list(self._parts(fields))
        except _Unfit as unfit:
            yield Fault(where, str(unfit), source)
            return
        for place, part in parts:
            try:
                yield Row(where + place, self._conversation(part), source, fields)
            except _Unfit as unfit:
                yield Fault(where + place, str(unfit), source)
