"""When a training is ended early, and when one that was is gone on with: functions of the curves so far."""

import math
from collections.abc import Mapping, Sequence

from optuna.pruners import MedianPruner
from optuna.trial import TrialState, create_trial

from ratchet.config_sweep import Pruner
from ratchet.records_sweep import Trial
from ratchet.studies.halving import Ladder, brackets, rungs
from ratchet.studies.lineage import Lineage, lineages
from ratchet.studies.shadow import finite, fresh_study, is_infeasible


def verdict(pruner: Pruner, history: Sequence[Trial], trial: Trial, longest_rows: int) -> str | None:
    """Why to end this training now; None: go on. To be asked after each of its validations.

    The same history gives the same answer. A training at its end is left alone: one that has learned from
    `longest_rows`, or done all steps of its `cost.planned_steps`.

    Args:
        pruner: Kind and its settings.
        history: All trials of the study; the record of this one may be older than `trial`.
        trial: With its curve up to the validation just done.
        longest_rows: Rows that the longest training of the study learns from.
    """
    if pruner.kind == "none" or not trial.curve or _is_at_its_end(trial, longest_rows):
        return None
    field = _field([trial, *(other for other in history if other.number != trial.number)])
    if pruner.kind == "median":
        return _below_median(pruner, field, trial, longest_rows)
    for ladder in _ladders(pruner, field, longest_rows):
        competes = any(trial.number in line.numbers for line in ladder.field)
        if competes and (place := ladder.lost(trial)) is not None:
            goes_on = place.among // pruner.reduction
            which = "the best" if goes_on == 1 else f"the best {goes_on}" if goes_on else f"one in {pruner.reduction}"
            return (
                f"validation loss {place.loss:.4g} after {place.rows} rows is number {place.rank} of {place.among}; "
                f"{pruner.kind} goes on with {which}"
            )
    return None


def promotable(pruner: Pruner, history: Sequence[Trial], longest_rows: int) -> int | None:
    """Number of a pruned trial that is among the best of its rung by now, to be gone on with from its checkpoint.

    One that is continued already, or was, is not named again; nor does `median` ever change its mind.
    """
    if pruner.kind in ("none", "median"):
        return None
    found = [ladder.promotable() for ladder in _ladders(pruner, _field(history), longest_rows)]
    return next((number for number in found if number is not None), None)


def most_promising(history: Sequence[Trial]) -> int | None:
    """Number of the pruned trial that has come farthest, the best of those, to be gone on with when nothing else is.

    One whose continuation failed is not named again.
    """
    found = []
    for line in lineages(history):
        last = line.trials[-1]
        if last.state == "pruned" and (curve := finite(line.curve)):
            rows = max(curve)
            found.append((-rows, curve[rows], last.number))
    return min(found)[2] if found else None


def describe(pruner: Pruner) -> str:
    """What ends trainings early, for people."""
    if pruner.kind == "none":
        return "none"
    if pruner.kind == "median":
        return f"median, from {pruner.first:g} of the longest training on, after {pruner.startup} trials"
    return f"{pruner.kind}: first rung at {pruner.first:g} of the longest training, one in {pruner.reduction} goes on"


def _is_at_its_end(trial: Trial, longest_rows: int) -> bool:
    cost = trial.cost
    return max(trial.curve) >= longest_rows or 0 < cost.planned_steps <= cost.steps


def _field(history: Sequence[Trial]) -> list[Lineage]:
    """The trainings that are compared: one that failed would keep a place at each rung that it passed, for nothing."""
    return [line for line in lineages(history) if line.competes]


def _ladders(pruner: Pruner, field: Sequence[Lineage], longest_rows: int) -> list[Ladder]:
    levels = rungs(pruner.first, pruner.reduction, longest_rows)
    if pruner.kind == "hyperband":
        return brackets(levels, pruner.reduction, field)
    return [Ladder(levels, pruner.reduction, tuple(field))]


def _below_median(pruner: Pruner, field: Sequence[Lineage], trial: Trial, longest_rows: int) -> str | None:
    """Optuna's rule: the best loss so far is worse than the median of complete trainings at the same number of rows.

    Optuna compares equal steps only, and trainings validate where their batch size lets them: the others' curves are
    read off at the rows of this one's last validation, on a line between theirs.
    """
    rows = max(trial.curve)
    study = fresh_study(1)
    for line in field:
        if line.told.state == "complete" and not is_infeasible(line.told) and trial.number not in line.numbers:
            value = _between(finite(line.curve), rows)
            study.add_trial(create_trial(value=0.0, intermediate_values={} if value is None else {rows: value}))
    judge = MedianPruner(
        n_startup_trials=pruner.startup,
        n_warmup_steps=math.ceil(pruner.first * longest_rows),
        interval_steps=1,
        n_min_trials=1,
    )
    running = create_trial(state=TrialState.RUNNING, intermediate_values=finite(trial.curve))
    if not judge.prune(study, running):
        return None
    best = min(finite(trial.curve).values())
    return f"best validation loss {best:.4g} after {rows} rows is worse than the median of complete trials"


def _between(curve: Mapping[int, float], rows: int) -> float | None:
    """A curve's value at a number of rows; its last one behind its end, None before its first validation."""
    if not curve or rows < min(curve):
        return None
    before = max(at for at in curve if at <= rows)
    after = min((at for at in curve if at >= rows), default=before)
    share = (rows - before) / (after - before) if after > before else 0.0
    return curve[before] + share * (curve[after] - curve[before])
