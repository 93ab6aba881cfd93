"""Pruning by hand-made tables, by properties that must hold for any curves, and against Optuna's own pruners."""

import math
import random
from collections import Counter
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config_sweep import Pruner
from ratchet.records_sweep import Cost, Trial
from ratchet.studies.halving import BRACKETS_OF, Ladder, bracket, rungs
from ratchet.studies.lineage import lineages
from ratchet.studies.pruning import describe, promotable, verdict

LONGEST = 900
ASHA = Pruner(kind="asha", first=0.11, reduction=3)  # rungs at 99 and 297 rows
HYPERBAND = Pruner(kind="hyperband", first=0.11, reduction=3)
MEDIAN = Pruner(kind="median", first=0.11, startup=3)


def run(number: int, curve: dict[int, float], state: str = "pruned", **fields: Any) -> Trial:
    """A trial with this curve."""
    if state == "complete":
        fields["objectives"] = (min(curve.values()),)
    return Trial(number=number, values={"k": number}, run_id=str(number), state=state, curve=curve, **fields)


def ends(pruner: Pruner, history: list[Trial], trial: Trial) -> bool:
    return verdict(pruner, history, trial, LONGEST) is not None


# Rungs


def test_rungs_grow_by_the_reduction_and_stop_where_nothing_would_be_saved() -> None:
    assert rungs(0.11, 3, 900) == pytest.approx((99, 297))  # not 891: that training is as good as done
    assert rungs(0.2, 3, 1000) == pytest.approx((200, 600))
    assert rungs(0.25, 2, 1000) == pytest.approx((250, 500))
    assert rungs(0.01, 4, 1000) == pytest.approx((10, 40, 160, 640))
    assert rungs(0.95, 3, 1000) == ()


# A table of asynchronous successive halving

FIRST_RUNG = [run(0, {100: 2.0}, "running"), run(1, {100: 3.0}, "running"), run(2, {100: 2.5}, "running")]


@pytest.mark.parametrize(
    ("others", "loss", "pruned"),
    [
        ([], 9.0, False),  # the best of one
        ([2.0], 1.9, False),
        ([2.0], 2.1, True),  # second of two, one goes on
        ([2.0, 3.0], 2.5, True),
        ([2.0, 3.0], 1.0, False),
        ([2.0, 3.0, 4.0, 5.0, 6.0], 2.5, False),  # second of six, two go on
        ([2.0, 3.0, 4.0, 5.0, 6.0], 3.5, True),
        ([2.0], 2.0, True),  # of equal ones the earlier is better
        ([math.nan], 8.0, False),
        ([math.inf, math.nan], math.nan, True),
        ([2.0], math.inf, True),
    ],
)
def test_who_goes_on_at_the_first_rung(others: list[float], loss: float, pruned: bool) -> None:
    history = [run(number, {100: value}, "running") for number, value in enumerate(others)]
    assert ends(ASHA, history, run(20, {100: loss}, "running")) is pruned


def test_the_reason_says_where_it_stood() -> None:
    assert verdict(ASHA, FIRST_RUNG, run(3, {50: 4.0, 120: 2.75}, "running"), LONGEST) == (
        "validation loss 2.75 after 120 rows is number 3 of 4; asha goes on with the best"
    )


def test_judged_is_the_first_validation_at_or_behind_a_rung_and_no_other() -> None:
    better = [run(number, {100: 1.0, 300: 0.5}, "complete") for number in range(3)]
    bad = {40: 9.0}
    assert not ends(ASHA, better, run(7, bad, "running"))  # before the first rung
    assert ends(ASHA, better, run(7, {**bad, 99: 9.0}, "running"))  # on it
    assert not ends(ASHA, better, run(7, {**bad, 99: 0.9, 200: 9.0}, "running"))  # between the rungs
    assert ends(ASHA, better, run(7, {**bad, 99: 0.9, 200: 9.0, 310: 9.0}, "running"))
    # Others count with what they had there, not with what they came to later.
    late = [run(0, {100: 5.0, 300: 0.1}, "complete")]
    assert not ends(ASHA, late, run(7, {100: 4.0}, "running"))


def test_a_validation_behind_two_rungs_is_judged_at_both() -> None:
    history = [run(0, {100: 1.0}, "pruned"), run(1, {400: 5.0}, "running")]
    assert ends(ASHA, history, run(2, {400: 4.0}, "running"))  # best on the second rung, second of three on the first
    assert not ends(ASHA, history, run(2, {400: 0.5}, "running"))


def test_a_training_at_its_end_is_left_alone() -> None:
    better = [run(number, {100: 1.0, 300: 0.5}, "complete") for number in range(3)]
    assert not ends(ASHA, better, run(7, {80: 9.0, 900: 9.0}, "running"))
    done = Cost(steps=10, planned_steps=10)
    assert not ends(ASHA, better, run(7, {300: 9.0}, "running", cost=done))
    assert ends(ASHA, better, run(7, {300: 9.0}, "running", cost=Cost(steps=9, planned_steps=10)))


