"""Tests prompt files: prompts, references, extra fields, invalid records, and the digest."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from generations import SETTINGS, with_generate
from ratchet.config.prepare import ColumnSettings, Prepare
from ratchet.config.settings import Settings
from ratchet.errors import DataError
from ratchet.inference import prompts
from ratchet.inference.prompts import Prompt, PromptSource


def read(path: Path, settings: Settings = SETTINGS) -> list[Prompt]:
    return list(PromptSource(path, settings).prompts())


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.conversation.messages]


USER = {"role": "user", "content": "a"}
BOT = {"role": "assistant", "content": "b"}
SPACED = {"role": "assistant", "content": " b\n"}
A = [("user", "a")]
RECORDS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str | None]] = {
    "prompt": ({"prompt": "a"}, A, None),
    "prompt and response": ({"prompt": "a", "response": "b"}, A, "b"),
    "empty response": ({"prompt": "a", "response": ""}, A, None),
    "object as response": ({"prompt": "a", "response": {"parts": ["b"]}}, A, None),
    "question and answer": ({"question": "a", "answer": "b"}, A, "b"),
    "number as answer": ({"question": "a", "answer": 7}, A, "7"),
    "text and label": ({"text": "a", "label": "spam"}, A, "spam"),
    "no pair": ({"text": "a", "output": "no pair"}, A, None),
    "alpaca": ({"instruction": "a", "input": "x", "output": "b"}, [("user", "a\n\nx")], "b"),
    "system": ({"prompt": "a", "system": "s"}, [("system", "s"), ("user", "a")], None),
    "messages": ({"messages": [USER]}, A, None),
    "answered messages": ({"messages": [USER, SPACED]}, A, " b"),
    "asked again": ({"messages": [USER, BOT, USER]}, [("user", "a"), ("assistant", "b"), ("user", "a")], None),
    "sharegpt": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, A, "b"),
    "prompt of messages": ({"prompt": [USER]}, A, None),
    "prompt of answered messages": ({"prompt": [USER, SPACED]}, A, " b"),
}
"""A record, its question and its reference."""


TOPIC = b'{"prompt": "a", "topic": ["x"]}\n'


@pytest.mark.parametrize("name", RECORDS)
def test_prompt_and_reference_of_a_record(name: str, tmp_path: Path) -> None:
    record, asked, reference = RECORDS[name]
    [prompt] = read(lines(tmp_path / "p.jsonl", record))
    assert said(prompt) == asked
    assert prompt.reference == reference
    assert Prompt.from_line(prompt.to_line().encode()) == prompt


def test_every_file_format_gives_the_same_prompts(tmp_path: Path) -> None:
    records = [{"id": "x", "prompt": "one"}, {"id": "y", "prompt": "two, three"}]
    plain = lines(tmp_path / "p.jsonl", *records)
    (tmp_path / "p.json").write_text(json.dumps(records), encoding="utf-8")
    with (tmp_path / "p.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", "prompt"])
        writer.writeheader()
        writer.writerows(records)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    found = {p.name: PromptSource(p, SETTINGS).measure() for p in sorted(tmp_path.iterdir())}
    assert len(set(found.values())) == 1
    assert len(found) == 5


def test_ids_are_those_of_the_records_or_their_numbers(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"id": 7, "prompt": "a"}, {"prompt": "b"}, {"id": "", "prompt": "c"})
    assert [prompt.id for prompt in read(path)] == ["7", "2", "3"]


def test_system_text_of_settings_is_for_prompts_without_one_and_can_be_merged(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a", "system": "own"}, {"prompt": "b"})
    found = [said(prompt)[0] for prompt in read(path, with_generate(system_prompt="ours"))]
    assert found == [("system", "own"), ("system", "ours")]
    merged = SETTINGS.model_copy(update={"prepare": Prepare(system="merge")})
    assert said(read(path, merged)[0]) == [("user", "own\n\na")]


def test_columns_of_prepare_and_of_generate_are_used(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"said": "a", "odd": "b", "wanted": "r", "prompt": "c", "answer": "s"})
    for response, reference in (("wanted", "r"), ("absent", "s")):
        columns = Prepare(columns=ColumnSettings(prompt="odd", response=response))
        [found] = read(path, SETTINGS.model_copy(update={"prepare": columns}))
        assert (said(found), found.reference) == ([("user", "b")], reference)
    [found] = read(path, with_generate(prompt_column="said"))
    assert (said(found), found.reference) == ([("user", "a")], "s")


def test_extra_fields_are_stored(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "a", "topic": "tax", "rank": 1.5, "sure": True, "none": None, "other": []},
        {"prompt": "b", "left": 3},
    )
    assert [
        one.fields for one in read(path, with_generate(extra_fields=["topic", "rank", "sure", "none", "left"]))
    ] == [
        {"topic": "tax", "rank": 1.5, "sure": True, "none": None},
        {"left": 3},
    ]
    table, when = tmp_path / "p.parquet", pa.scalar(0, pa.timestamp("s")).as_py()
    pq.write_table(pa.table({"prompt": ["a"], "topic": [when], "rank": [float("nan")], "left": ["x"]}), table)
    [found] = read(table, with_generate(extra_fields=["topic", "rank"]))
    assert found.fields == {"topic": "1970-01-01T00:00:00", "rank": None}


def test_sealed_prompts_equal_the_source(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "ä\u2028", "tools": tools}, {"prompt": "b"})
    source = PromptSource(path, SETTINGS)
    source.seal(tmp_path / "kept", 2)
    assert list(prompts.read_prompts(tmp_path / "kept")) == read(path)
    with pytest.raises(DataError, match="changed while it was read"):
        source.seal(tmp_path / "again", 3)
    assert not (tmp_path / "again").exists()


def test_records_without_a_prompt_are_refused_or_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": " "}, [1], {"prompt": "b"}, {"other": "c"})
    with pytest.raises(
        DataError, match=r"3 records are not valid prompts.*generate.skip_invalid(.|\n)*p.jsonl:2: .*empty"
    ):
        PromptSource(path, SETTINGS).measure()
    source = PromptSource(path, with_generate(skip_invalid=True))
    assert source.measure()[0] == 2
    assert source.invalid_count == 3
    assert [prompt.id for prompt in source.prompts()] == ["1", "4"]


@pytest.mark.parametrize(
    ("name", "content", "generate", "words"),
    [
        ("none.jsonl", None, {}, "no such file"),
        ("", None, {}, "found a directory"),
        ("p.jsonl", b"", {}, "holds no prompts"),
        ("p.txt", b"a", {}, "cannot read .txt"),
        ("p.jsonl", b'{"x": 1}\n', {}, "no column with a common name.*generate.prompt_column"),
        ("p.jsonl", b"nonsense\n", {}, "its only record cannot be read"),
        ("p.jsonl", b'{"prompt": " "}\n', {}, "1 records are not valid prompts"),
        ("p.json", b"[{", {}, "not JSON"),
        (
            "p.jsonl",
            b'{"x": 1}\n',
            {"prompt_column": "request"},
            r"no column 'request' \(generate.prompt_column\); found: x",
        ),
        (
            "p.jsonl",
            TOPIC,
            {"extra_fields": ["topics"]},
            r"no record has a field 'topics' \(generate.extra_fields\); did you mean 'topic'\?",
        ),
        (
            "p.jsonl",
            TOPIC,
            {"extra_fields": ["topic"]},
            r"field 'topic' \(generate.extra_fields\) is a list, expected text",
        ),
    ],
)
def test_unusable_files_are_refused(
    name: str, content: bytes | None, generate: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        PromptSource(tmp_path / name, with_generate(**generate)).measure()


def test_references_outside_of_the_labels_are_noted(tmp_path: Path) -> None:
    labels = ("ham", "spam ", "eggs", "f" * 40, "balance_not_updated_after_cheque_or_cash_deposit")
    path = lines(tmp_path / "p.jsonl", *({"text": "a", "label": one} for one in labels), {"text": "b"})
    source = PromptSource(path, with_generate(labels=["ham", "spam"]))
    source.measure()
    assert source.notes() == [
        "5 of them have a reference",
        f"references that are not among the 2 generate.labels: 3, such as 'eggs', '{'f' * 40}', "
        "'balance_not_updated_after_cheque_or_cas…'; their likelihoods are not computed",
    ]


def test_duplicate_ids_are_noted(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", *({"id": one, "text": "a"} for one in ("x", "y", "x", "x", "y" * 50, "y")))
    source = PromptSource(path, SETTINGS)
    for _ in range(2):
        source.measure()
        assert source.notes() == [
            "prompts with the id of an earlier prompt: 3, such as 'x', 'y'; "
            "the output keeps them in the order of the file"
        ]


def test_digest_depends_on_ids_order_system_text_references_and_kept_fields(tmp_path: Path) -> None:
    a, b = {"id": "1", "prompt": "a", "topic": "x"}, {"id": "2", "prompt": "b"}

    def digest(*records: Any, **generate: Any) -> str:
        path = lines(tmp_path / "p.jsonl", *records)
        return PromptSource(path, with_generate(extra_fields=["topic"], **generate)).measure()[1]

    others = [
        digest(b, a),
        digest(a, {**b, "id": "3"}),
        digest({**a, "topic": "y"}, b),
        digest({**a, "answer": "b"}, b),
        digest(a, b, system_prompt="s"),
    ]
    assert len({digest(a, b), *others}) == 6
    assert digest({**a, "note": 1}, b) == digest(a, b)
