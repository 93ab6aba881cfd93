"""Progress of a command: bars on a terminal, lines in a log, and nothing for quick tasks."""

import os
import pty
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from faked_terminal import Faked
from ratchet.console.progress import ProgressDisplay, show_progress
from ratchet.storage.progress import count_bytes, report_progress
from tmux_screen import Screen, needs_tmux

SCRIPT = """\
import sys, time
from pathlib import Path
from ratchet.console.progress import show_progress
from ratchet.storage.progress import report_progress
with show_progress(sys.stderr):
    number = 0
    while not Path(sys.argv[1]).exists():
        number += 1
        report_progress("rows read", number, 1_000_000)
        if number % 20 == 0:
            print("said", number)
        time.sleep(0.02)
print("the result")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return a command that reports progress until the file `stop` exists in the temporary directory."""
    (tmp_path / "work.py").write_text(SCRIPT, encoding="utf-8")
    return [sys.executable, str(tmp_path / "work.py"), str(tmp_path / "stop")]


class Lines(list[str]):
    """Lines of a display with a clock that the test advances."""

    def __init__(self, has_timings: bool = False) -> None:
        super().__init__()
        self.now_s = 100.0
        self.display = ProgressDisplay(write_line=self.append, has_timings=has_timings, clock=lambda: self.now_s)

    def report(self, age_s: float, task: str, done: int, total: int | None = None) -> None:
        """Report progress `age_s` seconds after the start."""
        self.now_s = 100.0 + age_s
        self.display.report(task, done, total, "")


def test_a_task_gets_lines_that_become_rare_and_a_last_line() -> None:
    lines = Lines()
    for second in range(1001):
        lines.report(second, "rows written", 2000 + second, 3000)
    assert [line for line in lines if "about" not in line] == ["rows written: 3,000 in 16 min 40 s"]
    seconds = [int(line.split()[2].replace(",", "")) - 2000 for line in lines[:-1]]
    assert seconds[:5] == [2, 7, 14, 28, 56]
    assert {after - before for before, after in pairwise(seconds[5:])} == {60}
    assert lines[3] == "rows written: 2,028 of 3,000, about 16 min 12 s left"  # the first 2,000 were there before


def test_quick_tasks_get_no_line_and_unknown_totals_get_the_time_so_far() -> None:
    lines = Lines()
    for number in range(100):
        lines.report(number / 100, f"task {number}", 1, 1)
        lines.report(number / 100, "other", number)
    assert lines == []
    lines.report(10, "loading", 0)
    lines.report(13, "loading", 0)
    lines.report(14, "rows read", 5)
    lines.report(17, "rows read", 1_500)
    lines.display.clear()
    assert lines == [
        "loading: 3 s so far",
        "loading: done in 4 s",
        "rows read: 1,500, 3 s so far",
        "rows read: 1,500 in 3 s",
    ]


def test_timings_are_lines_for_every_task() -> None:
    lines = Lines(has_timings=True)
    lines.report(0, "rows read", 20, 40)
    lines.report(0.5, "rows read", 40, 40)
    lines.report(1, "data sealed", 1, 1)
    assert lines == ["rows read: 40 in 0.5 s", "data sealed: done in 0 s"]


def test_bytes_are_counted_and_an_inner_display_replaces_the_outer_one() -> None:
    inner, outer = list[str](), list[str]()
    with show_progress(write_line=outer.append, has_timings=True):
        with show_progress(write_line=inner.append, has_timings=True), count_bytes("copied", 3 * 2**20) as add:
            add(2**20)
            add(2**21)
        report_progress("more", 1, 1)
    report_progress("nobody is shown this", 1, 1)
    assert [line.rpartition(" in ")[0] for line in inner] == ["copied: 3.0 MiB"]
    assert [line.rpartition(" in ")[0] for line in outer] == ["more: done"]


def test_reports_of_many_threads_are_all_taken() -> None:
    lines = Lines()
    threads = [threading.Thread(target=lambda: [lines.report(0, "x", n, 200) for n in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines == []


def test_a_closed_stream_ends_the_display_and_not_the_command() -> None:
    stream = Faked()
    stream.gone = BrokenPipeError()
    with show_progress(stream, has_timings=True):
        report_progress("rows read", 1, 1)
        report_progress("rows written", 1, 1)
    assert stream.getvalue() == ""


@needs_tmux
def test_a_bar_is_below_the_text_of_the_command_and_leaves_no_trace(command: list[str], tmp_path: Path) -> None:
    with Screen(" ".join(f"'{word}'" for word in command), 100, 20) as screen:
        shown = screen.until(lambda lines: any("rows read" in line and "left" in line for line in lines))
        assert not screen.shows_cursor
        assert re.fullmatch(r"  rows read [━╸╺ ]+ [\d,]+ of 1,000,000, about .* left", shown[-1])
        screen.until(lambda lines: len(lines) > 3 and lines[-2].startswith("said ") and "rows read" in lines[-1])
        (tmp_path / "stop").touch()
        screen.until(lambda lines: "[ended 0]" in lines)
        lines = screen.lines(all_of_it=True)
        assert screen.shows_cursor
    assert lines[-2:] == ["the result", "[ended 0]"]
    assert lines[:-2] == [f"said {number}" for number in range(20, 20 * len(lines) - 39, 20)]


@needs_tmux
@pytest.mark.parametrize("variable", ["CI=true", "TERM=dumb"])
def test_a_terminal_without_animations_gets_lines(variable: str, command: list[str], tmp_path: Path) -> None:
    with Screen(f"{variable} " + " ".join(f"'{word}'" for word in command), 100, 20) as screen:
        pattern = re.compile(r"  rows read: [\d,]+ of 1,000,000, about .* left")
        screen.until(lambda lines: any(map(pattern.fullmatch, lines)))  # the first line may have no estimate yet
        assert screen.shows_cursor
        (tmp_path / "stop").touch()
        screen.until(lambda lines: "[ended 0]" in lines)
        assert [line for line in screen.lines(all_of_it=True) if "rows read" in line]


def test_a_pipe_gets_lines_on_standard_error_alone(command: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        (tmp_path / "stop").touch()
        output, errors = process.communicate()
    assert re.fullmatch(r"  rows read: [\d,]+ of 1,000,000, about .* left\n", first)
    assert "\x1b" not in first + errors + output
    assert "rows read" not in output
    assert output.endswith("the result\n")


@pytest.mark.parametrize("is_colourless", [False, True], ids=["colours", "NO_COLOR"])
def test_no_color_removes_the_colours_of_the_bar(is_colourless: bool, command: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | ({"NO_COLOR": "1"} if is_colourless else {})
    main, secondary = pty.openpty()
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env=environment) as process:
        os.close(secondary)
        received = b""
        while b"left" not in received:
            received += os.read(main, 4096)
        (tmp_path / "stop").touch()
        try:
            while chunk := os.read(main, 4096):
                received += chunk
        except OSError:  # the last process has closed the terminal
            pass
        assert process.wait() == 0
    os.close(main)
    assert bool(re.search(rb"\x1b\[[0-9;]*(3|4|9)[0-9][0-9;]*m", received)) is not is_colourless
