"""Tests of the checkpoint interval: the formula of Young and Daly, its bounds, and settings in steps and in time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.machine import Machine
from ratchet.errors import SettingsError
from ratchet.training.async_checkpoint import (
    BACKGROUND_SHARE,
    FIRST_INTERVAL_S,
    MAX_INTERVAL_S,
    PRIOR_S,
    CheckpointInterval,
    auto_interval_s,
    optimal_interval_s,
)

LAWS = settings(max_examples=200, deadline=None, derandomize=True)
blocks = st.floats(0, 60)
saves = st.floats(0, 600)
deaths = st.integers(0, 100)
watched = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("cost_min", "failure_min", "expected_min", "published_min"),
    [
        (5, 24 * 60, 115, 117),  # sqrt(2 x 5 x 1440) - 5 = 120 - 5; Daly (2006), figure 3: 117
        (5, 6 * 60, 55, 57),  # sqrt(2 x 5 x 360) - 5 = 60 - 5; figure 4: 57
    ],
)
def test_the_best_interval_is_that_of_young_and_near_dalys(
    cost_min: float, failure_min: float, expected_min: float, published_min: float
) -> None:
    found = optimal_interval_s(60 * cost_min, 60 * failure_min) / 60
    assert found == pytest.approx(expected_min)
    assert found == pytest.approx(published_min, rel=0.04)


@LAWS
@given(st.floats(0.001, 100), st.floats(5, 10_000))
def test_the_best_interval_is_within_four_percent_of_dalys_full_estimate(cost: float, ratio: float) -> None:
    """The result is within 4 % of Daly's equation for C < 2 M, for C of at most a fiftieth of M."""
    mean = cost * max(50, ratio)
    part = cost / (2 * mean)
    full = math.sqrt(2 * cost * mean) * (1 + math.sqrt(part) / 3 + part / 9) - cost
    assert optimal_interval_s(cost, mean) == pytest.approx(full, rel=0.04)


def test_interval_is_zero_for_no_cost_or_a_cost_above_the_time_between_failures() -> None:
    assert optimal_interval_s(0, 3600) == 0
    assert optimal_interval_s(100, 10) == 0


def test_failures_are_estimated_from_the_run_itself() -> None:
    assert PRIOR_S == 6 * 3600
    for deaths, observed_s, failure_s in [
        (0, 0, 6 * 3600),
        (3, 6 * 3600, 3 * 3600),  # 12 hours / 4 failures; the prior is 6 hours and 1 failure
        (0, 18 * 3600, 24 * 3600),
    ]:
        assert auto_interval_s(0.1, 0.0, deaths, observed_s) == optimal_interval_s(0.1, failure_s)


@pytest.mark.parametrize(
    ("blocked_s", "save_s", "died", "observed_s", "expected_s"),
    [
        (0.05, 2.0, 0, 0, math.sqrt(2 * 0.25 * 21600) - 0.25),  # 104 s
        (0.05, 2.0, 3, 21600, math.sqrt(2 * 0.25 * 10800) - 0.25),  # 73 s: the failures shorten the interval
        (1.0, 10.0, 0, 0, math.sqrt(2 * 2 * 21600) - 2),  # 292 s
        (1.0, 10.0, 200, 0, 200.0),  # the limit of 1 % of the time, for any number of failures
        (0.0, 0.0, 0, 0, 0.0),
        (0.0, 1000.0, 0, 0, 10_000.0),  # the limit of 1 % exceeds half an hour
        (10.0, 1.0, 0, 1e7, MAX_INTERVAL_S),  # Young's formula gives four hours
    ],
)
def test_the_interval_of_auto(blocked_s: float, save_s: float, died: int, observed_s: float, expected_s: float) -> None:
    assert auto_interval_s(blocked_s, save_s, died, observed_s) == pytest.approx(expected_s)


@LAWS
@given(blocks, saves, deaths, watched)
def test_auto_keeps_its_bounds(blocked_s: float, save_s: float, died: int, observed_s: float) -> None:
    found = auto_interval_s(blocked_s, save_s, died, observed_s)
    cost = blocked_s + BACKGROUND_SHARE * save_s
    assert cost <= 0.01 * found * (1 + 1e-9)
    assert found >= 10 * save_s * (1 - 1e-9)
    assert found <= max(MAX_INTERVAL_S, 100 * cost) * (1 + 1e-9)


@LAWS
@given(blocks, saves, deaths, watched, st.floats(0, 30), st.integers(0, 5), st.floats(0, 1e5))
def test_dearer_checkpoints_and_rarer_failures_make_longer_intervals(
    blocked_s: float, save_s: float, died: int, observed_s: float, dearer_s: float, fewer: int, longer_s: float
) -> None:
    found = auto_interval_s(blocked_s, save_s, died + fewer, observed_s) - 1e-6
    assert auto_interval_s(blocked_s + dearer_s, save_s, died + fewer, observed_s) >= found
    assert auto_interval_s(blocked_s, save_s + dearer_s, died + fewer, observed_s) >= found
    assert auto_interval_s(blocked_s, save_s, died, observed_s) >= found
    assert auto_interval_s(blocked_s, save_s, died + fewer, observed_s + longer_s) >= found


