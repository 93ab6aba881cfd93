"""Converts records to prompts for `ratchet generate`; records may have an answer or not.

The columns are detected as in schema_detection.py, but no answer is required. If a record has one (the assistant's
last message, or the text of a response column), the model does not see it: it becomes the reference for comparisons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config.prepare import ColumnSettings
from ratchet.data.conversation import Conversation, MalformedRecord, Message, extract_text
from ratchet.data.readers import Fields
from ratchet.data.schema_detection import (
    COLUMN_PAIRS,
    CONVERSATION_COLUMNS,
    TURN_KEYS,
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

SYSTEM_COLUMNS = ("system", "system_prompt")
PROMPT_COLUMNS = tuple(dict.fromkeys(prompt for prompt, _ in COLUMN_PAIRS))
"""Common names of the prompt column, most likely first."""
RESPONSE_COLUMNS = tuple(dict.fromkeys(response for _, response in COLUMN_PAIRS))
"""Common names of the response column, most likely first."""


@dataclass(frozen=True)
class PromptRecord:
    """The prompt of one record."""

    conversation: Conversation
    """The conversation without an answer at its end."""
    reference: str | None
    """The record's answer; None if it has no answer that is text."""


@dataclass(frozen=True)
class PromptRecordReader:
    """Converts the records of one file to prompts."""

    description: str
    """The detected schema, in words."""
    _messages: Callable[[Fields], list[Message]]
    _tools: str
    _reference: str = ""
    """Column with the answer; "" if the file has none."""

    def read(self, where: str, fields: Fields) -> PromptRecord | MalformedRecord:
        """Return the prompt and the reference of a record."""
        try:
            messages = self._messages(fields)
            tools = parse_tools(fields.get(self._tools), self._tools) if self._tools else None
        except UnusableRecordError as error:
            return MalformedRecord(where, str(error))
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
    """Detect which columns of a file hold prompts and references.

    Args:
        records: the first records of the file.
        column: generate.prompt_column, if set.
        columns: prepare.columns, which apply to each column that the file has.
        label: the name of the file in messages.

    Raises:
        DataError: no column holds prompts, or the named one does not exist.
    """
    names = {name for fields in records for name in fields}
    if column is not None and column not in names:
        found = SampledRecords(records, ColumnSettings(), label, "generate").column_summary
        raise DataError(f"{label}: no column {column!r} (generate.prompt_column); found: {found}")
    sampled = SampledRecords(records, ColumnSettings(), label, "generate")
    system = sampled.find_optional(
        "", *(() if columns.system is None else (columns.system.casefold(),)), *SYSTEM_COLUMNS
    )
    tools = sampled.find_optional("", "tools", "functions")
    for candidate in (column, columns.messages, sampled.find_by_usual_name(*CONVERSATION_COLUMNS)):
        if candidate in names and candidate is not None and (keys := sampled.detect_turn_keys(candidate)):
            description = f"conversations in `{candidate}`{sampled.describe_optional(system=system, tools=tools)}"
            return PromptRecordReader(description, _conversation_reader(candidate, keys, system), tools)
    prompt = next(
        (c for c in (column, columns.prompt, sampled.find_by_usual_name(*PROMPT_COLUMNS)) if c and c in names), ""
    )
    if not prompt:
        raise DataError(
            f"{label}: no column with a common name holds prompts; found: {sampled.column_summary}; set "
            "generate.prompt_column to the column with the prompts"
        )
    input_column = sampled.find_optional("", "input", "context") if prompt.strip().casefold() == "instruction" else ""
    answer = _find_response_column(sampled, prompt, columns)
    optional_columns = sampled.describe_optional(context=input_column, system=system, tools=tools, reference=answer)
    description = f"column {prompt}{optional_columns}"
    return PromptRecordReader(description, _prompt_reader(prompt, input_column, system), tools, answer)


def _find_response_column(sampled: SampledRecords, prompt: str, columns: ColumnSettings) -> str:
    """Find the column with the answers: by the settings, else by a common name that matches the prompt column's."""
    usual_names = tuple(answer for name, answer in COLUMN_PAIRS if name == prompt.strip().casefold())
    named = () if columns.response is None else (columns.response.strip().casefold(),)
    column = sampled.find_optional("", *named, *(usual_names or RESPONSE_COLUMNS))
    has_references = _reference_text(sampled.first_value(column)) is not None
    return column if column in sampled.column_names and column != prompt and has_references else ""


def _reference_text(value: Any) -> str | None:
    """Return a reference as text; None if it is empty or neither text nor a number."""
    try:
        return parse_text(value, "the reference") or None
    except UnusableRecordError:
        return None


def _conversation_reader(column: str, keys: tuple[str, str], system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        turns = parse_messages(column_value(fields, column), column, keys)
        return turns if turns and turns[0]["role"] == "system" else _prepend_system(fields, system, turns)

    return messages


def _prompt_reader(prompt: str, input_column: str, system: str) -> Callable[[Fields], list[Message]]:
    def messages(fields: Fields) -> list[Message]:
        keys = next(iter(TURN_KEYS.values()))
        value: Any = column_value(fields, prompt)
        if isinstance(value, list):  # in a column of texts, some records may hold a conversation
            return parse_messages(value, prompt, keys)
        text = join_instruction(column_text(fields, prompt), optional_column_text(fields, input_column))
        return _prepend_system(fields, system, [{"role": "user", "content": text}])

    return messages


def _prepend_system(fields: Fields, system: str, messages: list[Message]) -> list[Message]:
    text = optional_column_text(fields, system)
    return [{"role": "system", "content": text}, *messages] if text else messages
