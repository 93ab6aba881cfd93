"""The journal: whatever dies while it writes, readers get every whole event once, in order, and count the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.run.journal import Event, Journal, Reader, Replay


def step(number: int, attempt: int = 1) -> Event:
    return Event("step", 0.0, attempt, {"step": number})


def steps(path: Path) -> list[int]:
    return [event.data["step"] for event in Reader(path).read()]


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", attempt=3)
    written = [journal.append("step", step=1, loss=0.1), journal.append("notice", text="grün\n🙂")]
    journal.sync()
    journal.close()
    assert list(Reader(tmp_path / "j").read()) == written
    assert written[1].attempt == 3
    assert written[1].data == {"text": "grün\n🙂"}


def test_an_event_is_one_line_whatever_its_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", attempt=1)
    journal.append("notice", text="two\nlines\r and \u2028 more")
    journal.append("step", step=1)
    journal.close()
    content = (tmp_path / "j").read_bytes()
    assert content.count(b"\n") == 2
    assert all(json.loads(line) for line in content.splitlines())


def test_a_journal_that_is_not_there_has_no_events_yet(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "j")
    assert list(reader.read()) == []
    journal = Journal(tmp_path / "j", attempt=1)
    journal.append("step", step=1)
    journal.close()
    assert [e.data["step"] for e in reader.read()] == [1]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_has_not_is_refused_and_writes_nothing(tmp_path: Path, number: float) -> None:
    journal = Journal(tmp_path / "j", attempt=1)
    with pytest.raises(ValueError, match="JSON"):
        journal.append("step", step=1, loss=number)
    journal.append("step", step=2, loss=0.5)
    journal.close()
    assert steps(tmp_path / "j") == [2]


def test_a_reader_follows_and_gives_each_event_once(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path / "j", attempt=1), Reader(tmp_path / "j")
    seen = []
    for number in range(1, 6):
        journal.append("step", step=number)
        seen.append([e.data["step"] for e in reader.read()])
    journal.close()
    assert seen == [[1], [2], [3], [4], [5]]
    assert list(reader.read()) == []


def test_a_reader_that_is_left_in_the_middle_goes_on_there(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path / "j", attempt=1), Reader(tmp_path / "j")
    for number in (1, 2, 3):
        journal.append("step", step=number)
    journal.close()
    assert next(iter(reader.read())).data["step"] == 1
    later = Reader(tmp_path / "j", offset=reader.offset)
    assert [e.data["step"] for e in later.read()] == [2, 3]
    assert later.offset == (tmp_path / "j").stat().st_size


def test_a_line_that_is_not_finished_yet_is_left_for_the_next_time(tmp_path: Path) -> None:
    whole, line = step(1).line(), step(2).line()
    reader = Reader(tmp_path / "j")
    for cut in range(1, len(line)):
        (tmp_path / "j").write_bytes(whole + line[:cut])
        reader = Reader(tmp_path / "j")
        assert [e.data["step"] for e in reader.read()] == [1]
        assert reader.offset == len(whole)
        assert list(reader.read()) == []
    (tmp_path / "j").write_bytes(whole + line)
    assert [e.data["step"] for e in reader.read()] == [2]
    assert reader.damaged_lines == 0


def test_a_line_torn_at_any_byte_costs_that_line_only_and_is_counted(tmp_path: Path) -> None:
    whole, line = step(1).line(), step(2).line()
    for cut in range(1, len(line) - 1):
        (tmp_path / "j").write_bytes(whole + line[:cut])
        journal = Journal(tmp_path / "j", attempt=2)
        journal.append("step", step=3)
        journal.close()
        reader = Reader(tmp_path / "j")
        assert [e.data["step"] for e in reader.read()] == [1, 3], f"torn after {cut} bytes"
        assert reader.damaged_lines == 1


def test_a_reader_that_waited_at_a_torn_line_finds_what_was_written_after_it(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(step(1).line() + step(2).line()[:20])
    reader = Reader(tmp_path / "j")
    assert [e.data["step"] for e in reader.read()] == [1]
    journal = Journal(tmp_path / "j", attempt=2)
    journal.append("step", step=3)
    journal.close()
    assert [e.data["step"] for e in reader.read()] == [3]
    assert reader.damaged_lines == 1


def test_a_whole_last_line_gets_no_empty_one_after_it(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        journal = Journal(tmp_path / "j", attempt)
        journal.append("step", step=attempt)
        journal.close()
    assert (tmp_path / "j").read_bytes().count(b"\n") == 3
    assert steps(tmp_path / "j") == [1, 2, 3]


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 4096, b"\xff\xfe\x80", b"[]", b"null", b"3", b'"step"', b"{}", b'{"event":"step"}',
     b'{"event":"step","t":0}',
     b'{"event":"step","t":"soon","attempt":1}', b'{"event":"step","t":0,"attempt":null}', b'{"event":"st', b"}{",
     b'{"event":"step","t":0,"attempt":1e999}', b"[" * 100_000],
    ids=lambda garbage: repr(garbage[:40]),
)  # fmt: skip
def test_garbage_in_the_middle_is_counted_and_skipped(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "j").write_bytes(step(1).line() + garbage + b"\n" + step(2).line())
    reader = Reader(tmp_path / "j")
    assert [e.data["step"] for e in reader.read()] == [1, 2]
    assert reader.damaged_lines == 1


def test_empty_lines_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"\n" + step(1).line() + b"\n\n")
    reader = Reader(tmp_path / "j")
    assert [e.data["step"] for e in reader.read()] == [1]
    assert reader.damaged_lines == 0


WRITER = """
import sys
from pathlib import Path
from ratchet.run.journal import Journal
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
    reader = Reader(tmp_path / "j")
    events = list(reader.read())
    assert reader.damaged_lines == 0
    for attempt in (1, 2):
        mine = [e for e in events if e.attempt == attempt]
        assert [e.data["step"] for e in mine] == list(range(500))
        assert all(e.data["text"] == "x" * (e.data["step"] % 97) * 40 for e in mine)


def test_replay_lets_each_step_and_each_validation_through_once() -> None:
    first = [*(step(n) for n in (1, 2, 3)), Event("validation", 0.0, 1, {"step": 2}), step(4)]
    resumed = [*(step(n, 2) for n in (3, 4)), Event("validation", 0.0, 2, {"step": 2}), step(5, 2)]
    replay = Replay()
    new = [e for e in (*first, *resumed) if replay.new(e)]
    assert [(e.kind, e.data["step"], e.attempt) for e in new] == [
        ("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("validation", 2, 1), ("step", 4, 1), ("step", 5, 2),
    ]  # fmt: skip


def test_replay_lets_every_other_event_through_each_time() -> None:
    replay = Replay()
    notice = Event("notice", 0.0, 1, {"text": "x"})
    assert [replay.new(notice), replay.new(notice)] == [True, True]


def test_replay_goes_on_from_where_an_observer_had_come() -> None:
    replay = Replay(after_step=2, after_validation=1)
    validations = [Event("validation", 0.0, 1, {"step": n}) for n in (1, 2)]
    assert [replay.new(step(n)) for n in (1, 2, 3)] == [False, False, True]
    assert [replay.new(e) for e in validations] == [False, True]
