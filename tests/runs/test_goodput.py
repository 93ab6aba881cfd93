"""Tests of goodput: the share of the time spent in steps that count."""

import pytest

from ratchet.runs.journal import JournalEvent
from ratchet.runs.status import Goodput


def of(*events: JournalEvent) -> Goodput:
    goodput = Goodput()
    for event in events:
        goodput.update(event)
    return goodput


def attempt(t: float) -> JournalEvent:
    return JournalEvent("attempt_started", t, 1, {"pid": 1})


def step(t: float, number: int, seconds: float = 10.0) -> JournalEvent:
    return JournalEvent("step", t, 1, {"step": number, "step_s": seconds})


def test_start_up_and_waits_are_lost() -> None:
    assert of().share() is None
    assert of(attempt(100.0)).share() is None
    assert of(attempt(100.0)).share(now_t=110.0) == 0.0
    goodput = of(attempt(100.0), step(120.0, 1), step(130.0, 2))
    assert goodput.useful_s == 20.0
    assert goodput.wall_s() == 30.0
    assert goodput.share() == pytest.approx(20 / 30)
    assert goodput.share(now_t=140.0) == pytest.approx(20 / 40)


def test_a_step_that_is_done_again_counts_once_and_its_first_time_is_lost() -> None:
    goodput = of(attempt(0.0), step(10.0, 1), step(20.0, 2, 10.0), attempt(25.0), step(40.0, 2, 8.0), step(50.0, 3))
    assert goodput.useful_s == 28.0
    assert goodput.share() == pytest.approx(28 / 50)


def test_what_is_told_of_a_finished_run_takes_none_of_its_time() -> None:
    over = [
        attempt(0.0),
        step(10.0, 1),
        JournalEvent("finished", 12.0, 1, {"step": 1}),
        JournalEvent("replicated", 500.0, 0, {}),
    ]
    assert of(*over).wall_s() == 12.0
    assert of(*over, attempt(600.0), step(610.0, 2)).wall_s() == 610.0, "it was not over after all"


def test_validations_are_useful_and_garbage_says_nothing() -> None:
    goodput = of(
        attempt(0.0),
        step(10.0, 1),
        JournalEvent("validation", 15.0, 1, {"step": 1, "loss": 1.0, "seconds": 5.0}),
        JournalEvent("step", 16.0, 1, {"step": "2", "step_s": 1.0}),
        JournalEvent("step", 17.0, 1, {"step": 3}),
    )
    assert goodput.useful_s == 15.0
    assert goodput.wall_s() == 17.0
