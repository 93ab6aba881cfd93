"""A fault plan is a pure function of its seed, and its faults cover every category."""

from collections import Counter
from dataclasses import replace

import pytest

from ratchet.errors import SettingsError
from ratchet.runs.fault_injection import plan
from ratchet.runs.fault_injection.plan import DOWN, FAULT_CATEGORIES, MAX_FRACTION, MAX_KILLS, FaultTrial, TrainingShape

SHAPE = TrainingShape(steps=24, validate_every_steps=8, fitting_tokens=60)


def drawn(
    seed: int = 0, kills: int = 5, shape: TrainingShape = SHAPE, names: tuple[str, ...] = tuple(FAULT_CATEGORIES)
) -> tuple[FaultTrial, ...]:
    return plan.draw_plan(seed, plan.allocate_counts(names, kills), shape)


def test_a_plan_depends_on_the_seed_and_a_row_on_no_other_row() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    alone = drawn(3, names=("bitflip", "sigterm"))
    assert alone == tuple(trial for trial in drawn(3) if trial.category in ("bitflip", "sigterm"))


def test_every_row_is_tried_and_names_are_unique() -> None:
    trials = drawn()
    assert list(dict.fromkeys(trial.category for trial in trials)) == list(FAULT_CATEGORIES)
    assert [name for name, times in Counter(trial.name for trial in trials).items() if times > 1] == []


@pytest.mark.parametrize("kills", [1, 4, 5, 9, 200])
@pytest.mark.parametrize("row", [name for name, row in FAULT_CATEGORIES.items() if row.kills])
def test_as_many_kills_as_asked_for_in_trials_of_few(row: str, kills: int) -> None:
    sizes = [len(trial.external_faults) for trial in drawn(kills=kills, names=(row,))]
    assert sum(sizes) == kills
    assert max(sizes) <= MAX_KILLS
    assert max(sizes) - min(sizes) <= 1


def test_kills_come_at_any_time_and_between_steps_by_turns() -> None:
    blows = [blow for trial in drawn(kills=200, names=("sigkill",)) for blow in trial.external_faults]
    for own_steps in (0, 1):
        fractions = sorted(blow.fraction for blow in blows if blow.worker_steps == own_steps)
        assert len(fractions) == 100
        assert fractions[0] < 0.1 * MAX_FRACTION
        assert 0.4 * MAX_FRACTION < fractions[50] < 0.6 * MAX_FRACTION
        assert 0.9 * MAX_FRACTION < fractions[-1] < MAX_FRACTION


def test_requests_to_stop_come_once_and_twice() -> None:
    blows = Counter(blow.action for trial in drawn(kills=100, names=("sigterm",)) for blow in trial.external_faults)
    assert blows.keys() == {"terminate", "terminate twice"}
    assert min(blows.values()) > 30


def test_files_are_damaged_while_nothing_runs_and_after_two_checkpoints() -> None:
    blows = [blow for trial in drawn() for blow in trial.external_faults if blow.action in DOWN]
    assert {blow.action for blow in blows} == DOWN
    assert all(blow.min_step >= 5 for blow in blows)


@pytest.mark.parametrize("steps", [plan.MIN_STEPS, 24, 100])
@pytest.mark.parametrize("seed", range(20))
def test_every_fault_and_signal_fits_into_the_training(seed: int, steps: int) -> None:
    for trial in drawn(seed, kills=20, shape=replace(SHAPE, steps=steps, validate_every_steps=steps // 3)):
        assert all(1 <= fault.step < steps for fault in trial.faults), trial
        assert all(0 <= blow.min_step < steps for blow in trial.external_faults), trial
        assert all(0 <= blow.fraction < 1 for blow in trial.external_faults), trial


def test_faults_strike_once_where_a_restarted_worker_would_meet_them_again_and_memory_where_a_sequence_fits() -> None:
    found = {trial.category: fault for trial in drawn() for fault in trial.faults if fault.kind in ("hang", "weights")}
    assert found.keys() == {"hang", "weights"}
    assert all(fault.mark for fault in found.values())
    memory = [trial.faults[0] for trial in drawn(names=("oom",))]
    assert [fault.phase for fault in memory] == ["train", "validation"]
    assert {fault.tokens for fault in memory} == {SHAPE.fitting_tokens}


def test_faults_that_change_the_result_are_compared_under_the_same_fault() -> None:
    trials = drawn(kills=30)
    changing = {trial.category for trial in trials if trial.reference_has_faults}
    assert changing == {"oom", "nan", "spike"}
    for trial in trials:
        faults, guards = trial.reference
        assert faults == (trial.faults if trial.reference_has_faults else ())
        assert guards == trial.guards
    once, skipped, back = (trial for trial in trials if trial.category == "nan" and trial.number < 3)
    assert (once.reference_has_faults, once.faults[0].times) == (False, 1)
    assert (dict(skipped.guards)["on_non_finite"], skipped.faults[0].times) == ("skip", 0)
    assert (dict(back.guards)["on_non_finite"], back.faults[0].times) == ("roll_back", 0)


def test_a_fault_that_must_show_itself_says_where() -> None:
    silent = {trial.category for trial in drawn() if not trial.expected_events}
    assert silent == {"none", "supervisor", "sigterm", "journal", "moved"}


@pytest.mark.parametrize(
    ("names", "kills", "steps", "words"),
    [
        (("sigkil",), 5, 24, ["--faults", "sigkil", "sigkill", "bitflip"]),
        ((), 5, 24, ["--faults", "no fault given"]),
        (("sigkill",), 0, 24, ["--kills", "0"]),
        (("sigkill",), -3, 24, ["--kills", "-3"]),
        (("sigkill",), 5, 4, ["--steps", "4", "12"]),
    ],
    ids=["unknown", "none", "no-kills", "negative", "short"],
)
def test_impossible_plans_are_refused(names: tuple[str, ...], kills: int, steps: int, words: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        drawn(kills=kills, names=names, shape=replace(SHAPE, steps=steps))
    assert all(word in str(raised.value) for word in words)
