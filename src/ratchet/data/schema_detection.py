"""Turns as sources have them (OpenAI's messages, ShareGPT's turns) into messages as chat templates want them."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from functools import partial
from typing import Any

from ratchet.config.data import ColumnSettings, Shape
from ratchet.data.conversation import Conversation, MalformedRecord, Message, SourceRow
from ratchet.data.readers import Fields, type_name
from ratchet.errors import DataError

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),  # OpenAI's newer name; templates know the older one
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}


class UnusableRecordError(Exception):
    """A record that is no example, and why; it becomes a Fault."""


# --------------------------------------------------------------------------------------------------------------- values


def find_text_flaw(text: str) -> str | None:
    """Why this is no text that can be learned from or written to a file; None if it is one."""
    if "\0" in text:
        return "holds a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is no text"
    return None


_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def parse_text(value: Any, place: str) -> str:
    """A value as text; null is no text, a number its digits. `place` says in messages whose value it is.

    Blank lines around it and white space at its end go; the first line keeps its indentation, which code needs.
    """
    if type(value) is str:
        text = _BLANK_LINES.sub("", value.rstrip())
    elif value is None:
        return ""
    elif isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise UnusableRecordError(f"{place} holds {type_name(value)}, expected text")
    elif not math.isfinite(value):
        raise UnusableRecordError(f"{place} holds {value}, which is no number")  # an answer `nan` would be learned
    else:
        text = str(value)
    if problem := find_text_flaw(text):
        raise UnusableRecordError(f"{place} {problem}")
    return text


def decode_json(value: Any, place: str) -> Any:
    """What JSON in a text says (tables keep lists so); other values as they are, and an empty text as null."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        hint = (
            "; it looks like Python's notation: write it with json.dumps" if value.lstrip()[:2] in ("[{", "{'") else ""
        )
        raise UnusableRecordError(f"{place} holds text that is not JSON ({error}){hint}") from None


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def to_plain_json(value: Any, place: str) -> Any:
    """A nested value as JSON can say it, its texts checked."""
    if isinstance(value, str):
        if problem := find_text_flaw(value):
            raise UnusableRecordError(f"{place} {problem}")
        return value
    if isinstance(value, dict):
        return {to_plain_json(key, place): to_plain_json(one, f"{place}.{key!a}") for key, one in value.items()}
    if isinstance(value, list):
        return [to_plain_json(one, place) for one in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableRecordError(f"{place} holds {value}, which is no number")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise UnusableRecordError(f"{place} holds {type_name(value)}, which JSON has no word for")


# ---------------------------------------------------------------------------------------------------------------- turns


def parse_messages(value: Any, place: str, keys: tuple[str, str]) -> list[Message]:
    """A list of turns, or JSON of one; `keys` are the names of who says what."""
    turns = decode_json(value, place)
    if turns is None:
        return []
    if not isinstance(turns, list):
        raise UnusableRecordError(f"{place} holds {type_name(turns)}, expected a list of messages")
    return [_parse_message(turn, f"{place}[{number}]", keys) for number, turn in enumerate(turns)]


def _parse_message(turn: Any, place: str, keys: tuple[str, str]) -> Message:
    who, what = keys
    if not isinstance(turn, Mapping):
        raise UnusableRecordError(f"{place} is {type_name(turn)}, expected an object with {who} and {what}")
    if who not in turn:
        raise UnusableRecordError(f"{place} has no {who!r}; found: {', '.join(map(ascii, turn))}")
    name = turn[who]
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableRecordError(f"{place} has the unknown role {name!a}; known: {', '.join(_ROLES)}")
    if role == "call":
        calls = decode_json(turn.get(what), f"{place}.{what}")
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": _parse_tool_calls(calls, f"{place}.{what}"),
            **_extra_fields(turn, place),
        }
    message: Message = {"role": role, "content": _parse_content(turn.get(what), f"{place}.{what}")}
    if len(turn) > len(keys) or what not in turn:
        message |= _extra_fields(turn, place)
    if what not in turn and "tool_calls" not in message:
        raise UnusableRecordError(f"{place} has no {what!r}; found: {', '.join(map(ascii, turn))}")
    return message


