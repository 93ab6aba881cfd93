"""Tests the table of a sweep in a terminal, and the lines of a sweep in a log."""

import errno
import io
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import sweep_example
from faked_terminal import Faked, drawn
from ratchet.console import sweep_table
from ratchet.console.sweep_table import create_sweep_display
from ratchet.console.terminal import GAP, build_table, fit_columns
from ratchet.runs.journal import JournalEvent
from ratchet.runs.status import RunProgress, replay_events
from ratchet.storage.records.sweep import SweepReport, Trial, TrialExecution

HERE = Path(__file__).parent
WHOLE = sweep_example.report(40, final_round=False).model_copy(update={"planned_trials": 60})


def part(count: int) -> SweepReport:
    return sweep_example.report(count, final_round=False).model_copy(update={"planned_trials": 60})


def at_work(report: SweepReport) -> dict[int, RunProgress]:
    """Return the progress of all running trials: each is at step 50 of 180, on its second attempt."""
    step = {"step": 50, "loss": 2.0, "learning_rate": 1e-3, "trained_tokens": 5, "input_tokens": 900, "step_s": 0.1}
    events = [
        JournalEvent("attempt_started", 1.0, 2, {}),
        JournalEvent("worker_ready", 1.0, 2, {"planned_steps": 180, "start_step": 0}),
        JournalEvent("step", 2.0, 2, step),
        JournalEvent("validation", 3.0, 2, {"step": 50, "loss": 1.75321, "seconds": 0.2, "improved": True}),
    ]
    return {trial.number: replay_events(events) for trial in report.trials if not trial.is_over}


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def changed(report: SweepReport, **fields: Any) -> SweepReport:
    """Return the report with these fields of trial 0 changed."""
    trials = [t.model_copy(update=fields) if t.number == 0 else t for t in report.trials]
    return report.model_copy(update={"trials": tuple(trials)})


RUNNING = Trial(
    number=0, values={"train.rank": 16, "train.alpha": 32.0, "train.target_modules": ("q", "v")}, run_id="a" * 12,
    state="running", started=1.0, executions=(TrialExecution(worker="node/1", started=1.0, last_seen=2.0),),
)  # fmt: skip
ONE = WHOLE.model_copy(update={"trials": (RUNNING,), "best": (), "planned_trials": 3})


def test_a_log_gets_a_line_for_each_change_and_no_other() -> None:
    stream, clock = io.StringIO(), Clock()
    view = create_sweep_display(stream, clock)
    news: list[list[str]] = []

    def show(report: SweepReport) -> None:
        started = stream.tell()
        for _ in range(3):
            view.show(report, at_work(report), 2)
        stream.seek(started)
        news.append(stream.read().splitlines())

    show(ONE)
    taken = (*RUNNING.executions, TrialExecution(worker="node/2", started=3.0, last_seen=4.0))
    show(changed(ONE, executions=taken))
    show(changed(ONE, executions=(*taken[:1], taken[1].model_copy(update={"last_seen": 9.0})), curve={320: 2.0}))
    pruned = changed(ONE, state="pruned", executions=taken, reason="number 5 of 9", ended=9.0)
    show(pruned)
    going_on = RUNNING.model_copy(update={"number": 1, "continues": 0})
    show(pruned.model_copy(update={"trials": (*pruned.trials, going_on)}))
    complete = going_on.model_copy(update={"state": "complete", "objectives": (1.5,), "ended": 12.0})
    last = pruned.model_copy(update={"trials": (*pruned.trials, complete), "best": (1,)})
    show(last)
    assert news == [
        ["sweep: 0 of 3 trials (1 running)", "2 workers", "trial 0 started: rank 16, target_modules q+v, by node/1"],
        ["trial 0 taken over by node/2"],
        [],
        ["trial 0 pruned: number 5 of 9"],
        ["trial 1 continues trial 0, by node/1"],
        ["trial 1 complete: validation loss 1.5, best so far"],
    ]  # fmt: skip
    clock.now += 65
    started = stream.tell()
    view.close(last)
    stream.seek(started)
    assert stream.read().splitlines() == [
        "sweep: 1 of 3 trials (1 complete)",
        "best: trial 1, validation loss 1.5 (rank 16, target_modules q+v)",
        "1 min 5 s",
    ]


def test_the_live_table_has_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    stream, clock = Faked(), Clock()
    view = create_sweep_display(stream, clock)
    view.show(ONE, {}, 2)
    assert "0 of 3" in stream.getvalue()
    clock.now += 60
    last = changed(ONE, state="complete", objectives=(1.5,), ended=2.0)
    view.show(last, {}, 2)
    assert "1 of 3, about 2 min left" in stream.getvalue()
    started = stream.tell()
    view.close(last)
    assert "left" not in stream.getvalue()[started:]


