"""Tests schema detection: every schema is detected, selectable, and described."""

import json
import math
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.prepare import ColumnSettings, RecordSchema
from ratchet.data import schema_detection
from ratchet.data.conversation import Conversation, MalformedRecord, SourceRow
from ratchet.errors import EXIT_INPUT, DataError

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def convert(
    *records: dict[str, Any], shape: RecordSchema = "auto", reads_labels: bool = False, **columns: str
) -> tuple[str, list[SourceRow | MalformedRecord]]:
    """Return the description of the detected schema of a source, and its rows."""
    named = ColumnSettings(**columns)
    reading = schema_detection.detect_schema(records, shape, named, "data/raw/a.jsonl", reads_labels=reads_labels)
    found = [
        row for number, fields in enumerate(records, start=1) for row in reading.rows(f"a.jsonl:{number}", fields, 3)
    ]
    assert all(row.source == 3 for row in found)
    return reading.description, found


def conversation(record: dict[str, Any], shape: RecordSchema = "auto", **columns: str) -> Conversation:
    """Return the single conversation that a record gives."""
    [row] = convert(record, shape=shape, **columns)[1]
    assert isinstance(row, SourceRow), row
    assert row.where == "a.jsonl:1"
    assert row.fields == record
    return row.conversation


def messages(record: dict[str, Any], shape: RecordSchema = "auto", **columns: str) -> list[dict[str, Any]]:
    return conversation(record, shape, **columns).messages


def detail(record: dict[str, Any], shape: RecordSchema = "auto", **columns: str) -> str:
    """Return the fault of a record that follows valid ones of the same source."""
    good: dict[str, dict[str, Any]] = {
        "messages": {"messages": [USER, ASSISTANT]},
        "conversations": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "mc1_targets": {"question": "a", "mc1_targets": {"b": 1, "c": 0}},
        "instances": {"instruction": "a", "instances": [{"input": "", "output": "b"}]},
    }
    first = next((rows for column, rows in good.items() if column in record), {"prompt": "a", "response": "b"})
    fault = convert(first, first, record, shape=shape, **columns)[1][-1]
    assert isinstance(fault, MalformedRecord), fault
    assert fault.where.startswith("a.jsonl:3")
    fault.detail.encode()  # a terminal can display the text
    return fault.detail


def refusal(*records: dict[str, Any], shape: RecordSchema = "auto", **columns: str) -> str:
    with pytest.raises(DataError) as caught:
        convert(*records, shape=shape, **columns)
    assert caught.value.exit_code == EXIT_INPUT
    str(caught.value).encode()
    return str(caught.value)


def turn(prompt: str, response: str, system: str = "") -> list[dict[str, str]]:
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


# ------------------------------------------------------------------------------------------------------------ detection