def test_in_steps_it_stays_due_until_something_is_saved() -> None:
    interval = CheckpointInterval(5, 0, 0.0)
    assert [step for step in range(1, 8) if interval.is_due(step, 0.0)] == [5, 6, 7]
    interval.record(7, 0.0, 0.1, 0.0)  # saved late, or for another reason
    assert [step for step in range(7, 12) if interval.is_due(step, 0.0)] == [10, 11]


@pytest.mark.parametrize(("setting", "seconds"), [("30 s", 30), ("10 min", 600), ("1.5 h", 5400), ("0.5 s", 0.5)])
def test_in_time_it_is_due_when_that_has_passed(setting: str, seconds: float) -> None:
    Machine(checkpoint_every=setting)  # params.yaml accepts the setting
    interval = CheckpointInterval(setting, 4, 1000.0)
    assert interval.seconds(0) == seconds
    assert not interval.is_due(5, 1000.0 + 0.99 * seconds)
    assert interval.is_due(5, 1000.0 + seconds)
    interval.record(5, 1000.0 + seconds, 50.0, 500.0)  # the cost of a save does not change a fixed interval
    assert not interval.is_due(6, 1000.0 + 1.99 * seconds)
    assert interval.is_due(6, 1000.0 + 2 * seconds)


@pytest.mark.parametrize("setting", [1, "1 s", "auto"])
def test_a_step_is_never_due_twice(setting: str | int) -> None:
    interval = CheckpointInterval(setting, 0, 0.0)
    assert not interval.is_due(0, 1e9)
    assert interval.is_due(1, 1e9)
    interval.record(1, 1e9, 0.1, 1.0)
    assert not interval.is_due(1, 2e9)


def test_auto_saves_first_after_half_a_minute_and_then_by_what_it_cost() -> None:
    interval = CheckpointInterval("auto", 0, 100.0)
    assert not interval.is_due(9, 129.0)
    assert interval.is_due(10, 130.0)
    interval.record(10, 130.0, 0.05, 0.0)  # that save is still in progress
    assert interval.seconds(140.0) == FIRST_INTERVAL_S
    assert interval.is_due(20, 160.0)
    interval.record(20, 160.0, 0.05, 2.0)
    expected = auto_interval_s(0.05, 2.0, 0, 100.0)
    assert interval.seconds(200.0) == pytest.approx(expected)
    assert not interval.is_due(30, 160.0 + 0.98 * expected)
    assert interval.is_due(30, 160.0 + 1.02 * expected)


def test_auto_uses_the_mean_of_blocks_the_last_save_and_earlier_attempts() -> None:
    interval = CheckpointInterval("auto", 0, 0.0)
    for step, (blocked_s, save_s) in enumerate([(0.3, 0.0), (0.2, 8.0), (0.6, 2.0), (0.1, 0.0)], start=1):
        interval.record(step, 0.0, blocked_s, save_s)
    assert interval.seconds(0.0) == pytest.approx(auto_interval_s(0.3, 2.0, 0, 0.0))
    unlucky = CheckpointInterval("auto", 0, 50.0, deaths=7, observed_s=3600.0)
    unlucky.record(1, 50.0, 0.1, 1.0)
    assert unlucky.seconds(150.0) == pytest.approx(auto_interval_s(0.1, 1.0, 7, 3700.0))


@pytest.mark.parametrize("setting", ["soon", "10", "10 days", "0 s", "-1 s", 0, -5, ""], ids=repr)
def test_what_is_no_interval_is_refused(setting: str | int) -> None:
    with pytest.raises(SettingsError, match=r"machine\.checkpoint_every: found .*; expected a number of steps"):
        CheckpointInterval(setting, 0, 0.0)


@LAWS
@given(st.integers(1, 50), st.integers(0, 60), st.lists(st.integers(1, 200), max_size=20, unique=True))
def test_in_steps_it_is_due_at_every_multiple_whatever_else_is_saved(
    every: int, begin: int, between: list[int]
) -> None:
    """Other saves, such as that of a new best checkpoint, do not move the checkpoints that are due."""
    interval, due = CheckpointInterval(every, begin, 1e6), []
    for step in range(begin, 201):
        if interval.is_due(step, 0.0):
            due.append(step)
            interval.record(step, 0.0, 1.0, 100.0)
        elif step in between:
            interval.record(step, 0.0, 0.0, 0.0)
    assert due == [step for step in range(every, 201, every) if step > begin]
    assert interval.seconds(0.0) is None
