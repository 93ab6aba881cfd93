"""Facts as JSON lines: what is written is read, and what cannot be is said."""

from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.storage.records import base


def test_every_text_survives_that_json_holds(tmp_path: Path) -> None:
    """Unicode calls more than a line feed the end of a line; prompts hold what they like."""
    rows = [{"id": str(number), "text": f"a{end}b"} for number, end in enumerate("\n\r\x0b\x0c\x1c\x85\u2028\u2029")]
    base.write_lines(tmp_path / "rows.jsonl", rows)
    assert base.read_lines(tmp_path / "rows.jsonl") == rows


def test_no_lines_are_none(tmp_path: Path) -> None:
    base.write_lines(tmp_path / "rows.jsonl", [])
    assert base.read_lines(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"\xff\xfe", "no such text"), (b'{"a": 1}\n{"a"\n', "rows.jsonl:2: not JSON")],
    ids=["missing", "no text", "torn"],
)
def test_what_cannot_be_read_is_damaged(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=says):
        base.read_lines(path)