def test_without_a_curve_or_a_pruner_nothing_ends() -> None:
    better = [run(number, {100: 1.0}, "complete") for number in range(3)]
    assert not ends(ASHA, better, run(7, {}, "running"))
    assert not ends(Pruner(kind="none"), better, run(7, {100: 9.0}, "running"))
    assert promotable(Pruner(kind="none"), [run(0, {100: 1.0})], LONGEST) is None


def test_the_answer_is_the_same_when_asked_again_with_the_record_in_the_history() -> None:
    own = run(3, {100: 2.75}, "running")
    older = run(3, {}, "running")
    answers = {
        verdict(ASHA, history, own, LONGEST) for history in (FIRST_RUNG, [*FIRST_RUNG, own], [older, *FIRST_RUNG[::-1]])
    }
    assert len(answers) == 1
    assert None not in answers


def test_duplicates_count_once_and_failed_ones_with_what_they_had() -> None:
    same = run(5, {100: 1.0}, "complete", same_as=0)
    lost = run(6, {100: 1.5}, "failed")
    base = [run(0, {100: 1.0}, "complete"), run(1, {100: 3.0}), run(2, {100: 4.0}), run(3, {100: 5.0})]
    assert not ends(ASHA, [*base, run(4, {100: 6.0})], run(9, {100: 2.0}, "running"))  # second of six
    assert ends(ASHA, [*base, same], run(9, {100: 2.0}, "running"))  # second of five
    assert not ends(ASHA, [*base, same, lost], run(9, {100: 1.2}, "running"))  # second of six


# Promotion


def test_a_pruned_one_is_promoted_when_enough_worse_ones_came_to_its_rung() -> None:
    history = [run(0, {100: 1.0}, "complete"), run(1, {100: 2.0}), run(2, {100: 3.0}), run(3, {100: 4.0})]
    assert promotable(ASHA, history, LONGEST) is None
    history += [run(4, {100: 5.0}), run(5, {100: 6.0}, "failed")]
    assert promotable(ASHA, history, LONGEST) == 1
    # Being gone on with, or gone on with before, it is not named again, whatever became of that.
    for state in ("running", "complete", "failed", "infeasible"):
        again = run(6, {} if state == "running" else {100: 2.0, 300: 1.0}, state, continues=1)
        assert promotable(ASHA, [*history, again], LONGEST) is None


def test_the_highest_rung_comes_first_and_there_the_best() -> None:
    low = [run(number, {100: 1.0 + number / 10}) for number in range(9)]
    assert promotable(ASHA, low, LONGEST) == 0
    high = [run(number, {100: 0.5, 300: 3.0 - number / 10}) for number in range(10, 16)]
    assert promotable(ASHA, low + high, LONGEST) == 15
    second = run(20, {100: 0.5}, "running", continues=15)
    assert promotable(ASHA, [*low, *high, second], LONGEST) == 14


def test_a_promoted_one_is_not_pruned_at_that_rung_again_but_at_the_next() -> None:
    pruned = run(1, {50: 4.0, 120: 2.0})
    others = [run(0, {100: 1.0, 300: 0.5}, "complete"), *(run(n, {100: 0.1 * n}) for n in range(2, 6))]
    history = [*others, pruned]
    for curve in ({50: 4.0}, {50: 4.0, 120: 2.0}, {50: 4.0, 120: 2.0, 200: 1.9}):
        assert ends(ASHA, others, run(1, curve, "running")) is (120 in curve and 200 not in curve)
        assert not ends(ASHA, history, run(9, curve, "running", continues=1))
    behind = {50: 4.0, 120: 2.0, 200: 1.9, 300: 1.8}
    assert ends(ASHA, history, run(9, behind, "running", continues=1))
    assert ends(ASHA, history, run(9, {300: 1.8}, "running", continues=1))  # only what is new was reported
    assert not ends(ASHA, history, run(9, {**behind, 300: 0.2}, "running", continues=1))


def test_a_pair_of_pruned_and_continued_counts_once_on_its_rung() -> None:
    pair = [run(0, {100: 1.0}), run(1, {100: 1.0, 300: 0.9}, "complete", continues=0)]
    others = [run(2, {100: 3.0}), run(3, {100: 4.0}), run(4, {100: 5.0})]
    assert ends(ASHA, pair + others, run(9, {100: 2.0}, "running"))  # second of five, not of six
    assert lineages(pair)[0].first == 0


