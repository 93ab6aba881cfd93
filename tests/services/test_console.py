"""What training shows in a terminal."""

import os
from typing import Any

import pytest

from ratchet.run.journal import Event
from ratchet.services.console import Console


def event(kind: str, **data: Any) -> Event:
    return Event(kind, 5.0, 1, data)


OWN = event("attempt", pid=os.getpid(), code_version="1")
BUDGET = {"step": 3, "phase": "train", "failed_tokens": 1000}


@pytest.mark.parametrize(
    ("news", "line"),
    [
        (event("notice", text="code changed"), "notice: code changed"),
        (event("alert", text="storage fails"), "alert: storage fails"),
        (event("skipped", step=3, action="skip", reason="loss is nan", rows=[1], to_step=None),
         "step 3: left out: loss is nan"),
        (event("skipped", step=3, action="roll_back", reason="spike", rows=[1], to_step=2),
         "step 3: left out, back to the weights of step 2: spike"),
        (event("repeated", step=3, reason="loss is nan"), "step 3: computed once more: loss is nan"),
        (event("spike", step=3, grad_norm=40.0, median=2.0, deviations=31.04, rows=[1]),
         "step 3: gradient norm 40 is 31.0 deviations above the median 2; learned from all the same"),
        (event("budget", action="shrink", budget={"tokens": 800}, **BUDGET),
         "step 3: micro-batch of train of at most 800 padded tokens: 1,000 did not fit"),
        (event("budget", action="grow", budget={"tokens": None}, **BUDGET),
         "step 3: micro-batch of train has no limit of its own any more: there was room for a while"),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)  # fmt: skip
def test_what_is_out_of_the_ordinary_has_a_line(news: Event, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Console().see([OWN, news])
    assert capsys.readouterr().out == f"  {line}\n"


def test_what_an_earlier_supervisor_saw_is_not_told_again_whatever_the_clock_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    old = [event("attempt", pid=1, code_version="1"), event("notice", text="old")]
    console.see([*old, OWN, event("notice", text="new")])
    console.see([Event("notice", 0.0, 1, {"text": "from an hour ago"})])
    assert capsys.readouterr().out == "  notice: new\n  notice: from an hour ago\n"


def test_all_that_was_there_before_is_old_and_all_that_comes_after_is_news(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.see([event("notice", text="old")])
    console.see([OWN, event("notice", text="new")])
    assert capsys.readouterr().out == "  notice: new\n"


def test_damaged_events_are_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    kinds = ("ready", "step", "validation", "notice", "alert", "skipped", "repeated", "spike", "budget", "checkpoint")
    console.see([OWN, *(event(kind) for kind in kinds), event("notice", text="whole")])
    console.finish("FINISHED")
    assert capsys.readouterr().out == "  notice: whole\n"
