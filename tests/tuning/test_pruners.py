"""Tests pruning with tables written by hand: which trials end, why, and which are continued later."""

import math
from collections import Counter
from typing import Any

import pytest

from ratchet.config.sweep import PrunerSettings
from ratchet.storage.records.sweep import TrainingCost, Trial
from ratchet.tuning.pruners import bracket_index, decide_pruning, describe, find_most_promising, find_promotable

LONGEST = 900
ASHA = PrunerSettings(kind="asha", min_resource_fraction=0.11, reduction_factor=3)  # rungs at 99 and 297 rows
HYPERBAND = PrunerSettings(kind="hyperband", min_resource_fraction=0.11, reduction_factor=3)
MEDIAN = PrunerSettings(kind="median", min_resource_fraction=0.11, n_startup_trials=3)


def run(number: int, curve: dict[int, float], state: str = "pruned", **fields: Any) -> Trial:
    """Build a trial with this curve."""
    if state == "complete":
        fields["objectives"] = (min(curve.values()),)
    return Trial(number=number, values={"k": number}, run_id=str(number), state=state, curve=curve, **fields)


def ends(pruner: PrunerSettings, history: list[Trial], trial: Trial) -> bool:
    return decide_pruning(pruner, history, trial, LONGEST) is not None


# A table of asynchronous successive halving


@pytest.mark.parametrize(
    ("others", "loss", "pruned"),
    [
        ([], 0.1, True),  # one in three continues, and there are not three yet
        ([2.0], 1.9, True),
        ([2.0, 3.0], 1.0, False),  # the best of three
        ([2.0, 3.0], 2.5, True),
        ([2.0, 3.0, 4.0, 5.0], 1.9, False),  # still one of five
        ([2.0, 3.0, 4.0, 5.0], 2.5, True),
        ([2.0, 3.0, 4.0, 5.0, 6.0], 2.5, False),  # the second of six; two continue
        ([2.0, 3.0, 4.0, 5.0, 6.0], 3.5, True),
        ([2.0, 3.0], 2.0, True),  # of equal losses, the earlier one is better
        ([math.nan, math.inf], 8.0, False),  # NaN and infinity count as worse than any number
        ([math.inf, math.nan], math.nan, True),
        ([2.0, 3.0], math.inf, True),
    ],
)
def test_trials_that_pass_the_first_rung(others: list[float], loss: float, pruned: bool) -> None:
    history = [run(number, {100: value}, "running") for number, value in enumerate(others)]
    assert ends(ASHA, history, run(20, {100: loss}, "running")) is pruned


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (0, "validation loss 2.75 after 120 rows is number 1 of 1; asha continues one in 3"),
        (1, "validation loss 2.75 after 120 rows is number 2 of 2; asha continues one in 3"),
        (3, "validation loss 2.75 after 120 rows is number 3 of 4; asha continues the best"),
        (6, "validation loss 2.75 after 120 rows is number 3 of 7; asha continues the best 2"),
    ],
)
def test_the_reason_says_where_it_stood(others: int, reason: str) -> None:
    losses = [2.0, 3.0, 2.5, 4.0, 5.0, 6.0][:others]
    history = [run(number, {100: loss}, "running") for number, loss in enumerate(losses)]
    assert decide_pruning(ASHA, history, run(9, {50: 4.0, 120: 2.75}, "running"), LONGEST) == reason


def test_judged_is_the_first_validation_at_or_behind_a_rung_and_no_other() -> None:
    better = [run(number, {100: 1.0, 300: 0.5}, "complete") for number in range(3)]
    bad = {40: 9.0}
    assert not ends(ASHA, better, run(7, bad, "running"))  # before the first rung
    assert ends(ASHA, better, run(7, {**bad, 99: 9.0}, "running"))  # at the rung
    assert not ends(ASHA, better, run(7, {**bad, 99: 0.9, 200: 9.0}, "running"))  # between the rungs
    assert ends(ASHA, better, run(7, {**bad, 99: 0.9, 200: 9.0, 310: 9.0}, "running"))
    # The others count with their loss at this rung, not with a later loss.
    late = [run(number, {100: 5.0, 300: 0.1}, "complete") for number in range(2)]
    assert not ends(ASHA, late, run(7, {100: 4.0}, "running"))


