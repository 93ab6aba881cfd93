"""Plans are pure: what befalls a training follows from the seed, and covers what it says."""

from collections import Counter
from dataclasses import replace

import pytest

from ratchet.errors import SettingsError
from ratchet.faults import plan
from ratchet.faults.plan import DOWN, LATEST, MOST_KILLS, ROWS, Shape, Trial

SHAPE = Shape(steps=24, validate_every_steps=8, fitting_tokens=60)


def drawn(
    seed: int = 0, kills: int = 5, shape: Shape = SHAPE, names: tuple[str, ...] = tuple(ROWS)
) -> tuple[Trial, ...]:
    return plan.draw(seed, plan.counts(names, kills), shape)


def test_the_same_seed_draws_the_same_plan_and_another_seed_another() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_a_row_is_drawn_alike_whichever_others_are_asked_for() -> None:
    alone = drawn(3, names=("bitflip", "sigterm"))
    assert alone == tuple(trial for trial in drawn(3) if trial.row in ("bitflip", "sigterm"))


def test_every_row_is_tried_and_every_name_is_told_once() -> None:
    trials = drawn()
    assert list(dict.fromkeys(trial.row for trial in trials)) == list(ROWS)
    assert [name for name, times in Counter(trial.name for trial in trials).items() if times > 1] == []


@pytest.mark.parametrize("kills", [1, 4, 5, 9, 200])
@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.kills])
def test_as_many_kills_as_asked_for_in_trials_of_few(row: str, kills: int) -> None:
    sizes = [len(trial.blows) for trial in drawn(kills=kills, names=(row,))]
    assert sum(sizes) == kills
    assert max(sizes) <= MOST_KILLS
    assert max(sizes) - min(sizes) <= 1


def test_kills_come_at_any_time_and_among_steps_by_turns() -> None:
    blows = [blow for trial in drawn(kills=200, names=("sigkill",)) for blow in trial.blows]
    for own_steps in (0, 1):
        fractions = sorted(blow.fraction for blow in blows if blow.own_steps == own_steps)
        assert len(fractions) == 100
        assert fractions[0] < 0.1 * LATEST
        assert 0.4 * LATEST < fractions[50] < 0.6 * LATEST
        assert 0.9 * LATEST < fractions[-1] < LATEST


def test_requests_to_stop_come_once_and_twice() -> None:
    blows = Counter(blow.what for trial in drawn(kills=100, names=("sigterm",)) for blow in trial.blows)
    assert blows.keys() == {"terminate", "terminate twice"}
    assert min(blows.values()) > 30


def test_what_is_damaged_is_damaged_while_nothing_runs_and_behind_two_checkpoints() -> None:
    blows = [blow for trial in drawn() for blow in trial.blows if blow.what in DOWN]
    assert {blow.what for blow in blows} == DOWN
    assert all(blow.past_step >= 5 for blow in blows)


@pytest.mark.parametrize("steps", [plan.FEWEST_STEPS, 24, 100])
@pytest.mark.parametrize("seed", range(20))
def test_every_fault_and_blow_fits_into_the_training(seed: int, steps: int) -> None:
    for trial in drawn(seed, kills=20, shape=replace(SHAPE, steps=steps, validate_every_steps=steps // 3)):
        assert all(1 <= fault.step < steps for fault in trial.faults), trial
        assert all(0 <= blow.past_step < steps for blow in trial.blows), trial
        assert all(0 <= blow.fraction < 1 for blow in trial.blows), trial


def test_what_a_restarted_worker_would_meet_again_for_ever_strikes_once() -> None:
    found = {trial.row: fault for trial in drawn() for fault in trial.faults if fault.kind in ("hang", "weights")}
    assert found.keys() == {"hang", "weights"}
    assert all(fault.mark for fault in found.values())


def test_faults_that_change_what_is_learned_are_compared_under_the_same_fault() -> None:
    trials = drawn(kills=30)
    changing = {trial.row for trial in trials if trial.same_fault}
    assert changing == {"oom", "nan", "spike"}
    for trial in trials:
        faults, guards = trial.reference
        assert faults == (trial.faults if trial.same_fault else ())
        assert guards == trial.guards
    once, skipped, back = (trial for trial in trials if trial.row == "nan" and trial.number < 3)
    assert (once.same_fault, once.faults[0].times) == (False, 1)
    assert (dict(skipped.guards)["on_non_finite"], skipped.faults[0].times) == ("skip", 0)
    assert (dict(back.guards)["on_non_finite"], back.faults[0].times) == ("roll_back", 0)


def test_memory_runs_out_in_training_and_in_validation_where_one_sequence_fits() -> None:
    faults = [trial.faults[0] for trial in drawn(names=("oom",))]
    assert [fault.phase for fault in faults] == ["train", "validation"]
    assert {fault.tokens for fault in faults} == {SHAPE.fitting_tokens}


def test_a_fault_that_must_show_itself_says_where() -> None:
    silent = {trial.row for trial in drawn() if not trial.shows}
    assert silent == {"none", "supervisor", "sigterm", "journal", "moved"}


@pytest.mark.parametrize(
    ("names", "kills", "steps", "words"),
    [
        (("sigkil",), 5, 24, ["--faults", "sigkil", "sigkill", "bitflip"]),
        ((), 5, 24, ["--faults", "no fault is named"]),
        (("sigkill",), 0, 24, ["--kills", "0"]),
        (("sigkill",), -3, 24, ["--kills", "-3"]),
        (("sigkill",), 5, 4, ["--steps", "4", "12"]),
    ],
    ids=["unknown", "none", "no-kills", "negative", "short"],
)
def test_a_plan_that_cannot_be_says_why(names: tuple[str, ...], kills: int, steps: int, words: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        drawn(kills=kills, names=names, shape=replace(SHAPE, steps=steps))
    assert all(word in str(raised.value) for word in words)
