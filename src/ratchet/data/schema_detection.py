"""Detects the schema of a source's records and converts them to conversations for chat templates.

The schema is detected once per source, from its first records. The known schemas are OpenAI messages, ShareGPT turns,
Alpaca, instruction with instances, multiple choice, and pairs of columns. A conversation always ends with an assistant
message. A conversation without an assistant message gets an empty answer, so that the row is counted as a row without
an answer and not lost. A conversation without a user message has an empty prompt. Messages after the last answer are
removed, because nothing is trained on them.

The module also extracts passthrough fields (prepare.extra_fields). The fields do not identify a row: two records with
the same conversation are duplicates even if their fields differ.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from typing import Any

from ratchet.config.prepare import ColumnSettings, RecordSchema
from ratchet.data.conversation import Conversation, MalformedRecord, Message, SourceRow
from ratchet.data.readers import Fields, type_name
from ratchet.errors import DataError
from ratchet.storage.files import reject_constant

SAMPLE_RECORDS = 100
"""Number of first records from which the schema of a source is detected."""
COLUMN_PAIRS = (
    ("prompt", "response"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("input", "output"), ("prompt", "completion"), ("query", "response"), ("query", "answer"),
    ("question", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "completion"),
    ("instruction", "answer"), ("input", "response"), ("input", "target"), ("inputs", "targets"),
    ("source", "target"), ("user", "assistant"), ("text", "label"), ("text", "category"), ("text", "intent"),
    ("sentence", "label"), ("utterance", "intent"), ("request", "intent"), ("request", "response"),
)  # fmt: skip
"""Common names of the columns with prompt and response, most likely first."""
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
LABEL_COLUMN = "label"
"""Common name of the column that says whether an answer is desirable."""
_SYSTEM_COLUMNS = ("system", "system_prompt")
_QUESTION_COLUMNS = ("question", "prompt", "query", "instruction")
TURN_KEYS: dict[RecordSchema, tuple[str, str]] = {"messages": ("role", "content"), "sharegpt": ("from", "value")}

NAMES_SHOWN = 20
"""Maximum number of field names in an error message."""
MAX_KNOWN_NAMES = 1000
"""Maximum number of field names in memory, because a file may have any number of different keys."""
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),  # "developer" is OpenAI's newer name; templates use the older
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Known names of roles, with the role in the conversation; `call` is a message that consists of tool calls."""
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):[ ]?")
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


class UnusableRecordError(Exception):
    """Error for a record that is not a valid example; the text is the reason. The error becomes a `MalformedRecord`."""


# ----- Schemas


@dataclass(frozen=True)
class RecordReader:
    """Converter of one source's records to rows."""

    description: str
    """The detected schema, in words."""
    _messages: Callable[[Fields], list[Message]]
    _parts: Callable[[Fields], list[tuple[str, Fields]]] = lambda fields: [("", fields)]
    """Divides a record with several examples; returns each with the end of its position."""
    _system: str = ""
    """Column with the system message; "" if the source has none."""
    _tools: str = ""
    _rejected: Callable[[Fields], list[Message]] | None = None
    """Reads the conversation that ends with the rejected answer."""
    _label: str = ""
    """Column that says whether the answer is desirable; "" if it is not read."""
    _response: str = ""
    """Column with the answer, if it is a column of its own."""

    def rows(self, where: str, fields: Fields, source: int = 0) -> Iterator[SourceRow | MalformedRecord]:
        """Yield the rows of a record: one, or several if the schema has several examples per record."""
        try:
            parts = self._parts(fields)
        except UnusableRecordError as error:
            yield MalformedRecord(where, str(error), source)
            return
        for path, part in parts:
            try:
                yield SourceRow(where + path, self._conversation(part), source, fields)
            except UnusableRecordError as error:
                yield MalformedRecord(where + path, self._describe_problem(part, error), source)
            except RecursionError:
                yield MalformedRecord(where + path, "values are nested too deep", source)

    def _describe_problem(self, fields: Fields, error: UnusableRecordError) -> str:
        """Return the reason; it names the form of a record that states a preference in another form than the first."""
        names = {str(name).strip().casefold() for name in fields}
        if self._rejected is not None and LABEL_COLUMN in names and "rejected" not in names:
            found, expected = "a label", "a rejected answer"
        elif self._label and "rejected" in names:
            found, expected = "a rejected answer", "a label"
        else:
            return str(error)
        return f"it has {found}, but the first rows of this source have {expected}; prepare one form only ({error})"

    def _conversation(self, fields: Fields) -> Conversation:
        messages = self._messages(fields)
        if not messages or messages[0]["role"] != "system":
            text = optional_column_text(fields, self._system)
            messages = [{"role": "system", "content": text}, *messages] if text else messages
        end = next((number for number in range(len(messages), 0, -1) if messages[number - 1]["role"] == "assistant"), 0)
        tools = parse_tools(fields.get(self._tools), self._tools) if self._tools else None
        if self._rejected is not None:
            return _build_pair(messages, self._rejected(fields), tools)
        label = parse_label(column_value(fields, self._label), self._label) if self._label else None
        if not end:
            return Conversation([*messages, {"role": "assistant", "content": ""}], tools, is_desirable=label)
        return Conversation(messages[:end], tools, unanswered=len(messages) - end, is_desirable=label)