def test_a_validation_behind_two_rungs_is_judged_at_both() -> None:
    history = [run(0, {100: 1.0}, "pruned"), run(1, {400: 5.0}, "running"), run(2, {400: 6.0}, "running")]
    assert ends(
        ASHA, history, run(3, {400: 4.0}, "running")
    )  # best of three at the second rung, second of four at the first
    assert not ends(ASHA, history, run(3, {400: 0.5}, "running"))
    history[2] = run(2, {100: 6.0}, "pruned")
    assert ends(ASHA, history, run(3, {400: 0.5}, "running"))  # best of four at the first rung, of two at the second


def test_a_training_at_its_end_is_left_alone() -> None:
    better = [run(number, {100: 1.0, 300: 0.5}, "complete") for number in range(3)]
    assert not ends(ASHA, better, run(7, {80: 9.0, 900: 9.0}, "running"))
    done = TrainingCost(steps=10, planned_steps=10)
    assert not ends(ASHA, better, run(7, {300: 9.0}, "running", cost=done))
    assert ends(ASHA, better, run(7, {300: 9.0}, "running", cost=TrainingCost(steps=9, planned_steps=10)))


def test_without_a_curve_or_a_pruner_nothing_ends() -> None:
    better = [run(number, {100: 1.0}, "complete") for number in range(3)]
    assert not ends(ASHA, better, run(7, {}, "running"))
    assert not ends(PrunerSettings(kind="none"), better, run(7, {100: 9.0}, "running"))
    assert find_promotable(PrunerSettings(kind="none"), [run(0, {100: 1.0})], LONGEST) is None


@pytest.mark.parametrize("state", ["failed", "infeasible"])
def test_one_that_came_to_nothing_takes_no_place_and_is_none_of_those_that_came(state: str) -> None:
    lost = run(0, {100: 0.1}, state)
    assert not ends(ASHA, [lost, run(1, {100: 3.0}), run(2, {100: 4.0})], run(9, {100: 2.0}, "running"))
    assert ends(ASHA, [lost, run(1, {100: 3.0})], run(9, {100: 2.0}, "running"))  # the best of two
    again = run(5, {}, "running", continues=0)  # a trial that is tried again counts with its earlier loss
    assert ends(ASHA, [lost, again, run(1, {100: 3.0}), run(2, {100: 4.0})], run(9, {100: 2.0}, "running"))


# Promotion


def test_a_pruned_one_is_promoted_when_enough_worse_ones_came_to_its_rung() -> None:
    history = [run(0, {100: 1.0}, "complete"), run(1, {100: 2.0}), run(2, {100: 3.0}), run(3, {100: 4.0})]
    assert find_promotable(ASHA, history, LONGEST) is None
    history += [run(4, {100: 5.0}), run(5, {100: 6.0}, "running")]
    assert find_promotable(ASHA, history, LONGEST) == 1
    # A trial that is or was continued is not proposed again, whatever the result.
    for state in ("running", "complete", "failed", "infeasible"):
        again = run(6, {} if state == "running" else {100: 2.0, 300: 1.0}, state, continues=1)
        assert find_promotable(ASHA, [*history, again], LONGEST) is None


def test_one_that_was_left_behind_two_rungs_at_once_has_to_be_among_the_best_of_both() -> None:
    history = [run(0, {400: 2.0}), run(1, {100: 1.0, 300: 3.0}, "complete"), run(2, {100: 1.5, 300: 4.0}, "complete")]
    assert find_promotable(ASHA, history, LONGEST) is None  # best of three at the second rung, but not at the first
    history += [run(number, {100: 9.0}) for number in range(3, 9)]
    assert find_promotable(ASHA, history, LONGEST) == 0  # third of nine


