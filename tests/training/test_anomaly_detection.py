"""Tests of the rules for abnormal steps: accept, repeat, skip, roll back, or stop the run."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ratchet.config.train import GuardSettings
from ratchet.training import anomaly_detection
from ratchet.training.anomaly_detection import StepVerdict
from ratchet.training.train_state import TrainState

APPLY = StepVerdict("apply")
LAWS = settings(max_examples=150, deadline=None, derandomize=True)
NAN, INF = float("nan"), float("inf")
Action = Literal["report", "skip", "roll_back"]
NonFinite = Literal["skip", "roll_back", "stop"]

# The median is 1.0. The median absolute deviation is 0.1, which gives a scaled deviation of 0.14826.
STEADY = TrainState(step=200, grad_norms=(0.9, 1.0, 1.1, 0.8, 1.2) * 10)
# All norms are equal, so the deviation is its minimum, 5 % of the median.
FLAT = TrainState(step=200, grad_norms=(2.0,) * 50)


def judge(
    rules: GuardSettings,
    state: TrainState,
    loss: float = 1.0,
    norm: float = 1.0,
    learning_rate: float = 2e-4,
    repeated: bool = False,
) -> StepVerdict:
    return anomaly_detection.judge_step(rules, state, loss, norm, learning_rate, repeated=repeated)


@pytest.mark.parametrize("state", [TrainState(), STEADY, FLAT], ids=["new", "steady", "flat"])
def test_ordinary_step_is_accepted(state: TrainState) -> None:
    norm = state.grad_norms[-1] if state.grad_norms else 1e6  # without history, every norm is accepted
    assert judge(GuardSettings(), state, norm=norm) == APPLY
    assert judge(GuardSettings(), state, norm=norm, repeated=True) == APPLY  # the NaN did not occur again


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (NAN, 1.0, "loss is nan"),
        (INF, 1.0, "loss is inf"),
        (-INF, NAN, "loss is -inf"),
        (1.0, NAN, "gradient norm is nan"),
        (1.0, INF, "gradient norm is inf"),
    ],
)
@pytest.mark.parametrize("rule", ["skip", "roll_back", "stop"])
def test_what_is_not_finite_is_computed_once_more_and_then_left_out(
    rule: NonFinite, loss: float, norm: float, reason: str
) -> None:
    rules = GuardSettings(on_non_finite=rule)
    assert judge(rules, STEADY, loss, norm) == StepVerdict("repeat", reason)
    verdict = judge(rules, STEADY, loss, norm, repeated=True)
    assert verdict.action == rule
    assert f"{reason}, computed twice" in verdict.reason


@pytest.mark.parametrize(
    ("state", "norm", "spike"),
    [
        (STEADY, 1 + 20 * 0.14826 - 1e-6, False),
        (STEADY, 1 + 20 * 0.14826 + 1e-6, True),
        (FLAT, 2 + 20 * 0.05 * 2 - 1e-6, False),
        (FLAT, 2 + 20 * 0.05 * 2 + 1e-6, True),
        (STEADY, 0.0, False),  # a small norm is not a spike
        (TrainState(step=25, grad_norms=(1.0,) * 24), 1e9, False),  # less than half a window of history
        (TrainState(step=25, grad_norms=(1.0,) * 25), 1e9, True),
        (TrainState(step=99, grad_norms=(0.0,) * 50), 1.0, False),  # a window without gradients has no scale
    ],
)
def test_a_spike_is_far_above_the_median(state: TrainState, norm: float, spike: bool) -> None:
    assert judge(GuardSettings(), state, norm=norm).action == ("report" if spike else "apply")


@pytest.mark.parametrize("rule", ["report", "skip", "roll_back"])
def test_spike_is_reported_skipped_or_rolled_back_without_computing_it_again(rule: Action) -> None:
    verdict = judge(GuardSettings(on_spike=rule), STEADY, norm=100.0)
    assert verdict.action == rule
    if rule == "report":
        assert verdict.median == 1.0
        assert verdict.deviations == pytest.approx(99 / 0.14826)
    else:
        assert verdict.reason == "gradient norm 100 is 667.7 deviations above the running median 1"


def test_spikes_depend_on_the_deviations_and_the_window_of_the_settings() -> None:
    assert judge(GuardSettings(spike_deviations=3), STEADY, norm=1.5) != APPLY
    assert judge(GuardSettings(spike_deviations=4), STEADY, norm=1.5) == APPLY
    early = TrainState(step=100, grad_norms=(100.0,) * 40 + (1.0,) * 10)
    assert judge(GuardSettings(window_steps=10), early, norm=50.0) != APPLY
    assert judge(GuardSettings(window_steps=50), early, norm=50.0) == APPLY


@pytest.mark.parametrize(
    ("bad", "patience", "stops"),
    [
        ((), 0, True),
        ((), 1, False),
        ((190, 195, 200), 3, True),
        ((190, 195, 200), 4, False),
        ((151, 152, 153), 3, False),  # the window of step 201 has 50 steps, and step 151 is outside
        ((152, 153, 154), 3, True),
        ((1, 2, 3, 4, 5, 6, 7), 1, False),  # far outside the window
    ],
)
def test_patience_ends_with_one_bad_step_too_many_in_the_window(
    bad: tuple[int, ...], patience: int, stops: bool
) -> None:
    state = replace(STEADY, bad_steps=bad)
    for rules, loss, norm in [
        (GuardSettings(max_bad_steps=patience), NAN, 1.0),
        (GuardSettings(max_bad_steps=patience, on_non_finite="roll_back"), NAN, 1.0),
        (GuardSettings(max_bad_steps=patience, on_spike="skip"), 1.0, 1e3),
    ]:
        assert (judge(rules, state, loss, norm, repeated=True).action == "stop") == stops
    rules = GuardSettings(max_bad_steps=patience)
    assert judge(rules, state, NAN).action == "repeat"  # a step is repeated once before training stops
    assert judge(rules, state, norm=1e3).action == "report"  # a step that is trained on is not a bad step


def test_a_diagnosis_says_which_steps_what_was_found_and_what_to_change() -> None:
    state = replace(STEADY, bad_steps=(198, 199, 200), learning_rate_scale=0.25)
    verdict = judge(GuardSettings(max_bad_steps=3), state, NAN, learning_rate=5e-5, repeated=True)
    assert verdict == StepVerdict(
        "stop",
        "step 201: loss is nan, computed twice; 4 bad steps in a row (198, 199, 200, 201); train.guards.max_bad_steps "
        "is 3; median gradient norm of the last 50 good steps 1; learning rate 5e-05 (train.guards has multiplied "
        "it by 0.25); these steps changed no weight. What to do: lower train.learning_rate or raise "
        "train.warmup_ratio, and check the rows of these steps",
    )


def test_a_diagnosis_of_scattered_spikes_names_the_last_ones_and_the_threshold() -> None:
    state = replace(STEADY, bad_steps=tuple(range(160, 200, 3)))
    verdict = judge(GuardSettings(max_bad_steps=10, on_spike="skip"), state, norm=1e4)
    assert verdict.action == "stop"
    assert "15 bad steps within 50 (..., 175, 178, 181, 184, 187, 190, 193, 196, 199, 201)" in verdict.reason
    assert "a higher train.guards.spike_deviations accepts such steps" in verdict.reason


def test_the_first_step_of_all_is_diagnosed_too() -> None:
    verdict = judge(GuardSettings(on_non_finite="stop"), TrainState(), 1.0, INF, learning_rate=1e-5, repeated=True)
    assert verdict == StepVerdict(
        "stop",
        "step 1: gradient norm is inf, computed twice; learning rate 1e-05; this step changed no weight. "
        "What to do: check the rows of this step and train.compute_dtype (float16 overflows), or lower "
        "train.learning_rate",
    )


def test_good_steps_fill_the_window_and_no_more() -> None:
    rules, state = GuardSettings(window_steps=8), TrainState(step=3)
    for norm in range(1, 21):
        state = anomaly_detection.record_good_step(state, rules, float(norm), 1.0)
    assert state.grad_norms == tuple(float(norm) for norm in range(13, 21))
    assert state.step == 3


def test_a_bad_step_is_counted_and_lowers_the_rate() -> None:
    rules = GuardSettings(window_steps=10, learning_rate_factor=0.5)
    state = TrainState(
        step=20,
        bad_steps=(9, 11, 12, 20),
        skipped_steps=7,
        learning_rate_scale=0.5,
        grad_norms=(1.0, 2.0),
        train_loss=3.0,
    )
    assert anomaly_detection.record_bad_step(state, rules) == replace(
        state, step=21, bad_steps=(12, 20, 21), skipped_steps=8, learning_rate_scale=0.25
    )


def test_a_lower_rate_recovers_by_one_factor_after_each_row_of_good_steps() -> None:
    rules = GuardSettings(learning_rate_factor=0.7, recovery_steps=3)
    state = TrainState()
    for _ in range(2):
        state = anomaly_detection.record_bad_step(state, rules)
    scales = [state.learning_rate_scale]
    for _ in range(5):
        state = anomaly_detection.record_good_step(state, rules, 1.0, 1.0)
        scales.append(state.learning_rate_scale)
    assert scales == pytest.approx([0.49, 0.49, 0.49, 0.7, 0.7, 0.7])
    state = anomaly_detection.record_bad_step(state, rules)  # the count of good steps begins again
    for _ in range(6):
        assert state.learning_rate_scale < 1
        state = anomaly_detection.record_good_step(state, rules, 1.0, 1.0)
    assert state.learning_rate_scale == 1.0
    assert state.recovering_steps == 0


LOSSES = TrainState(step=200, grad_norms=(1.0,) * 50, losses=(0.9, 1.0, 1.1, 0.8, 1.2) * 10)


@pytest.mark.parametrize("rule", ["ignore", "report", "skip", "roll_back"])
def test_a_loss_far_above_the_median_is_a_spike_too(rule: Literal["ignore", "report", "skip", "roll_back"]) -> None:
    rules = GuardSettings(on_loss_spike=rule)
    verdict = judge(rules, LOSSES, loss=1 + 20 * 0.14826 + 1e-6)
    assert verdict.action == ("apply" if rule == "ignore" else rule)
    assert ("loss 3.965 is 20 deviations above the running median 1" in verdict.reason) == (rule != "ignore")
    assert judge(rules, LOSSES, loss=1 + 20 * 0.14826 - 1e-6) == APPLY
    assert judge(rules, replace(LOSSES, losses=LOSSES.losses[:24]), loss=1e6) == APPLY  # less than half a window


def test_the_stronger_of_two_reactions_applies() -> None:
    rules = GuardSettings(on_spike="report", on_loss_spike="skip")
    assert judge(rules, LOSSES, loss=100.0, norm=100.0).action == "skip"
    rules = GuardSettings(on_spike="roll_back", on_loss_spike="report")
    assert judge(rules, LOSSES, loss=100.0, norm=100.0).action == "roll_back"


@pytest.mark.parametrize("rule", ["ignore", "report", "roll_back", "stop"])
def test_losses_that_rise_over_a_full_window_are_found(rule: Literal["ignore", "report", "roll_back", "stop"]) -> None:
    rules = GuardSettings(on_rising_loss=rule, window_steps=20)
    rising = tuple(1 + 0.04 * k + 0.1 * (-1) ** k for k in range(20))
    state = TrainState(step=40, losses=rising[:-1])
    verdict = judge(rules, state, loss=rising[-1])
    assert verdict.action == ("apply" if rule == "ignore" else rule)
    assert ("rise (medians of the halves 1.18, 1.58)" in verdict.reason) == (rule != "ignore")
    assert judge(rules, replace(state, losses=rising[1:-1]), loss=rising[-1]) == APPLY  # the window is not full
    assert judge(rules, replace(state, losses=rising[:0:-1]), loss=1.0) == APPLY  # they fall


def test_a_rise_is_reported_once_and_a_rollback_forgets_the_losses() -> None:
    rules = GuardSettings(on_rising_loss="report", window_steps=10)
    state, found = TrainState(), []
    for step in range(1, 35):
        if judge(rules, state, loss=float(step)).action == "report":
            found.append(step)
        state = replace(anomaly_detection.record_good_step(state, rules, 1.0, float(step)), step=step)
    assert found == [10, 20, 30]
    rules = GuardSettings(on_rising_loss="roll_back")
    assert anomaly_detection.record_bad_step(LOSSES, rules, rollback_to=TrainState()).losses == ()
    assert anomaly_detection.record_bad_step(LOSSES, rules).losses == LOSSES.losses


def test_a_window_in_which_no_rise_could_be_found_is_refused() -> None:
    with pytest.raises(ValidationError, match="window_steps: found 9; on_rising_loss needs at least 10"):
        GuardSettings(on_rising_loss="report", window_steps=9)


def test_steady_losses_are_hardly_ever_reported_as_rising() -> None:
    rules, reports, state = GuardSettings(on_rising_loss="report", window_steps=50), 0, TrainState()
    for loss in np.random.default_rng(5).normal(2.0, 0.3, 3000).tolist():
        reports += judge(rules, state, loss=loss).action == "report"
        state = anomaly_detection.record_good_step(state, rules, 1.0, loss)
    assert reports <= 1


def test_going_back_leaves_out_the_steps_since_and_counts_each_once() -> None:
    """Steps 1-10 are computed and step 5 is skipped, so the snapshot of step 10 contains nine steps. Step 15 rolls
    back to it, step 18 is skipped, and step 20 rolls back again."""
    rules = GuardSettings(on_non_finite="roll_back")
    start = TrainState()
    snapshot = TrainState(step=10, skipped_steps=1, bad_steps=(5,))
    first = anomaly_detection.record_bad_step(replace(snapshot, step=14), rules, rollback_to=snapshot)
    assert (first.step, first.skipped_steps, first.bad_steps) == (15, 6, (5, 15))
    left_out = anomaly_detection.record_bad_step(replace(first, step=17), rules)
    assert left_out.skipped_steps == 7
    again = anomaly_detection.record_bad_step(replace(left_out, step=19), rules, rollback_to=snapshot)
    assert again.step - again.skipped_steps == 9  # number of steps in the weights
    to_start = anomaly_detection.record_bad_step(again, rules, rollback_to=start)
    assert to_start.skipped_steps == to_start.step == 21


@st.composite
def cases(draw: st.DrawFn) -> tuple[GuardSettings, TrainState]:
    rules = GuardSettings(
        on_non_finite=draw(st.sampled_from(["skip", "roll_back", "stop"])),
        on_spike=draw(st.sampled_from(["report", "skip", "roll_back"])),
        spike_deviations=draw(st.floats(0.5, 100)), window_steps=draw(st.integers(8, 60)),
        max_bad_steps=draw(st.integers(0, 8)), learning_rate_factor=draw(st.floats(0.1, 1)),
    )  # fmt: skip
    norms = draw(st.lists(st.floats(0, 1e6), max_size=rules.window_steps))
    return rules, TrainState(step=draw(st.integers(0, 500)), grad_norms=tuple(norms))


numbers = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([NAN, INF, -INF]))


@LAWS
@given(cases(), numbers, st.one_of(st.floats(0, 1e6), st.sampled_from([NAN, INF])), st.booleans())
def test_nothing_that_is_not_finite_is_ever_learned_from(
    case: tuple[GuardSettings, TrainState], loss: float, norm: float, repeated: bool
) -> None:
    verdict = judge(*case, loss, norm, repeated=repeated)
    finite = math.isfinite(loss) and math.isfinite(norm)
    assert finite or verdict.action not in ("apply", "report")
    assert (verdict.action == "repeat") == (not finite and not repeated)
    assert verdict == judge(*case, loss, norm, repeated=repeated)


@LAWS
@given(cases(), st.lists(st.one_of(st.floats(0, 10), st.just(NAN)), max_size=60))
def test_a_run_stops_after_patience_and_counts_every_step_once(
    case: tuple[GuardSettings, TrainState], norms: list[float]
) -> None:
    rules, state = case
    rules = rules.model_copy(update={"on_spike": "report", "on_non_finite": "skip"})
    start, bad = state.step, []
    for norm in norms:
        verdict = judge(rules, state, norm=norm, repeated=True)
        number = state.step + 1
        if math.isfinite(norm):
            assert verdict.action in ("apply", "report")
            state = replace(anomaly_detection.record_good_step(state, rules, norm, 1.0), step=number)
            continue
        bad.append(number)
        recent = [step for step in bad if step > number - rules.window_steps]
        assert verdict.action == ("stop" if len(recent) > rules.max_bad_steps else "skip")
        state = anomaly_detection.record_bad_step(state, rules)
        assert state.step == number
        assert state.bad_steps == tuple(recent)
    assert state.step == start + len(norms)
    assert state.skipped_steps == len(bad)
    assert state.learning_rate_scale == pytest.approx(rules.learning_rate_factor ** len(bad))
    assert len(state.grad_norms) <= rules.window_steps


@LAWS
@given(st.floats(0.01, 1e3), st.integers(25, 50), st.floats(0, 0.9))
def test_norms_that_hardly_vary_make_no_step_a_spike(level: float, count: int, share: float) -> None:
    state = TrainState(step=100, grad_norms=(level,) * count)
    assert judge(GuardSettings(), state, norm=level * (1 + share)) == APPLY