def _parse_content(value: Any, place: str) -> str:
    """A message's text; OpenAI's lists of text parts are joined."""
    if not isinstance(value, list):
        return parse_text(value, place)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UnusableRecordError(f"{place}[{number}] is no text part; only text can be learned from")
    return parse_text("".join(map(str, texts)), place)


def _extra_fields(turn: Mapping[str, Any], place: str) -> Message:
    """What a template may read beside role and content: calls, names, reasoning, flags; nulls say nothing."""
    known = ("role", "content", "from", "value")
    rest = {key: value for key, value in turn.items() if value is not None and key not in known}
    calls = decode_json(rest.pop("tool_calls", None), f"{place}.tool_calls")
    if "function_call" in rest:  # OpenAI's older form of a single call
        calls = decode_json(rest.pop("function_call"), f"{place}.function_call")
    message: Message = {key: to_plain_json(value, f"{place}.{key}") for key, value in rest.items()}
    if calls:
        message["tool_calls"] = _parse_tool_calls(calls, f"{place}.tool_calls")
    return message


def _parse_tool_calls(value: Any, place: str) -> list[Any]:
    """Tool calls in OpenAI's form, their arguments as an object: templates would quote a text once more."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        called = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
            raise UnusableRecordError(
                f"{place} holds {type_name(call)}, expected calls with a function's name and arguments"
            )
        arguments = decode_json(called.get("arguments", called.get("parameters")), f"{place}.arguments")
        if not isinstance(arguments, (Mapping, type(None))):
            raise UnusableRecordError(f"{place}.arguments is {type_name(arguments)}, expected an object")
        outer = {key: one for key, one in call.items() if key not in ("function", "name", "arguments", "parameters")}
        function = {"name": called["name"], "arguments": arguments or {}}
        calls.append(to_plain_json({"type": "function", **outer, "function": function}, place))
    return calls


def parse_tools(value: Any, place: str) -> list[Any] | None:
    """The tools of a conversation, from a list of schemas, JSON of one, or a list of such JSON."""
    tools = decode_json(value, place)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnusableRecordError(f"{place} holds {type_name(tools)}, expected a list of tools")
    schemas = [decode_json(tool, place) for tool in tools]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise UnusableRecordError(f"{place} holds a tool that is no object with its schema")
    return [to_plain_json(schema, place) for schema in schemas]


def trim_after_last_answer(messages: list[Message]) -> tuple[list[Message], int]:
    """The messages up to the last answer, and how many behind it were left out; an empty answer where there is none."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return [*messages, {"role": "assistant", "content": ""}], 0
    end = answers[-1] + 1
    return messages[:end], len(messages) - end


# Records into conversations: what shape the records of a source have is settled once, from its first ones.
#
# Conversations end with an assistant message. One without any gets an empty one, so that it is counted as an empty
# answer
# rather than lost; one without a user message has an empty prompt. Messages behind the last answer train nothing and
# go.

SAMPLE_RECORDS = 100
"""Records of a source that its shape is looked for in."""

