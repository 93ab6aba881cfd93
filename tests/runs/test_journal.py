"""Tests of the journal: readers get every intact event once and in order after any crash, and count damaged lines."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ratchet.runs.journal import (
    Journal,
    JournalEvent,
    JournalReader,
    ReplayFilter,
    RunDecisions,
    read_decisions,
    read_last_event,
)


def step(number: int, attempt: int = 1) -> JournalEvent:
    return JournalEvent("step", 0.0, attempt, {"step": number})


def numbers(reader: JournalReader) -> list[int]:
    """Return the steps of the events that the reader has not returned yet."""
    return [event.data["step"] for event in reader.read()]


def found(path: Path) -> tuple[list[int], int]:
    """Return the steps of all events, and the number of damaged lines."""
    reader = JournalReader(path)
    return numbers(reader), reader.damaged_lines


def test_appended_events_are_read_back_one_line_each(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path / "j")
    assert list(reader.read()) == []  # the file does not exist yet
    journal = Journal(tmp_path / "j", attempt=3)
    text = "grün\n🙂\r and \u2028 more"
    written = [journal.append("step", step=1, loss=0.1), journal.append("notice", text=text)]
    journal.sync()
    journal.close()
    assert list(reader.read()) == written
    assert (written[1].attempt, written[1].data) == (3, {"text": text})
    content = (tmp_path / "j").read_bytes()
    assert content.count(b"\n") == 2
    assert all(json.loads(line) for line in content.splitlines())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_has_not_is_refused_and_writes_nothing(tmp_path: Path, number: float) -> None:
    journal = Journal(tmp_path / "j", attempt=1)
    with pytest.raises(ValueError, match="JSON"):
        journal.append("step", step=1, loss=number)
    journal.append("step", step=2, loss=0.5)
    journal.close()
    assert found(tmp_path / "j") == ([2], 0)


def test_reader_follows_and_continues_at_its_offset(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path / "j", attempt=1), JournalReader(tmp_path / "j")
    for number in range(1, 6):
        journal.append("step", step=number)
        assert numbers(reader) == [number]
    journal.close()
    assert numbers(reader) == []
    first = JournalReader(tmp_path / "j")
    assert next(iter(first.read())).data["step"] == 1
    later = JournalReader(tmp_path / "j", offset=first.offset)
    assert numbers(later) == [2, 3, 4, 5]
    assert later.offset == (tmp_path / "j").stat().st_size


def test_unfinished_line_is_left_for_the_next_read(tmp_path: Path) -> None:
    whole, line = step(1).line(), step(2).line()
    reader = JournalReader(tmp_path / "j")
    for cut in range(1, len(line)):
        (tmp_path / "j").write_bytes(whole + line[:cut])
        reader = JournalReader(tmp_path / "j")
        assert numbers(reader) == [1]
        assert reader.offset == len(whole)
        assert numbers(reader) == []
    (tmp_path / "j").write_bytes(whole + line)
    assert (numbers(reader), reader.damaged_lines) == ([2], 0)


def test_line_torn_at_any_byte_costs_that_line_only_and_is_counted(tmp_path: Path) -> None:
    whole, line = step(1).line(), step(2).line()
    for cut in range(1, len(line) - 1):
        (tmp_path / "j").write_bytes(whole + line[:cut])
        waiting = JournalReader(tmp_path / "j")
        assert numbers(waiting) == [1]
        journal = Journal(tmp_path / "j", attempt=2)
        journal.append("step", step=3)
        journal.close()
        assert found(tmp_path / "j") == ([1, 3], 1), f"torn after {cut} bytes"
        assert (numbers(waiting), waiting.damaged_lines) == ([3], 1), f"torn after {cut} bytes"


def test_a_whole_last_line_gets_no_empty_one_after_it(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        journal = Journal(tmp_path / "j", attempt)
        journal.append("step", step=attempt)
        journal.close()
    assert (tmp_path / "j").read_bytes().count(b"\n") == 3
    assert found(tmp_path / "j") == ([1, 2, 3], 0)


def notice(value: bytes) -> bytes:
    return b'{"attempt":1,"event":"notice","t":0.0,"value":' + value + b"}"


GARBAGE = [
    b"\x00" * 4096, b"\xff\xfe\x80", b"[]", b"null", b"3", b'"step"', b"{}", b'{"event":"step"}',
    b'{"event":"step","t":0}', b'{"event":"step","t":"soon","attempt":1}', b'{"event":"step","t":0,"attempt":null}',
    b'{"event":"st', b"}{", b'{"event":"step","t":0,"attempt":1e999}', b"[" * 100_000,
]  # fmt: skip
REFUSED_BY_JSON = [
    b"01", b"1.", b".5", b"+1", b"-NaN", b"nan", b"inf", b'"\x01"', b'"\xff"', b"[1,]", b"1" * 5000, b"1_0",
]  # fmt: skip


@pytest.mark.parametrize("line", GARBAGE + list(map(notice, REFUSED_BY_JSON)), ids=lambda line: repr(line[-40:]))
def test_damaged_line_in_the_middle_is_counted_and_skipped(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "j").write_bytes(step(1).line() + line + b"\n" + step(2).line())
    assert found(tmp_path / "j") == ([1, 2], 1)


@pytest.mark.parametrize(
    "value",
    [b'"\\ud83d\\ude42"', b'"\\ud800"', b"-0", b"-0.0", b"1e5", b"5e-324", b"1.7976931348623157e308", b"0.1", b"NaN",
     b"2251799813685248.75", b"123456789012345678901234567890", b"[" * 300 + b"]" * 300, b'{"a":1,"a":2}',
     b" [ 1 ,\t2 ] "],
    ids=lambda value: repr(value[:40]),
)  # fmt: skip
def test_every_value_is_read_as_json_reads_it(tmp_path: Path, value: bytes) -> None:
    (tmp_path / "j").write_bytes(notice(value) + b"\n")
    reader = JournalReader(tmp_path / "j")
    assert [repr(event.data) for event in reader.read()] == [repr({"value": json.loads(value)})]
    assert reader.damaged_lines == 0


def test_empty_lines_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"\n" + step(1).line() + b"\n\n")
    assert found(tmp_path / "j") == ([1], 0)


WRITER = """
import sys
import threading
from pathlib import Path
from ratchet.runs.journal import Journal
journal = Journal(Path(sys.argv[1]), attempt=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(500):
    journal.append("step", step=number, text="x" * (number % 97) * 40)
"""


def test_two_writers_at_once_mix_no_lines_and_lose_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "j")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, str(attempt)], **pipes) for attempt in (1, 2)]  # type: ignore[call-overload]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.wait() == 0
        writer.stdin.close()
        writer.stdout.close()
    reader = JournalReader(tmp_path / "j")
    events = list(reader.read())
    assert reader.damaged_lines == 0
    for attempt in (1, 2):
        mine = [e for e in events if e.attempt == attempt]
        assert [e.data["step"] for e in mine] == list(range(500))
        assert all(e.data["text"] == "x" * (e.data["step"] % 97) * 40 for e in mine)


def test_replay_lets_each_step_and_each_validation_through_once() -> None:
    first = [*(step(n) for n in (1, 2, 3)), JournalEvent("validation", 0.0, 1, {"step": 2}), step(4)]
    resumed = [*(step(n, 2) for n in (3, 4)), JournalEvent("validation", 0.0, 2, {"step": 2}), step(5, 2)]
    replay = ReplayFilter()
    new = [e for e in (*first, *resumed) if replay.is_new(e)]
    assert [(e.kind, e.data["step"], e.attempt) for e in new] == [
        ("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("validation", 2, 1), ("step", 4, 1), ("step", 5, 2),
    ]  # fmt: skip


def test_replay_always_passes_other_events() -> None:
    replay = ReplayFilter()
    assert [replay.is_new(JournalEvent("notice", 0.0, 1, {"text": "x"})) for _ in range(2)] == [True, True]


# ---------------------------------------------------------------------------------------------------------- a full disk

# A file size limit simulates a full disk: writes are cut short, then refused, until the limit is raised.
FULL = """
import json, resource, sys
from pathlib import Path
from ratchet.runs.journal import Journal
HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def room(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, HARD))
path, cut = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(path, attempt=1)
journal.append("step", step=1)
room(path.stat().st_size + cut)
for step in range(2, 6):
    journal.append("step", step=step)
