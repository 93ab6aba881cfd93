"""Reads, validates and digests the prompts of a file, and seals them with the run.

The columns are detected as in schema_detection.py, but no answer is required. If a record has an answer (the
assistant's last message, or the text of a response column), the model does not see it: the answer becomes the reference
for comparisons.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ratchet.config.generate import Generate
from ratchet.config.prepare import ColumnSettings
from ratchet.config.settings import Settings
from ratchet.data import readers
from ratchet.data.conversation import SYSTEM_ROLES, Conversation, MalformedRecord, Message, extract_text
from ratchet.data.readers import Fields, Record
from ratchet.data.schema_detection import (
    COLUMN_PAIRS,
    CONVERSATION_COLUMNS,
    SAMPLE_RECORDS,
    TURN_KEYS,
    SampledRecords,
    UnusableRecordError,
    column_text,
    column_value,
    find_text_flaw,
    format_field_value,
    join_instruction,
    optional_column_text,
    parse_messages,
    parse_text,
    parse_tools,
)
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import DataError
from ratchet.inference.spec import PROMPTS, PROMPTS_KIND
from ratchet.storage import digests, files

SYSTEM_COLUMNS = ("system", "system_prompt")
PROMPT_COLUMNS = tuple(dict.fromkeys(prompt for prompt, _ in COLUMN_PAIRS))
"""Common names of the prompt column, most likely first."""
RESPONSE_COLUMNS = tuple(dict.fromkeys(response for _, response in COLUMN_PAIRS))
"""Common names of the response column, most likely first."""

MAX_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 40
BLOCK_LINES = 1000
MAX_KNOWN_NAMES, MAX_NAMES_SHOWN = 1000, 20
"""Maximum number of field names in memory and in messages; a file may have any number of different keys."""


FieldValue = str | int | float | bool | None
"""Value of a field of generate.extra_fields."""


@dataclass(frozen=True)
class PromptRecord:
    """The prompt of one record."""

    conversation: Conversation
    """The conversation without an answer at its end."""
    reference: str | None
    """The record's answer; None if the record has no answer that is text."""


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
    """Detect which columns of a file contain prompts and references.

    Args:
        records: the first records of the file.
        column: generate.prompt_column, if set.
        columns: prepare.columns; names of columns that the file does not have are ignored.
        label: the name of the file in messages.

    Raises:
        DataError: no column contains prompts, or generate.prompt_column does not exist.
    """
    names = {name for fields in records for name in fields}
    sampled = SampledRecords(records, ColumnSettings(), label, "generate")
    if column is not None and column not in names:
        raise DataError(f"{label}: no column {column!r} (generate.prompt_column); found: {sampled.column_summary}")
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
    """Find the column with the answers by the settings, else by a common name that fits the prompt column's name."""
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
        if isinstance(value, list):  # in a column of texts, some records may contain a conversation
            return parse_messages(value, prompt, keys)
        text = join_instruction(column_text(fields, prompt), optional_column_text(fields, input_column))
        return _prepend_system(fields, system, [{"role": "user", "content": text}])

    return messages


def _prepend_system(fields: Fields, system: str, messages: list[Message]) -> list[Message]:
    text = optional_column_text(fields, system)
    return [{"role": "system", "content": text}, *messages] if text else messages


class Prompt(NamedTuple):
    """A prompt with its reference and extra fields."""

    id: str
    """The `id` of the record, else its number in the file, from 1."""
    digest: str
    """Digest of messages and tools."""
    conversation: Conversation
    reference: str | None = None
    """The answer in the record; None if the record has no answer."""
    fields: Mapping[str, FieldValue] = MappingProxyType({})
    """The fields of generate.extra_fields that the record has."""

    def to_line(self) -> str:
        """Return a line of JSON."""
        tools = {"tools": self.conversation.tools} if self.conversation.tools else {}
        document = {
            "id": self.id, "digest": self.digest, "messages": self.conversation.messages, **tools,
            "reference": self.reference, "fields": dict(self.fields),
        }  # fmt: skip
        return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Prompt":
        """Read the output of `to_line`."""
        document = json.loads(line)
        conversation = Conversation(document["messages"], document.get("tools"))
        return cls(
            document["id"], document["digest"], conversation, document.get("reference"), document.get("fields", {})
        )  # fmt: skip


