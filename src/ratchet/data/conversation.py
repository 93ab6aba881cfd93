"""Data types of the data pipeline: conversations, source rows, and encoded conversations."""

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.config.prepare import DropReason

IGNORE_INDEX = -100
"""Label of a position that is not trained on (the default `ignore_index` of torch's cross entropy)."""
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder()
_USER_FIRST = '{"messages":[{"role":"user","content":"'
"""Beginning of most conversations as JSON; the text of the first message follows."""

SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]
"""A message has `role`, `content`, and other keys that the chat template or prepare.turns reads (tool_calls, name,
reasoning_content, train)."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, usually with the assistant's as the last, and the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None
    unanswered: int = 0
    """Number of messages after the last answer that were removed because nothing is trained on them."""
    rejected: Message | None = None
    """Answer that is worse than the last message, for preference tuning."""
    is_desirable: bool | None = None
    """Label of the last message, for preference tuning; None without a label."""

    @property
    def context(self) -> "Conversation":
        """The conversation without its last message: the input for a model that generates the last answer."""
        return Conversation(self.messages[:-1], self.tools)

    @property
    def with_rejected(self) -> "Conversation":
        """The conversation with the rejected answer as its last message."""
        if self.rejected is None:
            raise ValueError("the conversation has no rejected answer")
        return Conversation([*self.messages[:-1], self.rejected], self.tools)

    @property
    def prompt(self) -> str:
        """Text of the first user message, which determines the split by default."""
        return next((extract_text(m) for m in self.messages if m["role"] == "user"), "")

    @property
    def response(self) -> str:
        """Text of the last message."""
        return extract_text(self.messages[-1])

    @property
    def calls_tools(self) -> bool:
        """Whether the last message calls tools. Its text is then only a part of the answer, and often empty."""
        return bool(self.messages[-1].get("tool_calls"))

    @property
    def needs_tools(self) -> bool:
        """Whether there are tools, or messages that call them or have their results."""
        return bool(self.tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in self.messages)

    @property
    def text(self) -> str:
        """Texts of all messages except system messages, one per line; used to find near-duplicates and leaks.

        A long system message that all rows share would make all rows similar.
        """
        messages = self.messages if self.rejected is None else [*self.messages, self.rejected]
        return "\n".join(extract_text(m) for m in messages if m["role"] not in SYSTEM_ROLES)

    @property
    def system(self) -> str:
        """Texts of the system and developer messages, one per line."""
        return "\n".join(extract_text(m) for m in self.messages if m["role"] in SYSTEM_ROLES)

    def to_json(self) -> str:
        """Return JSON for the Arrow file. Keys keep their order, because a template may render a tool call as JSON."""
        tools = {"tools": self.tools} if self.tools else {}
        rejected = {"rejected": self.rejected} if self.rejected else {}
        label = {} if self.is_desirable is None else {"is_desirable": self.is_desirable}
        return _JSON.encode({"messages": self.messages, **tools, **rejected, **label})

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Read the output of `to_json`."""
        document = json.loads(text)
        return cls(
            document["messages"],
            document.get("tools"),
            rejected=document.get("rejected"),
            is_desirable=document.get("is_desirable"),
        )


def read_prompt(text: str) -> str:
    """Read only the prompt (`Conversation.prompt`) from the output of `to_json`."""
    if text.startswith(_USER_FIRST):
        prompt, _ = _DECODER.raw_decode(text, len(_USER_FIRST) - 1)
        return str(prompt)
    return Conversation.from_json(text).prompt


def format_pair(prompt: list[Message], chosen: str, rejected: str, tools: list[Any] | None) -> dict[str, Any]:
    """Return a pair of answers to a prompt as a row that `prepare.task: preferences` reads."""
    answers = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": prompt, **answers, **({"tools": tools} if tools else {})}


def extract_text(message: Message) -> str:
    """Return a message's content as text. The content may be null (with tool calls) or a list of text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content or ""


@dataclass(frozen=True)
class SourceRow:
    """One example read from a source; its texts may be empty."""

    where: str
    """Position: `file:line`; `file[index]` for JSON arrays and Parquet; `dataset[split]#index` for hub datasets."""
    conversation: Conversation
    source: int = 0
    """Index into prepare.sources."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the record, for grouping, stratification and balancing."""


def missing_part_reason(row: SourceRow) -> DropReason | None:
    """Return the reason to drop a row that has no prompt, no answer, or two equal answers; None if it is complete."""
    conversation = row.conversation
    if not conversation.prompt.strip():
        return "empty_prompt"
    answers = [conversation] if conversation.rejected is None else [conversation, conversation.with_rejected]
    if any(not answer.response.strip() and not answer.calls_tools for answer in answers):
        return "empty_answer"
    if conversation.rejected is not None and conversation.rejected == conversation.messages[-1]:
        return "equal_answers"
    return None


@dataclass(frozen=True)
class MalformedRecord:
    """A record that is not a valid example; it is counted as malformed."""

    where: str
    detail: str
    source: int = 0


def join_leaf_texts(fields: Any) -> str:
    """Join all texts of a record, at any depth, in order, one per line."""
    texts: list[str] = []
    pending: list[Any] = [fields]
    while pending:  # not recursive: JSON may be nested deeper than Python's recursion limit
        match pending.pop():
            case dict() as inner if inner and all(isinstance(value, int) for value in inner.values()):
                pending += reversed(inner)  # the keys are answers, marked 0 or 1, as in TruthfulQA
            case dict() as inner:
                pending += reversed([*inner.values()])
            case list() as inner:
                pending += reversed(inner)
            case str() as text:
                texts.append(text)
    return "\n".join(texts)


@dataclass(frozen=True)
class EncodedConversation:
    """Token ids of a conversation, and labels of the same length: the token id if trained on, else IGNORE_INDEX."""

    input_ids: list[int]
    labels: list[int]

    @property
    def answer_count(self) -> int:
        """Number of contiguous runs of trained positions."""
        is_trained = list(map(IGNORE_INDEX.__ne__, self.labels))
        return sum(map(operator.gt, is_trained, [False, *is_trained]))

    @property
    def trained_tokens(self) -> int:
        """Number of positions that are trained on."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


@dataclass(frozen=True)
class RefusedConversation:
    """A conversation that cannot be encoded or used."""

    reason: str
    """Reason under which the row is counted: `refused` (by the template or the tokenizer), `control_token`, ..."""
    detail: str


def replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which some servers send and UTF-8 cannot encode, by the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text
