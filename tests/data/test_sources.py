"""Tests sources: files and globs in order, with positions; missing or misplaced files are refused."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.config.prepare import Prepare
from ratchet.data import sources
from ratchet.data.conversation import MalformedRecord, SourceRow
from ratchet.data.sources import SourceReader
from ratchet.errors import EXIT_INPUT, DataError

REAL = Path(__file__).parents[3] / "shared" / "data"
REAL_SHAPES = {
    "banking77_train.csv": ("columns text, category", 10_003),
    "gsm8k_train.jsonl": ("columns question, answer", 7_473),
    "truthfulqa_mc.json": ("question, with the answer marked 1 in `mc1_targets`", 790),
    "selfinstruct_seed_tasks.jsonl": ("instruction, with input and output of each entry of `instances`", 175),
}


def prepare(*listed: Any, **settings: Any) -> Prepare:
    """Build settings with these sources; file names are relative to data/raw."""
    below = [f"data/raw/{one}" if isinstance(one, str) else one for one in listed]
    return Prepare.model_validate({"sources": below, **settings})


def empty_parquet() -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), target)
    return target.getvalue()


def put(root: Path, name: str, content: str | bytes) -> None:
    path = root / "data" / "raw" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(root: Path, *listed: Any, **settings: Any) -> list[SourceRow | MalformedRecord]:
    return list(SourceReader(root, prepare(*listed, **settings)).rows())


def texts(rows: list[SourceRow | MalformedRecord]) -> list[tuple[str, str]]:
    assert all(isinstance(row, SourceRow) for row in rows), rows
    return [(row.conversation.prompt, row.conversation.response) for row in rows if isinstance(row, SourceRow)]


def refusal(root: Path, *listed: Any, **settings: Any) -> str:
    """Return the message with which these sources are refused."""
    with pytest.raises(DataError) as caught:
        read(root, *listed, **settings)
    assert caught.value.exit_code == EXIT_INPUT
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------- valid sources


def test_sources_are_read_in_order_with_schema_and_index(tmp_path: Path) -> None:
    put(tmp_path, "b.jsonl", '{"prompt": "1", "response": "x"}\n\n{"prompt": "2", "response": "x"}\n')
    put(tmp_path, "a.csv", "question,answer\n3,x\n")
    put(tmp_path, "c.json", json.dumps([{"messages": [{"role": "user", "content": "4"}]}]))
    found = SourceReader(tmp_path, prepare("b.jsonl", "a.csv", "c.json"))
    assert found.schema_descriptions == ["", "", ""]
    rows = list(found.rows())
    assert [(row.where, row.source) for row in rows] == [
        ("data/raw/b.jsonl:1", 0), ("data/raw/b.jsonl:3", 0), ("data/raw/a.csv:2", 1), ("data/raw/c.json[0]", 2),
    ]  # fmt: skip
    assert texts(rows) == [("1", "x"), ("2", "x"), ("3", "x"), ("4", "")]
    assert found.schema_descriptions == [
        "columns prompt, response",
        "columns question, answer",
        "OpenAI messages in `messages`",
    ]
    assert found.files == [
        {f"data/raw/{name}": tmp_path / "data/raw" / name} for name in ("b.jsonl", "a.csv", "c.json")
    ]
    assert list(found.rows()) == rows


def test_a_glob_matches_files_sorted_by_name(tmp_path: Path) -> None:
    for name in ("part/2.jsonl", "part/10.jsonl.gz", "part/deep/1.jsonl", "other.csv", "part/.hidden.jsonl"):
        row = json.dumps({"question": name, "answer": "x"})
        put(tmp_path, name, gzip.compress(row.encode()) if name.endswith("gz") else row)
    found = SourceReader(tmp_path, prepare("part/*.jsonl*"))
    assert list(found.files[0]) == ["data/raw/part/10.jsonl.gz", "data/raw/part/2.jsonl"]
    assert [prompt for prompt, _ in texts(list(found.rows()))] == ["part/10.jsonl.gz", "part/2.jsonl"]
    assert len(read(tmp_path, "**/*.jsonl")) == 2
    put(tmp_path, "a[1].jsonl", '{"question": "brackets", "answer": "x"}')
    assert texts(read(tmp_path, "a[1].jsonl")) == [("brackets", "x")]
    put(tmp_path, "part/3.jsonl", "")  # an empty file is allowed
    assert len(read(tmp_path, "part/*.jsonl")) == 1


def test_a_source_may_override_columns_and_schema(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "question,answer,title,body\nq,a,t,b\n")
    put(tmp_path, "b.csv", "question,answer,title,body\nq,a,t,b\n")
    put(tmp_path, "c.jsonl", '{"instruction": "i", "input": "n", "output": "o", "title": "t", "body": "b"}')
    own = {"files": "data/raw/b.csv", "columns": {"prompt": "title", "response": "body"}}
    asked = {"files": "data/raw/c.jsonl", "record_schema": "alpaca", "columns": {}}
    assert texts(read(tmp_path, "a.csv", own, asked)) == [("q", "a"), ("t", "b"), ("i\n\nn", "o")]
    everywhere = {"prompt": "title", "response": "body"}
    assert texts(read(tmp_path, "a.csv", {"files": "data/raw/b.csv", "columns": {}}, columns=everywhere)) == [
        ("t", "b"), ("q", "a"),
    ]  # fmt: skip
    wrong = {"files": "data/raw/b.csv", "columns": {"prompt": "title", "response": "text"}}
    assert refusal(tmp_path, "a.csv", wrong) == (
        "data/raw/b.csv: no column 'text' (prepare.sources[1].columns.response); found: question, answer, title, body"
    )


def test_a_link_in_data_raw_may_point_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.csv").write_text("prompt,response\na,b\n")
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "a.csv").symlink_to(tmp_path / "elsewhere.csv")
    assert len(read(tmp_path, "a.csv")) == 1


def test_malformed_records_keep_their_source_and_order(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"question": "a", "answer": "b"}')
    lines = ["no JSON"] * 250 + ['{"question": "a", "answer": "b"}', '{"question": "a"}', "[]"] + ["no JSON"] * 250
    put(tmp_path, "b.jsonl", "\n".join(lines))
    found = SourceReader(tmp_path, prepare("a.jsonl", "b.jsonl"))
    rows = list(found.rows())[1:]
    assert [row.where for row in rows] == [f"data/raw/b.jsonl:{number}" for number in range(1, 504)]
    assert {row.source for row in rows} == {1}
    assert [number for number, row in enumerate(rows) if isinstance(row, SourceRow)] == [250]
    assert rows[251].detail == "no column 'answer'; found: question"
    assert found.schema_descriptions[1] == "columns question, answer"


def test_a_source_of_malformed_records_has_no_schema(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", "no JSON\n" * 150)
    found = SourceReader(tmp_path, prepare("a.jsonl"))
    assert sum(isinstance(row, MalformedRecord) for row in found.rows()) == 150
    assert found.schema_descriptions == ["nothing: no record could be read"]


@pytest.mark.parametrize("setting", ["group", "stratify", "time"])
def test_a_split_field_must_be_valid_text(tmp_path: Path, setting: str) -> None:
    put(tmp_path, "a.jsonl", '{"question": "a", "answer": "b", "who": "half \\ud83d"}')
    assert len(texts(read(tmp_path, "a.jsonl"))) == 1
    assert read(tmp_path, "a.jsonl", split={setting: "who"}) == [
        MalformedRecord("data/raw/a.jsonl:1", "field 'who' holds half a surrogate pair, which is not valid text", 0)
    ]


@pytest.mark.skipif(not REAL.is_dir(), reason="no folder of real data sets beside the project (../shared/data)")
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_real_files_are_read_completely(tmp_path: Path, name: str) -> None:
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / name).symlink_to(REAL / name)
    found = SourceReader(tmp_path, prepare(name))
    rows = texts(list(found.rows()))
    assert (found.schema_descriptions[0], len(rows)) == REAL_SHAPES[name]
    assert all(prompt for prompt, _ in rows)


# ------------------------------------------------------------------------------------------------------ refused sources


@pytest.mark.parametrize(
    "name",
    [
        "../outside.csv",
        "data/outside.csv",
        "data/raw/../outside.csv",
        "/etc/hostname",
        "data/rawer/a.csv",
        "data/*/a.csv",
    ],
)
def test_a_source_outside_data_raw_is_refused(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "outside.csv", tmp_path / "data" / "outside.csv", tmp_path / "data" / "rawer" / "a.csv"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("prompt,response\na,b\n")
    (tmp_path / "data" / "raw").mkdir()
    with pytest.raises(DataError, match=r"prepare\.sources: .* is not below data/raw or data/distilled, so DVC would"):
        SourceReader(tmp_path, Prepare.model_validate({"sources": [name]}))


def test_a_missing_file_is_refused_with_the_existing_files(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a.csv") == "data/raw/a.csv: no such file; data/raw holds no files"
    put(tmp_path, "sub/b.csv", "prompt,response\na,b\n")
    assert refusal(tmp_path, "a.csv") == "data/raw/a.csv: no such file; data/raw holds data/raw/sub/b.csv"
    assert refusal(tmp_path, "*.json") == "data/raw/*.json: no such file; data/raw holds data/raw/sub/b.csv"
    assert (
        refusal(tmp_path, "sub")
        == "data/raw/sub: found a folder, expected files; write for example data/raw/sub/*.jsonl"
    )
    put(tmp_path, "c.csv.dvc", "outs:\n- path: c.csv\n")
    assert refusal(tmp_path, "c.csv") == "data/raw/c.csv: the content is not in the workspace; fetch it with dvc pull"
    for number in range(40):
        put(tmp_path, f"{number}.csv", "")
    assert refusal(tmp_path, "a.csv").endswith(" ...")
    assert "cannot search for files" in refusal(tmp_path, "x" * 300 + ".csv")
    assert "cannot search for files" in refusal(tmp_path, "a**b.csv")


def test_an_unsupported_ending_is_refused_before_reading(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt,response\na,b\n")
    put(tmp_path, "b.txt", "x")
    for pattern in ("b.txt", "*"):
        with pytest.raises(DataError, match=r"data/raw/b\.txt: cannot read \.txt; supported: \.json, "):
            SourceReader(tmp_path, prepare("a.csv" if pattern != "*" else "b.txt", pattern))


def test_a_file_of_two_sources_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "prompt,response\na,b\n")
    for twice in ("a.csv", "*.csv", "./a.csv"):
        assert refusal(tmp_path, "a.csv", twice) == (
            f"params.yaml: prepare.sources: data/raw/a.csv belongs to both data/raw/a.csv and data/raw/{twice}; "
            "name it once, with a weight if it should count more"
        )


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", ""), ("a.jsonl", ""), ("a.json", ""), ("a.csv", "prompt,response\n"), ("a.jsonl", "\n \n"),
     ("a.json", "[]"), ("a.json", "\ufeff"), ("a.csv", "\ufeff"), ("a.json", " [ \n] "),
     ("a.parquet", empty_parquet())],
)  # fmt: skip
def test_a_source_without_rows_is_refused(tmp_path: Path, name: str, content: str | bytes) -> None:
    put(tmp_path, name, content)
    put(tmp_path, "full.csv", "prompt,response\na,b\n")
    message = f"data/raw/{name}: no rows; add rows, or remove the source from prepare.sources"
    assert refusal(tmp_path, name) == refusal(tmp_path, "full.csv", name) == message


def test_a_damaged_file_stops_reading(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl.gz", gzip.compress(b'{"prompt": "1", "response": "x"}\n' * 99)[:-4])
    rows = SourceReader(tmp_path, prepare("a.jsonl.gz")).rows()
    with pytest.raises(DataError, match=r"data/raw/a\.jsonl\.gz: the gzip data is truncated"):
        list(rows)


# -------------------------------------------------------------------------------------------------------- documents


def test_documents_join_all_texts_of_a_record(tmp_path: Path) -> None:
    put(
        tmp_path,
        "a.jsonl",
        '{"q": "one", "n": 7, "options": ["two", {"x": "three"}], "y": null, "": {"z": ["four"]}}\n{}',
    )
    put(tmp_path, "b.csv", "q,a\nfive,six\n")
    tasks = tmp_path / "data" / "tasks"
    tasks.mkdir()
    (tasks / "c.json").write_text('[{"q": "seven"}]')
    assert sources.read_evaluation_sets(tmp_path, ["data/raw/*", "data/tasks/c.json", "data/raw/b.csv"]) == {
        "data/raw/a.jsonl": ["one\ntwo\nthree\nfour", ""],
        "data/raw/b.csv": ["five\nsix"],
        "data/tasks/c.json": ["seven"],
    }
    assert sources.read_evaluation_sets(tmp_path, []) == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"q": "a"}\nno JSON\n', "data/raw/a.jsonl:2: not JSON (Expecting value at character 1); fix or remove"),
        ('{"q": "a"}\n[{"q": "b"}]\n', "data/raw/a.jsonl:2: expected an object, found a list; fix or remove"),
        ('{"q": ["\\ud83d"]}', "data/raw/a.jsonl:1: a text holds half a surrogate pair"),
        ("\n", "data/raw/a.jsonl: no records; add records, or remove the file from prepare.leakage.files"),
    ],
)
def test_an_evaluation_set_with_a_bad_record_is_refused(tmp_path: Path, content: str, says: str) -> None:
    put(tmp_path, "a.jsonl", content)
    with pytest.raises(DataError) as caught:
        sources.read_evaluation_sets(tmp_path, ["data/raw/a.jsonl"])
    assert str(caught.value).startswith(says)


def test_a_deeply_nested_document_is_read(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"q": ' + "[" * 900 + '"deep"' + "]" * 900 + "}")
    assert sources.read_evaluation_sets(tmp_path, ["data/raw/a.jsonl"]) == {"data/raw/a.jsonl": ["deep"]}


@pytest.mark.parametrize("name", ["elsewhere/a.jsonl", "data/raw/none.jsonl", "data/raw/a.txt"])
def test_a_missing_evaluation_set_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, "a.txt", "x")
    with pytest.raises(DataError, match=r"not below data/raw or data/tasks|no such file|cannot read \.txt"):
        sources.read_evaluation_sets(tmp_path, [name])