def test_what_was_over_before_is_not_told_again() -> None:
    stream = io.StringIO()
    view = create_sweep_display(stream)
    view.show(WHOLE, {}, 2)
    lines = stream.getvalue().splitlines()
    running = [trial for trial in WHOLE.trials if not trial.is_over]
    assert running
    assert len([line for line in lines if line.startswith("trial ")]) == len(running)
    assert "pruning saved" in lines[2]


def test_the_end_names_the_winner_with_rows_and_p_values() -> None:
    stream = io.StringIO()
    view = create_sweep_display(stream)
    view.close(sweep_example.report(40))
    [winner] = [line for line in stream.getvalue().splitlines() if line.startswith("winner: ")]
    assert winner.endswith(
        "6 is the cheaper one; over 512 validation rows, trial 11 has p = 0.081 against trial 6, p = 0.0004 against "
        "trial 23"
    )


def test_hostile_and_unencodable_texts() -> None:
    stream = io.StringIO()
    view = create_sweep_display(stream)
    view.show(ONE, {}, 1)
    reason = f"{sweep_example.HOSTILE}\nsecond line"
    values = {"train.rank": 16, "train.target_modules": sweep_example.HOSTILE}
    last = changed(ONE, state="failed", reason=reason, values=values, ended=2.0)
    view.close(last.model_copy(update={"stopped": f"\n\x1b[2J{reason}"}))
    text = stream.getvalue()
    assert "second line" not in text
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert "stopped: " in text
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii")
    create_sweep_display(ascii_only).close(ONE.model_copy(update={"stopped": "Speicher voll: größer geht nicht"}))
    ascii_only.flush()
    assert b"gr??er" in raw.getvalue()


@pytest.mark.parametrize("live", [True, False])
def test_a_stream_that_breaks_ends_the_show_only(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm" if live else "dumb")
    monkeypatch.delenv("CI", raising=False)
    stream = Faked()
    monkeypatch.setattr(sys, "stdout", stream)
    view = create_sweep_display(stream)
    view.show(ONE, {}, 1)
    assert (sys.stdout is stream) == (not live)
    stream.gone = BrokenPipeError(errno.EPIPE, "nobody reads")
    view.show(WHOLE, {}, 1)
    assert sys.stdout is stream
    view.show(WHOLE, {}, 1)
    view.close(WHOLE)
    assert ("\x1b" in stream.getvalue()) == live
    closed = io.StringIO()
    view = create_sweep_display(closed)
    closed.close()
    view.show(ONE, {}, 1)
    view.close(ONE)


@pytest.mark.parametrize("metrics", [("validation_loss",), ("accuracy", "memory_bytes")])
def test_columns_fit_into_any_width_and_the_first_ones_are_always_there(metrics: tuple[str, ...]) -> None:
    report = sweep_example.report(40, final_round=False, metrics=metrics)
    trials = sweep_table.select_trials(report, 20)
    made = sweep_table.build_columns(report, trials, at_work(report))
    for width in range(24, 240):
        chosen = fit_columns(made, width)
        titles = [column.title for column, _ in chosen]
        assert titles[:2] == ["trial", "state"]
        assert sum(taken + GAP for _, taken in chosen) - GAP <= width
        assert all(taken == column.width for column, taken in chosen if not column.is_elastic)
    assert {"rank", "learning_rate", "step", "tokens/s", "worker", "tries", "loss"} <= set(titles)
    assert "alpha" not in titles


def test_what_was_cut_off_of_a_reason_is_marked() -> None:
    failed = changed(ONE, state="failed", reason="memory ran out: 漢字漢字漢字漢字, and more", ended=2.0)
    made, whole = sweep_table.build_columns(failed, failed.trials, {}), failed.trials[0].reason
    for width in range(24, 100):
        _, row = drawn(partial(build_table, made, [""]), width, 24)
        assert cell_len(row.rstrip()) <= width
        if "memory" in row:
            why = row[row.index("memory") :].rstrip()
            assert why == whole or (why.endswith("…") and whole.startswith(why[:-1].rstrip()))
    assert why == whole


def test_rows_are_running_trials_then_the_best_then_the_latest() -> None:
    listed = sweep_table.select_trials(WHOLE, 10)
    running = [trial for trial in WHOLE.trials if not trial.is_over]
    cells = {column.title: column.cells[0] for column in sweep_table.build_columns(WHOLE, running[:1], at_work(WHOLE))}
    assert (cells["step"], cells["loss"], cells["tokens/s"], cells["tries"]) == ("50/180", "1.7532", "9,000", "2")
    assert listed[: len(running)] == running
    assert listed[len(running)].number == WHOLE.best[0]
    ends = [trial.ended or 0.0 for trial in listed[len(running) + 1 :]]
    assert ends == sorted(ends, reverse=True)
    assert len(listed) == 10
    continued = {trial.continues for trial in WHOLE.trials} - {None}
    assert continued
    assert not continued & {trial.number for trial in sweep_table.select_trials(WHOLE, 100)}


class Shown:
    """Emulates a terminal of the given width, limited to the control sequences that the live table uses."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.row, self.column, self.overflows = width, [""], 0, 0, 0

    def feed(self, text: str) -> None:
        for found in re.finditer(r"\x1b\[([?0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b])", text):
            number, command, home, feed, letter = found.groups()
            if command == "A":
                self.row -= int(number or 1)
            elif command == "K":
                self.lines[self.row] = self.lines[self.row][: 0 if number == "2" else self.column]
            elif command == "J":
                self.lines[self.row :] = [self.lines[self.row][: self.column]]
            elif home:
                self.column = 0
            elif feed:
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif letter:
                self.overflows += self.column >= self.width
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
                self.column += 1


PLAYED = """\
import sys
from test_sweep_table import at_work, part
from ratchet.console.sweep_table import create_sweep_display
view = create_sweep_display(sys.stdout)
for count in (0, 1, 8, 20, 39):
    view.show(part(count), at_work(part(count)), 2)
    if count == 8:
        print("said beside it")
        print("an error beside it", file=sys.stderr)
view.close(part(40))
print("after it")
"""


def played(width: int, height: int, environment: Mapping[str, str]) -> str:
    """Return the output of a sweep in a real terminal of this size."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (height, width))
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", PLAYED], stdin=theirs, stdout=theirs, stderr=theirs, cwd=HERE,
        env={**kept, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path[1:]), **environment},
    )  # fmt: skip
    os.close(theirs)
    text = b"".join(read(ours))
    os.close(ours)
    assert process.wait() == 0, text.decode()
    return text.decode()


