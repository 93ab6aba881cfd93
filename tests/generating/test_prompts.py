"""Files into prompts: what is asked, what is no prompt, and what the digest hangs on."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from generations import SETTINGS, with_generate
from ratchet.config import Settings
from ratchet.config_data import Columns, Prepare
from ratchet.errors import DataError
from ratchet.generating import prompts
from ratchet.generating.prompts import Prompt, Source


def read(path: Path, settings: Settings = SETTINGS) -> list[Prompt]:
    return list(Source(path, settings).prompts())


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.question.messages]


USER = {"role": "user", "content": "a"}
BOT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"prompt": "a"}, [("user", "a")]),
        ({"question": "a", "answer": "b"}, [("user", "a")]),
        ({"instruction": "a", "input": "x", "output": "b"}, [("user", "a\n\nx")]),
        ({"prompt": "a", "system": "s"}, [("system", "s"), ("user", "a")]),
        ({"messages": [USER]}, [("user", "a")]),
        ({"messages": [USER, BOT]}, [("user", "a")]),
        ({"messages": [USER, BOT, USER]}, [("user", "a"), ("assistant", "b"), ("user", "a")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [("user", "a")]),
        ({"prompt": [USER]}, [("user", "a")]),
    ],
    ids=["prompt", "pair", "alpaca", "system", "messages", "answered", "last answer", "sharegpt", "prompt messages"],
)
def test_what_records_ask(record: dict[str, Any], asked: list[tuple[str, str]], tmp_path: Path) -> None:
    assert [said(prompt) for prompt in read(lines(tmp_path / "p.jsonl", record))] == [asked]


def test_every_format_asks_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"id": "x", "prompt": "one"}, {"id": "y", "prompt": "two, three"}]
    plain = lines(tmp_path / "p.jsonl", *records)
    (tmp_path / "p.json").write_text(json.dumps(records), encoding="utf-8")
    with (tmp_path / "p.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", "prompt"])
        writer.writeheader()
        writer.writerows(records)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    found = {p.name: Source(p, SETTINGS).measured() for p in sorted(tmp_path.iterdir())}
    assert len(set(found.values())) == 1
    assert len(found) == 5


def test_ids_are_the_records_own_else_their_numbers(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"id": 7, "prompt": "a"}, {"prompt": "b"}, {"id": "", "prompt": "c"})
    assert [prompt.id for prompt in read(path)] == ["7", "2", "3"]


def test_the_system_text_of_settings_is_for_prompts_without_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a", "system": "own"}, {"prompt": "b"})
    found = [said(prompt)[0] for prompt in read(path, with_generate(system="ours"))]
    assert found == [("system", "own"), ("system", "ours")]


def test_system_messages_are_merged_where_prepare_merges_them(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a", "system": "s"})
    merged = SETTINGS.model_copy(update={"prepare": Prepare(system="merge")})
    assert said(read(path, merged)[0]) == [("user", "s\n\na")]


def test_columns_of_prepare_and_of_generate_are_meant(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"request": "a", "odd": "b", "prompt": "c"})
    columns = Prepare(columns=Columns(prompt="odd", response="intent"))
    assert said(read(path, SETTINGS.model_copy(update={"prepare": columns}))[0]) == [("user", "b")]
    assert said(read(path, with_generate(column="request"))[0]) == [("user", "a")]


def test_what_is_kept_with_a_run_is_what_was_read(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "ä\u2028", "tools": tools}, {"prompt": "b"})
    source = Source(path, SETTINGS)
    source.keep(tmp_path / "kept", 2)
    assert list(prompts.kept(tmp_path / "kept")) == read(path)
    with pytest.raises(DataError, match="changed while it was read"):
        source.keep(tmp_path / "again", 3)
    assert not (tmp_path / "again").exists()


def test_records_that_are_no_prompts_are_refused_or_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": " "}, [1], {"prompt": "b"}, {"other": "c"})
    with pytest.raises(
        DataError, match=r"3 of its records are no prompts.*generate.skip_faults(.|\n)*p.jsonl:2: .*empty"
    ):
        Source(path, SETTINGS).measured()
    source = Source(path, with_generate(skip_faults=True))
    assert source.measured()[0] == 2
    assert source.fault_count == 3
    assert [prompt.id for prompt in source.prompts()] == ["1", "4"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", b"", "holds no prompts"),
        ("p.txt", b"a", "cannot read .txt"),
        ("p.jsonl", b'{"x": 1}\n', "no column of a usual name.*generate.column"),
        ("p.jsonl", b"nonsense\n", "its only record cannot be read"),
        ("p.jsonl", b'{"prompt": " "}\n', "1 of its records are no prompts"),
        ("p.json", b"[{", "not JSON"),
    ],
    ids=["empty", "ending", "no column", "no records", "no prompt", "half a list"],
)
def test_unusable_files_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        Source(tmp_path / name, SETTINGS).measured()


def test_a_missing_file_and_a_missing_column_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        Source(tmp_path / "none.jsonl", SETTINGS).measured()
    with pytest.raises(DataError, match="is a directory"):
        Source(tmp_path, SETTINGS).measured()
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match=r"no column 'request' \(generate.column\); found: prompt"):
        Source(path, with_generate(column="request")).measured()


def test_the_digest_hangs_on_ids_order_and_system_text(tmp_path: Path) -> None:
    a, b = {"id": "1", "prompt": "a"}, {"id": "2", "prompt": "b"}
    first = Source(lines(tmp_path / "1.jsonl", a, b), SETTINGS).measured()
    assert Source(lines(tmp_path / "2.jsonl", b, a), SETTINGS).measured() != first
    assert Source(lines(tmp_path / "3.jsonl", a, {**b, "id": "3"}), SETTINGS).measured() != first
    assert Source(tmp_path / "1.jsonl", with_generate(system="s")).measured() != first
    assert Source(lines(tmp_path / "4.jsonl", {**a, "note": 1}, b), SETTINGS).measured() == first