@pytest.mark.parametrize(
    ("record", "shape", "described"),
    [
        ({"prompt": "a", "response": "b"}, "columns", "columns prompt, response"),
        ({"id": 7, "question": "a", "answer": "b"}, "columns", "columns question, answer"),
        ({"Answer": "b", " Question ": "a"}, "columns", "columns  Question , Answer"),
        ({"text": "a", "category": "b"}, "columns", "columns text, category"),
        ({"request": "a", "intent": "b"}, "columns", "columns request, intent"),
        ({"input": "a", "output": "b"}, "columns", "columns input, output"),
        ({"prompt": "a", "completion": "b"}, "columns", "columns prompt, completion"),
        ({"instruction": "a", "output": "b"}, "alpaca", "Alpaca columns instruction, output"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca", "Alpaca columns instruction, input, output"),
        (
            {"instruction": "a", "context": "", "response": "b"},
            "alpaca",
            "Alpaca columns instruction, context, response",
        ),
        ({"messages": turn("a", "b")}, "messages", "OpenAI messages in `messages`"),
        ({"conversations": turn("a", "b"), "source": "x"}, "messages", "OpenAI messages in `conversations`"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "sharegpt",
            "ShareGPT turns in `conversations`",
        ),
        (
            {"question": "a", "mc1_targets": {"b": 1, "c": 0}},
            "choices",
            "question, with the answer marked 1 in `mc1_targets`",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_schema_is_detected_described_and_selectable(
    record: dict[str, Any], shape: RecordSchema, described: str
) -> None:
    assert convert(record)[0] == described
    assert messages(record) == turn("a", "b")
    assert messages(record, shape) == turn("a", "b")


def test_each_instance_gives_a_row() -> None:
    record = {
        "id": "seed_1",
        "instruction": "Translate.",
        "instances": [{"input": "eins", "output": "one"}, {"input": "", "output": "two"}, "three", {"input": "vier"}],
    }
    for shape in ("auto", "instances"):
        described, rows = convert(record, shape=shape)
        assert described == "instruction, with input and output of each entry of `instances`"
        assert [row.where for row in rows] == [f"a.jsonl:1[{number}]" for number in range(4)]
        one, two, three, four = rows
        assert one.conversation.messages == turn("Translate.\n\neins", "one")
        assert one.fields is record
        assert two.conversation.messages == turn("Translate.", "two")
        assert three == MalformedRecord("a.jsonl:1[2]", "instance is text, expected an object with input and output", 3)
        assert four == MalformedRecord("a.jsonl:1[3]", "no column 'output'; found: input", 3)


def test_the_input_follows_the_instruction() -> None:
    for instruction, below, prompt in (("a", "b", "a\n\nb"), ("a", None, "a"), (" ", "b", "b"), (None, "", "")):
        assert messages({"instruction": instruction, "input": below, "output": "x"}) == turn(prompt, "x")


def test_truthfulqa_uses_mc1_targets() -> None:
    targets = {"right": 1, "wrong": 0}
    record = {"question": "q", "mc0_targets": {"x": 1, "y": 0}, "mc1_targets": targets, "mc2_targets": {"x": 1, "z": 1}}
    assert messages(record) == turn("q", "right")
    assert messages(record, prompt="question", response="mc0_targets", shape="choices") == turn("q", "x")
    as_lists = {"question": "q", "mc1_targets": {"choices": ["wrong", "right"], "labels": [0, 1]}}
    assert messages(as_lists) == turn("q", "right")
    assert messages({"question": "q", "mc1_targets": json.dumps(targets)}) == turn("q", "right")
    for marks in ({"a": 0, "b": 0}, {"a": 1, "b": 1}, {}, {"a": "x"}, None, "text"):
        assert "answers as correct, expected one" in detail({"question": "q", "mc1_targets": marks})


def test_the_most_likely_pair_of_columns_is_used() -> None:
    # An empty column name is the index of a data frame.
    record = {"": "7", "text": "t", "label": "l", "question": "q", "answer": "a"}
    assert convert(record)[0] == "columns question, answer"
    assert messages(record) == turn("q", "a")
    assert messages(record, prompt="text", response="label") == turn("t", "l")


def test_a_single_record_does_not_decide_the_schema() -> None:
    described, rows = convert({"prompt": "a", "response": "b"}, *[{"question": "a", "answer": "b"}] * 3)
    assert described == "columns question, answer"
    assert rows[0] == MalformedRecord("a.jsonl:1", "no column 'question'; found: prompt, response", 3)
    assert all(isinstance(row, SourceRow) for row in rows[1:])


def test_columns_from_the_settings_take_precedence() -> None:
    record = {"messages": turn("x", "y"), "Customer says": "hello", "We say": "hi", "Tone": "kind", "system": "other"}
    assert messages(record, prompt="Customer says", response="We say") == turn("hello", "hi")
    assert messages(record, prompt="Customer says", response="We say", system="Tone") == turn("hello", "hi", "kind")
    assert convert(record, prompt="Customer says", response="We say", system="Tone")[0] == (
        "columns Customer says, We say, system in `Tone`"
    )
    chat = {"prompt": "a", "response": "b", "chat_log": turn("x", "y")}
    assert messages(chat, messages="chat_log") == turn("x", "y")
    chat = {"talk": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    assert convert(chat, messages="talk") == ("ShareGPT turns in `talk`", convert(chat, messages="talk")[1])
    assert messages(chat, messages="talk") == turn("x", "y")


def test_a_system_column_is_found_even_if_few_records_have_one() -> None:
    records = [{"question": "a", "answer": "b"}] * 30
    described, rows = convert(*records, {"question": "a", "answer": "b", "system_prompt": "Be brief."})
    assert described == "columns question, answer, system in `system_prompt`"
    assert [len(row.conversation.messages) for row in rows if isinstance(row, SourceRow)] == [2] * 30 + [3]


def test_an_optional_column_in_later_records_is_used() -> None:
    reading = schema_detection.detect_schema([{"instruction": "a", "output": "b"}], "auto", ColumnSettings(), "a")
    [row] = reading.rows("a:101", {"instruction": "a", "input": "x", "output": "b", "system": "s"})
    assert row.conversation.messages == turn("a\n\nx", "b", "s")
    reading = schema_detection.detect_schema([{"messages": turn("a", "b")}], "auto", ColumnSettings(), "a")
    [row] = reading.rows("a:101", {"messages": turn("a", "b"), "tools": [TOOL]})
    assert row.conversation.tools == [TOOL]


def test_unknown_columns_are_refused_with_advice() -> None:
    assert refusal({"title": "a", "body": "b", "n": 1}) == (
        "data/raw/a.jsonl: no known schema fits its columns; found: title (text), body (text), n (a number); "
        "set prepare.columns.prompt and prepare.columns.response, or prepare.columns.messages, or prepare.record_schema"
    )
    assert "found: prompt;response (text)" in refusal({"prompt;response": "a;b"})
    assert "found: none" in refusal({})
    assert refusal({f"column_{number}": 1 for number in range(50)}).count("column_") == 20
    refusal({"\ud83d": "half"})


@pytest.mark.parametrize("shape", ["columns", "alpaca", "messages", "sharegpt", "instances", "choices"])
def test_a_selected_schema_that_does_not_fit_is_refused(shape: RecordSchema) -> None:
    message = refusal({"title": "a", "body": "b"}, shape=shape)
    assert (
        f"prepare.record_schema is {shape}, which does not fit its columns; found: title (text), body (text)" in message
    )


def test_a_missing_column_from_the_settings_is_refused() -> None:
    record = {"question": "a", "answer": "b"}
    expected = "data/raw/a.jsonl: no column 'answr' (prepare.columns.response); found: question, answer"
    assert refusal(record, prompt="question", response="answr") == expected
    assert "(prepare.columns.prompt)" in refusal(record, prompt="qestion", response="answer")
    assert "(prepare.columns.system)" in refusal(record, prompt="question", response="answer", system="tone")
    assert "(prepare.columns.system)" in refusal(record, system="tone")
    assert "(prepare.columns.tools)" in refusal(record, tools="tools")
    assert "(prepare.columns.messages)" in refusal(record, messages="messages")
    assert refusal(record, messages="answer") == (
        "data/raw/a.jsonl: column 'answer' (prepare.columns.messages) does not "
        "hold a list of messages with role and content, "
        "or from and value; found: question (text), answer (text)"
    )


# --------------------------------------------------------------------------------------------------------------- texts


def test_texts_lose_white_space_but_not_the_indentation_of_their_first_line() -> None:
    assert messages({"prompt": "\n \t\n  hi \n", "response": "    return x\n"}) == turn("  hi", "    return x")
    assert messages({"prompt": " \n ", "response": None}) == turn("", "")


def test_numbers_become_text_and_null_is_empty() -> None:
    assert messages({"prompt": "hi", "response": 7}) == turn("hi", "7")
    assert messages({"prompt": "hi", "response": 0.5}) == turn("hi", "0.5")
    assert messages({"prompt": "hi", "response": Decimal("1.50")}) == turn("hi", "1.50")
    assert messages({"prompt": "hi", "response": "x", "system": " \t"}) == turn("hi", "x")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "holds true or false, expected text"),
        (["a"], "holds a list, expected text"),
        ({"a": 1}, "holds an object, expected text"),
        (b"a", "holds bytes, expected text"),
        (date(2026, 1, 2), "holds date, expected text"),
        (math.nan, "holds nan, which is not a number"),
        (-math.inf, "holds -inf, which is not a number"),
        ("a\0b", "holds a NUL character"),
        ("half \ud83d", "holds half a surrogate pair, which is not valid text"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_value_that_is_not_text_is_malformed(value: Any, says: str) -> None:
    assert detail({"prompt": "a", "response": value}) == f"column 'response' {says}"
    assert detail({"prompt": "a", "response": "b", "system": value}) == f"column 'system' {says}"
    place = "messages[1].content"
    if not isinstance(value, list):
        assert detail({"messages": [USER, {"role": "assistant", "content": value}]}) == f"{place} {says}"


def test_a_missing_column_is_malformed_with_the_existing_columns() -> None:
    assert detail({"prompt": "a", "answer": "b"}) == "no column 'response'; found: prompt, answer"
    assert detail({}) == "no column 'prompt'; found: none"


# ------------------------------------------------------------------------------------------------------- conversations


def test_messages_keep_extra_fields_and_lose_nulls() -> None:
    said = [
        {"role": "system", "content": "\nBe kind. "},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": text} for text in ("Hi ", "there")]},
        {"role": "assistant", "content": "Hm", "weight": 0, "tool_calls": None, "at": date(2026, 1, 2)},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Hello", "train": True, "reasoning_content": "They greet."},
    ]
    assert messages({"messages": said}) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi there", "name": "Ann"},
        {"role": "assistant", "content": "Hm", "weight": 0, "at": "2026-01-02"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Hello", "train": True, "reasoning_content": "They greet."},
    ]


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps], ids=["objects", "JSON in text"])
def test_tools_and_tool_calls_are_normalized(encode: Any) -> None:
    arguments = encode({"city": "Bern"})
    said = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": encode({"sun": True}) if encode is json.dumps else "sun"},
        {"role": "assistant", "content": "Sunny."},
    ]
    found = conversation({"messages": encode(said), "tools": encode([TOOL])})
    assert found.tools == [TOOL]
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]}
    assert found.messages[3]["tool_call_id"] == "c1"
    described, _ = convert({"messages": encode(said), "tools": encode([TOOL])})
    assert described == "OpenAI messages in `messages`, tools in `tools`"