def _build_pair(chosen: list[Message], rejected: list[Message], tools: list[Any] | None) -> Conversation:
    """Return a conversation with two answers. Raises UnusableRecordError if the answers have different prompts."""
    prompt = [message for message in chosen[:-1] if message["role"] != "system"]
    other = [message for message in rejected[:-1] if message["role"] != "system"]
    ends = [messages[-1]["role"] if messages else "nothing" for messages in (chosen, rejected)]
    if ends != ["assistant", "assistant"]:
        raise UnusableRecordError(f"chosen ends with {ends[0]} and rejected with {ends[1]}, expected assistant")
    if prompt != other:
        raise UnusableRecordError("chosen and rejected differ before the last answer, expected the same prompt")
    return Conversation(chosen, tools, rejected=rejected[-1])


def detect_schema(
    records: Sequence[Fields], schema: RecordSchema, columns: ColumnSettings, label: str, setting: str = "prepare",
    reads_labels: bool = False,
) -> RecordReader:  # fmt: skip
    """Detect the schema of a source from its first records. Raises DataError if no schema fits their columns.

    `schema` and `columns` are from the settings (section `setting`), `label` is the name of the source in messages.
    With `reads_labels`, a column says whether an answer is desirable, unless the source has pairs of answers.
    """
    sampled = SampledRecords(records, columns, label, setting)
    if schema == "auto" and columns.messages:
        keys = sampled.detect_turn_keys(column := sampled.find("messages"))
        if keys is None:
            raise DataError(
                f"{label}: column {column!r} ({setting}.columns.messages) does not hold a list of messages "
                f"with role and content, or from and value; found: {sampled.column_summary}"
            )
        schema = next(name for name in TURN_KEYS if TURN_KEYS[name] == keys)
    elif schema == "auto" and columns.prompt:
        schema = "preferences" if columns.rejected else "columns"
    for name, detect in _DETECTORS.items():
        if schema in ("auto", name) and (reader := detect(sampled)):
            # If the settings name the prompt column, common names of other columns do not count.
            system = sampled.find_optional("system", *(() if columns.prompt else _SYSTEM_COLUMNS))
            has_tools = name in TURN_KEYS or name == "preferences"
            tools = sampled.find_optional("tools", *(("tools", "functions") if has_tools else ()))
            desirable = sampled.find_desirability() if reads_labels and name != "preferences" else ""
            desirable = "" if desirable == reader._response else desirable  # a class label is the answer itself
            description = reader.description + sampled.describe_optional(system=system, tools=tools, label=desirable)
            other = sampled.find_by_usual_name(LABEL_COLUMN)
            if reads_labels and name != "preferences" and other and not desirable and other != reader._response:
                description += f", without `{other}` (it would label answers with true and false, or 1 and 0)"
            return replace(reader, description=description, _system=system, _tools=tools, _label=desirable)
    problem = (
        "no known schema fits its columns"
        if schema == "auto"
        else f"{setting}.record_schema is {schema}, which does not fit its columns"
    )
    is_pair = any(sampled.find_by_usual_name(name) for name in ("chosen", "rejected"))
    hint = "; a pair needs a prompt, a chosen and a rejected answer" if is_pair else ""
    raise DataError(
        f"{label}: {problem}{hint}; found: {sampled.column_summary}; set {setting}.columns.prompt and "
        f"{setting}.columns.response, or "
        f"{setting}.columns.messages, or {'another ' if schema != 'auto' else ''}{setting}.record_schema"
    )