def test_one_may_be_promoted_from_rung_to_rung() -> None:
    twice = [run(0, {100: 1.0}), run(6, {100: 1.0, 300: 0.9}, continues=0)]
    others = [run(n, {100: 2.0 + n, 300: 1.0 + n}) for n in range(1, 4)]
    assert promotable(ASHA, twice + others, LONGEST) == 6
    third = run(7, {}, "running", continues=6)
    assert promotable(ASHA, [*twice, *others, third], LONGEST) is None
    assert not ends(ASHA, [*twice, *others], run(7, {100: 1.0, 300: 0.9}, "running", continues=6))


# For any curves


@st.composite
def studies(draw: st.DrawFn) -> list[tuple[int, dict[int, float]]]:
    """Final curves of some trainings, in the order in which they begin; ties, infinities and odd rows among them."""
    losses = st.one_of(st.floats(0, 5), st.sampled_from([1.0, 2.0, math.inf, math.nan]))
    every = st.sampled_from([25, 60, 100, 150, 320])
    found = []
    for number in range(draw(st.integers(1, 14))):
        rows = range(gap := draw(every), LONGEST + 1, gap)
        found.append((number, {at: draw(losses) for at in (*rows, LONGEST)}))
    return found


def simulated(pruner: Pruner, curves: list[tuple[int, dict[int, float]]]) -> list[Trial]:
    """One worker: whoever is promotable first, then new ones; each is asked about after each validation."""
    history: list[Trial] = []
    waiting = dict(curves)
    while True:
        number = promotable(pruner, history, LONGEST)
        if number is not None:
            origin = number
            while (before := history[origin].continues) is not None:
                origin = before
            curve = dict(curves)[history[origin].values["k"]]
        elif waiting:
            origin = min(waiting)
            curve = waiting.pop(origin)
        else:
            return history
        now = Trial(
            number=len(history), values={"k": origin if number is None else history[origin].values["k"]}, run_id="r",
            state="running", continues=number,
        )  # fmt: skip
        state = "complete"
        for rows in sorted(curve):
            now = now.model_copy(update={"curve": {at: curve[at] for at in curve if at <= rows}})
            assert verdict(pruner, history, now, LONGEST) == verdict(pruner, [*history[::-1], now], now, LONGEST)
            if ends(pruner, history, now):
                state = "pruned"
                break
        history.append(now.model_copy(update={"state": state, "objectives": (0.0,) if state == "complete" else ()}))
        assert len(history) <= 8 * len(curves)


