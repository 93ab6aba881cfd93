"""Tests file readers: records with positions, malformed records, and refused files."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ratchet.data import readers
from ratchet.data.conversation import MalformedRecord
from ratchet.data.readers import MAX_RECORD_BYTES, Record
from ratchet.errors import EXIT_INPUT, DataError

GOOD = [{"prompt": "Hi", "response": "Hello"}, {"prompt": "Grüße, 日本 🙂", "response": 'say "x", y\nand z'}]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def written(rows: list[dict[str, Any]], ending: str) -> bytes:
    """Return the rows as the bytes of a file with this ending."""
    if ending == ".parquet":
        target = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), target)
        return target.getvalue()
    if ending in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if ending == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if ending == ".json":
        return json.dumps(rows, ensure_ascii=False).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(folder: Path, name: str, content: bytes | str) -> list[Record]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(readers.read_records(path, name))


def fields(records: list[Record]) -> list[dict[str, Any]]:
    return [record[1] for record in records]  # type: ignore[index]


def refusal(folder: Path, name: str, content: bytes | str) -> str:
    """Return the message with which this file is refused."""
    with pytest.raises(DataError) as caught:
        read(folder, name, content)
    assert caught.value.exit_code == EXIT_INPUT
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------------------------------------- valid files


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_records_however_compressed(tmp_path: Path, ending: str, packed: str) -> None:
    name, content = f"rows{ending}{packed}", written(GOOD, ending)
    assert fields(read(tmp_path, name, PACK[packed](content))) == GOOD
    assert fields(read(tmp_path, name.upper(), PACK[packed](content))) == GOOD
    if ending != ".parquet":
        assert fields(read(tmp_path, name, PACK[packed](BYTE_ORDER_MARK + content))) == GOOD


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", '{"a":"1"}\n\n  \n{"a":"2"}', ["a.jsonl:1", "a.jsonl:4"]),
        ("a.jsonl", '{"a":"1\u2028b\u0085c"}\r\n{"a":"2"}\r\n', ["a.jsonl:1", "a.jsonl:2"]),
        ("a.json", '[{"a":"1"},\n{"a":"2"}]', ["a.json[0]", "a.json[1]"]),
        ("a.csv", 'a,b\r\n"over\ntwo lines",x\r\n\r\n6,"x\r\n\r\ny"\r\nlast,x', ["a.csv:2", "a.csv:5", "a.csv:8"]),
        ("a.tsv", 'a\tb\n1,"2\tx, y\n', ["a.tsv:2"]),
    ],
)
def test_every_record_has_its_position(tmp_path: Path, name: str, content: str, places: list[str]) -> None:
    records = read(tmp_path, name, content)
    assert [record.where if isinstance(record, MalformedRecord) else record[0] for record in records] == places


def test_parquet_positions_continue_across_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "n": number} for number in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    records = list(readers.read_records(tmp_path / "a.parquet", "a.parquet"))
    assert records == [(f"a.parquet[{number}]", row) for number, row in enumerate(rows)]


def test_nested_parquet_equals_the_json(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "g"}}]}]},
        {"messages": None},
    ]
    records = read(tmp_path, "a.parquet", written(rows, ".parquet"))
    first, second, third = (record[1]["messages"] for record in records)  # type: ignore[index]
    assert first[1]["tool_calls"] == calls
    # Arrow writes null for keys that a struct has only in another row; this call has no arguments.
    assert second[0]["tool_calls"] == [{"type": "function", "function": {"name": "g"}}]
    assert third is None


@PROPERTY
@given(
    rows=st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), max_size=4),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
        max_size=8,
    ),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_json_of_any_layout_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None, ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("json")
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    assume(all(not 0xD800 <= ord(character) <= 0xDFFF for character in text))
    assert read(folder, "a.json", text) == [(f"a.json[{number}]", row) for number, row in enumerate(rows)]
    lines = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    assert read(folder, "a.jsonl", lines) == [(f"a.jsonl:{number}", row) for number, row in enumerate(rows, start=1)]


def test_a_json_array_across_many_blocks_is_read(tmp_path: Path) -> None:
    """Values, numbers and multi-byte characters cross block boundaries; one value is longer than a block."""
    rows = [{"n": 7**number, "text": "ü日🙂" * (number % 1300)} for number in range(1200)]
    rows.insert(3, {"n": 0, "text": "lang " * 600_000})
    content = json.dumps(rows, ensure_ascii=False, indent=1).encode()
    assert len(content) > 6 * 2**20
    assert fields(read(tmp_path, "a.json", content)) == rows


@pytest.mark.parametrize(
    ("ending", "packed"), [(".jsonl", ""), (".json", ""), (".csv", ""), (".parquet", ""), (".jsonl", ".gz")]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str, packed: str) -> None:
    def peak_bytes(rows: int) -> int:
        path = tmp_path / f"{rows}{ending}{packed}"
        content = written([{"prompt": f"{number} " * 400, "response": "x"} for number in range(rows)], ending)
        path.write_bytes(gzip.compress(content, 1, mtime=0) if packed else content)
        del content
        tracemalloc.start()
        count = sum(1 for _ in readers.read_records(path, path.name))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == rows
        return peak

    assert peak_bytes(8_000) < peak_bytes(2_000) + 2 * 2**20


# ---------------------------------------------------------------------------------------------------- malformed records


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a: b", "not JSON (Expecting value at character 1)"),
        ('{"a": "b"} {"a": "c"}', "not JSON (Extra data at character 11)"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON (Exceeds the limit"),
        ('{"a": ' + "[" * 100_000 + "}", "lists or objects are nested too deeply"),
        ('{"a": NaN}', "not JSON (NaN is not valid JSON)"),
        ('{"a": -Infinity}', "not JSON (-Infinity is not valid JSON)"),
        ('["a", "b"]', "expected an object, found a list"),
        ("null", "expected an object, found null"),
        ("7", "expected an object, found a number"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_bad_line_is_counted_and_the_next_one_read(tmp_path: Path, line: str, says: str) -> None:
    before, bad, after = read(tmp_path, "a.jsonl", '{"a": "1"}\n\n' + line + '\n{"a": "2"}\n')
    assert (before, after) == (("a.jsonl:1", {"a": "1"}), ("a.jsonl:4", {"a": "2"}))
    assert bad.where == "a.jsonl:3"
    assert bad.detail.startswith(says)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('{"a": NaN}', "not JSON (NaN)"),
        ('{"a": [-Infinity]}', "not JSON (-Infinity)"),
        ('{"a": ' + "9" * 5000 + "}", "a number of 5,000 digits"),
        ('["a"]', "expected an object, found a list"),
        ("null", "expected an object, found null"),
        ("12", "expected an object, found a number"),
        ("true", "expected an object, found true or false"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_bad_element_is_counted_and_the_next_one_read(tmp_path: Path, value: str, says: str) -> None:
    records = read(tmp_path, "a.json", '[{"a": 1}, ' + value + ', {"a": 2}]')
    assert records == [("a.json[0]", {"a": 1}), MalformedRecord("a.json[1]", says), ("a.json[2]", {"a": 2})]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_line_of_fifty_megabytes_is_counted_in_bounded_memory(tmp_path: Path, packed: str) -> None:
    long = b'{"a": "' + b"x" * 50_000_000 + b'"}\n'
    content = PACK[packed](b'{"a": "1"}\n' + long + b'{"a": "2"}\n')
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(content)
    del content
    tracemalloc.start()
    records = list(readers.read_records(path, path.name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == [
        (f"{path.name}:1", {"a": "1"}),
        MalformedRecord(f"{path.name}:2", f"the line has {len(long):,} bytes; the limit is 16 MiB"),
        (f"{path.name}:3", {"a": "2"}),
    ]
    assert peak < 3 * MAX_RECORD_BYTES


def test_the_record_size_limit_is_exact(tmp_path: Path) -> None:
    longest = '{"a": "' + "x" * (MAX_RECORD_BYTES - 10) + '"}\n'
    assert len(longest) == MAX_RECORD_BYTES
    assert isinstance(read(tmp_path, "a.jsonl", longest)[0], tuple)
    assert isinstance(read(tmp_path, "a.jsonl", longest.replace("x", "xx", 1))[0], MalformedRecord)
    longer = '[{"a": "' + "x" * (MAX_RECORD_BYTES + 1) + '"}, {"a": "2"}]'
    found, after = read(tmp_path, "a.json", longer)
    assert found.where == "a.json[0]"
    assert after == ("a.json[1]", {"a": "2"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a,b,c", "3 cells under 2 columns; quote cells with commas"),
        ("a", "1 cells under 2 columns; quote cells with commas"),
        ("a,b,", "3 cells under 2 columns; quote cells with commas"),
        ("a\0b,y", "holds a NUL character"),
    ],
)
def test_a_bad_row_of_a_table_is_counted_and_the_next_one_read(tmp_path: Path, line: str, says: str) -> None:
    records = read(tmp_path, "a.csv", f'p,r\nx,y\n"1\n2",z\n{line}\nx,y\n')
    assert [record for record in records if isinstance(record, MalformedRecord)] == [MalformedRecord("a.csv:5", says)]
    assert len(records) == 4


@PROPERTY
@given(lines=st.lists(st.binary(max_size=30), max_size=10))
def test_every_jsonl_line_is_a_record_or_malformed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    """Every line is read as a record or as malformed, whatever its content, unless the file is not UTF-8."""
    filled = [line.replace(b"\n", b"") for line in lines]
    try:
        records = read(tmp_path_factory.mktemp("lines"), "a.jsonl", b'{"a": 1}\n' + b"\n".join(filled))
    except DataError as error:
        assert "not UTF-8" in str(error)
        return
    assert len(records) == 1 + sum(bool(line.strip(b" \t\r\n")) for line in filled)


@PROPERTY
@given(
    start=st.sampled_from([b"", b"[", b'[{"a": 1}, ', b"a,b\n", b'a,b\n"', b"PAR1", b"\x1f\x8b", b"(\xb5/\xfd"]),
    content=st.binary(max_size=80) | st.text('{}[]",: \n\\u0d8 12', max_size=40).map(str.encode),
    name=st.sampled_from(
        ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.csv.gz", "a.json.xz", "a.tsv.zst", "a.json.bz2"]
    ),
)
def test_random_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, content: bytes, name: str
) -> None:
    try:
        records = read(tmp_path_factory.mktemp("any"), name, start + content)
    except DataError as error:
        assert str(error).startswith(name)
    else:
        assert all(isinstance(record, MalformedRecord) or isinstance(record[1], dict) for record in records)


# -------------------------------------------------------------------------------------------------------- refused files


@pytest.mark.parametrize("name", ["a", "a.txt", "a.xlsx", "a.gz", "a.csv.zip", ".jsonl"])
def test_an_unsupported_ending_is_refused_with_the_supported_ones(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, name, "x")
    assert message.endswith(
        "supported: .json, .jsonl, .ndjson, .csv, .tsv, .parquet, each also with .gz, .bz2, .xz, .zst"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"prompt": "a",\n "response" "b"}]', "a.json:2: not JSON (Expecting ':' delimiter)"),
        ('[{"a": 1},\n{"a": 2}\n{"a": 3}]', "a.json:3: not JSON (Expecting ',' delimiter)"),
        ('[{"a": 1},\n\n{"a": ', "a.json:3: not JSON (Expecting value)"),
        ('[{"a": 1},\n]', "a.json:2: not JSON (Expecting value)"),
        ('[{"a": 1}\n', "a.json:2: not JSON (the list is not closed)"),
        ('[{"a": 1}]\n]', "a.json:2: not JSON (Extra data)"),
        ("[", "a.json:1: not JSON"),
        ("[1,2", "a.json:1: not JSON (the list is not closed)"),
        (
            '{"a": "b"}\n{"a": "c"}\n',
            "a.json:2: not JSON (Extra data); a file with one object per line is JSONL: name it .jsonl",
        ),
        ('{"a": "b"}', "a.json: expected a list of objects, found an object"),
        ('"text"', "a.json: expected a list of objects, found text"),
        ("prompt,response", "a.json:1: not JSON"),
        ("[" * 100_000, "a.json:1: lists or objects are nested too deeply"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_damaged_json_array_is_refused_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    assert refusal(tmp_path, "a.json", content).startswith(says)


def test_damage_late_in_a_json_array_is_reported_with_its_line(tmp_path: Path) -> None:
    rows = ['{"text": "' + "x" * 1000 + '"}'] * 4000
    rows[3000] = rows[3000].replace('"text"', "'text'")
    message = refusal(tmp_path, "a.json", "[" + ",\n".join(rows) + "]")
    assert message.startswith("a.json:3001: not JSON (Expecting property name")


def test_a_json_array_in_a_jsonl_file_is_refused(tmp_path: Path) -> None:
    for content in ('\n[{"a": 1},\n{"a": 2}]', '[{"a": 1}, {"a": 2}]', "[\n"):
        assert refusal(tmp_path, "a.jsonl", content).endswith(
            "looks like a JSON array; expected one object per line; name a file with an array .json"
        )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "not a valid JSON file but gzip; name it a.jsonl.gz"),
        ("a.csv", bz2.compress(b"{}"), "not a valid CSV file but bzip2; name it a.csv.bz2"),
        ("a.json", lzma.compress(b"{}"), "not a valid JSON file but xz; name it a.json.xz"),
        ("a.tsv", PACK[".zst"](b"{}"), "not a valid TSV file but Zstandard; name it a.tsv.zst"),
        ("a.jsonl", written(GOOD, ".parquet"), "not a valid JSON file but Parquet; name it a.parquet"),
        ("a.csv", b"PK\x03\x04" + b"\x14\0\x08\0" * 9, "not a valid CSV file but zip (or Excel); unpack or convert it"),
        ("a.jsonl", b"%PDF-1.7\n", "not a valid JSON file but PDF"),
        (
            "a.json",
            b"<!DOCTYPE html>\n<html>",
            "not a valid JSON file but HTML or XML; unpack or convert it, or download it again",
        ),
        (
            "a.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1",
            "fetch the file itself with git lfs pull",
        ),
        ("a.csv.gz", b"a,b\n1,2\n", "not a valid gzip file: it begins with b'a,b\\n1,2\\n'"),
        ("a.csv.gz", bz2.compress(b"a,b"), "not a valid gzip file but bzip2; name it a.csv.bz2"),
        (
            "a.csv.gz",
            gzip.compress(gzip.compress(b"a,b", mtime=0), mtime=0),
            "not a valid CSV file but compressed twice with gzip; decompress it once",
        ),
        ("a.csv.xz", b"", "not a valid xz file: the file is empty"),
        ("a.parquet", b'{"a": 1}\n', "not a valid Parquet file: it begins with b'{\"a\": 1}\\n'"),
        ("a.parquet", b"", "not a valid Parquet file: the file is empty"),
        ("a.parquet", gzip.compress(b"x", mtime=0), "not a valid Parquet file but gzip; name it a.parquet.gz"),
        ("a.jsonl.gz", gzip.compress(b"x" * 257 + b"ustar" + b"\0" * 250, mtime=0), "not a valid JSON file but tar"),
        ("a.jsonl", b"\0" * 4096, "NUL bytes: not text; copy it again"),
    ],
)
def test_a_file_with_the_wrong_ending_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    assert says in refusal(tmp_path, name, content)


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, ending: str, packed: str) -> None:
    rows = [{"prompt": f"{number} {number**9}", "response": "x"} for number in range(300)]
    whole = PACK[packed](written(rows, ending))
    for kept in (len(whole) - 1, len(whole) - 9, len(whole) // 2, 30, 12):
        message = refusal(tmp_path, f"a{ending}{packed}", whole[:kept])
        assert message.endswith("copy or download it again"), message


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz"])
def test_a_corrupt_byte_is_always_detected(tmp_path: Path, packed: str) -> None:
    rows = [{"prompt": f"{number} {number**9}", "response": "x"} for number in range(300)]
    whole = PACK[packed](written(rows, ".jsonl"))
    for place in range(20, len(whole), len(whole) // 25):
        damaged = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        assert "copy or download it again" in refusal(tmp_path, f"a.jsonl{packed}", damaged)


def test_concatenated_members_are_one_file(tmp_path: Path) -> None:
    for packed, pack in PACK.items():
        content = pack(b'{"a": 1}\n') + pack(b'{"a": 2}\n')
        assert len(read(tmp_path, f"a.jsonl{packed}", content)) == 2


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("rows_before", [0, 60_000], ids=["early", "late"])
@pytest.mark.parametrize("bad", [b"Gr\xfc\xdfe", b"\xe2\x82"], ids=["latin-1", "half a letter"])
def test_invalid_utf8_is_refused_with_line_and_offset(tmp_path: Path, name: str, rows_before: int, bad: bytes) -> None:
    head, row, tail = {
        "a.csv": (b"prompt,response\n", "some wörds,yes\n", b",yes\n"),
        "a.json": (b"[\n", '{"p": "some wörds"},\n', b'"}]'),
    }.get(name, (b"", '{"p": "some wörds"}\n', b'"}\n'))  # fmt: skip
    opening = b"" if name == "a.csv" else b'{"p": "'
    before = head + row.encode() * rows_before + opening
    content = before + bad + tail
    byte = len(before) + bad.index(b"\xfc") if b"\xfc" in bad else len(before)
    line = before.count(b"\n") + 1
    message = refusal(tmp_path, name, gzip.compress(content, 1, mtime=0) if name.endswith(".gz") else content)
    text = "decompressed text" if name.endswith(".gz") else "file"
    assert message == f"{name}:{line}: not UTF-8 (byte {byte} of the {text}); convert it, e.g. with iconv"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".json"])
def test_utf16_and_utf32_are_recognized(tmp_path: Path, encoding: str, ending: str) -> None:
    message = refusal(tmp_path, f"a{ending}", written(GOOD, ending).decode().encode(encoding))
    assert encoding[:6].upper() in message
    assert "not UTF-8" in message
    assert "iconv" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('p,r\nx,y\na,"b\nc,d\n', "a.csv:3: not valid CSV (a quote is opened and never closed)"),
        ('p,r\nx,y\n"a"b,c\n', "a.csv:3: not valid CSV (',' expected after '\"')"),
        ("p,r,p\na,b,c\n", "a.csv:1: column 'p' appears twice; rename one"),
        ("p,r\nx," + "y" * (MAX_RECORD_BYTES + 1) + "\n", "a.csv:2: the record that begins here is over 16 MiB"),
        (
            'p,r\nx,y\nx,"' + ("y" * 999 + "\n") * (MAX_RECORD_BYTES // 999),
            "a.csv:3: the record that begins here is over 16 MiB",
        ),
    ],
    ids=["open quote", "letters behind a quote", "column twice", "long cell", "open quote in a long file"],
)
def test_a_table_with_an_unclosed_quote_is_refused(tmp_path: Path, content: str, says: str) -> None:
    assert refusal(tmp_path, "a.csv", content).startswith(says)


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, "a.csv", "p,r\n" + "word " * 50_000 + ",x\n")[0] == (
        "a.csv:2",
        {"p": "word " * 50_000, "r": "x"},
    )


def test_parquet_that_is_damaged_is_refused(tmp_path: Path) -> None:
    whole = written([{"p": f"{number**5}", "r": "x"} for number in range(5000)], ".parquet")
    assert refusal(tmp_path, "a.parquet", whole[:-20]).endswith("write or copy it again")
    assert refusal(tmp_path, "a.parquet", whole[:40] + whole[60:]).endswith("write or copy it again")


def test_parquet_with_a_duplicate_column_is_refused(tmp_path: Path) -> None:
    target = io.BytesIO()
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["p", "p"]), target)
    assert refusal(tmp_path, "a.parquet", target.getvalue()) == "a.parquet: column 'p' appears twice; rename one"


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    target = io.BytesIO()
    column = pa.array([b"good", b"Gr\xfc\xdfe"]).view(pa.string())
    pq.write_table(pa.table({"p": column}), target)
    assert refusal(tmp_path, "a.parquet", target.getvalue()).startswith("a.parquet[0] or one of the next 1 rows")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(Is a directory\)"):
        list(readers.read_records(tmp_path / "a.jsonl", "a.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read \(No such file or directory\)"):
        list(readers.read_records(tmp_path / "b.jsonl", "b.jsonl"))