# ----- Columns


class SampledRecords:
    """The first records of a source, with a search for columns by their names in the settings or by common names."""

    def __init__(self, records: Sequence[Fields], columns: ColumnSettings, label: str, setting: str) -> None:
        self.records, self.columns, self._label, self._setting = records, columns, label, setting
        counts = Counter(name for fields in records for name in fields)
        self.column_names = list(counts)
        # Names are compared without case and outer spaces. A column in fewer than half of the records is optional or an
        # error.
        self._columns = {name.strip().casefold(): name for name in counts}
        self._shared_columns = {key: name for key, name in self._columns.items() if 2 * counts[name] >= len(records)}

    @property
    def column_summary(self) -> str:
        """The columns with the type of their values, for messages."""
        shown = [
            f"{_escape_name(name)} ({type_name(self.first_value(name))})" for name in self.column_names[:NAMES_SHOWN]
        ]
        return ", ".join(shown) + (" ..." if len(self.column_names) > NAMES_SHOWN else "") or "none"

    def first_value(self, column: str) -> Any:
        """Return the first value of a column that is not empty."""
        return next((fields[column] for fields in self.records if fields.get(column)), None)

    def find_by_usual_name(self, *names: str) -> str:
        """Return the first column with one of these names that at least half of the records have; "" if none exists."""
        return next((self._shared_columns[name] for name in names if name in self._shared_columns), "")

    def find(self, role: str, *names: str) -> str:
        """Return the column that the settings name for this role, or the first with a common name; "" if none exist."""
        name: str | None = getattr(self.columns, role, None)
        if name is None:
            return self.find_by_usual_name(*names)
        if name not in self.column_names:
            found = ", ".join(map(_escape_name, self.column_names[:NAMES_SHOWN])) or "none"
            raise DataError(f"{self._label}: no column {name!r} ({self._setting}.columns.{role}); found: {found}")
        return name

    def find_optional(self, role: str, *names: str) -> str:
        """Return the column of an optional role: the column in the settings, or else the first of `names` that exists.

        If no sampled record has such a column, return the first name, because later records may have it.
        """
        return self.find(role) or next(
            (self._columns[name] for name in names if name in self._columns), *names[:1] or [""]
        )

    def find_desirability(self) -> str:
        """Return the column that says whether answers are desirable: that of the settings, or `label` if most of its
        values are true or false, or all are 1 or 0; "" if there is none."""
        column = self.find("label", LABEL_COLUMN)
        values = [str(fields[column]).strip().casefold() for fields in self.records if fields.get(column) is not None]
        is_truth = sum(value in ("true", "false") for value in values) > len(values) / 2
        is_number = bool(values) and all(value in _TRUTH for value in values)  # with other values, 0 and 1 are classes
        return column if self.columns.label is not None or is_truth or is_number else ""

    def describe_optional(self, **columns: str) -> str:
        """Return text that names the existing columns among optional columns, each with its role."""
        return "".join(
            f", {role} in `{column}`" for role, column in columns.items() if column and column in self.column_names
        )

    def detect_turn_keys(self, column: str) -> tuple[str, str] | None:
        """Return the keys of role and content in the turns of a column; None if it has no turns."""
        for fields in self.records:
            try:
                turns = decode_json(fields.get(column), column)
            except UnusableRecordError:
                continue
            if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
                return next((keys for keys in TURN_KEYS.values() if keys[0] in turns[0]), None)
        return None


def _escape_name(name: Any) -> str:
    return str(name).encode(errors="backslashreplace").decode()


