"""Rows out of files: what is right is read with its place; what is wrong is refused with its place and a way out."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.config_data import Prepare
from ratchet.data import sources
from ratchet.data.sources import Row
from ratchet.errors import EXIT_INPUT, DataError

GOOD = [{"prompt": "Hi", "response": "Hello"}, {"prompt": "Grüße, 日本 🙂", "response": 'say "x", y\nand z'}]


def settings(*names: str, **columns: str) -> Prepare:
    return Prepare.model_validate({"sources": [f"data/raw/{name}" for name in names], "columns": columns})


def put(root: Path, name: str, content: str | bytes) -> None:
    path = root / "data" / "raw" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(root: Path, *names: str, **columns: str) -> list[Row]:
    return list(sources.rows(root, settings(*names, **columns)))


def refusal(root: Path, *names: str, **columns: str) -> str:
    """The message with which these sources are refused."""
    with pytest.raises(DataError) as caught:
        read(root, *names, **columns)
    assert caught.value.exit_code == EXIT_INPUT
    return str(caught.value)


def as_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


# ------------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "with BOM"])
@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "JSONL"])
def test_each_format_gives_the_same_rows(tmp_path: Path, ending: str, bom: bytes) -> None:
    (tmp_path / "data" / "raw").mkdir(parents=True)
    path = tmp_path / "data" / "raw" / f"rows.{ending}"
    if ending == "json":
        path.write_text(json.dumps(GOOD, ensure_ascii=False), encoding="utf-8")
    elif ending == "csv":
        as_csv(GOOD, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in GOOD), encoding="utf-8")
    path.write_bytes(bom + path.read_bytes())
    rows = read(tmp_path, path.name)
    assert [(row.prompt, row.response, row.system) for row in rows] == [
        (good["prompt"], good["response"], None) for good in GOOD
    ]


def test_every_row_knows_where_it_stands(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt":"1","response":"x"}\n\n  \n{"prompt":"2","response":"x"}')
    put(tmp_path, "b.json", '[{"prompt":"3","response":"x"},\n{"prompt":"4","response":"x"}]')
    put(tmp_path, "c.csv", 'prompt,response\r\n"5\nover two lines",x\r\n\r\n6,x\r\n')
    rows = read(tmp_path, "a.jsonl", "b.json", "c.csv")
    assert [row.prompt[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    places = [row.where.removeprefix("data/raw/") for row in rows]
    assert places[:4] == ["a.jsonl:1", "a.jsonl:4", "b.json[0]", "b.json[1]"]
    assert places[4] in ("c.csv:2", "c.csv:3")  # one of the row's own lines
    assert places[5] == "c.csv:5"


def test_columns_are_mapped(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "id,Customer says,We say,Tone\n1,hello,hi,kind\n2,bye,see you,\n")
    rows = read(tmp_path, "a.csv", prompt="Customer says", response="We say", system="Tone")
    assert [(r.prompt, r.response, r.system) for r in rows] == [("hello", "hi", "kind"), ("bye", "see you", None)]


def test_texts_are_stripped_and_missing_ones_are_empty(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "  hi \\n", "response": null}\n{"prompt": "", "response": " \\t"}\n')
    assert [(r.prompt, r.response) for r in read(tmp_path, "a.jsonl")] == [("hi", ""), ("", "")]


def test_numbers_are_taken_as_labels(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "hi", "response": 7}\n{"prompt": "ho", "response": 0.5}\n')
    assert [r.response for r in read(tmp_path, "a.jsonl")] == ["7", "0.5"]


def test_quoted_line_breaks_commas_and_quotes_belong_to_the_cell(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", 'prompt,response\n"one\ntwo, ""three""",x\n')
    assert [r.prompt for r in read(tmp_path, "a.csv")] == ['one\ntwo, "three"']


def test_unusual_line_separators_inside_a_json_string_do_not_end_the_row(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "a\u2028b\u0085c", "response": "x"}\r\n{"prompt": "2", "response": "x"}\r\n')
    assert [(r.prompt, r.where[-2:]) for r in read(tmp_path, "a.jsonl")] == [("a\u2028b\u0085c", ":1"), ("2", ":2")]


def test_a_link_in_data_raw_may_point_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.csv").write_text("prompt,response\na,b\n")
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "a.csv").symlink_to(tmp_path / "elsewhere.csv")
    assert len(read(tmp_path, "a.csv")) == 1