def test_function_call_becomes_a_tool_call() -> None:
    said = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city":"Bern"}'}},
    ]
    assert messages({"messages": said})[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_sharegpt_roles_are_mapped() -> None:
    turns = [
        ("system", "Use tools."), ("human", "Weather?"), ("function_call", json.dumps(CALL["function"])),
        ("observation", "sun"), ("gpt", "Sunny."), ("user", "Thanks"), ("chatgpt", "Welcome"), ("Human", "Bye"),
        ("model", "Bye"), ("human", "?"), ("bot", "!"), ("function_response", "x"), ("assistant", "y"),
    ]  # fmt: skip
    found = conversation(
        {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": json.dumps([TOOL])}
    )
    assert [message["role"] for message in found.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant", "user", "assistant", "user",
        "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.tools == [TOOL]


def test_a_system_column_is_used_if_the_conversation_has_no_system_message() -> None:
    assert messages({"messages": turn("a", "b"), "system": "s"}) == turn("a", "b", "s")
    assert messages({"messages": turn("a", "b", "own"), "system": "s"}) == turn("a", "b", "own")


def test_messages_after_the_last_answer_are_removed() -> None:
    assert messages({"messages": [USER, ASSISTANT, USER, {"role": "tool", "content": "x"}]}) == [USER, ASSISTANT]
    assert conversation({"messages": [ASSISTANT]}).prompt == ""


@pytest.mark.parametrize(
    ("said", "prompt"), [([], ""), (None, ""), ("", ""), ([USER], "Hi"), ([{"role": "system", "content": "s"}], "")]
)
def test_a_conversation_without_answer_ends_with_an_empty_one(said: Any, prompt: str) -> None:
    good = {"messages": [USER, ASSISTANT]}
    row = convert(good, {"messages": said})[1][1]
    assert row.conversation.messages[-1] == {"role": "assistant", "content": ""}
    assert (row.conversation.prompt, row.conversation.response) == (prompt, "")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([USER, {"role": "narrator", "content": "x"}], "messages[1] has the unknown role 'narrator'; known: system,"),
        ([USER, {"role": None, "content": "x"}], "messages[1] has the unknown role None"),
        ([USER, {"content": "x"}], "messages[1] has no 'role'; found: 'content'"),
        ([USER, {"role": "assistant"}], "messages[1] has no 'content'; found: 'role'"),
        ([USER, {"role": "assistant", "text": "x"}], "messages[1] has no 'content'; found: 'role', 'text'"),
        ([USER, "Hello"], "messages[1] is text, expected an object with role and content"),
        ({"role": "user"}, "messages holds an object, expected a list of messages"),
        (7, "messages holds a number, expected a list of messages"),
        ("[{'role': 'user'}]", "messages holds text that is not JSON"),
        ("[NaN]", "messages holds text that is not JSON (NaN is not valid JSON)"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0] is not a text part",
        ),
        (
            [USER, {"role": "assistant", "content": "x", "name": "\ud83d"}],
            "messages[1].name holds half a surrogate pair",
        ),
        ([USER, {"role": "assistant", "content": "x", "extra": [{"a": math.nan}]}], "messages[1].extra.'a' holds nan"),
        ([USER, {"role": "assistant", "content": "x", "raw": b"x"}], "messages[1].raw holds bytes"),
        ([USER, {"role": "assistant", "tool_calls": "no JSON"}], "messages[1].tool_calls holds text that is not JSON"),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "messages[1].tool_calls holds text, expected calls"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[1].tool_calls.arguments is a list, expected an object",
        ),
    ],
)
def test_a_malformed_conversation_is_reported_with_its_position(said: Any, says: str) -> None:
    assert detail({"messages": said}).startswith(says)