def column_value(fields: Fields, column: str) -> Any:
    """Return the value of a column. Raises UnusableRecordError if the record does not have it."""
    try:
        return fields[column]
    except KeyError:
        found = ", ".join(map(_escape_name, list(fields)[:NAMES_SHOWN])) or "none"
        raise UnusableRecordError(f"no column {column!r}; found: {found}") from None


def column_text(fields: Fields, column: str) -> str:
    """Return the text of a column. Raises UnusableRecordError if the column is missing, or its value is not text."""
    return parse_text(column_value(fields, column), f"column {column!r}")


def optional_column_text(fields: Fields, column: str) -> str:
    """Return the text of an optional column; "" if the record or the source does not have it."""
    return parse_text(fields.get(column), f"column {column!r}") if column else ""


# ----- Detectors, one for each schema


def _single_turn(prompt: str, response: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _detect_conversations(sampled: SampledRecords, schema: RecordSchema) -> RecordReader | None:
    keys = TURN_KEYS[schema]
    column = sampled.find(
        "messages",
        *(name for name in CONVERSATION_COLUMNS if sampled.detect_turn_keys(sampled.find_by_usual_name(name)) == keys),
    )
    if not column or sampled.detect_turn_keys(column) != keys:
        return None
    name = "OpenAI messages" if schema == "messages" else "ShareGPT turns"
    return RecordReader(
        f"{name} in `{column}`", lambda fields: parse_messages(column_value(fields, column), column, keys)
    )


def _detect_instances(sampled: SampledRecords) -> RecordReader | None:
    instruction, instances = sampled.find("prompt", "instruction"), sampled.find_by_usual_name("instances")
    sample = sampled.first_value(instances)
    if not instruction or not (isinstance(sample, list) or (isinstance(sample, str) and sample.lstrip()[:1] == "[")):
        return None

    def parts(fields: Fields) -> list[tuple[str, Fields]]:
        items = decode_json(column_value(fields, instances), instances)
        if not isinstance(items, list) or not items:
            raise UnusableRecordError(
                f"column {instances!r} holds {type_name(items)}, expected a list of objects with input and output"
            )
        return [(f"[{number}]", {**fields, instances: item}) for number, item in enumerate(items)]

    def messages(fields: Fields) -> list[Message]:
        item = fields[instances]
        if not isinstance(item, dict):
            raise UnusableRecordError(f"instance is {type_name(item)}, expected an object with input and output")
        question = join_instruction(column_text(fields, instruction), parse_text(item.get("input"), "input"))
        return _single_turn(question, column_text(item, "output"))

    return RecordReader(f"{instruction}, with input and output of each entry of `{instances}`", messages, parts)


def _detect_choices(sampled: SampledRecords) -> RecordReader | None:
    question = sampled.find("prompt", *_QUESTION_COLUMNS)
    marked = (
        name
        for name in sampled.column_names
        if name == sampled.find_by_usual_name(name.strip().casefold()) and _is_one_marked(sampled.first_value(name))
    )
    # An object of numbers next to a response column is a note about the row.
    has_response = any(prompt == question for prompt, _ in _find_usual_pairs(sampled))
    choices = sampled.find("response", "mc1_targets") or ("" if has_response else next(marked, ""))
    if not question or not _marked_answers(sampled.first_value(choices)):
        return None

    def messages(fields: Fields) -> list[Message]:
        correct = [answer for answer, mark in _marked_answers(column_value(fields, choices)) if mark == 1]
        if len(correct) != 1:
            raise UnusableRecordError(f"column {choices!r} marks {len(correct)} answers as correct, expected one")
        return _single_turn(column_text(fields, question), parse_text(correct[0], f"column {choices!r}"))

    return RecordReader(f"{question}, with the answer marked 1 in `{choices}`", messages)


def _is_one_marked(value: Any) -> bool:
    """Return whether a value holds several answers, of which one is marked 1."""
    marks = [mark for _, mark in _marked_answers(value)]
    return len(marks) > 1 and marks.count(1) == 1


def _marked_answers(value: Any) -> list[tuple[Any, Any]]:
    """Return (answer, mark) pairs from {answer: mark} or {"choices": [...], "labels": [...]}; [] for other values."""
    try:
        value = decode_json(value, "")
    except UnusableRecordError:
        return []
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("choices"), list) and isinstance(value.get("labels"), list):
        pairs = list(zip(value["choices"], value["labels"], strict=False))
    else:
        pairs = [(answer, mark) for answer, mark in value.items() if mark is not None]
    return pairs if all(mark in (0, 1) and not isinstance(mark, bool) for _, mark in pairs) else []