def test_a_long_text_is_read_from_every_format(tmp_path: Path) -> None:
    long = "word " * 50_000 + "end"
    put(tmp_path, "a.jsonl", json.dumps({"prompt": long, "response": "x"}))
    put(tmp_path, "b.csv", f"prompt,response\n{long},x\n")
    assert [r.prompt for r in read(tmp_path, "a.jsonl", "b.csv")] == [long, long]


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    "name", ["../outside.csv", "data/outside.csv", "data/raw/../outside.csv", "/etc/hostname", "data/rawer/a.csv"]
)
def test_a_source_outside_data_raw_is_refused(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "outside.csv", tmp_path / "data" / "outside.csv", tmp_path / "data" / "rawer" / "a.csv"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("prompt,response\na,b\n")
    (tmp_path / "data" / "raw").mkdir()
    with pytest.raises(DataError, match=r"prepare\.sources: .* is not below data/raw"):
        list(sources.rows(tmp_path, Prepare.model_validate({"sources": [name]})))


def test_a_missing_file_is_refused_with_those_there_are(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a.csv") == "data/raw/a.csv: no such file; data/raw holds nothing"
    put(tmp_path, "sub/b.csv", "prompt,response\na,b\n")
    assert refusal(tmp_path, "a.csv") == "data/raw/a.csv: no such file; data/raw holds data/raw/sub/b.csv"
    assert "no such file" in refusal(tmp_path, "sub")


@pytest.mark.parametrize("name", ["a.parquet", "a", "a.csv.gz"])
def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, "x")
    assert refusal(tmp_path, name).endswith("known: .json, .jsonl, .csv")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", ""), ("a.jsonl", ""), ("a.json", ""), ("a.csv", "prompt,response\n"), ("a.jsonl", "\n \n"),
     ("a.json", "[]"), ("a.json", "\ufeff"), ("a.csv", "\ufeff")],
)  # fmt: skip
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, content: str) -> None:
    put(tmp_path, name, content)
    assert refusal(tmp_path, name) == f"data/raw/{name}: no rows; give it some or take it out of prepare.sources"


def test_an_empty_file_beside_a_full_one_is_refused_too(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt,response\na,b\n")
    put(tmp_path, "b.csv", "")
    assert refusal(tmp_path, "a.csv", "b.csv").startswith("data/raw/b.csv: no rows")


@pytest.mark.parametrize(
    "line", ['{"prompt": "a", "response": ', "{'prompt': 'a'}", "prompt: a", '{"prompt": "a"} {"prompt": "b"}', '"open',
             "\x00", '{"prompt": "a", "response": ' + "9" * 5000 + "}"],
    ids=lambda line: repr(line[:30]),
)  # fmt: skip
def test_a_malformed_json_line_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "a", "response": "b"}\n\n' + line + "\n")
    message = refusal(tmp_path, "a.jsonl")
    assert message.startswith("data/raw/a.jsonl:3: not JSON (")
    assert message.endswith("mend or remove the line")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"prompt": "a",\n "response" "b"}]', "data/raw/a.json:2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "one object a line is JSONL: name the file .jsonl"),
        ('{"prompt": "a", "response": "b"}', "expected a list of objects, found dict"),
        ('"text"', "expected a list of objects, found str"),
        (
            '[{"prompt": "a", "response": "b"}, ["c"]]',
            "data/raw/a.json[1]: expected an object with columns, found list",
        ),
        ("[null]", "data/raw/a.json[0]: expected an object with columns, found NoneType"),
        ('[{"prompt": "a", "response": ' + "9" * 5000 + "}]", "data/raw/a.json"),
        ("[" * 100_000, "data/raw/a.json"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_malformed_json_file_is_refused(tmp_path: Path, content: str, says: str) -> None:
    put(tmp_path, "a.json", content)
    assert says in refusal(tmp_path, "a.json")


def test_a_json_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "a", "response": "b"}\n["a", "b"]\n')
    assert refusal(tmp_path, "a.jsonl") == "data/raw/a.jsonl:2: expected an object with columns, found list"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_missing_column_is_refused_with_those_that_exist(tmp_path: Path, name: str) -> None:
    content = {
        "a.jsonl": '{"question": "a", "answer": "b"}',
        "a.json": '[{"question": "a", "answer": "b"}]',
        "a.csv": "question,answer\na,b\n",
    }
    put(tmp_path, name, content[name])
    place = {"a.jsonl": "a.jsonl:1", "a.json": "a.json[0]", "a.csv": "a.csv:2"}[name]
    assert refusal(tmp_path, name) == (
        f"data/raw/{place}: no column 'prompt' (prepare.columns.prompt); found: question, answer"
    )
    message = refusal(tmp_path, name, prompt="question", response="answr")
    assert message == f"data/raw/{place}: no column 'answr' (prepare.columns.response); found: question, answer"
    assert "prepare.columns.system" in refusal(tmp_path, name, prompt="question", response="answer", system="tone")


