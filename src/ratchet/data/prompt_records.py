"""Records into questions, for `ratchet generate`: what a model is to answer, whether or not the record has an answer.

The same columns are looked for as in data that is learned from (shapes.py), but no answer is needed. One that is there,
the assistant's words at the end of a conversation or the text of a response column, is not shown to the model: it is
the reference that answers can be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config.data import ColumnSettings
from ratchet.data.conversation import Conversation, MalformedRecord, Message, extract_text
from ratchet.data.readers import Fields
from ratchet.data.schema_detection import (
    CONVERSATIONS,
    PAIRS,
    TURNS,
    SampledRecords,
    UnusableRecordError,
    column_text,
    column_value,
    join_instruction,
    optional_column_text,
    parse_messages,
    parse_text,
    parse_tools,
)
from ratchet.errors import DataError

SYSTEMS = ("system", "system_prompt")
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS))
"""Usual names of the column with the prompt, the likeliest first."""
RESPONSES = tuple(dict.fromkeys(response for _, response in PAIRS))
"""The same of the column with the answer."""


@dataclass(frozen=True)
class PromptRecord:
    """What one record asks."""

    conversation: Conversation
    """Without an answer at its end."""
    reference: str | None
    """The record's own answer; None: it has none that is text."""


@dataclass(frozen=True)
class PromptRecordReader:
    """How the records of a file are read."""

    described: str
    """What they were taken for, in words."""
    _messages: Callable[[Fields], list[Message]]
    _tools: str
    _reference: str = ""
    """Column with the answer to a prompt."""

    def question(self, where: str, fields: Fields) -> PromptRecord | MalformedRecord:
        """The messages that the assistant is to answer, and the answer that the record has."""
        try:
            messages = self._messages(fields)
            tools = parse_tools(fields.get(self._tools), self._tools) if self._tools else None
        except UnusableRecordError as unfit:
            return MalformedRecord(where, str(unfit))
        except RecursionError:
            return MalformedRecord(where, "values are nested too deep")
        reference = _reference_text(fields.get(self._reference)) if self._reference else None
        if messages and messages[-1]["role"] == "assistant":
            reference = _reference_text(extract_text(messages[-1]))
            messages = messages[:-1]
        if not any(message["role"] in ("user", "tool") and message.get("content", "").strip() for message in messages):
            return MalformedRecord(where, "the prompt is empty")
        return PromptRecord(Conversation(messages, tools), reference)


def detect_prompts(
    records: Sequence[Fields], column: str | None, columns: ColumnSettings, label: str
) -> PromptRecordReader:
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
        found = SampledRecords(records, ColumnSettings(), label, "generate").found
        raise DataError(f"{label}: no column {column!r} (generate.column); found: {found}")
    seen = SampledRecords(records, ColumnSettings(), label, "generate")
    system = seen.optional("", *(() if columns.system is None else (columns.system.casefold(),)), *SYSTEMS)
    tools = seen.optional("", "tools", "functions")
    for candidate in (column, columns.messages, seen.usual(*CONVERSATIONS)):
        if candidate in names and candidate is not None and (keys := seen.keys_of(candidate)):
            described = f"conversations in `{candidate}`{seen.also(system=system, tools=tools)}"
            return PromptRecordReader(described, _conversation_reader(candidate, keys, system), tools)
    prompt = next((c for c in (column, columns.prompt, seen.usual(*PROMPTS)) if c and c in names), "")
    if not prompt:
        raise DataError(
            f"{label}: no column of a usual name holds prompts; found: {seen.found}; set generate.column to the one "
            "that does"
        )
    given = seen.optional("", "input", "context") if prompt.strip().casefold() == "instruction" else ""
    answer = _find_response_column(seen, prompt, columns)
    described = f"column {prompt}{seen.also(context=given, system=system, tools=tools, reference=answer)}"
    return PromptRecordReader(described, _prompt_reader(prompt, given, system), tools, answer)


def _find_response_column(seen: SampledRecords, prompt: str, columns: ColumnSettings) -> str:
    """The column with the answers to the prompts: that of the settings, else of a usual name beside the prompt's; ""
    if there is none."""
    usual = tuple(answer for name, answer in PAIRS if name == prompt.strip().casefold())
    named = () if columns.response is None else (columns.response.strip().casefold(),)
    found = seen.optional("", *named, *(usual or RESPONSES))
    return found if found in seen.names and found != prompt and _reference_text(seen.sample(found)) is not None else ""


def _reference_text(value: Any) -> str | None:
    """A reference, if it is one: a text or a number."""
    try:
        return parse_text(value, "the reference") or None
    except UnusableRecordError:
        return None


def _conversation_reader(column: str, keys: tuple[str, str], system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        found = parse_messages(column_value(fields, column), column, keys)
        return found if found and found[0]["role"] == "system" else _prepend_system(fields, system, found)

    return messages


def _prompt_reader(prompt: str, given: str, system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        keys = next(iter(TURNS.values()))
        value: Any = column_value(fields, prompt)
        if isinstance(value, list):  # a column of texts in which some records hold a conversation
            return parse_messages(value, prompt, keys)
        text = join_instruction(column_text(fields, prompt), optional_column_text(fields, given))
        return _prepend_system(fields, system, [{"role": "user", "content": text}])

    return messages


def _prepend_system(fields: Fields, system: str, messages: list[Message]) -> list[Message]:
    text = optional_column_text(fields, system)
    return [{"role": "system", "content": text}, *messages] if text else messages