def _detect_alpaca(sampled: SampledRecords) -> RecordReader | None:
    instruction, output = sampled.find("prompt", "instruction"), sampled.find("response", "output", "response")
    if not instruction or not output:
        return None
    input_column = sampled.find_optional("", "input", "context")

    def messages(fields: Fields) -> list[Message]:
        question = join_instruction(column_text(fields, instruction), optional_column_text(fields, input_column))
        return _single_turn(question, column_text(fields, output))

    columns = ", ".join(name for name in (instruction, input_column, output) if name in sampled.column_names)
    return RecordReader(f"Alpaca columns {columns}", messages)


def join_instruction(instruction: str, input_text: str) -> str:
    """Join an instruction and its input by a blank line."""
    return "\n\n".join(filter(None, (instruction, input_text)))


def _find_usual_pairs(sampled: SampledRecords) -> Iterator[tuple[str, str]]:
    """Yield the columns of each pair of COLUMN_PAIRS that the source has."""
    for names in COLUMN_PAIRS:
        prompt, response = map(sampled.find_by_usual_name, names)
        if prompt and response:
            yield prompt, response


def _detect_pair(sampled: SampledRecords) -> RecordReader | None:
    named = (sampled.find("prompt"), sampled.find("response"))
    prompt, response = named if all(named) else next(_find_usual_pairs(sampled), ("", ""))
    if not prompt:
        return None

    def messages(fields: Fields) -> list[Message]:
        question, answer = column_value(fields, prompt), column_value(fields, response)
        if any(isinstance(value, list) and isinstance((value or [None])[0], Mapping) for value in (question, answer)):
            return [*_parse_turns(question, prompt, "user"), *_parse_turns(answer, response, "assistant")]
        return _single_turn(column_text(fields, prompt), column_text(fields, response))

    return RecordReader(f"columns {prompt}, {response}", messages, _response=response)


def _detect_preferences(sampled: SampledRecords) -> RecordReader | None:
    """Detect two answers (`chosen` and `rejected`), or several answers with scores."""
    prompt = sampled.find("prompt", *_QUESTION_COLUMNS)
    chosen, rejected = sampled.find("response", "chosen"), sampled.find("rejected", "rejected")
    if not chosen or not rejected:
        return _detect_scored_answers(sampled, prompt)
    if any(sampled.detect_turn_keys(column) is not None for column in (chosen, prompt)):
        description = f"two conversations in `{chosen}` and `{rejected}`"
    elif prompt:
        description = f"columns {prompt}, {chosen}, {rejected}"
    elif _TRANSCRIPT.search(str(sampled.first_value(chosen))):
        description = f"two transcripts of Human and Assistant in `{chosen}` and `{rejected}`"
    else:
        return None

    def read(column: str, fields: Fields) -> list[Message]:
        value, question = column_value(fields, column), fields.get(prompt) if prompt else None
        if isinstance(value, str) and not prompt and _TRANSCRIPT.search(value):
            return _parse_transcript(value)
        answer = _parse_turns(value, column, "assistant")
        if len(answer) > 1 or question is None:
            return answer
        return [*_parse_turns(question, prompt, "user"), *answer]

    return RecordReader(description, partial(read, chosen), _rejected=partial(read, rejected))