def test_python_notation_in_a_table_is_recognised() -> None:
    hint = "it looks like Python's notation: write it with json.dumps"
    assert detail({"messages": str([USER, ASSISTANT])}).endswith(hint)


def test_deeply_nested_values_are_malformed() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert detail({"messages": [USER, {**ASSISTANT, "extra": deep}]}) == "values are nested too deep"


@pytest.mark.parametrize("tools", [7, {"a": 1}, "no JSON", ["no JSON"], [7], [{"name": "\ud83d"}]])
def test_invalid_tools_are_malformed(tools: Any) -> None:
    assert detail({"messages": [USER, ASSISTANT], "tools": tools}).startswith("tools")


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_empty_tools_become_none(tools: Any) -> None:
    assert conversation({"messages": [USER, ASSISTANT], "tools": tools}).tools is None


# ---------------------------------------------------------------------------------------------------- arbitrary records

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TURN_KEYS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "tool", "narrator"]) | JSON_VALUES,
            "content": st.text(max_size=5) | JSON_VALUES,
            "tool_calls": st.just([CALL]) | JSON_VALUES,
            "weight": JSON_VALUES,
        },
    ),
    max_size=5,
)
GOOD: dict[RecordSchema, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT]},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "instances": {"instruction": "a", "instances": [{"input": "", "output": "b"}]},
    "choices": {"question": "a", "mc1_targets": {"b": 1}},
    "columns": {"prompt": "a", "response": "b"},
    "preferences": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@PROPERTY