@settings(max_examples=60, deadline=None)
@given(studies(), st.sampled_from([ASHA, HYPERBAND, Pruner(kind="asha", first=0.03, reduction=2)]))
def test_in_the_end_the_best_of_every_rung_have_gone_on_and_none_twice(
    curves: list[tuple[int, dict[int, float]]], pruner: Pruner
) -> None:
    history = simulated(pruner, curves)
    assert all(count == 1 for count in Counter(one.continues for one in history if one.continues is not None).values())
    field = lineages(history)
    assert len(field) == len(curves)
    assert any(line.told.state == "complete" for line in field)  # the best of the highest rung always goes on
    for line in field:
        states = [one.state for one in line.trials]
        assert states[:-1] == ["pruned"] * (len(states) - 1)
        reached = [max(one.curve) for one in line.trials]
        assert reached == sorted(set(reached))  # each continuation gets further than the one before
    if pruner.kind == "asha":
        levels = rungs(pruner.first, pruner.reduction, LONGEST)
        ladder = Ladder(levels, pruner.reduction, tuple(field))
        for line in field:
            stopped = [rung for rung in levels if rung <= max(line.curve)]
            if line.told.state == "pruned":
                places = [ladder.place(line, rung) for rung in stopped]
                assert any(place.rank > place.among // pruner.reduction for place in places)


# Against Optuna


def optunas(pruner: optuna.pruners.BasePruner, curves: list[dict[int, float]]) -> list[int]:
    """Rows at which Optuna ends each training, one after the other."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(study_name=BRACKETS_OF, storage=storage, pruner=pruner)
    ended = []
    for curve in curves:
        trial = study.ask()
        for rows, loss in curve.items():
            trial.report(loss, rows)
            if rows < LONGEST and trial.should_prune():
                break
        ended.append(rows)
        pruned = rows < LONGEST
        study.tell(trial, None if pruned else loss, state=optuna.trial.TrialState.PRUNED if pruned else None)
    return ended


def ours(pruner: Pruner, curves: list[dict[int, float]]) -> list[int]:
    """The same without promotion, which Optuna does not have."""
    history: list[Trial] = []
    for number, curve in enumerate(curves):
        so_far: dict[int, float] = {}
        for rows, loss in curve.items():
            so_far[rows] = loss
            if ends(pruner, history, run(number, dict(so_far), "running")):
                break
        history.append(run(number, so_far, "complete" if LONGEST in so_far else "pruned"))
    return [max(one.curve) for one in history]


def random_curves(seed: int, count: int) -> list[dict[int, float]]:
    source = random.Random(seed)
    return [{rows: source.random() + 100 / rows for rows in range(50, LONGEST + 1, 50)} for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_without_promotion_we_decide_as_optuna_does(seed: int) -> None:
    curves = random_curves(seed, 30)
    # Optuna has one more rung, at 891 rows; the only validation behind it is the end, where nothing is pruned.
    pairs = [
        (ASHA, optuna.pruners.SuccessiveHalvingPruner(min_resource=99, reduction_factor=3)),
        (HYPERBAND, optuna.pruners.HyperbandPruner(min_resource=99, max_resource=LONGEST, reduction_factor=3)),
        (MEDIAN, optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=99)),
    ]
    for pruner, theirs in pairs:
        found = ours(pruner, curves)
        assert found == optunas(theirs, curves)
        assert len(set(found)) >= 2  # some were pruned, some not


# Hyperband


def test_brackets_have_the_shares_of_hyperband_and_never_change() -> None:
    counts = Counter(bracket(number, 2, 3) for number in range(17_000))
    assert {s: count / 1000 for s, count in counts.items()} == pytest.approx({0: 9, 1: 5, 2: 3}, rel=0.1)
    assert [bracket(number, 2, 3) for number in range(8)] == [bracket(number, 2, 3) for number in range(8)]


def test_only_trainings_of_one_bracket_compete_and_the_last_prunes_nothing() -> None:
    by_bracket = {s: [number for number in range(200) if bracket(number, 2, 3) == s] for s in range(3)}
    better = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[0][:5]]
    bad = {100: 9.0, 300: 9.0}
    assert ends(HYPERBAND, better, run(by_bracket[0][5], {100: 9.0}, "running"))
    assert not ends(HYPERBAND, better, run(by_bracket[1][5], bad, "running"))
    second = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[1][:5]]
    assert not ends(HYPERBAND, second, run(by_bracket[1][5], {100: 9.0}, "running"))
    assert ends(HYPERBAND, second, run(by_bracket[1][5], bad, "running"))
    last = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[2][:5]]
    assert not ends(HYPERBAND, last, run(by_bracket[2][5], bad, "running"))


def test_a_promoted_training_stays_in_its_bracket() -> None:
    number = next(n for n in range(200) if bracket(n, 2, 3) == 0)
    follower = next(n for n in range(200, 400) if bracket(n, 2, 3) == 2)
    others = [n for n in range(number + 1, 199) if bracket(n, 2, 3) == 0][:5]
    history = [run(number, {100: 2.0}), *(run(n, {100: 3.0 + n, 300: 1.0}, "complete") for n in others)]
    assert promotable(HYPERBAND, history, LONGEST) == number
    assert ends(HYPERBAND, history, run(follower, {100: 2.0, 300: 1.5}, "running", continues=number))


# Median


def test_the_median_reads_curves_between_their_validations() -> None:
    complete = [run(number, {90: 4.0, 190: 2.0, 900: 1.0}, "complete") for number in range(3)]
    # At 140 rows the others were at 3.0, though none of them validated there.
    assert ends(MEDIAN, complete, run(7, {140: 3.1}, "running"))
    assert not ends(MEDIAN, complete, run(7, {140: 2.9}, "running"))
    assert not ends(MEDIAN, complete, run(7, {70: 9.0, 95: 9.0}, "running"))  # before the first fraction
    assert not ends(MEDIAN, complete[:2], run(7, {140: 9.0}, "running"))  # too few to know
    # The best so far counts; at 600 rows the others were at 1.42.
    assert not ends(MEDIAN, complete, run(7, {120: 1.3, 600: 9.0}, "running"))
    assert ends(MEDIAN, complete, run(7, {120: 2.5, 600: 1.5}, "running"))


def test_the_median_stands_curves_that_are_no_numbers() -> None:
    complete = [run(number, {100: math.nan, 900: 1.0}, "complete") for number in range(2)]
    complete.append(run(2, {100: 2.0, 900: 1.0}, "complete"))
    assert not ends(MEDIAN, complete, run(7, {100: 3.0}, "running"))
    fine = [run(number, {100: 2.0, 900: 1.0}, "complete") for number in range(3)]
    assert ends(MEDIAN, fine, run(7, {100: math.nan}, "running"))


# Words


def test_descriptions() -> None:
    assert describe(ASHA, LONGEST) == "ASHA: one in 3 goes on at each rung (rows: 99, 297)"
    assert describe(HYPERBAND, LONGEST).startswith("asynchronous Hyperband: one in 3")
    assert describe(MEDIAN, LONGEST) == "worse than the median of complete trials, after 99 rows and 3 trials"
    assert describe(Pruner(kind="none"), LONGEST) == "none"
    assert "none before the end" in describe(Pruner(first=0.95), LONGEST)