def _detect_scored_answers(sampled: SampledRecords, prompt: str) -> RecordReader | None:
    answers = sampled.find_by_usual_name("responses", "completions", "answers")
    scores = sampled.find_by_usual_name("scores", "ratings", "rewards")
    if not (prompt and answers and scores and isinstance(sampled.first_value(scores), list)):
        return None

    def read(number: int, fields: Fields) -> list[Message]:
        texts, values = column_value(fields, answers), column_value(fields, scores)
        if not isinstance(texts, list) or not isinstance(values, list) or not 2 <= len(texts) == len(values):
            raise UnusableRecordError(f"{answers} and {scores} are not lists of the same length, 2 or more")
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            raise UnusableRecordError(f"column {scores!r} holds a value that is not a number")
        if min(values) == max(values):
            raise UnusableRecordError(f"all {len(values)} answers have the score {values[0]}, so none is preferred")
        order = sorted(range(len(values)), key=lambda k: (-values[k], k))
        answer = parse_text(texts[order[number]], f"{answers}[{order[number]}]")
        return _single_turn(column_text(fields, prompt), answer)

    description = f"{prompt}, with the answers of `{answers}` that have the highest and the lowest of `{scores}`"
    return RecordReader(description, partial(read, 0), _rejected=partial(read, -1))


def _parse_turns(value: Any, path: str, role: str) -> list[Message]:
    """Parse a text, which becomes one message of `role`, or a list of turns."""
    if isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:2] == "[{"):
        turns = decode_json(value, path)
        keys = TURN_KEYS["sharegpt"] if turns and isinstance(turns[0], Mapping) and "from" in turns[0] else None
        return parse_messages(turns, path, keys or TURN_KEYS["messages"])
    return [{"role": role, "content": parse_text(value, f"column {path!r}")}]


def _parse_transcript(text: str) -> list[Message]:
    """Parse turns that begin with `Human:` or `Assistant:` after a blank line (Bai et al. 2022)."""
    parts = _TRANSCRIPT.split(f"\n\n{text.lstrip()}")
    if parts[0].strip():
        raise UnusableRecordError("the transcript begins with neither Human: nor Assistant:")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": parse_text(content, "transcript")}
        for name, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


# In the order of detection: schemas with more requirements come first.
_DETECTORS: dict[RecordSchema, Callable[[SampledRecords], RecordReader | None]] = {
    "preferences": _detect_preferences,
    "messages": partial(_detect_conversations, schema="messages"),
    "sharegpt": partial(_detect_conversations, schema="sharegpt"),
    "instances": _detect_instances,
    "choices": _detect_choices,
    "alpaca": _detect_alpaca,
    "columns": _detect_pair,
}


# ----- Values


def find_text_flaw(text: str) -> str | None:
    """Return the reason why a text cannot be trained on or written to a file; None if the text is valid."""
    if "\0" in text:
        return "holds a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is not valid text"
    return None


def parse_text(value: Any, path: str) -> str:
    """Convert the value at `path` to text; null becomes "", a number its digits.

    Blank lines around the text, and white space at its end, are removed. The first line keeps its indentation, which
    matters for code. Raises UnusableRecordError if the value is neither valid text nor a finite number.
    """
    if type(value) is str:
        text = _BLANK_LINES.sub("", value.rstrip())
    elif value is None:
        return ""
    elif isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise UnusableRecordError(f"{path} holds {type_name(value)}, expected text")
    elif not math.isfinite(value):  # otherwise `nan` would be trained as an answer
        raise UnusableRecordError(f"{path} holds {value}, which is not a number")
    else:
        text = str(value)
    if problem := find_text_flaw(text):
        raise UnusableRecordError(f"{path} {problem}")
    return text


def parse_label(value: Any, path: str) -> bool:
    """Convert true, false, 1, 0, or one of them as text. Raises UnusableRecordError for another value."""
    text = str(value).strip().casefold()
    if text not in _TRUTH:
        found = f"{value!r:.40}" if isinstance(value, (str, int, float)) else type_name(value)
        raise UnusableRecordError(f"column {path!r} holds {found}, expected true or false")
    return _TRUTH[text]