def read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            return
        if not piece:
            return
        yield piece


@pytest.mark.parametrize(
    ("width", "height", "coloured"), [(80, 24, True), (40, 24, False), (160, 50, True), (80, 9, True)]
)
def test_live_table_stays_in_place_and_respects_no_color(width: int, height: int, coloured: bool) -> None:
    text = played(width, height, {} if coloured else {"NO_COLOR": "1"})
    shown = Shown(width)
    shown.feed(text)
    assert shown.overflows == 0
    lines = [line.rstrip() for line in shown.lines]
    assert lines[:2] == ["said beside it", "an error beside it"]
    assert len([line for line in lines if line.startswith("sweep: ")]) == 1
    assert len([line for line in lines if line.startswith("trial  state")]) == 1
    assert lines[-2:] == ["after it", ""]
    assert height < 10 or f"{part(40).best[0]}*  complete" in "\n".join(lines)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"
    assert bool(re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m", text)) == coloured


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}])
def test_what_cannot_draw_gets_lines(environment: dict[str, str]) -> None:
    text = played(80, 24, environment)
    assert "\x1b" not in text
    assert text.count("trial 1 started") + text.count("trial 1 (") == 1


def test_a_frame_is_one_write() -> None:
    stream = Faked()
    view = sweep_table.LiveSweepTable(stream, time.time)
    view.show(WHOLE, {}, 2)
    before = stream.writes
    for _ in range(5):
        view.show(WHOLE, {}, 2)
    assert stream.writes == before + 5
    view.close(WHOLE)


def test_the_progress_never_falls_and_is_not_complete_while_a_paused_trial_may_be_continued() -> None:
    paused = [RUNNING.model_copy(update={"number": n, "run_id": f"{n:012}", "state": "pruned"}) for n in range(3)]
    all_paused = ONE.model_copy(update={"trials": tuple(paused)})
    assert sweep_table.count_finished(all_paused) == all_paused.planned_trials == 3
    assert sweep_table.count_progress(all_paused) == 2
    continued = RUNNING.model_copy(update={"number": 3, "continues": 0, "run_id": paused[0].run_id})
    other = continued.model_copy(update={"number": 4, "continues": 1, "run_id": paused[1].run_id})
    both = all_paused.model_copy(update={"trials": (*paused, continued, other)})
    assert sweep_table.count_finished(both) == 1
    assert sweep_table.count_progress(both, 2) == 2
