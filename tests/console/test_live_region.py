"""The live region is redrawn in place, in a real terminal and on streams that fail."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from rich.text import Text

from faked_terminal import Faked
from ratchet.console.live_region import LiveRegion
from ratchet.console.text_layout import encode_safely, is_live_terminal
from tmux_screen import Screen, needs_tmux

SCRIPT = """\
import logging, sys, time
from rich.text import Text
from ratchet.console.live_region import LiveRegion
for number in range(30):
    print("before", number)
canvas = LiveRegion(sys.stdout)
canvas.open()
log = logging.StreamHandler()
seen = set()
for number in range(10_000):
    def picture(size):
        seen.add(size.width)
        rows = [f"frame of {size.width}", "x" * min(size.width, 70), "y" * min(size.width, 110), "last row"]
        return Text("\\n", no_wrap=True, overflow="crop").join(Text(row) for row in rows)
    canvas.draw(picture)
    if number % 10 == 5:
        print("said", number)
    if number == 12:
        print("a warning", file=sys.stderr)
        print("a\\x1b[2Jb")
    if number == 17:
        sys.stderr.write("progress 1\\rprogress 2\\n")
    time.sleep(0.02)
    if 79 in seen:
        break
canvas.close()
print("after")
log.emit(logging.LogRecord("x", 30, "", 0, "a late word", (), None))
"""


@needs_tmux
def test_it_stays_in_its_place_while_others_print_and_the_terminal_changes(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(SCRIPT, encoding="utf-8")
    with Screen(f"'{sys.executable}' '{tmp_path}/draw.py'", 120, 20) as one:
        for width in (60, 100, 40, 119):
            one.resize(width, 20)
            lines = one.until(lambda lines, width=width: f"frame of {width - 1}" in lines)
            assert len([line for line in lines if line.startswith("frame of")]) == 1
            assert lines.count("last row") == 1
        assert not one.shows_cursor
        one.resize(80, 20)
        one.until(lambda lines: "[ended 0]" in lines)
        lines = one.lines(all_of_it=True)
        assert one.shows_cursor
    assert [line for line in lines if line.startswith("before")] == [f"before {number}" for number in range(30)]
    said = [line for line in lines if line.startswith("said ")]
    assert said == [f"said {number}" for number in range(5, 5 + 10 * len(said), 10)]
    assert {"a warning", "a\\u001b[2Jb", "progress 2"} <= set(lines)
    end = lines.index("frame of 79")
    assert lines[end:] == ["frame of 79", "x" * 70, "y" * 79, "last row", "after", "a late word", "[ended 0]"]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO], ids=["pipe", "terminal"])
def test_a_terminal_that_is_gone_is_told_to_who_draws_and_streams_are_given_back(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Faked()
    monkeypatch.setattr(sys, "stdout", stream)
    canvas = LiveRegion(stream)
    canvas.open()
    assert sys.stdout is not stream
    print("above")
    canvas.draw(lambda size: Text("picture"))
    stream.gone = OSError(number, os.strerror(number))
    print("who prints does not suffer")
    with pytest.raises(OSError, match=r"Errno") as raised:
        canvas.draw(lambda size: Text("picture"))
    assert raised.value.errno == number
    canvas.close()
    canvas.close()
    assert sys.stdout is stream
    assert "above" in stream.getvalue()
    assert not canvas.is_open


ABANDONED = """\
import sys
from rich.text import Text
from ratchet.console.live_region import LiveRegion
canvas = LiveRegion(sys.stdout)
canvas.open()
canvas.draw(lambda size: Text("picture"))
raise SystemExit(3)
"""


@needs_tmux
def test_a_process_that_ends_without_a_word_leaves_a_cursor(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(ABANDONED, encoding="utf-8")
    with Screen(f"'{sys.executable}' '{tmp_path}/draw.py'") as screen:
        assert screen.until(lambda lines: "[ended 3]" in lines) == ["picture", "[ended 3]"]
        assert screen.shows_cursor


def test_a_closed_stream_and_a_canvas_that_was_never_opened() -> None:
    stream = Faked()
    LiveRegion(stream).close()
    canvas = LiveRegion(stream)
    canvas.draw(lambda size: Text("nothing"))
    assert stream.getvalue() == ""
    canvas.open()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        canvas.draw(lambda size: Text("picture"))
    canvas.close()


def test_frame_is_one_write_and_too_large_a_picture_is_cut() -> None:
    stream = Faked()
    canvas = LiveRegion(stream)
    canvas.open()
    for _ in range(3):
        before, at = stream.writes, stream.tell()
        canvas.draw(lambda size: Text("\n".join(map(str, range(500)))))
        assert stream.writes == before + 1
    assert stream.getvalue()[at:].count("\n") < 100
    at = stream.tell()
    canvas.draw(lambda size: Text("x" * 500, no_wrap=True, overflow="crop"))
    frame = stream.getvalue()[at:]
    assert frame.index("\x1b[?7l") < frame.index("x") < frame.index("\x1b[?7h"), "the terminal breaks no row"
    assert frame.count("x") < 500
    canvas.close()
    assert stream.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("name", "value", "live"),
    [("TERM", "dumb", False), ("TERM", "", False), ("TERM", "xterm", True), ("CI", "true", False)],
    ids=["dumb", "no TERM", "terminal", "CI"],
)
def test_live_streams_and_writable_letters(name: str, value: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv(name, value)
    assert is_live_terminal(Faked()) is live
    assert not is_live_terminal(io.StringIO())
    assert encode_safely("größer", "ascii") == "gr??er"
    assert encode_safely("größer", "utf-8") == "größer"


def test_lines_above_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Faked()
    canvas = LiveRegion(stream)
    canvas.open()
    canvas.draw(lambda size: Text("picture"))
    at = stream.tell()
    canvas.print_line(
        "  alert: no checkpoint was saved in \x1b[33m1,234,567\x1b[0m s\nagain, of wide letters: 漢字 漢字 漢字 漢字"
    )
    above = stream.getvalue()[at:].replace("\x1b[33m", "").replace("\x1b[0m", "")
    rows = above[above.index("  alert") : above.index("\x1b[?7l")].split("\r\n")
    assert rows[:2] == ["  alert: no checkpoint was saved in", "  1,234,567 s"]
    assert rows[2:] == ["again, of wide letters: 漢字 漢字 漢字", "漢字", ""]
    canvas.close()