def decode_json(value: Any, path: str) -> Any:
    """Decode a text as JSON, because tables store lists as text. An empty text is null; other values are unchanged."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        hint = (
            "; it looks like Python's notation: write it with json.dumps" if value.lstrip()[:2] in ("[{", "{'") else ""
        )
        raise UnusableRecordError(f"{path} holds text that is not JSON ({error}){hint}") from None


def to_plain_json(value: Any, path: str) -> Any:
    """Convert a nested value to JSON types and check its texts."""
    if isinstance(value, str):
        if problem := find_text_flaw(value):
            raise UnusableRecordError(f"{path} {problem}")
        return value
    if isinstance(value, dict):
        return {to_plain_json(key, path): to_plain_json(item, f"{path}.{key!a}") for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain_json(item, path) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableRecordError(f"{path} holds {value}, which is not a number")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise UnusableRecordError(f"{path} holds {type_name(value)}, which JSON cannot represent")


# ----- Turns


def parse_messages(value: Any, path: str, keys: tuple[str, str]) -> list[Message]:
    """Parse a list of turns, or its JSON text; `keys` are the keys of role and content."""
    turns = decode_json(value, path)
    if turns is None:
        return []
    if not isinstance(turns, list):
        raise UnusableRecordError(f"{path} holds {type_name(turns)}, expected a list of messages")
    return [_parse_message(turn, f"{path}[{number}]", keys) for number, turn in enumerate(turns)]


def _parse_message(turn: Any, path: str, keys: tuple[str, str]) -> Message:
    role_key, content_key = keys
    if not isinstance(turn, Mapping):
        raise UnusableRecordError(f"{path} is {type_name(turn)}, expected an object with {role_key} and {content_key}")
    if role_key not in turn:
        raise UnusableRecordError(f"{path} has no {role_key!r}; found: {', '.join(map(ascii, turn))}")
    name = turn[role_key]
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableRecordError(f"{path} has the unknown role {name!a}; known: {', '.join(_ROLES)}")
    path_of_content = f"{path}.{content_key}"
    if role == "call":
        calls = _parse_tool_calls(decode_json(turn.get(content_key), path_of_content), path_of_content)
        return {"role": "assistant", "content": "", "tool_calls": calls, **_extra_fields(turn, path)}
    message: Message = {"role": role, "content": _parse_content(turn.get(content_key), path_of_content)}
    if len(turn) > len(keys) or content_key not in turn:
        message |= _extra_fields(turn, path)
    if content_key not in turn and "tool_calls" not in message:
        raise UnusableRecordError(f"{path} has no {content_key!r}; found: {', '.join(map(ascii, turn))}")
    return message


def _parse_content(value: Any, path: str) -> str:
    """Return a message's text. OpenAI's lists of text parts are joined."""
    if not isinstance(value, list):
        return parse_text(value, path)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UnusableRecordError(f"{path}[{number}] is not a text part; only text is supported")
    return parse_text("".join(map(str, texts)), path)


def _extra_fields(turn: Mapping[str, Any], path: str) -> Message:
    """Return the other fields that a template may read (tool calls, names, reasoning, flags), without nulls."""
    known = ("role", "content", "from", "value")
    rest = {key: value for key, value in turn.items() if value is not None and key not in known}
    calls = decode_json(rest.pop("tool_calls", None), f"{path}.tool_calls")
    if "function_call" in rest:  # OpenAI's older format of a single call
        calls = decode_json(rest.pop("function_call"), f"{path}.function_call")
    message: Message = {key: to_plain_json(value, f"{path}.{key}") for key, value in rest.items()}
    if calls:
        message["tool_calls"] = _parse_tool_calls(calls, f"{path}.tool_calls")
    return message


def _parse_tool_calls(value: Any, path: str) -> list[Any]:
    """Convert tool calls to OpenAI's format. Arguments become an object, as a template would quote JSON text again."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        target = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(target, Mapping) or not isinstance(target.get("name"), str):
            raise UnusableRecordError(
                f"{path} holds {type_name(call)}, expected calls with a function's name and arguments"
            )
        arguments = decode_json(target.get("arguments", target.get("parameters")), f"{path}.arguments")
        if not isinstance(arguments, (Mapping, type(None))):
            raise UnusableRecordError(f"{path}.arguments is {type_name(arguments)}, expected an object")
        outer = {key: item for key, item in call.items() if key not in ("function", "name", "arguments", "parameters")}
        function = {"name": target["name"], "arguments": arguments or {}}
        calls.append(to_plain_json({"type": "function", **outer, "function": function}, path))
    return calls