PAIRS = (
    ("prompt", "response"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("input", "output"), ("prompt", "completion"), ("query", "response"), ("query", "answer"),
    ("question", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "completion"),
    ("instruction", "answer"), ("input", "response"), ("input", "target"), ("inputs", "targets"),
    ("source", "target"), ("user", "assistant"), ("text", "label"), ("text", "category"), ("text", "intent"),
    ("sentence", "label"), ("utterance", "intent"), ("request", "intent"), ("request", "response"),
)  # fmt: skip
"""Usual names of the columns with prompt and response, the likeliest first."""

CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_SYSTEMS = ("system", "system_prompt")
_QUESTIONS = ("question", "prompt", "query", "instruction")
TURNS: dict[Shape, tuple[str, str]] = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class RecordReader:
    """How the records of one source are read."""

    described: str
    """What they were taken for, in words."""
    _conversation: Callable[[Fields], Conversation]
    _parts: Callable[[Fields], list[tuple[str, Fields]]] | None = None

    def rows(self, where: str, fields: Fields, source: int = 0) -> Iterator[SourceRow | MalformedRecord]:
        """What a record holds: one row, or several where the shape has several examples in a record."""
        try:
            parts = self._parts(fields) if self._parts else [("", fields)]
        except UnusableRecordError as unfit:
            yield MalformedRecord(where, str(unfit), source)
            return
        for place, part in parts:
            try:
                yield SourceRow(where + place, self._conversation(part), source, fields)
            except UnusableRecordError as unfit:
                yield MalformedRecord(where + place, str(unfit), source)
            except RecursionError:
                yield MalformedRecord(where + place, "values are nested too deep", source)


def detect_schema(
    records: Sequence[Fields], shape: Shape, columns: ColumnSettings, label: str, setting: str = "prepare"
) -> RecordReader:
    """What the records of a source are, from the first of them.

    `label` is what the source is called, `setting` the key path of its settings `shape` and `columns`.

    Raises:
        DataError: nothing fits; the message names the columns found and what to set.
    """
    seen = SampledRecords(records, columns, label, setting)
    if shape == "auto" and columns.messages:
        shape = seen.shape_of(seen.named("messages"))
    elif shape == "auto" and columns.prompt:
        shape = "columns"
    for name, find in _FINDERS.items():
        if shape in ("auto", name) and (reading := find(seen)):
            usual = ("tools", "functions") if name in TURNS else ()
            tools = seen.optional("tools", *usual)
            return _with_tools(reading, tools, seen) if tools else reading
    what = "its columns are of no usual shape" if shape == "auto" else f"{setting}.shape is {shape}, and no columns fit"
    raise DataError(
        f"{label}: {what}; found: {seen.found}; set {setting}.columns.prompt and {setting}.columns.response, or "
        f"{setting}.columns.messages, or {'another ' if shape != 'auto' else ''}{setting}.shape"
    )


# -------------------------------------------------------------------------------------------------------------- finding


class SampledRecords:
    """The first records of a source, and the names that its settings give to columns."""

    def __init__(self, records: Sequence[Fields], columns: ColumnSettings, label: str, setting: str) -> None:
        self.records, self.columns, self._label, self._setting = records, columns, label, setting
        counts = Counter(name for fields in records for name in fields)
        self.names = list(counts)
        # Names are compared without case and outer spaces. A column of few records is an accident or optional.
        self._all = {name.strip().casefold(): name for name in counts}
        self._most = {key: name for key, name in self._all.items() if 2 * counts[name] >= len(records)}

    @property
    def found(self) -> str:
        """The columns, with what they hold."""
        shown = [f"{_escape_name(name)} ({type_name(self.sample(name))})" for name in self.names[:_SHOWN_COLUMNS]]
        return ", ".join(shown) + (" ..." if len(self.names) > _SHOWN_COLUMNS else "") or "none"

    def sample(self, column: str) -> Any:
        """The first value of a column that is not empty."""
        return next((fields[column] for fields in self.records if fields.get(column)), None)

    def usual(self, *names: str) -> str:
        """The first column with one of these names that at least half of the records have; "" if there is none."""
        return next((self._most[name] for name in names if name in self._most), "")

    def named(self, role: str, *names: str) -> str:
        """The column that the settings name for this role, else the first with a usual name; "" if there is none."""
        name: str | None = getattr(self.columns, role, None)
        if name is None:
            return self.usual(*names)
        if name not in self.names:
            found = ", ".join(map(_escape_name, self.names[:_SHOWN_COLUMNS])) or "none"
            raise DataError(f"{self._label}: no column {name!r} ({self._setting}.columns.{role}); found: {found}")
        return name

    def optional(self, role: str, *names: str) -> str:
        """The column for what records may have or not; the first of `names` where no record so far has one."""
        return self.named(role) or next((self._all[name] for name in names if name in self._all), *names[:1] or [""])

    def also(self, **columns: str) -> str:
        """Mention of optional columns, as far as records have them."""
        return "".join(f", {role} in `{column}`" for role, column in columns.items() if column and column in self.names)

    def keys_of(self, column: str) -> tuple[str, str] | None:
        """Names of who says what in the turns that a column holds; None if it holds no turns."""
        for fields in self.records:
            try:
                turns = decode_json(fields.get(column), column)
            except UnusableRecordError:
                continue
            if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
                return next((keys for keys in TURNS.values() if keys[0] in turns[0]), None)
        return None

    def shape_of(self, column: str) -> Shape:
        """Shape of the conversations that a column holds."""
        for shape, keys in TURNS.items():
            if self.keys_of(column) == keys:
                return shape
        raise DataError(
            f"{self._label}: column {column!r} ({self._setting}.columns.messages) holds no list of messages with "
            f"role and content, or from and value; found: {self.found}"
        )


def _escape_name(name: Any) -> str:
    return str(name).encode(errors="backslashreplace").decode()


def column_value(fields: Fields, column: str) -> Any:
    """What a record has in a column. Raises UnusableRecordError where it has none."""
    try:
        return fields[column]
    except KeyError:
        found = ", ".join(map(_escape_name, list(fields)[:_SHOWN_COLUMNS])) or "none"
        raise UnusableRecordError(f"no column {column!r}; found: {found}") from None


def column_text(fields: Fields, column: str) -> str:
    """The text of a column. Raises UnusableRecordError where a record has none."""
    return parse_text(column_value(fields, column), f"column {column!r}")


def optional_column_text(fields: Fields, column: str) -> str:
    """The text of a column that records may have or not, and of no column: empty."""
    return parse_text(fields.get(column), f"column {column!r}") if column else ""


def _find_system_column(seen: SampledRecords) -> str:
    """The column with a system message; only a named one where the settings name the other columns."""
    return seen.optional("system", *(() if seen.columns.prompt else _SYSTEMS))


def _with_tools(reading: RecordReader, column: str, seen: SampledRecords) -> RecordReader:
    def conversation(fields: Fields) -> Conversation:
        return replace(reading._conversation(fields), tools=parse_tools(fields.get(column), column))

    return replace(reading, described=reading.described + seen.also(tools=column), _conversation=conversation)


def _single_turn_conversation(fields: Fields, prompt: str, response: str, system: str) -> Conversation:
    messages: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    if text := optional_column_text(fields, system):
        messages.insert(0, {"role": "system", "content": text})
    return Conversation(messages)


# -------------------------------------------------------------------------------------------------------------- shapes


def _detect_conversations(seen: SampledRecords, shape: Shape) -> RecordReader | None:
    keys = TURNS[shape]
    column = seen.named("messages", *(name for name in CONVERSATIONS if seen.keys_of(seen.usual(name)) == keys))
    if not column or seen.keys_of(column) != keys:
        return None
    system = _find_system_column(seen)

    def conversation(fields: Fields) -> Conversation:
        messages = parse_messages(column_value(fields, column), column, keys)
        if not messages or messages[0]["role"] != "system":
            text = optional_column_text(fields, system)
            messages = [{"role": "system", "content": text}, *messages] if text else messages
        kept, unanswered = trim_after_last_answer(messages)
        return Conversation(kept, unanswered=unanswered)

    name = "OpenAI messages" if shape == "messages" else "ShareGPT turns"
    return RecordReader(f"{name} in `{column}`{seen.also(system=system)}", conversation)


def _detect_instances(seen: SampledRecords) -> RecordReader | None:
    instruction, instances = seen.named("prompt", "instruction"), seen.usual("instances")
    sample = seen.sample(instances)
    if not instruction or not (isinstance(sample, list) or (isinstance(sample, str) and sample.lstrip()[:1] == "[")):
        return None

    def parts(fields: Fields) -> list[tuple[str, Fields]]:
        several = decode_json(column_value(fields, instances), instances)
        if not isinstance(several, list) or not several:
            raise UnusableRecordError(
                f"column {instances!r} holds {type_name(several)}, expected a list of input and output"
            )
        return [(f"[{number}]", {**fields, instances: one}) for number, one in enumerate(several)]

    def conversation(fields: Fields) -> Conversation:
        one = fields[instances]
        if not isinstance(one, dict):
            raise UnusableRecordError(f"instance is {type_name(one)}, expected an object with input and output")
        question = join_instruction(column_text(fields, instruction), parse_text(one.get("input"), "input"))
        return _single_turn_conversation(fields, question, column_text(one, "output"), system)

    system = _find_system_column(seen)
    return RecordReader(
        f"{instruction}, and input and output of each of `{instances}`{seen.also(system=system)}", conversation, parts
    )


def _detect_choices(seen: SampledRecords) -> RecordReader | None:
    question = seen.named("prompt", *_QUESTIONS)
    marked = (
        name
        for name in seen.names
        if name == seen.usual(name.strip().casefold()) and _marked_answers(seen.sample(name))
    )
    choices = seen.named("response", "mc1_targets") or next(marked, "")
    if not question or not _marked_answers(seen.sample(choices)):
        return None

    def conversation(fields: Fields) -> Conversation:
        right = [answer for answer, mark in _marked_answers(column_value(fields, choices)) if mark == 1]
        if len(right) != 1:
            raise UnusableRecordError(f"column {choices!r} marks {len(right)} answers as right, expected one")
        return _single_turn_conversation(
            fields, column_text(fields, question), parse_text(right[0], f"column {choices!r}"), system
        )

    system = _find_system_column(seen)
    return RecordReader(f"{question}, and the answer marked 1 in `{choices}`{seen.also(system=system)}", conversation)


def _marked_answers(value: Any) -> list[tuple[Any, Any]]:
    """Answers with their marks 0 or 1, of {answer: mark} or {"choices": [answer], "labels": [mark]}; else none."""
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


def _detect_alpaca(seen: SampledRecords) -> RecordReader | None:
    instruction, output = seen.named("prompt", "instruction"), seen.named("response", "output", "response")
    if not instruction or not output:
        return None
    given, system = seen.optional("", "input", "context"), _find_system_column(seen)

    def conversation(fields: Fields) -> Conversation:
        question = join_instruction(column_text(fields, instruction), optional_column_text(fields, given))
        return _single_turn_conversation(fields, question, column_text(fields, output), system)

    described = ", ".join(name for name in (instruction, given, output) if name in seen.names)
    return RecordReader(f"Alpaca records of {described}{seen.also(system=system)}", conversation)


def join_instruction(instruction: str, given: str) -> str:
    """An instruction, and below it what it is about."""
    return "\n\n".join(filter(None, (instruction, given)))


def _detect_pair(seen: SampledRecords) -> RecordReader | None:
    usual = ((seen.usual(prompt), seen.usual(response)) for prompt, response in PAIRS)
    named = (seen.named("prompt"), seen.named("response"))
    prompt, response = named if all(named) else next((pair for pair in usual if all(pair)), ("", ""))
    if not prompt:
        return None
    system = _find_system_column(seen)

    def conversation(fields: Fields) -> Conversation:
        return _single_turn_conversation(fields, column_text(fields, prompt), column_text(fields, response), system)

    return RecordReader(f"columns {prompt}, {response}{seen.also(system=system)}", conversation)


# In the order in which they are looked for: the more there must be, the earlier.
_FINDERS: dict[Shape, Callable[[SampledRecords], RecordReader | None]] = {
    "messages": partial(_detect_conversations, shape="messages"),
    "sharegpt": partial(_detect_conversations, shape="sharegpt"),
    "instances": _detect_instances,
    "choices": _detect_choices,
    "alpaca": _detect_alpaca,
    "columns": _detect_pair,
}
