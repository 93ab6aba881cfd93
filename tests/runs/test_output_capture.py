"""Tests of the captured output of a training process: prints, logging, warnings and exceptions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BEGIN = """
import os, sys
from pathlib import Path
from ratchet.config.machine import Machine
from ratchet.runs.log import capture_output
folder = Path(sys.argv[1])
said = capture_output(folder / "logs", Machine(**json.loads(sys.argv[2])), 3, json.loads(sys.argv[3]))
"""


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def process(
    folder: Path, script: str, rank: int | None = None, **machine: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a script whose output is captured as the supervisor captures a worker's: both streams append to
    worker.log."""
    code = f"import json\n{BEGIN}\n{script}\nsaid.end()\nos._exit(0)\n"
    with (folder / "worker.log").open("ab") as output:
        return subprocess.run(
            [sys.executable, "-c", code, str(folder), json.dumps(machine), json.dumps(rank)],
            stdout=output, stderr=output, check=False,
        )  # fmt: skip


def output(folder: Path) -> str:
    return (folder / "worker.log").read_text(encoding="utf-8")


def test_prints_are_records_and_stay_in_the_output(tmp_path: Path) -> None:
    process(tmp_path, """
print("one", 2, sep=", ")
print("a\\nb")
print("half", end=" "); print("and half")
print("wrong", file=sys.stderr)
sys.stdout.buffer.write(b"bytes \\xff\\n")
print(" 10 %\\r 20 %\\r100 % done")
print()
os.write(1, b"from C\\n")
print("no end of line", end="", flush=True)
""")  # fmt: skip
    found = records(tmp_path / "logs" / "worker.jsonl")
    assert [(one["level"], one["source"], one["text"]) for one in found] == [
        ("info", "stdout", "one, 2"), ("info", "stdout", "a\nb"), ("info", "stdout", "half and half"),
        ("warning", "stderr", "wrong"), ("info", "stdout", "bytes \\xff"), ("info", "stdout", "100 % done"),
        ("info", "stdout", "no end of line"),
    ]  # fmt: skip
    assert {one["attempt"] for one in found} == {3}
    assert output(tmp_path) == (
        "one, 2\na\nb\nhalf and half\nwrong\nbytes \\xff\n100 % done\n\nfrom C\nno end of line\n"
    )


def test_each_rank_has_a_log_of_its_own_and_an_uncaught_exception_is_one_record(tmp_path: Path) -> None:
    process(tmp_path, "print('here')", 0)
    done = process(tmp_path, "raise RuntimeError('two\\nlines')", 3)
    assert done.returncode == 1
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["worker-0.jsonl", "worker-3.jsonl"]
    (found,) = records(tmp_path / "logs" / "worker-3.jsonl")
    assert (found["rank"], found["level"], found["text"]) == (3, "error", "uncaught: RuntimeError: two\nlines")
    assert found["traceback"] in output(tmp_path)


def test_logging_warnings_and_exceptions_of_threads_are_records_with_where_and_why(tmp_path: Path) -> None:
    process(tmp_path, """
import logging, threading, warnings
logging.getLogger("library.part").info("news")
logging.getLogger("library.part").debug("workings")
logging.getLogger("library.part").error("failed: %s", "so")
warnings.warn("it will change", FutureWarning)
def fail(): raise ValueError("in here")
thread = threading.Thread(target=fail, name="saver"); thread.start(); thread.join()
class Bad:
    def __del__(self): raise KeyError("while going")
bad = Bad(); del bad
""")  # fmt: skip
    news, failed, warned, thread, ignored = records(tmp_path / "logs" / "worker.jsonl")
    assert (news["level"], news["source"], news["text"]) == ("info", "library.part", "news")
    assert (failed["level"], failed["text"]) == ("error", "failed: so")
    assert (warned["source"], warned["text"], warned["reason"]) == ("warnings", "it will change", "FutureWarning")
    assert warned["where"].startswith("<string>:")
    assert (thread["level"], thread["text"]) == ("error", "uncaught in saver: ValueError: in here")
    assert "in fail" in thread["traceback"]
    assert ignored["text"] == "ignored by Python: KeyError: 'while going'"
    said = output(tmp_path)
    assert "error: library.part: failed: so\n" in said
    assert "FutureWarning: it will change" in said
    assert "ValueError: in here\n" in said
    assert "news" not in said


@pytest.mark.parametrize(("level", "kept"), [("debug", 3), ("info", 3), ("warning", 1), ("error", 0)])
def test_the_level_holds_for_prints_too(level: str, kept: int, tmp_path: Path) -> None:
    process(tmp_path, "print('a'); print('b'); print('c', file=sys.stderr)", log_level=level)
    path = tmp_path / "logs" / "worker.jsonl"
    assert len(records(path) if path.exists() else []) == kept
    assert output(tmp_path) == "a\nb\nc\n"


def test_who_prints_faster_than_anybody_cuts_fills_no_disk(tmp_path: Path) -> None:
    process(tmp_path, """
for number in range(5000): print(number, "x" * 90)
os.truncate(folder / "worker.log", 0)
print("after")
print("y" * 1_000_000)
""", log_max_bytes=20_000, log_files=2)  # fmt: skip
    sizes = [path.stat().st_size for path in (tmp_path / "logs").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 20_000
    first, second, *_ = output(tmp_path).splitlines()
    assert first.endswith("lines dropped here: too many at once; logs/ may have them")
    assert 4000 < int(first.split()[1]) < 5000
    assert second == "after"
    assert (tmp_path / "worker.log").stat().st_size <= 2 * 20_000


def test_a_full_disk_below_the_output_stops_no_print(tmp_path: Path) -> None:
    (tmp_path / "worker.log").symlink_to("/dev/full")
    process(tmp_path, "print('a'); print('b', file=sys.stderr)\n(folder / 'reached').touch()")
    assert (tmp_path / "reached").exists()
    assert [one["text"] for one in records(tmp_path / "logs" / "worker.jsonl")] == ["a", "b"]