@given(shape=st.sampled_from(sorted(GOOD)), data=st.data())
def test_random_records_give_a_valid_conversation_or_malformed(shape: RecordSchema, data: Any) -> None:
    good = GOOD[shape]
    values = {column: JSON_VALUES | (TURN_KEYS if column == "messages" else st.text()) for column in good}
    record = data.draw(st.fixed_dictionaries({}, optional={**values, "tools": JSON_VALUES, "system": JSON_VALUES}))
    reading = schema_detection.detect_schema([good], shape, ColumnSettings(), "a")
    rows = list(reading.rows("a:1", record))
    assert rows
    for row in rows:
        if isinstance(row, MalformedRecord):
            row.detail.encode()
            continue
        found = row.conversation
        assert found.messages[-1]["role"] == "assistant"
        text = found.to_json()
        text.encode()
        assert "\0" not in found.text
        assert Conversation.from_json(text) == found
        assert all(message["content"] == message["content"].strip() for message in found.messages)


# ------------------------------------------------------------------------------------------------------- preferences

ASKED = [{"role": "user", "content": "Hi"}]
BETTER, WORSE = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "No"}
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    "question": {"question": "Hi", "chosen": "Hello", "rejected": "No"},
    "conversations (UltraFeedback)": {"prompt": "Hi", "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "answers as messages": {"prompt": ASKED, "chosen": [BETTER], "rejected": [WORSE]},
    "ShareGPT": {
        "chosen": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        "rejected": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No"}],
    },
    "JSON in a text": {"chosen": json.dumps([*ASKED, BETTER]), "rejected": json.dumps([*ASKED, WORSE])},
    "transcripts (HH-RLHF)": {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
        "rejected": "\n\nHuman: Hi\n\nAssistant: No",
    },
    "scores": {"prompt": "Hi", "responses": ["Well", "No", "Hello"], "scores": [2, 1.5, 4]},
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", ["auto", "preferences"])
def test_pairs_of_answers(name: str, shape: RecordSchema) -> None:
    found = conversation(PAIRS[name], shape)
    assert found.messages == [*ASKED, BETTER]
    assert found.rejected == WORSE
    assert found.with_rejected.messages == [*ASKED, WORSE]
    assert Conversation.from_json(found.to_json()) == found


def test_the_columns_of_a_pair_can_be_named() -> None:
    record = {"ask": "Hi", "yes": "Hello", "no": "No", "system": "Be kind."}
    names = {"prompt": "ask", "response": "yes", "rejected": "no"}
    found = conversation(record, "preferences", **names, system="system")
    assert found.messages == [{"role": "system", "content": "Be kind."}, *ASKED, BETTER]
    assert found.rejected == WORSE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"chosen": [*ASKED, BETTER], "rejected": [USER, USER, WORSE]},
            "chosen and rejected differ before the last",
        ),
        ({"chosen": ASKED, "rejected": [*ASKED, WORSE]}, "chosen ends with user and rejected with assistant"),
        ({"chosen": 7.5 - 7.5j, "rejected": "No"}, "expected text"),
    ],
)
def test_pairs_that_are_none(changes: dict[str, Any], says: str) -> None:
    good = PAIRS["conversations (UltraFeedback)"]
    fault = convert(good, good, good | changes)[1][-1]
    assert isinstance(fault, MalformedRecord)
    assert says in fault.detail


