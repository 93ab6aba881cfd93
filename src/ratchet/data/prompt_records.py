"""Records into questions, for `ratchet generate`: what a model is to answer, whether or not the record has an answer.

The same columns are looked for as in data that is learned from (shapes.py), but no answer is needed. One that is there,
the assistant's words at the end of a conversation or the text of a response column, is not shown to the model: it is
the reference that answers can be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config.data import Columns
from ratchet.data.conversation import Conversation, Fault, Message, text_of
from ratchet.data.readers import Fields
from ratchet.data.schema_detection import (
    CONVERSATIONS,
    PAIRS,
    TURNS,
    Seen,
    UnfitError,
    joined,
    messages_from,
    optional_text,
    text_from,
    text_in,
    tools_from,
    value_in,
)
from ratchet.errors import DataError

SYSTEMS = ("system", "system_prompt")
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS))
"""Usual names of the column with the prompt, the likeliest first."""
RESPONSES = tuple(dict.fromkeys(response for _, response in PAIRS))
"""The same of the column with the answer."""


@dataclass(frozen=True)
class Question:
    """What one record asks."""

    conversation: Conversation
    """Without an answer at its end."""
    reference: str | None
    """The record's own answer; None: it has none that is text."""


@dataclass(frozen=True)
class Asking:
    """How the records of a file are read."""

    described: str
    """What they were taken for, in words."""
    _messages: Callable[[Fields], list[Message]]
    _tools: str
    _reference: str = ""
    """Column with the answer to a prompt."""

    def question(self, where: str, fields: Fields) -> Question | Fault:
        """The messages that the assistant is to answer, and the answer that the record has."""
        try:
            messages = self._messages(fields)
            tools = tools_from(fields.get(self._tools), self._tools) if self._tools else None
        except UnfitError as unfit:
            return Fault(where, str(unfit))
        except RecursionError:
            return Fault(where, "values are nested too deep")
        reference = _text(fields.get(self._reference)) if self._reference else None
        if messages and messages[-1]["role"] == "assistant":
            reference = _text(text_of(messages[-1]))
            messages = messages[:-1]
        if not any(message["role"] in ("user", "tool") and message.get("content", "").strip() for message in messages):
            return Fault(where, "the prompt is empty")
        return Question(Conversation(messages, tools), reference)


def settle(records: Sequence[Fields], column: str | None, columns: Columns, label: str) -> Asking:
    """What the records of a file ask, from the first of them.

    Args:
        records: the first ones.
        column: that holds the prompt, if the settings name it.
        columns: prepare.columns; where a file has these, they are meant.
        label: what the file is called.

    Raises:
        DataError: nothing fits; the message names the columns found and what to set.
    """
    names = {name for fields in records for name in fields}
    if column is not None and column not in names:
        found = Seen(records, Columns(), label, "generate").found
        raise DataError(f"{label}: no column {column!r} (generate.column); found: {found}")
    seen = Seen(records, Columns(), label, "generate")
    system = seen.optional("", *(() if columns.system is None else (columns.system.casefold(),)), *SYSTEMS)
    tools = seen.optional("", "tools", "functions")
    for candidate in (column, columns.messages, seen.usual(*CONVERSATIONS)):
        if candidate in names and candidate is not None and (keys := seen.keys_of(candidate)):
            described = f"conversations in `{candidate}`{seen.also(system=system, tools=tools)}"
            return Asking(described, _conversations(candidate, keys, system), tools)
    prompt = next((c for c in (column, columns.prompt, seen.usual(*PROMPTS)) if c and c in names), "")
    if not prompt:
        raise DataError(
            f"{label}: no column of a usual name holds prompts; found: {seen.found}; set generate.column to the one "
            "that does"
        )
    given = seen.optional("", "input", "context") if prompt.strip().casefold() == "instruction" else ""
    answer = _response(seen, prompt, columns)
    described = f"column {prompt}{seen.also(context=given, system=system, tools=tools, reference=answer)}"
    return Asking(described, _prompts(prompt, given, system), tools, answer)


def _response(seen: Seen, prompt: str, columns: Columns) -> str:
    """The column with the answers to the prompts: that of the settings, else of a usual name beside the prompt's; ""
    if there is none."""
    usual = tuple(answer for name, answer in PAIRS if name == prompt.strip().casefold())
    named = () if columns.response is None else (columns.response.strip().casefold(),)
    found = seen.optional("", *named, *(usual or RESPONSES))
    return found if found in seen.names and found != prompt and _text(seen.sample(found)) is not None else ""


def _text(value: Any) -> str | None:
    """A reference, if it is one: a text or a number."""
    try:
        return text_from(value, "the reference") or None
    except UnfitError:
        return None


def _conversations(column: str, keys: tuple[str, str], system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        found = messages_from(value_in(fields, column), column, keys)
        return found if found and found[0]["role"] == "system" else _below_system(fields, system, found)

    return messages


def _prompts(prompt: str, given: str, system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        keys = next(iter(TURNS.values()))
        value: Any = value_in(fields, prompt)
        if isinstance(value, list):  # a column of texts in which some records hold a conversation
            return messages_from(value, prompt, keys)
        text = joined(text_in(fields, prompt), optional_text(fields, given))
        return _below_system(fields, system, [{"role": "user", "content": text}])

    return messages


def _below_system(fields: Fields, system: str, messages: list[Message]) -> list[Message]:
    text = optional_text(fields, system)
    return [{"role": "system", "content": text}, *messages] if text else messages
