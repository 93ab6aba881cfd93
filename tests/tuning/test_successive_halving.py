"""Tests successive halving for any curves: its properties, the paper's own algorithm, and Optuna."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.sweep import PrunerSettings
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.pruners import (
    BRACKETS_OF,
    HyperbandBracket,
    build_brackets,
    compute_rungs,
    decide_pruning,
    find_promotable,
)
from ratchet.tuning.samplers import TrialLineage, group_by_lineage

Curve = dict[int, float]

LONGEST = 900
ASHA = PrunerSettings(kind="asha", min_resource_fraction=0.11, reduction_factor=3)  # rungs at 99 and 297 rows
# Rungs at 27, 54, 108, 216 and 432 rows.
HALVING = PrunerSettings(kind="asha", min_resource_fraction=0.03, reduction_factor=2)
HYPERBAND = PrunerSettings(kind="hyperband", min_resource_fraction=0.11, reduction_factor=3)
MEDIAN = PrunerSettings(kind="median", min_resource_fraction=0.11, n_startup_trials=3)


# Rungs


def test_rungs_grow_by_the_reduction_and_stop_where_nothing_would_be_saved() -> None:
    assert compute_rungs(0.11, 3, 900) == (99, 297)  # no rung at 891, because a training is almost complete there
    assert compute_rungs(0.2, 3, 1000) == (200, 600)
    assert compute_rungs(0.25, 2, 1000) == (250, 500)
    assert compute_rungs(0.01, 4, 1000) == (10, 40, 160, 640)
    assert compute_rungs(0.95, 3, 1000) == ()


def test_rungs_are_where_they_are_meant_to_be_whatever_floating_point_makes_of_it() -> None:
    assert compute_rungs(0.05, 3, 15_000) == (750, 2250, 6750)
    # In floating point, 0.1 x 3 x 3 and 0.3 x 3 are on different sides of 0.9.
    assert compute_rungs(0.1, 3, 1000) == (100, 300)
    assert compute_rungs(0.3, 3, 1000) == (300,)
    better = [Trial(number=n, values={}, run_id=str(n), state="complete", curve={2250: 1.0}) for n in range(3)]
    own = Trial(number=3, values={}, run_id="3", state="running", curve={768: 0.5, 2250: 2.0})
    assert decide_pruning(PrunerSettings(), better, own, 15_000) is not None


# Properties for any curves


@st.composite
def studies(draw: st.DrawFn) -> list[Curve]:
    """Draw the complete curves of some trainings in order of their start, with ties, infinities and irregular rows."""
    losses = st.one_of(st.floats(0, 5), st.sampled_from([1.0, 2.0, math.inf, math.nan]))
    every = st.sampled_from([25, 60, 100, 150, 320])
    found = []
    for _ in range(draw(st.integers(1, 20))):
        rows = range(gap := draw(every), LONGEST + 1, gap)
        found.append({at: draw(losses) for at in (*rows, LONGEST)})
    return found


def simulated(pruner: PrunerSettings, curves: Sequence[Curve]) -> list[Trial]:
    """Simulate one worker: it runs promotable trials first, then new ones, and judges each after each validation."""
    history: list[Trial] = []
    waiting = list(range(len(curves)))
    while True:
        number = find_promotable(pruner, history, LONGEST)
        if number is None and not waiting:
            return history
        which = waiting.pop(0) if number is None else history[number].values["k"]
        now = Trial(number=len(history), values={"k": which}, run_id="r", state="running", continues=number)
        state = "complete"
        for rows in sorted(curves[which]):
            now = now.model_copy(update={"curve": now.curve | {rows: curves[which][rows]}})
            reason = decide_pruning(pruner, history, now, LONGEST)
            assert reason == decide_pruning(pruner, [*history[::-1], now], now, LONGEST)
            if reason is not None:
                state = "pruned"
                break
        history.append(now.model_copy(update={"state": state, "objectives": (0.0,) if state == "complete" else ()}))
        assert len(history) <= 8 * len(curves)


def ladders(pruner: PrunerSettings, field: list[TrialLineage]) -> list[HyperbandBracket]:
    levels = compute_rungs(pruner.min_resource_fraction, pruner.reduction_factor, LONGEST)
    if pruner.kind == "hyperband":
        return build_brackets(levels, pruner.reduction_factor, field)
    return [HyperbandBracket(levels, pruner.reduction_factor, tuple(field))]


def reached(curve: Curve, rung: float) -> float | None:
    """Return the loss that counts at this rung; None if the curve does not reach it."""
    loss = next((loss for rows, loss in sorted(curve.items()) if rows >= rung), None)
    return None if loss is None else loss if math.isfinite(loss) else math.inf


def best_of(ladder: HyperbandBracket, rung: float) -> list[int]:
    """Return the first trials of the lineages that finally continue from a rung: the best floor(n / reduction) of n."""
    there = sorted((loss, line.first) for line in ladder.field if (loss := reached(line.curve, rung)) is not None)
    return [first for _, first in there[: len(there) // ladder.reduction]]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(studies(), st.sampled_from([ASHA, HYPERBAND, HALVING]))
def test_the_best_of_every_rung_are_continued_and_none_twice(curves: list[Curve], pruner: PrunerSettings) -> None:
    history = simulated(pruner, curves)
    assert all(count == 1 for count in Counter(one.continues for one in history if one.continues is not None).values())
    field = group_by_lineage(history)
    assert [line.first for line in field] == sorted({line.first for line in field})
    assert len(field) == len(curves)
    for line in field:
        states = [one.state for one in line.trials]
        assert states[:-1] == ["pruned"] * (len(states) - 1)
        # Each trial trains longer than the one before.
        assert all(max(one.curve) < max(next_one.curve) for one, next_one in pairwise(line.trials))
    for ladder in ladders(pruner, field):
        chosen = {rung: best_of(ladder, rung) for rung in ladder.rungs}
        for line in ladder.field:
            if line.decisive.state == "pruned":
                *_, before, last = (0, *line.curve)
                here = [rung for rung in ladder.rungs if before < rung <= last]
                assert here, "pruned between the rungs"
                assert any(line.first not in chosen[rung] for rung in here), "left, and among the best"


# Comparison with the paper


def algorithm_2(curves: Sequence[Curve], levels: Sequence[float], reduction: int) -> list[tuple[int, float]]:
    """Run asynchronous successive halving of Li et al. 2020; return one worker's jobs as training and rung."""
    told: dict[float, dict[int, float]] = {rung: {} for rung in levels}
    promoted: dict[float, set[int]] = {rung: set() for rung in levels}
    jobs: list[tuple[int, float]] = []
    begun = 0

    def get_job() -> tuple[int, float] | None:
        for rung, above in reversed([*pairwise(levels)]):
            candidates = sorted(told[rung], key=told[rung].__getitem__)[: len(told[rung]) // reduction]
            for training in candidates:
                if training not in promoted[rung]:
                    promoted[rung].add(training)
                    return training, above
        return (begun, levels[0]) if begun < len(curves) else None

    while (job := get_job()) is not None:
        training, rung = job
        begun += training == begun
        loss = reached(curves[training], rung)
        assert loss is not None
        told[rung][training] = loss
        jobs.append(job)
    return jobs


def jobs_of(history: Sequence[Trial], levels: Sequence[float]) -> list[tuple[int, float]]:
    """Return the jobs of a study: every rung that a trial reached and that its training had not reached before."""
    jobs: list[tuple[int, float]] = []
    for trial in history:
        new = [rung for rung in levels if reached(trial.curve, rung) is not None]
        jobs += [(trial.values["k"], rung) for rung in new if (trial.values["k"], rung) not in jobs]
    return jobs


def random_curves(seed: int, count: int, every: int = 50) -> list[Curve]:
    source = random.Random(seed)
    return [{rows: source.random() + 100 / rows for rows in range(every, LONGEST + 1, every)} for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "pruner",
    [
        ASHA,
        HALVING,
        PrunerSettings(min_resource_fraction=0.05, reduction_factor=3),
        PrunerSettings(min_resource_fraction=0.1, reduction_factor=4),
    ],
)
def test_one_worker_does_the_jobs_of_the_paper_in_its_order(pruner: PrunerSettings, seed: int) -> None:
    """A trial that is promoted at its rung continues at once; the paper's worker would choose the same next job."""
    curves = random_curves(seed, 40, every=10)
    levels = (*compute_rungs(pruner.min_resource_fraction, pruner.reduction_factor, LONGEST), LONGEST)
    expected = algorithm_2(curves, levels, pruner.reduction_factor)
    assert jobs_of(simulated(pruner, curves), levels) == expected
    assert Counter(rung for _, rung in expected)[levels[1]] >= 40 // pruner.reduction_factor


# Comparison with Optuna


def optunas(pruner: optuna.pruners.BasePruner) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.InMemoryStorage()
    return optuna.create_study(study_name=BRACKETS_OF, storage=storage, pruner=pruner)


def decisions(
    ours: PrunerSettings, theirs: optuna.pruners.BasePruner, curves: list[Curve]
) -> list[tuple[bool, bool, int]]:
    """Run a study with Optuna's pruner, which promotes no trial.

    Return its decision, ours, and how many trials had reached the rung, for each validation before the end. The number
    is 0 where the trial reached no rung.
    """
    study, found = optunas(theirs), []
    history: list[Trial] = []
    for number, curve in enumerate(curves):
        trial = study.ask()
        now = Trial(number=number, values={}, run_id=str(number), state="running")
        ended = False
        for rows, loss in curve.items():
            now = now.model_copy(update={"curve": now.curve | {rows: loss}})
            trial.report(loss, rows)
            if rows == LONGEST:
                break
            ended = trial.should_prune()
            found.append(
                (ended, decide_pruning(ours, history, now, LONGEST) is not None, _among(ours, [*history, now]))
            )
            if ended:
                break
        objectives = () if ended else (loss,)
        history.append(now.model_copy(update={"state": "pruned" if ended else "complete", "objectives": objectives}))
        study.tell(trial, None if ended else loss, state=optuna.trial.TrialState.PRUNED if ended else None)
    return found


def _among(pruner: PrunerSettings, history: list[Trial]) -> int:
    """Return how many trials reached the rung that the last one has just reached; 0 if it reached none."""
    curve = history[-1].curve
    *_, before, last = (0, *curve)
    for ladder in ladders(pruner, group_by_lineage(history)):
        if any(line.first == history[-1].number for line in ladder.field):
            for rung in ladder.rungs:
                if before < rung <= last:
                    return sum(reached(line.curve, rung) is not None for line in ladder.field)
    return 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        # Optuna has an additional rung at 891 rows. Only the final validation comes after it, and no trial is pruned
        # there.
        (ASHA, optuna.pruners.SuccessiveHalvingPruner(min_resource=99, reduction_factor=3)),
        (HYPERBAND, optuna.pruners.HyperbandPruner(min_resource=99, max_resource=LONGEST, reduction_factor=3)),
    ],
    ids=["asha", "hyperband"],
)
def test_where_enough_came_to_a_rung_we_decide_as_optuna_does(
    ours: PrunerSettings, theirs: optuna.pruners.BasePruner, seed: int
) -> None:
    """With fewer trials, Optuna continues the best, because it cannot resume it; we stop all, because we can."""
    found = decisions(ours, theirs, random_curves(seed, 40))
    enough = [(their, our) for their, our, among in found if among >= ours.reduction_factor]
    assert all(their == our for their, our in enough)
    assert set(enough) == {(True, True), (False, False)}
    few = [(their, our) for their, our, among in found if 0 < among < ours.reduction_factor]
    assert (False, True) in few
    assert all(our for _, our in few)
    assert {(their, our) for their, our, among in found if not among} == {(False, False)}  # between the rungs


@pytest.mark.parametrize("seed", range(5))
def test_the_median_is_optunas(seed: int) -> None:
    theirs = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=99)
    found = decisions(MEDIAN, theirs, random_curves(seed, 30))
    assert {(their, our) for their, our, _ in found} == {(True, True), (False, False)}