try:
    journal.sync()
except OSError as error:
    print("refused", error.errno is not None, error.filename == str(path))
"""


def after_full(path: Path, cut: int, then: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", FULL + then, str(path), str(cut)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("cut", [0, 1, 20, 43, 44, 45, 60])
def test_lines_that_a_full_disk_refused_are_written_later_whole_and_in_order(tmp_path: Path, cut: int) -> None:
    then = "room(HARD)\njournal.append('step', step=6)\njournal.sync()\njournal.close()"
    assert after_full(tmp_path / "j", cut, then).stdout == "refused True True\n"
    numbers, damaged = found(tmp_path / "j")
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert damaged <= 1, f"cut after {cut} of {len(step(2).line())} bytes"


def test_closing_writes_once_more_and_counts_the_lines_that_are_lost(tmp_path: Path) -> None:
    after_full(tmp_path / "room", 10, "room(HARD)\njournal.close()")
    assert found(tmp_path / "room")[0] == [1, 2, 3, 4, 5]
    done = after_full(tmp_path / "full", 10, "journal.close()")
    assert f"4 lines of {tmp_path / 'full'} are lost" in done.stderr
    assert found(tmp_path / "full")[0] == [1]


def test_what_another_writer_added_to_a_line_that_was_cut_off_is_not_lost(tmp_path: Path) -> None:
    other = """