@dataclass
class PromptSource:
    """The prompts of one file. Each call of `prompts` reads the file again, because the file may not fit in memory.

    All fields but the first two describe the last pass over the file.
    """

    path: Path
    settings: Settings
    description: str = ""
    """The detected schema, in words."""
    invalid_records: list[MalformedRecord] = field(default_factory=list)
    """The first records that are not valid prompts."""
    invalid_count: int = 0
    references: int = 0
    """Number of prompts with a reference."""
    unknown_references: dict[str, None] = field(default_factory=dict)
    """The first references that are not in generate.labels, if labels are set."""
    unknown_reference_count: int = 0
    first_with_tools: str | None = None
    """Id of the first prompt with tools, tool calls or tool results; None if there is none."""
    duplicate_ids: dict[str, None] = field(default_factory=dict)
    """The first ids that more than one prompt has (set by `measure`)."""
    duplicate_id_count: int = 0
    """Number of prompts whose id an earlier prompt has."""
    _field_names: dict[str, None] = field(default_factory=dict)
    """Names of the records' fields."""

    def prompts(self) -> Iterator[Prompt]:
        """Yield all prompts, in order.

        Raises:
            DataError: the file does not exist, cannot be read, or contains no prompt.
        """
        if not self.path.is_file():
            raise DataError(
                f"{self.path}: {'found a directory, expected a file' if self.path.is_dir() else 'no such file'}"
            )
        self.invalid_records, self.invalid_count, self.references = [], 0, 0
        self.unknown_references, self.unknown_reference_count, self.first_with_tools = {}, 0, None
        records = readers.read_records(self.path, self.path.name)
        head = list(islice(records, SAMPLE_RECORDS))
        if not head:
            raise DataError(f"{self.path}: the file holds no prompts")
        readable = [record[1] for record in head if not isinstance(record, MalformedRecord)]
        if not readable:
            self._add_invalid_record(head[0])
            failure = "its only record cannot" if len(head) == 1 else f"none of its first {len(head):,} records can"
            raise DataError(f"{self.path}: {failure} be read: {_describe_record(self.invalid_records[0])}")
        columns = self.settings.prepare.columns
        reader = detect_prompts(readable, self.settings.generate.prompt_column, columns, self.path.name)
        self.description = reader.description
        for number, record in enumerate(chain(head, records), start=1):
            if prompt := self._prompt(record, reader, number):
                self._note_reference(prompt.reference)
                if self.first_with_tools is None and prompt.conversation.needs_tools:
                    self.first_with_tools = prompt.id
                yield prompt

    def measure(self) -> tuple[int, str]:
        """Return the number of prompts and the digest of all prompts in order.

        Raises:
            DataError: see `prompts`; or records are not valid and generate.skip_invalid is not set; or no record has a
                field of generate.extra_fields.
        """
        count, parts, field_names, ids = 0, [], set[str](), set[str]()
        self.duplicate_ids, self.duplicate_id_count = {}, 0
        for prompt in self.prompts():
            if prompt.id in ids:
                self.duplicate_id_count += 1
                if len(self.duplicate_ids) < MAX_EXAMPLES:
                    self.duplicate_ids.setdefault(_shorten_text(prompt.id))
            ids.add(prompt.id)
            content = [prompt.id, prompt.digest, prompt.reference, dict(prompt.fields)]
            parts.append(digests.hash_json(content)[:32])
            field_names.update(prompt.fields)
            count += 1
        if self.invalid_count and not self.settings.generate.skip_invalid:
            shown = "\n".join(f"  {_describe_record(record)}" for record in self.invalid_records)
            raise DataError(
                f"{self.path}: {self.invalid_count:,} records are not valid prompts; fix them, or leave them out with "
                f"generate.skip_invalid: true. The first:\n{shown}"
            )
        if not count:
            raise DataError(
                f"{self.path}: no record is a valid prompt; the first: {_describe_record(self.invalid_records[0])}"
            )
        for name in self.settings.generate.extra_fields:
            if name not in field_names:
                suggestion = self._suggest_field(name)
                raise DataError(f"{self.path}: no record has a field {name!r} (generate.extra_fields){suggestion}")
        return count, digests.hash_bytes("\n".join(parts).encode())

    def digest_with(self, generate: Generate) -> str | None:
        """Return the digest of the prompts with system prompt and extra fields of `generate`; None if invalid."""
        update = {"extra_fields": generate.extra_fields, "system_prompt": generate.system_prompt}
        changed = self.settings.generate.model_copy(update=update)
        try:
            return PromptSource(self.path, self.settings.model_copy(update={"generate": changed})).measure()[1]
        except DataError:
            return None

    def notes(self) -> list[str]:
        """Return notes about ids and references for the user."""
        notes = [f"{self.references:,} of them have a reference"] if self.references else []
        if self.duplicate_id_count:
            notes.append(
                f"prompts with the id of an earlier prompt: {self.duplicate_id_count:,}, such as "
                f"{', '.join(map(repr, self.duplicate_ids))}; the output keeps them in the order of the file"
            )
        if self.unknown_reference_count:
            notes.append(
                f"references that are not among the {len(self.settings.generate.labels):,} generate.labels: "
                f"{self.unknown_reference_count:,}, such as {', '.join(map(repr, self.unknown_references))}; their "
                "likelihoods are not computed"
            )
        return notes

    def seal(self, folder: Path, count: int) -> None:
        """Read the prompts and seal them in a folder.

        Raises:
            DataError: the number of prompts is not `count`, so the file changed since it was measured.
        """
        with files.sealed_directory(folder, PROMPTS_KIND) as scratch:
            written_count = 0

            def blocks() -> Iterator[list[bytes]]:
                nonlocal written_count
                prompts = self.prompts()
                while block := [prompt.to_line().encode() for prompt in islice(prompts, BLOCK_LINES)]:
                    written_count += len(block)
                    yield block

            files.write_blocks(scratch / PROMPTS, blocks())
            if written_count != count:
                raise DataError(
                    f"{self.path}: the file changed while it was read; wait until it is complete, and run the command "
                    "again"
                )

    def _prompt(self, record: Record, reader: PromptRecordReader, number: int) -> Prompt | None:
        if isinstance(record, MalformedRecord):
            self._add_invalid_record(record)
            return None
        where, fields = record
        row = reader.read(where, fields)
        record_id = _record_id(fields.get("id"), number)
        if isinstance(row, MalformedRecord) or find_text_flaw(record_id):
            self._add_invalid_record(
                row
                if isinstance(row, MalformedRecord)
                else MalformedRecord(where, f"field 'id' {find_text_flaw(record_id)}")
            )
            return None
        try:
            extra_fields = self._extra_fields(fields)
        except UnusableRecordError as error:
            self._add_invalid_record(MalformedRecord(where, str(error)))
            return None
        conversation = self._with_system(row.conversation)
        digest = digests.hash_json([conversation.messages, conversation.tools])
        return Prompt(record_id, digest, conversation, row.reference, extra_fields)

    def _extra_fields(self, fields: Fields) -> dict[str, FieldValue]:
        if len(self._field_names) < MAX_KNOWN_NAMES:
            self._field_names.update(dict.fromkeys(map(str, fields)))
        return {
            name: _to_json_value(name, fields[name]) for name in self.settings.generate.extra_fields if name in fields
        }

    def _note_reference(self, reference: str | None) -> None:
        if reference is not None:
            self.references += 1
            labels = self.settings.generate.labels
            if labels and reference.strip() not in labels:
                self.unknown_reference_count += 1
                if len(self.unknown_references) < MAX_EXAMPLES:
                    self.unknown_references.setdefault(_shorten_text(reference))

    def _suggest_field(self, name: str) -> str:
        matches = difflib.get_close_matches(name, self._field_names, n=3)
        names = list(self._field_names)
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (" ..." if len(names) > MAX_NAMES_SHOWN else "")
        return (f"; did you mean {' or '.join(map(repr, matches))}?" if matches else "") + f" (found: {shown})"

    def _with_system(self, conversation: Conversation) -> Conversation:
        system = self.settings.generate.system_prompt
        if system is not None and conversation.messages[0]["role"] not in SYSTEM_ROLES:
            conversation = Conversation(
                [{"role": "system", "content": system}, *conversation.messages], conversation.tools
            )
        return merge_system_messages(conversation) if self.settings.prepare.system == "merge" else conversation

    def _add_invalid_record(self, record: Record) -> None:
        self.invalid_count += 1
        if isinstance(record, MalformedRecord) and len(self.invalid_records) < MAX_EXAMPLES:
            self.invalid_records.append(record)


