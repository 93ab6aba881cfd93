"""Tests the output of a training in a terminal."""

import errno
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from faked_terminal import Faked
from ratchet.console.callback import ConsoleCallback
from ratchet.runs.callbacks import CallbackList
from ratchet.runs.journal import Journal, JournalEvent, JournalReader


def event(kind: str, **data: Any) -> JournalEvent:
    return JournalEvent(kind, 5.0, 1, data)


OWN = event("attempt_started", pid=os.getpid(), code_version="1")
BUDGET = {"step": 3, "phase": "train", "failed_tokens": 1000}


@pytest.mark.parametrize(
    ("news", "line"),
    [
        (event("notice", text="code changed"), "notice: code changed"),
        (event("alert", text="storage fails"), "alert: storage fails"),
        (event("step_skipped", step=3, action="skip", reason="loss is nan", rows=[1], rollback_step=None),
         "step 3: skipped: loss is nan"),
        (event("step_skipped", step=3, action="roll_back", reason="spike", rows=[1], rollback_step=2),
         "step 3: skipped, rolled back to the weights of step 2: spike"),
        (event("step_repeated", step=3, reason="loss is nan"), "step 3: repeated: loss is nan"),
        (event("gradient_spike", step=3, grad_norm=40.0, median=2.0, deviations=31.04, rows=[1]),
         "step 3: gradient norm 40 is 31.0 deviations above the median 2; trained on anyway"),
        (event("microbatch_budget", action="shrink", budget={"tokens": 800}, **BUDGET),
         "step 3: micro-batch of train limited to 800 padded tokens: 1,000 did not fit"),
        (event("microbatch_budget", action="grow", budget={"tokens": None}, **BUDGET),
         "step 3: micro-batch of train no longer limited: memory was sufficient for a while"),
    ],
    ids=lambda value: value.kind if isinstance(value, JournalEvent) else "",
)  # fmt: skip
def test_what_is_out_of_the_ordinary_has_a_line(
    news: JournalEvent, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ConsoleCallback().on_events([OWN, news])
    assert capsys.readouterr().out == f"  {line}\n"


KINDS = (
    "worker_ready",
    "step",
    "validation",
    "notice",
    "alert",
    "step_skipped",
    "step_repeated",
    "gradient_spike",
    "microbatch_budget",
    "checkpoint_saved",
)
OLD, NEW = event("notice", text="old"), event("notice", text="new")


@pytest.mark.parametrize(
    ("batches", "lines"),
    [
        ([[event("attempt_started", pid=1, code_version="1"), OLD, OWN, NEW],
          [JournalEvent("notice", 0.0, 1, {"text": "past"})]],
         ["notice: new", "notice: past"]),
        ([[OLD], [OWN, NEW]], ["notice: new"]),
        ([[OWN, *map(event, KINDS), NEW]], ["notice: new"]),
    ],
    ids=["of an earlier supervisor, and of a clock that is late", "before this attempt", "damaged"],
)  # fmt: skip
def test_only_whole_events_of_this_attempt_are_shown(
    batches: list[list[JournalEvent]], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    console = ConsoleCallback()
    for batch in batches:
        console.on_events(batch)
    console.on_end("FINISHED")
    assert capsys.readouterr().out == "".join(f"  {line}\n" for line in lines)


READY = event("worker_ready", start_step=0, planned_steps=50, device="cpu", compute_dtype="float32", ranks=1)
STEP = event("step", step=1, loss=2.0, learning_rate=1e-3, grad_norm=1.0, trained_tokens=5, input_tokens=50, step_s=0.5)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Faked:
    """Return a fake terminal that replaces standard output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return Faked()


@pytest.mark.parametrize("no_color", [False, True], ids=["colour", "no colour"])
def test_screen_is_drawn_and_its_last_state_stays(
    terminal: Faked, no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    with redirect_stdout(terminal):
        console = ConsoleCallback()
        console.on_events([event("notice", text="old"), OWN, READY])
        assert sys.stdout is not terminal
        print("said by another")
        console.on_events([STEP, event("alert", text="storage fails"), event("gradient_spike", step=1)])
        console.on_end("FINISHED")
        assert sys.stdout is terminal
    text = terminal.getvalue()
    assert text.index("said by another") < text.index("  alert: storage fails")
    assert "notice: old\r\n" not in text  # the notice is in the live screen, but is not printed as a line
    last = re.sub(r"\x1b\[[0-9;]*m", "", text[text.rindex("\x1b[?7l") :])
    assert "step 1 of 50" in last
    assert "train loss  2.0000" in last
    assert text.endswith("\x1b[?25h")
    assert bool(re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m", text)) is not no_color


def test_a_run_that_was_trained_before_draws_nothing(terminal: Faked) -> None:
    with redirect_stdout(terminal):
        console = ConsoleCallback()
        console.on_events([event("attempt_started", pid=1), READY, STEP, event("finished", step=1, reason="completed")])
        console.on_end("FINISHED")
        assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    "gone", [OSError(errno.EIO, "terminal"), BrokenPipeError(errno.EPIPE, "pipe"), RuntimeError("a fault of ours")],
    ids=["EIO", "EPIPE", "fault"],
)  # fmt: skip
@pytest.mark.parametrize("at_the_end", [False, True], ids=["in a frame", "at the end"])
def test_broken_terminal_ends_the_show_and_is_reported_once(terminal: Faked, gone: Exception, at_the_end: bool) -> None:
    with redirect_stdout(terminal):
        console = ConsoleCallback()
        console.on_events([OWN, READY])
        terminal.gone = gone
        with pytest.raises(type(gone)):
            if at_the_end:
                console.on_end("FINISHED")
            else:
                console.on_events([event("alert", text="storage fails")])
        assert sys.stdout is terminal
        console.on_events([event("alert", text="again"), STEP])
        console.on_end("FINISHED")


def test_a_terminal_that_hangs_up_costs_a_notice_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    ours, theirs = pty.openpty()
    journal = Journal(tmp_path / "journal.jsonl", attempt=1)
    with open(theirs, "w", encoding="utf-8") as stream:  # noqa: PTH123 (a descriptor)
        audience = CallbackList([ConsoleCallback(stream=stream)], journal)
        audience.start()
        journal.append("attempt_started", pid=os.getpid(), code_version="1")
        read = b""
        while b"loading" not in read:
            read += os.read(ours, 1 << 16)
        os.close(ours)
        for number in range(3):
            journal.append("alert", text=f"{number}")
        audience.end("FINISHED", 60.0)
        with suppress(OSError):
            stream.close()
    journal.close()
    notices = [e.data["text"] for e in JournalReader(journal.path).read() if e.kind == "notice"]
    assert len(notices) == 1
    assert "console failed (OSError: [Errno 5]" in notices[0]
    for one in threading.enumerate():
        if type(one).__module__ == "rich.live":
            one.join(60.0)
            assert not one.is_alive()


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true", "TERM": "xterm"}], ids=["dumb", "CI"])
def test_what_cannot_draw_gets_lines(tmp_path: Path, environment: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "TERM")}
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", LINES], stdout=theirs, stderr=theirs, env={**kept, **environment}, cwd=tmp_path
    )
    os.close(theirs)
    text = b""
    with suppress(OSError):
        while piece := os.read(ours, 1 << 16):
            text += piece
    os.close(ours)
    assert done.wait() == 0
    assert text.decode() == "  alert: storage fails\r\n  step 1/50: loss 2.0000, 100 tokens/s\r\n"


LINES = """\
import os
from ratchet.runs.journal import JournalEvent
from ratchet.console.callback import ConsoleCallback
console = ConsoleCallback()
step = dict(step=1, loss=2.0, learning_rate=1e-3, grad_norm=1.0, trained_tokens=5, input_tokens=50, step_s=0.5)
console.on_events([JournalEvent("attempt_started", 1.0, 1, {"pid": os.getpid()}),
             JournalEvent("alert", 1.0, 1, {"text": "storage fails"}),
             JournalEvent("worker_ready", 1.0, 1, {"planned_steps": 50, "start_step": 0}),
             JournalEvent("step", 2.0, 1, step)])
console.on_end("FINISHED")
"""
