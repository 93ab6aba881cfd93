"""The prompts of a file: read, checked and digested, and kept with the run as they were read."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ratchet.config.generate import Generate
from ratchet.config.schema import Settings
from ratchet.data import prompt_records, readers
from ratchet.data.conversation import SYSTEM_ROLES, Conversation, MalformedRecord
from ratchet.data.passthrough_columns import format_field_value
from ratchet.data.prompt_records import PromptRecordReader
from ratchet.data.readers import Fields, Record
from ratchet.data.schema_detection import SAMPLE_RECORDS, UnusableRecordError, find_text_flaw
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import DataError
from ratchet.inference.spec import ASKED, PROMPTS
from ratchet.storage import digests, files

SHOWN_FAULTS = 5
BLOCK_LINES = 1000
KNOWN_NAMES, SHOWN_NAMES = 1000, 20
"""Of fields: records may have keys without end."""
SHOWN_CHARACTERS = 40

Value = str | int | float | bool | None
"""Of a kept field."""


class Prompt(NamedTuple):
    """One of them."""

    id: str
    """The record's own `id`, else its number in the file, from 1."""
    digest: str
    """Of its messages and tools."""
    question: Conversation
    reference: str | None = None
    """The record's own answer; None: it has none."""
    fields: Mapping[str, Value] = MappingProxyType({})
    """Those of generate.keep that the record has."""

    def line(self) -> str:
        """As JSON, with the line's end."""
        tools = {"tools": self.question.tools} if self.question.tools else {}
        document = {
            "id": self.id, "digest": self.digest, "messages": self.question.messages, **tools,
            "reference": self.reference, "fields": dict(self.fields),
        }  # fmt: skip
        return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Prompt":
        """What `line` wrote."""
        document = json.loads(line)
        question = Conversation(document["messages"], document.get("tools"))
        return cls(
            document["id"], document["digest"], question, document.get("reference"), document.get("fields", {})
        )  # fmt: skip