def read_prompts(folder: Path) -> Iterator[Prompt]:
    """Yield the prompts that `PromptSource.seal` wrote."""
    with (folder / PROMPTS).open("rb") as stream:
        for line in stream:
            yield Prompt.from_line(line)


def _to_json_value(name: str, value: Any) -> FieldValue:
    """Convert the value of an extra field to JSON: dates to ISO 8601, NaN and infinity to null.

    Raises:
        UnusableRecordError: the value is a list or an object, or its text is not valid.
    """
    if isinstance(value, str):
        if problem := find_text_flaw(value):
            raise UnusableRecordError(f"field {name!r} (generate.extra_fields) {problem}")
        return value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = format_field_value(value)
    if text is None:
        raise UnusableRecordError(
            f"field {name!r} (generate.extra_fields) is {readers.type_name(value)}, expected text, a number, true/false"
            " or null"
        )
    return text


def _shorten_text(text: str) -> str:
    return f"{text[: MAX_EXAMPLE_CHARACTERS - 1]}…" if len(text) > MAX_EXAMPLE_CHARACTERS else text


def _record_id(value: Any, number: int) -> str:
    """Return the `id` of a record if it is text or a whole number, else the record's number."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else str(number)


def _describe_record(record: MalformedRecord) -> str:
    return f"{record.where}: {record.detail}"
