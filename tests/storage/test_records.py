"""JSON lines are read as they were written, and unreadable lines are reported."""

from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.storage.records import base
from ratchet.storage.records.gate import Verdict


def test_every_json_text_round_trips(tmp_path: Path) -> None:
    """Unicode has line ends other than a line feed, and prompts may contain all of them."""
    rows = [{"id": str(number), "text": f"a{end}b"} for number, end in enumerate("\n\r\x0b\x0c\x1c\x85\u2028\u2029")]
    base.write_lines(tmp_path / "rows.jsonl", rows)
    assert base.read_lines(tmp_path / "rows.jsonl") == rows


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    base.write_lines(tmp_path / "rows.jsonl", [])
    assert base.read_lines(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"\xff\xfe", "cannot be read as text"), (b'{"a": 1}\n{"a"\n', "rows.jsonl:2: not JSON")],
    ids=["missing", "no text", "torn"],
)
def test_unreadable_lines_raise_damaged_file_error(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=says):
        base.read_lines(path)


def test_a_deeply_nested_record_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text("[" * 200_000)
    with pytest.raises(DamagedFileError, match=r"verdict.json: not a Verdict \(maximum recursion depth exceeded"):
        Verdict.load(tmp_path / "verdict.json")