LABELLED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "texts (TRL)": ({"prompt": "Hi", "completion": "Hello", "label": False}, {}),
    "messages (TRL)": ({"prompt": ASKED, "completion": [BETTER], "label": False}, {}),
    "conversations": ({"messages": [*ASKED, BETTER], "label": False}, {}),
    "a table": ({"question": "Hi", "answer": "Hello", "label": "FALSE"}, {}),
    "numbers": ({"question": "Hi", "answer": "Hello", "label": 0}, {}),
    "named": (
        {"ask": "Hi", "say": "Hello", "good": 0, "label": "greeting"},
        {"prompt": "ask", "response": "say", "label": "good"},
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_answers_with_a_label(name: str) -> None:
    record, columns = LABELLED[name]
    description, [row] = convert(record, reads_labels=True, **columns)
    assert isinstance(row, SourceRow)
    assert (row.conversation.messages, row.conversation.is_desirable) == ([*ASKED, BETTER], False)
    assert Conversation.from_json(row.conversation.to_json()) == row.conversation
    assert f"label in `{columns.get('label', 'label')}`" in description
    assert conversation(record, **columns).is_desirable is None  # read for preferences only


def test_labels_that_are_none() -> None:
    good = LABELLED["texts (TRL)"][0]
    for value, found in ((None, "null"), ("maybe", "'maybe'"), (2, "2"), ([1], "a list")):
        fault = convert(good, good, good | {"label": value}, reads_labels=True)[1][-1]
        assert isinstance(fault, MalformedRecord)
        assert f"'label' holds {found}, expected true or false" in fault.detail
    asked = {"prompt": "Hi", "completion": "Hello"}
    classes = [asked | {"label": number} for number in (0, 1, 2)]
    is_answer = {"text": "Hi", "label": "true"}
    others = ([asked | {"label": "yes"}], classes, [is_answer])
    for other, is_named in zip(others, (True, True, False), strict=True):
        description, rows = convert(*other, reads_labels=True)
        assert all(isinstance(row, SourceRow) and row.conversation.is_desirable is None for row in rows)
        assert ("without `label` (it would label answers with true and false, or 1 and 0)" in description) is is_named


@pytest.mark.parametrize("is_pair", [True, False], ids=["pairs", "labels"])
def test_a_row_of_the_other_form_of_preference_is_named(is_pair: bool) -> None:
    pair, label = PAIRS["texts"], LABELLED["texts (TRL)"][0]
    first, other = (pair, label) if is_pair else (label, pair)
    *_, fault = convert(first, first, other, reads_labels=True)[1]
    assert isinstance(fault, MalformedRecord) and fault.where == "a.jsonl:3"
    names = ("a label", "a rejected answer") if is_pair else ("a rejected answer", "a label")
    assert fault.detail.startswith("it has {}, but the first rows of this source have {}; prepare".format(*names))


@pytest.mark.parametrize(
    ("scores", "says"),
    [([1, 1, 1], "have the score 1"), ([1, 2], "are not lists of the same length"), ([1, "a", 2], "is not a number")],
)
def test_scores_that_prefer_no_answer(scores: list[Any], says: str) -> None:
    fault = convert(PAIRS["scores"], PAIRS["scores"] | {"scores": scores})[1][-1]
    assert isinstance(fault, MalformedRecord)
    assert says in fault.detail


def test_an_object_of_numbers_beside_a_response_is_no_choice_and_named_columns_can_be_a_pair() -> None:
    record = {"prompt": "Hi", "response": "Hello", "meta": {"reviewed": 1, "translated": 0}}
    assert messages(record) == turn("Hi", "Hello")
    pair = {"ask": "Hi", "yes": "Hello", "no": "No"}
    assert conversation(pair, prompt="ask", response="yes", rejected="no").rejected == WORSE


@pytest.mark.parametrize(
    "record", [{"prompt": "Hi", "chosen": "Hello"}, {"chosen": "Hello", "rejected": "No"}], ids=str
)
def test_half_a_pair_is_named(record: dict[str, Any]) -> None:
    assert "a pair needs a prompt, a chosen and a rejected answer" in refusal(record)