def test_a_promoted_one_is_not_pruned_at_that_rung_again_but_at_the_next() -> None:
    pruned = run(1, {50: 4.0, 120: 2.0})
    others = [run(n, {100: 0.1 * n, 300: 0.5 + n}, "complete") for n in (0, 2)]
    others += [run(n, {100: 0.1 * n}) for n in range(3, 6)]
    others.append(run(6, {100: 0.6, 300: 0.7}, "running"))
    history = [*others, pruned]
    for curve in ({50: 4.0}, {50: 4.0, 120: 2.0}, {50: 4.0, 120: 2.0, 200: 1.9}):
        assert ends(ASHA, others, run(1, curve, "running")) is (120 in curve and 200 not in curve)
        assert not ends(ASHA, history, run(9, curve, "running", continues=1))
    behind = {50: 4.0, 120: 2.0, 200: 1.9, 300: 1.8}
    assert ends(ASHA, history, run(9, behind, "running", continues=1))
    assert ends(ASHA, history, run(9, {300: 1.8}, "running", continues=1))  # only new validations were reported
    assert not ends(ASHA, history, run(9, {**behind, 300: 0.2}, "running", continues=1))  # the best of four


def test_the_first_to_come_to_a_rung_are_promoted_once_there_are_enough() -> None:
    history = [run(0, {100: 3.0}), run(1, {100: 2.0})]
    assert (
        find_promotable(ASHA, [*history, run(2, {100: 4.0}, "running")], LONGEST) == 1
    )  # a running trial reached the rung as well
    # Trial 2 has not reached the rung.
    assert find_promotable(ASHA, [*history, run(2, {50: 1.0}, "running")], LONGEST) is None
    assert (
        find_promotable(ASHA, [*history, run(2, {100: 1.0}, "complete")], LONGEST) is None
    )  # the best one continued without a stop


# Hyperband


def test_brackets_have_the_shares_of_hyperband() -> None:
    counts = Counter(bracket_index(number, 2, 3) for number in range(17_000))
    assert {s: count / 1000 for s, count in counts.items()} == pytest.approx({0: 9, 1: 5, 2: 3}, rel=0.1)


def test_only_trainings_of_one_bracket_compete_and_the_last_prunes_nothing() -> None:
    by_bracket = {s: [number for number in range(200) if bracket_index(number, 2, 3) == s] for s in range(3)}
    better = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[0][:5]]
    bad = {100: 9.0, 300: 9.0}
    assert ends(HYPERBAND, better, run(by_bracket[0][5], {100: 9.0}, "running"))
    worse = [run(number, {300: 9.5}) for number in by_bracket[1][:2]]
    # The best of the three in its bracket.
    assert not ends(HYPERBAND, better + worse, run(by_bracket[1][5], bad, "running"))
    assert ends(HYPERBAND, better + worse[:1], run(by_bracket[1][5], bad, "running"))
    second = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[1][:5]]
    assert not ends(HYPERBAND, second, run(by_bracket[1][5], {100: 9.0}, "running"))
    assert ends(HYPERBAND, second, run(by_bracket[1][5], bad, "running"))
    last = [run(number, {100: 1.0, 300: 1.0}, "complete") for number in by_bracket[2][:5]]
    assert not ends(HYPERBAND, last, run(by_bracket[2][5], bad, "running"))


def test_a_promoted_training_stays_in_its_bracket() -> None:
    number = next(n for n in range(200) if bracket_index(n, 2, 3) == 0)
    follower = next(n for n in range(200, 400) if bracket_index(n, 2, 3) == 2)
    others = [n for n in range(number + 1, 199) if bracket_index(n, 2, 3) == 0][:5]
    history = [run(number, {100: 2.0}), *(run(n, {100: 3.0 + n, 300: 1.0}, "complete") for n in others)]
    assert find_promotable(HYPERBAND, history, LONGEST) == number
    assert ends(HYPERBAND, history, run(follower, {100: 2.0, 300: 1.5}, "running", continues=number))


