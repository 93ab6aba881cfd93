"""Tests of logs: content, bounded size, and independence of failing disks."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.errors import InterruptedRunError, RunFailedError
from ratchet.redaction import HIDDEN
from ratchet.runs import log
from ratchet.runs.directory import RunDirectory, RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import JsonLog, print_message, trim_file
from ratchet.runs.supervisor import JournalLogCallback, log_supervision

SMALL = Machine(log_max_bytes=4096, log_files=3)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pieces(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


class Complaints(list[str]):
    """Receives the messages about lost records."""

    def __call__(self, text: str) -> None:
        self.append(text)


def opened(folder: Path, machine: Machine = SMALL, told: Complaints | None = None) -> JsonLog:
    return JsonLog(folder / "worker.jsonl", machine, lambda: {"attempt": 7}, Complaints() if told is None else told)


# -------------------------------------------------------------------------------------------------- content of a record


def test_a_record_says_when_how_grave_who_where_and_what(tmp_path: Path) -> None:
    with_log = opened(tmp_path / "logs")
    with_log.write("warning", "library", "zwei\nLinien \ud800", reason="because", left=None, many=list(range(99)))
    (found,) = records(tmp_path / "logs" / "worker.jsonl")
    assert list(found) == ["t", "level", "source", "attempt", "pid", "text", "reason", "many"]
    assert (found["level"], found["source"], found["attempt"], found["pid"]) == ("warning", "library", 7, os.getpid())
    assert (found["text"], found["reason"], len(found["many"])) == ("zwei\nLinien \ud800", "because", 32)
    assert len(found["t"]) == len("2026-11-23T00:00:00.000Z")
    assert found["t"].endswith("Z")


@pytest.mark.parametrize("level", list(log.LEVELS))
def test_what_is_less_grave_than_asked_for_is_left_out(level: log.Level, tmp_path: Path) -> None:
    made = opened(tmp_path, SMALL.model_copy(update={"log_level": level}))
    for one in log.LEVELS:
        made.write(one, "test", one)
    wanted = list(log.LEVELS)[list(log.LEVELS).index(level) :]
    assert [found["text"] for found in records(tmp_path / "worker.jsonl")] == wanted


def test_neither_text_nor_fields_hold_secrets_and_no_value_breaks_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "planted-4711")
    opened(tmp_path).write(
        "info", "planted-4711", "planted-4711", path=Path("/planted-4711"), deep={"a": ["planted-4711", float("nan")]},
        t="mine", number=float("inf"),
    )  # fmt: skip
    (found,) = records(tmp_path / "worker.jsonl")
    assert (found["source"], found["text"], found["path"]) == (HIDDEN, HIDDEN, f"/{HIDDEN}")
    assert (found["deep"], found["number"]) == ({"a": [HIDDEN, "nan"]}, "inf")
    assert found["t"] != "mine"


def test_what_python_s_logging_is_told_keeps_its_reason_and_its_traceback(tmp_path: Path) -> None:
    logger, listener = logging.Logger("library"), log.LoggingBridge(opened(tmp_path))
    logger.addHandler(listener)
    try:
        raise KeyError("x")
    except KeyError:
        logger.critical("failed %d times", 3, exc_info=True, extra={"reason": "bug", "event": "worker_error"})
    logger.warning("%d", "of a wrong kind")
    logger.log(5, "chatter")
    first, second = records(tmp_path / "worker.jsonl")
    assert (first["level"], first["source"], first["text"]) == ("error", "library", "failed 3 times")
    assert (first["reason"], first["event"]) == ("bug", "worker_error")
    assert first["traceback"].endswith("KeyError: 'x'\n")
    assert second["text"].startswith("%d (TypeError: ")


# --------------------------------------------------------------------------------------------------------- bounded size


@pytest.mark.parametrize("files", [1, 2, 3])
def test_log_is_never_larger_than_allowed_and_loses_its_oldest(files: int, tmp_path: Path) -> None:
    many = opened(tmp_path, SMALL.model_copy(update={"log_files": 5}))
    for _ in range(300):
        many.write("info", "test", "of the start before, with more files" + "x" * 60)
    assert len(pieces(tmp_path)) == 5
    many.close()
    made = opened(tmp_path, SMALL.model_copy(update={"log_files": files}))
    for number in range(400):
        made.write("info", "test", f"{number} {'x' * (number % 90)}")
        sizes = pieces(tmp_path)
        assert len(sizes) <= files
        assert max(sizes.values()) <= 4096
    names = ["worker.jsonl", "worker.1.jsonl", "worker.2.jsonl"][:files]
    assert sorted(pieces(tmp_path)) == sorted(names)
    told = [int(found["text"].split()[0]) for name in reversed(names) for found in records(tmp_path / name)]
    assert told == list(range(told[0], 400))


@pytest.mark.parametrize("text", ["x" * 100_000, "ü" * 100_000, '"\\\n' * 40_000, "\x00" * 50_000])
def test_a_record_that_is_too_large_is_cut_and_says_so(text: str, tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.write("info", "test", "before")
    made.write("info", "test", text, reason="long")
    made.write("info", "test", "few", traceback=text)
    assert max(pieces(tmp_path).values()) <= 4096
    found = [one for path in sorted(tmp_path.iterdir(), reverse=True) for one in records(path)]
    cut = next(one for one in found if one.get("reason") == "long")
    assert text.startswith(cut["text"])
    assert len(cut["text"]) > 400
    assert cut["cut_bytes"] == len(text.encode()) - len(cut["text"].encode())
    assert next(one for one in found if one["text"] == "few")["omitted_fields"] == ["traceback"]


def test_many_threads_lose_nothing_and_mix_no_lines(tmp_path: Path) -> None:
    made = opened(tmp_path, Machine(log_max_bytes=50_000, log_files=50))

    def speak(name: int) -> None:
        for number in range(200):
            made.write("info", "test", f"{name} {number}")

    threads = [threading.Thread(target=speak, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.write("info", "test", "last")  # also writes records that one thread left for another
    told = [tuple(map(int, one["text"].split())) for path in tmp_path.iterdir() for one in records(path)
            if one["text"] != "last"]  # fmt: skip
    assert sorted(told) == [(name, number) for name in range(8) for number in range(200)]


def test_a_signal_handler_may_log_while_the_log_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, write = opened(tmp_path), os.write

    def interrupted(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGUSR2)
        return write(fd, data)

    before = signal.signal(signal.SIGUSR2, lambda *about: made.write("info", "test", "within"))
    try:
        monkeypatch.setattr(os, "write", interrupted)
        made.write("info", "test", "outer")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [one["text"] for one in records(tmp_path / "worker.jsonl")] == ["outer", "within"]


def test_torn_line_is_closed_before_the_next_and_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "worker.jsonl").write_bytes(b'{"t": "2026')
    told = Complaints()
    made = opened(tmp_path, told=told)
    made.write("info", "test", "whole")
    made.close()
    made.write("info", "test", "after")
    torn, whole = (tmp_path / "worker.jsonl").read_text().splitlines()
    assert torn == '{"t": "2026'
    assert json.loads(whole)["text"] == "whole"
    assert told == []


# -------------------------------------------------------------------------------------- failures do not stop the caller


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_costs_records_which_are_counted(tmp_path: Path) -> None:
    told = Complaints()
    (tmp_path / "worker.jsonl").symlink_to("/dev/full")
    made = opened(tmp_path, told=told)
    for number in range(5):
        made.write("info", "test", str(number))
    assert told == [
        f"{tmp_path / 'worker.jsonl'} cannot be written (No space left on device); "
        "training continues, its log has a gap"
    ]
    made.close()


LIMITED = """
import json, resource, sys
from pathlib import Path
from ratchet.config.machine import Machine
from ratchet.runs.log import JsonLog
told = []
log = JsonLog(Path(sys.argv[1]), Machine(log_max_bytes=100_000), dict, told.append)
log.write("info", "test", "before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 20, hard))
for number in range(4): log.write("info", "test", "lost")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write("info", "test", "after")
print(json.dumps(told))
"""


def test_a_disk_that_has_room_again_has_whole_lines_and_says_how_many_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "worker.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 1
    found = records(path)
    assert [one["text"].split(":")[0] for one in found] == ["before", "4 records lost here", "after"]
    assert (found[1]["level"], found[1]["lost"]) == ("warning", 4)


@pytest.mark.parametrize("how", ["removed", "a file in its place", "read-only"])
def test_a_folder_that_goes_and_comes_back(how: str, tmp_path: Path) -> None:
    folder, told = tmp_path / "logs", Complaints()
    made = opened(folder, told=told)
    made.write("info", "test", "before")
    shutil.rmtree(folder)
    if how == "a file in its place":
        folder.write_text("")
    elif how == "read-only":
        folder.symlink_to("/proc/1/task")  # not even root can create a file there
    made.write("info", "test", "meanwhile")
    assert len(told) == (how != "removed")
    if how != "removed":
        folder.unlink()
    made.write("info", "test", "after")
    texts = [one["text"].split(":")[0] for one in records(folder / "worker.jsonl")]
    assert texts == (["meanwhile", "after"] if how == "removed" else ["1 record lost here", "after"])


def test_who_comes_while_another_waits_for_the_disk_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, goes_on, inside, write = opened(tmp_path), threading.Event(), threading.Event(), os.write

    def slow(fd: int, data: bytes) -> int:
        inside.set()
        assert goes_on.wait(60)
        return write(fd, data)

    made.write("info", "test", "first")
    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(log, "MAX_WAITING", 3)
    waiting = threading.Thread(target=made.write, args=("info", "test", "slow"))
    waiting.start()
    assert inside.wait(60)
    for number in range(5):
        made.write("info", "test", f"meanwhile {number}")  # the write returns at once, or the test would hang
    goes_on.set()
    waiting.join()
    texts = [one["text"] for one in records(tmp_path / "worker.jsonl")]
    assert texts == [
        "first",
        "slow",
        "2 records lost here: the disk was too slow",
        *(f"meanwhile {n}" for n in range(3)),
    ]


# ------------------------------------------------------------------------------------------------------- worker.log


def test_output_is_cut_while_others_append_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"".join(b"line %06d\n" % number for number in range(1000)))
        assert trim_file(path, 5000)
        kept = (tmp_path / "worker.log.1").read_text().splitlines()
        assert kept[-1] == "line 000999"
        assert kept[0].startswith("line ")
        assert 4900 < (tmp_path / "worker.log.1").stat().st_size <= 5000
        assert path.read_bytes() == b""
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert not trim_file(path, 5000)
    assert sorted(pieces(tmp_path)) == ["worker.log", "worker.log.1"]


def test_output_without_room_for_a_copy_is_cut_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    (tmp_path / "worker.log.1").mkdir()  # nothing can take its place
    path.write_bytes(b"x" * 9000)
    assert trim_file(path, 5000)
    assert path.stat().st_size == 0
    assert not trim_file(tmp_path / "none", 5000)


# ------------------------------------------------------------------------------------------------ log of the supervisor


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory.open(tmp_path / "runs", RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64))
    yield made
    made.close()


def supervisors(run: RunDirectory) -> list[dict[str, Any]]:
    return records(run.paths.logs / "supervisor.jsonl")


@pytest.mark.parametrize(
    ("kind", "data", "level", "text"),
    [
        ("step_skipped", {"step": 3, "reason": "loss is NaN", "rollback_step": 2, "rows": ["a"]}, "warning",
         "step 3: skipped, rolled back to the weights of step 2: loss is NaN"),
        ("worker_exited", {"failure_class": "killed", "decision": "Retry", "text": "killed by SIGKILL",
            "exit_code": -9}, "warning",
         "attempt 3 died: killed by SIGKILL"),
        ("worker_exited", {"failure_class": "bug", "decision": "GiveUp", "text": "KeyError", "exit_code": 1}, "error",
         "attempt 3 died: bug, KeyError"),
        ("checkpoint_saved", {"step": 4, "seconds": 0.25}, "debug", "checkpoint of step 4 saved in 0.25 s"),
        ("microbatch_budget", {"step": 4, "phase": "train", "action": "shrink", "failed_tokens": 2048,
            "budget": {"tokens": 1024}}, "warning",
         "step 4: micro-batch of train limited to 1,024 padded tokens: 2,048 did not fit"),
        ("finished", {"step": 9, "reason": "early_stopped"}, "info", "finished at step 9 (early_stopped)"),
        ("worker_ready", {"nothing": 1}, "warning", "damaged event worker_ready"),
        ("alert", {"text": 5}, "warning", "5"),
    ],
    ids=["skipped", "retry", "give up", "checkpoint", "budget", "finished", "damaged", "no text"],
)  # fmt: skip
def test_an_event_becomes_words_with_a_level_and_a_reason(
    kind: str, data: dict[str, Any], level: str, text: str, tmp_path: Path
) -> None:
    made = opened(tmp_path, SMALL.model_copy(update={"log_level": "debug"}))
    JournalLogCallback(made, tmp_path / "journal.jsonl").on_events(
        [JournalEvent(kind, 1e12, 3, data), JournalEvent("step", 1e12, 3, {"step": 1})]
    )
    (found,) = records(tmp_path / "worker.jsonl")
    assert (found["event"], found["attempt"], found["level"], found["text"]) == (kind, 3, level, text)
    if reason := data.get("reason", data.get("failure_class")):
        assert found["reason"] == reason


def test_only_events_after_the_start_are_logged_and_a_replaced_journal_is_read_from_its_beginning(
    run: RunDirectory,
) -> None:
    run.journal.append("notice", text="of yesterday")
    with log_supervision(run, SMALL) as book:
        assert book.offset == run.paths.journal.stat().st_size
        book.on_events([JournalEvent("notice", 1.0, 1, {"text": "after the clock was set back"})])
        other = run.paths.root / "other.jsonl"  # a new journal file, as after a restore from a replica
        other.write_text("")
        other.replace(run.paths.journal)
        assert book.offset == 0
        book.on_events(
            [JournalEvent("notice", 1.0, 1, {"text": "old"}), JournalEvent("notice", 1e12, 2, {"text": "new"})]
        )
    assert [one["text"] for one in supervisors(run)] == ["after the clock was set back", "new"]


def test_what_is_said_is_logged_and_without_secrets(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "planted-4711")
    run.journal.attempt = 5
    factory, show = logging.getLogRecordFactory(), warnings.showwarning
    aloof = logging.getLogger("aloof")  # like MLflow's logger: it has its own stream and does not propagate
    aloof.propagate = False
    with log_supervision(run, SMALL):
        stream = logging.StreamHandler(sys.stderr)
        aloof.addHandler(stream)
        print_message("planted-4711 is said")
        aloof.warning("%s is logged", "planted-4711")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("planted-4711 is warned of", UserWarning, stacklevel=1)
        aloof.removeHandler(stream)
    print_message("afterwards")
    shown = capsys.readouterr().err
    assert f"ratchet: {HIDDEN} is said\n" in shown
    assert f"{HIDDEN} is logged\n" in shown
    assert f"UserWarning: {HIDDEN} is warned of" in shown
    assert "planted-4711 is" not in shown.replace('warn("planted-4711 is', "")
    found = supervisors(run)
    assert [(one["source"], one["text"], one["attempt"]) for one in found] == [
        ("ratchet", f"{HIDDEN} is said", 5), ("aloof", f"{HIDDEN} is logged", 5),
        ("warnings", f"{HIDDEN} is warned of", 5),
    ]  # fmt: skip
    assert (logging.getLogRecordFactory(), warnings.showwarning) == (factory, show)


@pytest.mark.parametrize(
    ("error", "level"),
    [(RunFailedError("gave up"), "error"), (InterruptedRunError("stopped"), "info"), (KeyError("x"), "error")],
    ids=["failed", "interrupted", "bug"],
)
def test_how_a_supervision_ended_is_logged(error: Exception, level: str, run: RunDirectory) -> None:
    with pytest.raises(type(error)), log_supervision(run, SMALL):
        raise error
    (found,) = supervisors(run)
    assert (found["level"], found["reason"]) == (level, type(error).__name__)
    assert ("traceback" in found) == isinstance(error, KeyError)