def parse_tools(value: Any, path: str) -> list[Any] | None:
    """Parse a conversation's tools: a list of JSON schemas, the JSON text of such a list, or a list of JSON texts."""
    tools = decode_json(value, path)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnusableRecordError(f"{path} holds {type_name(tools)}, expected a list of tools")
    schemas = [decode_json(tool, path) for tool in tools]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise UnusableRecordError(f"{path} holds a tool that is not an object with a schema")
    return [to_plain_json(schema, path) for schema in schemas]


# ----- Passthrough fields


class FieldNames:
    """Names of the fields of the records, at most `MAX_KNOWN_NAMES`, for a message about a missing field."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add the names of the fields of a record."""
        if len(self.names) < MAX_KNOWN_NAMES:
            self.names.update(dict.fromkeys(map(str, fields)))

    def describe_missing(self, name: str) -> str:
        """Describe that no record has a field, with the names that are nearest."""
        matches = difflib.get_close_matches(name, self.names, n=3)
        shown = ", ".join(list(self.names)[:NAMES_SHOWN]) + (" ..." if len(self.names) > NAMES_SHOWN else "")
        suggestion = f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
        return f"no record has a field {name!r}{suggestion} (found: {shown})"


class PassthroughFields:
    """Extractor of the passthrough fields of rows (prepare.extra_fields), which counts missing values.

    The field prepare.split.group is stored separately.
    """

    def __init__(self, names: Sequence[str], group: str | None) -> None:
        self.missing = dict.fromkeys(names, 0)
        """Number of rows without a value, by field."""
        self._group = group
        self._rows = 0
        self._fields = FieldNames()

    def find_problem(self, row: SourceRow) -> str | None:
        """Return the reason why a field of a row cannot be stored; None if all fields can be stored."""
        for name in self.missing:
            try:
                value = _format_passthrough_value(row.fields.get(name))
            except (TypeError, ValueError) as error:
                return f"field {name!r} (prepare.extra_fields) cannot be written as JSON: {error}"
            if problem := find_text_flaw(value):
                return f"field {name!r} (prepare.extra_fields) {problem}"
        return None

    def take(self, row: SourceRow) -> str:
        """Return the fields of a valid row as a JSON object of strings; a missing value is an empty string."""
        if not self.missing:
            return "{}"
        self._rows += 1
        self._fields.add(row.fields)
        values = {name: _format_passthrough_value(row.fields.get(name)) for name in self.missing}
        for name, value in values.items():
            self.missing[name] += not value
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    def group_of(self, row: SourceRow) -> str | None:
        """Return the value of the field prepare.split.group as text, as in `SplitAssigner.add`."""
        return None if self._group is None else str(row.fields[self._group])

    def check(self) -> None:
        """Raise DataError if no row has one of the fields. Call this method after all rows."""
        for name, missing in self.missing.items():
            if name not in self._fields.names and self._rows and missing == self._rows:
                raise DataError(f"params.yaml: prepare.extra_fields: {self._fields.describe_missing(name)}")

    def notes(self) -> list[str]:
        """Return notes about missing values for the dataset card."""
        return [
            f"field {name!r} (prepare.extra_fields) has no value in {missing:,} of {self._rows:,} rows"
            for name, missing in self.missing.items()
            if missing
        ]


def _format_passthrough_value(value: Any) -> str:
    """Format a value as text; lists and objects, such as the instructions of IFEval, as JSON."""
    text = format_field_value(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False) if text is None else text


def format_field_value(value: Any) -> str | None:
    """Format a value as text: numbers and booleans as in JSON, dates as in ISO 8601; None for a list or an object."""
    match value:
        case str():
            return value
        case float() if not math.isfinite(value):
            return ""  # tables use NaN for a missing value
        case bool() | int() | float():
            return json.dumps(value)
        case datetime():
            return value.isoformat()
        case date() | time() | Decimal():
            return str(value)  # ISO 8601 for dates and times
    return "" if value is None else None
