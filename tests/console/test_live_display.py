"""The live display is redrawn in place, in a real terminal and on streams that fail."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from rich.text import Text

from faked_terminal import Faked
from ratchet.console.terminal import LiveDisplay, create_console, is_live_terminal
from ratchet.redaction import HIDDEN
from tmux_screen import Screen, needs_tmux

SCRIPT = """\
import logging, sys, time
from rich.text import Text
from ratchet.console.terminal import LiveDisplay
for number in range(30):
    print("before", number)
seen = set()
def picture(options):
    width = options.max_width
    seen.add(width)
    rows = [f"frame of {width}", "x" * min(width, 70), "y" * min(width, 110), "last row"]
    return Text("\\n").join(Text(row) for row in rows)
canvas = LiveDisplay(sys.stdout, picture)
canvas.start()
log = logging.StreamHandler()
for number in range(10_000):
    canvas.refresh()
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
canvas.stop()
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
    assert {"a warning", "ab", "progress 2"} <= set(lines)
    end = lines.index("frame of 79")
    assert lines[end:] == ["frame of 79", "x" * 70, "y" * 79, "last row", "after", "a late word", "[ended 0]"]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO], ids=["pipe", "terminal"])
def test_a_terminal_that_is_gone_ends_the_display_and_streams_are_given_back(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Faked()
    monkeypatch.setattr(sys, "stdout", stream)
    display = LiveDisplay(stream, lambda options: Text("picture"))
    display.start()
    assert sys.stdout is not stream
    print("above")
    stream.gone = OSError(number, os.strerror(number))
    display.refresh()
    assert isinstance(display.error, OSError)
    assert display.error.errno == number
    assert sys.stdout is stream
    display.stop()
    display.start()
    assert sys.stdout is stream
    assert "above" in stream.getvalue()
    assert not display.is_started


ABANDONED = """\
import sys
from rich.text import Text
from ratchet.console.terminal import LiveDisplay
LiveDisplay(sys.stdout, lambda options: Text("picture")).start()
raise SystemExit(3)
"""


@needs_tmux
def test_a_process_that_ends_without_a_word_leaves_a_cursor(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(ABANDONED, encoding="utf-8")
    with Screen(f"'{sys.executable}' '{tmp_path}/draw.py'") as screen:
        assert screen.until(lambda lines: "[ended 3]" in lines) == ["picture", "[ended 3]"]
        assert screen.shows_cursor


def test_a_closed_stream_and_a_display_that_was_never_started() -> None:
    stream = Faked()
    LiveDisplay(stream, lambda options: Text("nothing")).stop()
    assert stream.getvalue() == ""
    display = LiveDisplay(stream, lambda options: Text("picture"))
    display.start()
    stream.close()
    display.refresh()
    assert isinstance(display.error, ValueError)
    display.stop()


def test_frame_is_one_write_and_too_large_a_picture_is_cut() -> None:
    stream = Faked()
    picture = Text("\n".join(map(str, range(500))))
    display = LiveDisplay(stream, lambda options: picture)
    display.start()
    for _ in range(3):
        before, at = stream.writes, stream.tell()
        display.refresh()
        assert stream.writes == before + 1
    assert stream.getvalue()[at:].count("\n") < 100
    at, picture = stream.tell(), Text("x" * 500, no_wrap=True, overflow="crop")
    display.refresh()
    frame = stream.getvalue()[at:]
    assert frame.index("\x1b[?7l") < frame.index("x") < frame.index("\x1b[?7h"), "the terminal breaks no row"
    assert frame.count("x") < 500
    display.stop()
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
    for encoding, text in (("ascii", "gr??er"), ("utf-8", "größer")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        create_console(stream).print("größer")
        stream.seek(0)
        assert stream.read() == f"{text}\n"


def test_lines_above_are_broken_between_words_and_control_characters_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Faked()
    display = LiveDisplay(stream, lambda options: Text("picture"))
    display.start()
    at = stream.tell()
    display.print_line("  alert: no checkpoint was \x1b[2J saved in 1,234,567 s, of wide letters: 漢字 漢字 漢字 漢字")
    above = stream.getvalue()[at:]
    rows = above[above.index("  alert") : above.index("\x1b[?7l")].split("\n")
    assert rows == [
        "  alert: no checkpoint was \\u001b[2J ",
        "saved in 1,234,567 s, of wide letters: ",
        "漢字 漢字 漢字 漢字",
        "",
    ]
    display.stop()


def test_secrets_on_standard_error_are_hidden_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    stream = Faked()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    display = LiveDisplay(stream, lambda options: Text("picture"))
    display.start()
    print("a library prints hf_abcdefgh", file=sys.stderr)
    display.stop()
    assert (sys.stdout, sys.stderr) == (stream, stream)
    assert f"a library prints {HIDDEN}" in stream.getvalue()
    assert "hf_abcdefgh" not in stream.getvalue()