import os
fd = os.open(path, os.O_WRONLY | os.O_APPEND)
room(HARD)
from ratchet.runs.journal import JournalEvent
os.write(fd, JournalEvent("notice", 0.0, 2, {"text": "of another"}).line())
journal.append("step", step=6)
journal.close()
"""
    after_full(tmp_path / "j", 20, other)
    reader = JournalReader(tmp_path / "j")
    events = list(reader.read())
    assert [e.data.get("step", e.kind) for e in events] == [1, "notice", 2, 3, 4, 5, 6]
    assert reader.damaged_lines == 1


def test_a_device_that_is_full_from_the_start_stops_nobody() -> None:
    journal = Journal(Path("/dev/full"), attempt=1)
    for number in range(100):
        journal.append("step", step=number)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        journal.sync()


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", attempt=1)

    def write(first: int) -> None:
        for number in range(first, first + 300):
            journal.append("step", step=number, text="x" * (number % 50))

    threads = [threading.Thread(target=write, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    numbers, damaged = found(tmp_path / "j")
    assert damaged == 0
    for n in range(4):
        assert [x for x in numbers if x // 1000 == n] == list(range(1000 * n, 1000 * n + 300))


# ------------------------------------------------------------------------------------------------------------ readers


def test_clock_that_was_set_back_changes_nothing(tmp_path: Path) -> None:
    events = [JournalEvent("step", t, 1, {"step": n}) for n, t in enumerate((9000.0, 5400.0, 5400.0, 9001.0), start=1)]
    (tmp_path / "j").write_bytes(b"".join(e.line() for e in events))
    assert found(tmp_path / "j") == ([1, 2, 3, 4], 0)
    replay = ReplayFilter()
    assert all(replay.is_new(e) for e in events)


def test_many_lines_are_read_once_and_the_last_is_found(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"".join(step(n).line() for n in range(1000)) * 200)
    reader = JournalReader(tmp_path / "j")
    assert sum(1 for _ in reader.read()) == 200_000
    assert reader.offset == (tmp_path / "j").stat().st_size
    assert list(reader.read()) == []
    last = read_last_event(tmp_path / "j")
    assert last is not None
    assert last.data["step"] == 999


@pytest.mark.parametrize(
    ("content", "last"),
    [
        (None, None),
        (b"", None),
        (b"garbage\n" * 3, None),
        (step(1).line(), 1),
        (step(1).line() + step(2).line()[:20], 1),
        (step(1).line() + b"\x00" * 300_000, 1),
        (step(1).line() + b"garbage\n" * 30_000 + b"\xff", 1),
        (step(1).line() + JournalEvent("step", 0.0, 1, {"step": 2, "text": "x" * 200_000}).line(), 2),
    ],
    ids=["missing", "empty", "garbage", "one", "torn", "zeros", "much garbage", "long line"],
)
def test_last_event_is_found_from_the_end(tmp_path: Path, content: bytes | None, last: int | None) -> None:
    if content is not None:
        (tmp_path / "j").write_bytes(content)
    event = read_last_event(tmp_path / "j")
    assert (event and event.data["step"]) == last


def test_a_step_that_was_left_out_is_told_once_like_one_that_was_not() -> None:
    told = [step(1), JournalEvent("step_skipped", 0.0, 1, {"step": 2}), step(3)]
    again = [
        JournalEvent("step_skipped", 0.0, 2, {"step": 2}),
        step(2),
        step(3, 2),
        JournalEvent("step_skipped", 0.0, 2, {"step": 4}),
        step(4),
    ]
    replay = ReplayFilter()
    assert [(e.kind, e.data["step"]) for e in (*told, *again) if replay.is_new(e)] == [
        ("step", 1), ("step_skipped", 2), ("step", 3), ("step_skipped", 4),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [None, "7", [1], 1.5])
def test_a_step_without_a_number_is_nothing_new(number: object) -> None:
    replay = ReplayFilter()
    assert not replay.is_new(JournalEvent("step", 0.0, 1, {"step": number}))
    assert not replay.is_new(JournalEvent("validation", 0.0, 1, {}))
    assert replay.is_new(step(1))


# ---------------------------------------------------------------------------------------------------------- decisions


def budget(at: int, phase: str, tokens: int, attempt: int = 1) -> JournalEvent:
    return JournalEvent("microbatch_budget", 0.0, attempt, {"step": at, "phase": phase, "budget": {"tokens": tokens}})


def written(path: Path, *events: JournalEvent) -> Path:
    path.write_bytes(b"".join(event.line() for event in events))
    return path


def test_decisions_after_a_checkpoint_are_found(tmp_path: Path) -> None:
    """A validation at the checkpoint's step comes after the checkpoint; the step itself comes before it."""
    path = written(
        tmp_path / "j", budget(4, "train", 99), budget(4, "validation", 60),
        JournalEvent("step_skipped", 0.0, 1, {"step": 4}),
        step(4), budget(5, "train", 80), budget(5, "train", 40), step(5), budget(5, "validation", 70),
        JournalEvent("step_skipped", 0.0, 1, {"step": 6, "action": "skip"}), budget(7, "train", 50),
        budget(7, "train", 30, attempt=2),
    )  # fmt: skip
    found = read_decisions(path, checkpoint_step=4)
    assert {key: data["budget"]["tokens"] for key, data in found.budgets.items()} == {
        ("validation", 4): 60, ("train", 5): 40, ("validation", 5): 70, ("train", 7): 30,
    }  # fmt: skip
    assert {number: data["action"] for number, data in found.skipped_steps.items()} == {6: "skip"}


def test_damage_decides_nothing(tmp_path: Path) -> None:
    odd = [
        JournalEvent("microbatch_budget", 0.0, 1, data)
        for data in ({}, {"step": 1}, {"step": 1, "phase": "train"}, {"step": "1", "phase": "train", "budget": {}},
                     {"step": 1, "phase": "odd", "budget": {}}, {"step": 1, "phase": ["train"], "budget": {}})
    ]  # fmt: skip
    path = written(tmp_path / "j", *odd, JournalEvent("step_skipped", 0.0, 1, {}))
    assert read_decisions(path, 0) == RunDecisions()
    assert read_decisions(tmp_path / "none", 0) == RunDecisions()