def test_a_column_that_is_missing_in_a_later_row_is_refused_there(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n{}\n')
    assert refusal(tmp_path, "a.jsonl").startswith("data/raw/a.jsonl:2: no column 'response'")


@pytest.mark.parametrize("value", ["true", '["a"]', '{"a": 1}'])
def test_a_value_that_is_no_text_is_refused(tmp_path: Path, value: str) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "a", "response": ' + value + "}")
    assert "a.jsonl:1: column 'response' holds " in refusal(tmp_path, "a.jsonl")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_that_is_none_is_refused_and_not_learned_as_a_word(tmp_path: Path, name: str, value: str) -> None:
    """Python's json writes a missing value of a data frame as NaN; the answer `nan` would be learned."""
    row = '{"prompt": "a", "response": ' + value + "}"
    put(tmp_path, name, f"[{row}]" if name == "a.json" else row)
    assert refusal(tmp_path, name).startswith(f"data/raw/{name}")


@pytest.mark.parametrize("line", ["a,b,c", "a", "a,b,"])
def test_a_ragged_csv_row_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    put(tmp_path, "a.csv", f"prompt,response\nx,y\n{line}\n")
    cells = line.count(",") + 1
    assert refusal(tmp_path, "a.csv").startswith(f"data/raw/a.csv:3: {cells} cells under 2 columns")


def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", 'prompt,response\na,"b\nc,d\n')
    assert "not valid CSV" in refusal(tmp_path, "a.csv")


def test_a_column_that_appears_twice_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt,response,prompt\na,b,c\n")
    assert refusal(tmp_path, "a.csv") == "data/raw/a.csv:1: column 'prompt' appears twice; rename one"


def test_a_csv_with_semicolons_is_refused_with_what_its_header_was_read_as(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt;response\na;b\n")
    assert "found: prompt;response" in refusal(tmp_path, "a.csv")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
@pytest.mark.parametrize("rows_before", [0, 2000], ids=["early", "late"])
def test_a_byte_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path, name: str, rows_before: int) -> None:
    head, row, bad, tail = {
        "a.csv": ("prompt,response\n", "some words of a request,yes\n", "Gr\xfc\xdfe,yes\n", ""),
        "a.jsonl": (
            "",
            '{"prompt": "some words", "response": "x"}\n',
            '{"prompt": "Gr\xfc\xdfe", "response": "x"}\n',
            "",
        ),
        "a.json": (
            "[\n",
            '{"prompt": "some words", "response": "x"},\n',
            '{"prompt": "Gr\xfc\xdfe", "response": "x"}\n',
            "]",
        ),
    }[name]
    content = (head + row * rows_before + bad + tail).encode("latin-1")
    put(tmp_path, name, content)
    message = refusal(tmp_path, name)
    byte = content.index(b"\xfc")
    line = content[:byte].count(b"\n") + 1
    assert "not UTF-8" in message
    assert f"byte {byte}:" in message or f"{name}:{line}:" in message


def test_utf16_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt,response\na,b\n".encode("utf-16"))
    message = refusal(tmp_path, "a.csv")
    assert message.startswith("data/raw/a.csv")
    assert "not UTF-8" in message


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path: Path, column: str) -> None:
    row = {"prompt": "a", "response": "b", column: "half \ud83d"}
    put(tmp_path, "a.jsonl", '{"prompt": "a", "response": "b"}\n' + json.dumps(row))
    message = refusal(tmp_path, "a.jsonl")
    assert message.startswith(f"data/raw/a.jsonl:2: column {column!r} holds half a surrogate pair")
    message.encode()  # a terminal can show it


def test_a_whole_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "\\ud83d\\ude42", "response": "b"}')
    assert [r.prompt for r in read(tmp_path, "a.jsonl")] == ["🙂"]


def test_reading_stops_at_the_first_row_that_cannot_be_read(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"prompt": "1", "response": "x"}\nnot json\n{"prompt": "3", "response": "x"}\n')
    rows = sources.rows(tmp_path, settings("a.jsonl"))
    assert next(rows).prompt == "1"
    with pytest.raises(DataError):
        next(rows)
