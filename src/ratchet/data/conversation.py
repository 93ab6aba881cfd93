"""What flows through the data room: conversations with the place they come from, and their tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MASKED = -100
"""Label of a position that is not learned from (the value torch's cross entropy ignores)."""

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]
"""`role` and `content`, and whatever else the chat template reads (tool_calls, name, reasoning_content, train)."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, the last one of them the assistant's, and the tools they may use."""

    messages: list[Message]
    tools: list[Any] | None = None
    unanswered: int = 0
    """Messages behind the last answer that the source had and that were left out: they train nothing."""

    @property
    def question(self) -> "Conversation":
        """All but the last answer: what a model is shown when it has to give that answer itself."""
        return Conversation(self.messages[:-1], self.tools)

    @property
    def prompt(self) -> str:
        """What the user says first: it decides the split."""
        return next((extract_text(m) for m in self.messages if m["role"] == "user"), "")

    @property
    def response(self) -> str:
        """What the assistant says last."""
        return extract_text(self.messages[-1])

    @property
    def text(self) -> str:
        """Every message's text but the system's, a line each: what is compared to find near-duplicates and leaks.

        A long system message that all rows share would make all of them alike.
        """
        return "\n".join(extract_text(m) for m in self.messages if m["role"] not in SYSTEM_ROLES)

    @property
    def system(self) -> str:
        """What the system or developer messages say."""
        return "\n".join(extract_text(m) for m in self.messages if m["role"] in SYSTEM_ROLES)

    def to_json(self) -> str:
        """JSON, for the Arrow file. Keys stay in their order: a template may write a tool call as it is given."""
        tools = {"tools": self.tools} if self.tools else {}
        return _JSON.encode({"messages": self.messages, **tools})

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """What `to_json` wrote."""
        document = json.loads(text)
        return cls(document["messages"], document.get("tools"))


def list_content_kinds(conversation: Conversation) -> set[str]:
    """What there is beside questions and answers."""
    roles = {message["role"] for message in conversation.messages}
    found = {"system messages"} if roles & set(SYSTEM_ROLES) else set()
    found |= {"tool results"} if "tool" in roles else set()
    return found | ({"tools"} if conversation.tools else set())


def extract_text(message: Message) -> str:
    """A message's content as text: content may be null beside tool calls, or a list of text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content or ""


@dataclass(frozen=True)
class SourceRow:
    """One example as a source gives it; texts may be empty."""

    where: str
    """file:line (JSON arrays and Parquet: file[index])."""
    conversation: Conversation
    source: int = 0
    """Index into prepare.sources."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The record as read, for the fields that divide rows."""


def missing_part_reason(row: SourceRow) -> str | None:
    """The reason for which a row without prompt or answer is dropped, or None."""
    conversation = row.conversation
    if not conversation.prompt.strip():
        return "empty_prompt"
    last = conversation.messages[-1]
    if not conversation.response.strip() and not last.get("tool_calls"):
        return "empty_answer"
    return None


@dataclass(frozen=True)
class MalformedRecord:
    """A record that is no example; it is counted as malformed."""

    where: str
    detail: str
    source: int = 0


def join_leaf_texts(fields: Any) -> str:
    """All texts of a record in order, a line each, however deep they stand."""
    texts: list[str] = []
    left: list[Any] = [fields]
    while left:  # no recursion: JSON may be nested deeper than functions may call
        match left.pop():
            case dict() as inner if inner and all(isinstance(value, int) for value in inner.values()):
                left += reversed(inner)  # answers with their marks, as in TruthfulQA
            case dict() as inner:
                left += reversed(inner.values())
            case list() as inner:
                left += reversed(inner)
            case str() as text:
                texts.append(text)
    return "\n".join(texts)


@dataclass(frozen=True)
class EncodedConversation:
    """Token ids of a whole conversation, and labels of the same length: the id where it is learned, else MASKED."""

    input_ids: list[int]
    labels: list[int]

    @property
    def answers(self) -> int:
        """Number of runs of learned positions."""
        learned = [label != MASKED for label in self.labels]
        return sum(now and not before for before, now in zip([False, *learned], learned, strict=False))

    @property
    def trained(self) -> int:
        """Number of positions that are learned from."""
        return len(self.labels) - self.labels.count(MASKED)


@dataclass(frozen=True)
class RefusedConversation:
    """A conversation that cannot be encoded, and why."""

    reason: str
    """`refused` (the template raised) or `control_token`."""
    detail: str