# Median


def test_the_median_reads_curves_between_their_validations() -> None:
    complete = [run(number, {90: 4.0, 190: 2.0, 900: 1.0}, "complete") for number in range(3)]
    # The others have an interpolated loss of 3.0 at 140 rows, although none of them validated there.
    assert ends(MEDIAN, complete, run(7, {140: 3.1}, "running"))
    assert not ends(MEDIAN, complete, run(7, {140: 2.9}, "running"))
    assert not ends(MEDIAN, complete, run(7, {70: 9.0, 95: 9.0}, "running"))  # before the first fraction
    assert not ends(MEDIAN, complete[:2], run(7, {140: 9.0}, "running"))  # too few trials to decide
    # The best loss so far counts; at 600 rows the others have 1.42.
    assert not ends(MEDIAN, complete, run(7, {120: 1.3, 600: 9.0}, "running"))
    assert ends(MEDIAN, complete, run(7, {120: 2.5, 600: 1.5}, "running"))


def test_the_median_handles_nan() -> None:
    complete = [run(number, {100: math.nan, 900: 1.0}, "complete") for number in range(2)]
    complete.append(run(2, {100: 2.0, 900: 1.0}, "complete"))
    assert not ends(MEDIAN, complete, run(7, {100: 3.0}, "running"))
    fine = [run(number, {100: 2.0, 900: 1.0}, "complete") for number in range(3)]
    assert ends(MEDIAN, fine, run(7, {100: math.nan}, "running"))


# Continuation when no new trial is left


def test_the_most_promising_is_the_best_of_those_that_came_farthest() -> None:
    low = [run(0, {100: 0.5}), run(1, {100: 0.1})]
    assert find_most_promising(low) == 1
    far = [run(2, {100: 3.0, 300: 2.0}), run(3, {100: 3.0, 300: 1.5}), run(4, {100: 0.1, 300: 1.5})]
    assert find_most_promising(low + far) == 3  # by the last loss, not the best one; of equal losses the earlier trial
    assert find_most_promising([*far[::-1], *low]) == 3


def test_without_anything_pruned_there_is_none() -> None:
    assert find_most_promising([]) is None
    others = [run(0, {900: 1.0}, "complete"), run(1, {100: 1.0}, "running"), run(2, {100: 1.0}, "failed")]
    assert find_most_promising([*others, run(3, {100: 1.0}, "infeasible"), run(4, {})]) is None


@pytest.mark.parametrize("state", ["running", "complete", "failed", "infeasible"])
def test_one_that_is_or_was_continued_is_not_named_again(state: str) -> None:
    history = [run(0, {100: 1.0}), run(1, {100: 2.0}), run(2, {100: 1.0, 300: 0.5}, state, continues=0)]
    assert find_most_promising(history) == 1
    assert find_most_promising([history[0], history[2]]) is None
    again = [run(0, {100: 1.0}), run(1, {100: 0.5}), run(2, {300: 5.0}, continues=0)]  # pruned again
    assert find_most_promising(again) == 2


def test_nan_comes_last_among_those_that_came_as_far() -> None:
    broken = [run(0, {100: math.nan}), run(1, {100: math.inf}), run(2, {100: 9.0})]
    assert find_most_promising(broken) == 2
    assert find_most_promising(broken[:2]) == 0
    # It was trained longer than the others.
    assert find_most_promising([*broken, run(3, {100: 1.0, 300: math.nan})]) == 3


# Texts


def test_descriptions() -> None:
    assert (
        describe(ASHA)
        == f"asha: first rung at {ASHA.min_resource_fraction:g} of the longest training, one in 3 continues"
    )
    assert describe(HYPERBAND).startswith("hyperband: first rung at")
    assert describe(MEDIAN).endswith(f"of the longest training on, after {MEDIAN.n_startup_trials} trials")
    assert describe(PrunerSettings(kind="none")) == "none"
