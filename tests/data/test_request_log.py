"""Tests the lines of request logs that servers write, and files that grow."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ratchet.data.request_log import LoggedRequest, begin_file, list_log_files, parse_request, read_lines
from ratchet.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi!"}
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = LoggedRequest(prompt="Hello?", answer="Hi!")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hello?", "answer": "Hi!"}, PLAIN),
        ({"prompt": "Hello?", "response": "Hi!"}, PLAIN),
        ({"messages": [SYSTEM, ASKED], "completion": "Hi!"}, PLAIN),
        ({"messages": [SYSTEM, ASKED, ANSWERED]}, PLAIN),  # `/save` of `ratchet chat`
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}], "output": "Hi!"}, PLAIN),
        ({"request": {"messages": [ASKED]}, "response": {"choices": [{"message": ANSWERED}]}}, PLAIN),
        ({"request": {"prompt": "Hello?"}, "response": {"choices": [{"text": "Hi!"}]}}, PLAIN),
        ({"request": {"messages": [ASKED]}, "response": {"message": ANSWERED}}, PLAIN),  # Ollama
        (
            {"request": {"messages": [ASKED]}, "response": {"id": "c1", "created": 5, "choices": [{"text": "Hi!"}]}},
            LoggedRequest(id="c1", time_s=5.0, prompt="Hello?", answer="Hi!"),
        ),
        (
            {"custom_id": "b1", "response": {"status_code": 200, "body": {"choices": [{"message": ANSWERED}]}}},
            LoggedRequest(id="b1", answer="Hi!"),
        ),
        (
            {"id": "p1", "sample": 2, "text": "Hi!", "answer": "Hi!", "reference": "Hi"},  # `ratchet generate`
            LoggedRequest(id="p1/2", answer="Hi!", reference="Hi"),
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            LoggedRequest(prompt="Hello?"),
        ),
        ({"id": 7, "score": True}, LoggedRequest(id="7", score=1.0)),
        ({"id": "a", "score": 0.25, "time": "2026-01-01T01:00:00+01:00"}, LoggedRequest("a", 1767225600.0, score=0.25)),
        ({"prompt": "Hello?", "time": 1767225600123}, LoggedRequest(time_s=1767225600.123, prompt="Hello?")),
        ({"prompt": "Hello?", "version": 3}, LoggedRequest(version=3, prompt="Hello?")),
        ({"prompt": "Hello?", "version": "3"}, LoggedRequest(version=3, prompt="Hello?")),
    ],
)  # fmt: skip
def test_forms_of_requests(record: dict[str, Any], expected: LoggedRequest) -> None:
    assert parse_request(record) == expected


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], "found a list; expected an object"),
        ("private", "found text; expected an object"),
        ({"private": "private"}, "found none of the known fields"),
        ({"prompt": ["private"]}, "prompt: found a list"),
        ({"messages": ["private"]}, "messages: expected a list of objects"),
        ({"prompt": "private", "answer": 5}, "answer: found a number"),
        ({"prompt": "private", "response": {"choices": []}}, "answer: found an object without text; expected text"),
        ({"prompt": "private", "score": "private"}, "score: found text"),
        ({"prompt": "private", "score": float("nan")}, "score: found a number"),
        ({"prompt": "private", "time": "private"}, "time: expected Unix seconds or ISO 8601"),
        ({"prompt": "private", "time": 10**400}, "time: expected Unix seconds or ISO 8601"),
        ({"prompt": "private", "score": 10**400}, "score: found a number"),
        ({"messages": [{"role": "user", "content": {"private": 1}}]}, "messages: content is an object"),
        ({"messages": [{"role": "user", "content": [{"text": None}]}]}, "messages: content is a list"),
        ({"response": {"message": {"content": 5}}}, "answer: content is a number"),
    ],
)
def test_what_is_no_request_is_explained_without_quoting_it(record: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_request(record)
    assert "private" not in str(error.value)


def test_only_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\n\xff\n{"prompt": "b", "n": NaN}\n' + b"[" * 100_000 + b'\n{"prompt": "c')
    with path.open("rb") as read:
        found = list(read_lines(read, path, begin_file(path)))
    assert [(line.where.rpartition(":")[2], line.request, line.problem) for line in found] == [
        ("1", LoggedRequest(prompt="a"), ""), ("3", None, "not JSON"), ("4", None, "NaN is not valid JSON"),
        ("5", None, "not JSON"),
    ]  # fmt: skip
    with path.open("ab") as stream:
        stream.write(b'"}\n')
    with path.open("rb") as read:
        [line] = read_lines(read, path, found[-1].progress)
    assert (line.where, line.request) == (f"{path}:6", LoggedRequest(prompt="c"))
    assert line.progress.offset == path.stat().st_size


def test_logs_in_a_folder_are_read_from_the_oldest_on(tmp_path: Path) -> None:
    for age, name in enumerate(
        ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3.gz", ".log.jsonl", "other.txt"]
    ):
        path = tmp_path / name
        path.write_text(json.dumps({}))
        os.utime(path, (1000 - age, 1000 - age))
    assert [path.name for path in list_log_files([tmp_path])] == ["log.jsonl.2", "log.jsonl.1", "log.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no log in this folder"):
        list_log_files([tmp_path / "empty"])