@dataclass
class PromptSource:
    """The prompts of one file; read as often as they are asked for, and never all in memory."""

    path: Path
    settings: Settings
    described: str = ""
    """What the records were taken for; known once they were read."""
    faults: list[MalformedRecord] = field(default_factory=list)
    """The first records that are no prompts, when they were read the last time."""
    fault_count: int = 0
    references: int = 0
    """Prompts with a reference, when they were read the last time."""
    strange: dict[str, None] = field(default_factory=dict)
    """The first references that are none of generate.labels, if there are labels."""
    strange_count: int = 0
    repeated: dict[str, None] = field(default_factory=dict)
    """The first ids that more than one prompt has, when they were measured."""
    repeated_count: int = 0
    """Prompts whose id an earlier one has."""
    _names: dict[str, None] = field(default_factory=dict)
    """Of the records' fields."""

    def prompts(self) -> Iterator[Prompt]:
        """All of them, in order.

        Raises:
            DataError: the file is not there, cannot be read as a whole, or nothing in it is a prompt.
        """
        if not self.path.is_file():
            what = "is a directory; name a file in it" if self.path.is_dir() else "no such file"
            raise DataError(f"{self.path}: {what}")
        self.faults, self.fault_count, self.references = [], 0, 0
        self.strange, self.strange_count = {}, 0
        records = readers.read_records(self.path, self.path.name)
        head = list(islice(records, SAMPLE_RECORDS))
        if not head:
            raise DataError(f"{self.path}: holds no prompts; give it some")
        known = [record[1] for record in head if not isinstance(record, MalformedRecord)]
        if not known:
            self._note(head[0])
            none = "its only record cannot" if len(head) == 1 else f"none of its first {len(head):,} records can"
            raise DataError(f"{self.path}: {none} be read: {_describe_fault(self.faults[0])}")
        columns = self.settings.prepare.columns
        asking = prompt_records.detect_prompts(known, self.settings.generate.column, columns, self.path.name)
        self.described = asking.described
        for number, record in enumerate(chain(head, records), start=1):
            if prompt := self._prompt(record, asking, number):
                self._note_reference(prompt.reference)
                yield prompt

    def measured(self) -> tuple[int, str]:
        """How many there are, and the digest of all of them in their order.

        Raises:
            DataError: as `prompts`; or records are no prompts, and generate.skip_faults is not set; or no record has a
                field of generate.keep.
        """
        count, parts, kept_names, ids = 0, [], set[str](), set[str]()
        self.repeated, self.repeated_count = {}, 0
        for prompt in self.prompts():
            if prompt.id in ids:
                self.repeated_count += 1
                if len(self.repeated) < SHOWN_FAULTS:
                    self.repeated.setdefault(_shorten_text(prompt.id))
            ids.add(prompt.id)
            told = [prompt.id, prompt.digest, prompt.reference, dict(prompt.fields)]
            parts.append(digests.hash_json(told)[:32])
            kept_names.update(prompt.fields)
            count += 1
        if self.fault_count and not self.settings.generate.skip_faults:
            shown = "\n".join(f"  {_describe_fault(fault)}" for fault in self.faults)
            raise DataError(
                f"{self.path}: {self.fault_count:,} of its records are no prompts; mend them, or leave them out with "
                f"generate.skip_faults: true. The first:\n{shown}"
            )
        if not count:
            raise DataError(
                f"{self.path}: none of its records is a prompt; the first: {_describe_fault(self.faults[0])}"
            )
        for name in self.settings.generate.keep:
            if name not in kept_names:
                raise DataError(f"{self.path}: no record has a field {name!r} (generate.keep){self._meant(name)}")
        return count, digests.hash_bytes("\n".join(parts).encode())

    def digest_with(self, other: Generate) -> str | None:
        """Digest of the prompts that these records would be with another system message and other kept fields; None
        where they would be none."""
        changed = self.settings.generate.model_copy(update={"keep": other.keep, "system": other.system})
        try:
            return PromptSource(self.path, self.settings.model_copy(update={"generate": changed})).measured()[1]
        except DataError:
            return None

    def notes(self) -> list[str]:
        """What is worth telling of ids and references, when they were read the last time."""
        found = [f"{self.references:,} of them have a reference"] if self.references else []
        if self.repeated_count:
            found.append(
                f"prompts whose id an earlier one has: {self.repeated_count:,}, such as "
                f"{', '.join(map(repr, self.repeated))}; in the output their order tells them apart"
            )
        if self.strange_count:
            found.append(
                f"references that are none of the {len(self.settings.generate.labels):,} generate.labels: "
                f"{self.strange_count:,}, such as {', '.join(map(repr, self.strange))}; how likely they are is not "
                "computed"
            )
        return found

    def keep(self, folder: Path, count: int) -> None:
        """Seal the prompts in a folder, as they are read now.

        Raises:
            DataError: there are more or fewer than before: the file is being written.
        """
        with files.sealed_directory(folder, ASKED) as scratch:
            written = [0]
            files.write_blocks(scratch / PROMPTS, _batch_prompts(self.prompts(), written))
            if written[0] != count:
                raise DataError(f"{self.path}: changed while it was read; wait until it is whole, and repeat")

    def _prompt(self, record: Record, asking: PromptRecordReader, number: int) -> Prompt | None:
        if isinstance(record, MalformedRecord):
            self._note(record)
            return None
        where, fields = record
        row = asking.question(where, fields)
        own = _record_id(fields.get("id"), number)
        if isinstance(row, MalformedRecord) or find_text_flaw(own):
            self._note(
                row if isinstance(row, MalformedRecord) else MalformedRecord(where, f"field 'id' {find_text_flaw(own)}")
            )
            return None
        try:
            carried = self._carried(fields)
        except UnusableRecordError as unfit:
            self._note(MalformedRecord(where, str(unfit)))
            return None
        question = self._with_system(row.conversation)
        of = digests.hash_json([question.messages, question.tools])
        return Prompt(own, of, question, row.reference, carried)

    def _carried(self, fields: Fields) -> dict[str, Value]:
        if len(self._names) < KNOWN_NAMES:
            self._names.update(dict.fromkeys(map(str, fields)))
        return {name: _kept_field_value(name, fields[name]) for name in self.settings.generate.keep if name in fields}

    def _note_reference(self, reference: str | None) -> None:
        if reference is not None:
            self.references += 1
            labels = self.settings.generate.labels
            if labels and reference.strip() not in labels:
                self.strange_count += 1
                if len(self.strange) < SHOWN_FAULTS:
                    self.strange.setdefault(_shorten_text(reference))

    def _meant(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._names, n=3)
        shown = ", ".join(list(self._names)[:SHOWN_NAMES]) + (" ..." if len(self._names) > SHOWN_NAMES else "")
        return (f"; did you mean {' or '.join(map(repr, near))}?" if near else "") + f" (found: {shown})"

    def _with_system(self, question: Conversation) -> Conversation:
        system = self.settings.generate.system
        if system is not None and question.messages[0]["role"] not in SYSTEM_ROLES:
            question = Conversation([{"role": "system", "content": system}, *question.messages], question.tools)
        return merge_system_messages(question) if self.settings.prepare.system == "merge" else question

    def _note(self, fault: Record) -> None:
        self.fault_count += 1
        if isinstance(fault, MalformedRecord) and len(self.faults) < SHOWN_FAULTS:
            self.faults.append(fault)


def read_prompts(folder: Path) -> Iterator[Prompt]:
    """The prompts that `Source.keep` sealed."""
    with (folder / PROMPTS).open("rb") as stream:
        for line in stream:
            yield Prompt.from_line(line)


def _batch_prompts(prompts: Iterator[Prompt], written: list[int]) -> Iterator[list[bytes]]:
    while block := [prompt.line().encode() for prompt in islice(prompts, BLOCK_LINES)]:
        written[0] += len(block)
        yield block


def _kept_field_value(name: str, value: Any) -> Value:
    """A kept field as JSON can hold it; dates as in ISO 8601, and a number that is none as null.

    Raises:
        UnusableRecordError: it has parts, or is no text that a file can hold.
    """
    if isinstance(value, str):
        if problem := find_text_flaw(value):
            raise UnusableRecordError(f"field {name!r} (generate.keep) {problem}")
        return value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    written = format_field_value(value)
    if written is None:
        raise UnusableRecordError(
            f"field {name!r} (generate.keep) is {readers.type_name(value)}, expected text, a number, true/false or null"
        )
    return written


def _shorten_text(text: str) -> str:
    """As much of a text as a message shows."""
    return f"{text[: SHOWN_CHARACTERS - 1]}…" if len(text) > SHOWN_CHARACTERS else text


def _record_id(value: Any, number: int) -> str:
    """A record's own name for itself, if it is one; else its number."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else str(number)


def _describe_fault(fault: MalformedRecord) -> str:
    return f"{fault.where}: {fault.detail}"
