"""Asynchronous successive halving, as rungs that trainings are compared at (Li et al. 2020, Algorithm 2).

The paper's workers leave a training at each rung and promote the best of those left. Here a training that is among the
best when it comes to a rung goes on at once, so that the model stays in memory; one that is not is left, and promoted
later if enough worse ones have come to that rung meanwhile. As in the paper one of `reduction` goes on, so the first to
come are left until there are others. (Optuna's pruner promotes none later, and so lets the best so far go on where
fewer than `reduction` have come: in a simulated search with TPE, which keeps finding new bests, ten of 24 trainings
went to the end, and a search cost twice as much.) Rungs count rows learned from.
"""

import math
from binascii import crc32
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from optuna.pruners import MedianPruner
from optuna.trial import TrialState, create_trial

from ratchet.config.sweep import PrunerSettings
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.in_memory_study import (
    TrialLineage,
    create_empty_study,
    group_by_lineage,
    is_infeasible,
    replace_non_finite,
)

LAST_RUNG = 0.9
"""Of the longest training: a rung there saves next to nothing, and costs a training that is as good as done.
(Without it 0.11 with reduction 3 would end two of three trainings after 99 % of their rows.)"""

DECIMALS = 6
"""Of rungs, in rows and in shares of the longest training."""

BRACKETS_OF = "ratchet"
"""Hashed together with a trial's number to choose its bracket."""


@dataclass(frozen=True)
class RungPosition:
    """Of one training among all that came to a rung."""

    rank: int
    """From 1, the best."""
    among: int
    loss: float
    """Validation loss there, in nats per token."""
    rows: int
    """Learned from when it was measured."""


@dataclass(frozen=True)
class HyperbandBracket:
    """Rungs, and the trainings that are compared on them."""

    rungs: tuple[float, ...]
    """Rows learned from, ascending."""
    reduction: int
    """One in so many goes on."""
    field: tuple[TrialLineage, ...]

    def place(self, line: TrialLineage, rung: float) -> RungPosition:
        """Of a training that came to this rung.

        Compared is the first validation at or behind the rung. What is not a number is worse than any; of equal ones
        the training that began first is better.
        """
        own = _first_validation_at(line.curve, rung)
        if own is None:
            raise ValueError(f"trial {line.first} has not come to {rung:g} rows")
        values = [
            (found[1], other.first)
            for other in self.field
            if (found := _first_validation_at(other.curve, rung)) is not None
        ]
        rank = 1 + sum(value < (own[1], line.first) for value in values if value[1] != line.first)
        among = len({first for _, first in values} | {line.first})
        return RungPosition(rank, among, own[1], own[0])

    def lost(self, trial: Trial) -> RungPosition | None:
        """The place that ends this training now: on a rung that it just came to, and not among the best there.

        Rungs that it was pruned at or before, and was promoted from, do not count again.
        """
        line = self._line(trial.number)
        for rung in self._just_reached(line, trial):
            place = self.place(line, rung)
            if place.rank > place.among // self.reduction:
                return place
        return None

    def promotable(self) -> int | None:
        """The pruned trial that is among the best of its rung by now: on the highest rung, the best of those."""
        found = []
        for line in self.field:
            last = line.trials[-1]
            rungs = self._just_reached(line, last) if last.state == "pruned" else []
            places = [self.place(line, rung) for rung in rungs]
            if places and all(place.rank <= place.among // self.reduction for place in places):
                found.append((-rungs[-1], places[-1].rank, last.number))
        return min(found)[2] if found else None

    def _line(self, number: int) -> TrialLineage:
        return next(line for line in self.field if number in line.numbers)

    def _just_reached(self, line: TrialLineage, trial: Trial) -> list[float]:
        """Rungs between the trial's last validation and the one before, without those that it was promoted from."""
        before = [rows for earlier in line.trials if earlier.number < trial.number for rows in earlier.curve]
        now = max(trial.curve, default=0)
        past = max([*before, *(rows for rows in line.curve if rows < now)], default=0)
        return [rung for rung in self.rungs if past < rung <= now]


def compute_rungs(first: float, reduction: int, longest: int) -> tuple[float, ...]:
    """Rows at which trainings are compared: `first` x `longest`, and `reduction` times as many from rung to rung.

    All below `LAST_RUNG`. Rounded to what was meant: 3 x 0.05 x 15,000 is 2250.0000000000005 in floating point, and a
    validation after 2,250 rows would not be on it.
    """
    shares = [first]
    while round(shares[-1], DECIMALS) < LAST_RUNG:
        shares.append(shares[-1] * reduction)
    return tuple(round(share * longest, DECIMALS) for share in shares[:-1])


def bracket_index(number: int, levels: int, reduction: int) -> int:
    """Which bracket of Hyperband a training belongs to, from 0, by the number of its first trial.

    A training in bracket s skips the lowest s of `levels` rungs; the last bracket prunes nothing, in case the
    beginning of a curve says little of its end. Each gets its share of n = ceil((levels + 1) / (s + 1) *
    reduction^s) trainings (Li et al. 2018, Algorithm 1; there s counts the other way), evenly scattered by a checksum,
    as Optuna does it.
    """
    count = levels + 1
    shares = [ceil(count * reduction ** (count - 1 - s) / (count - s)) for s in range(count)]
    left = crc32(f"{BRACKETS_OF}_{number}".encode()) % sum(shares)
    for s, share in enumerate(shares):
        if left < share:
            return s
        left -= share
    raise AssertionError("unreachable: the remainder is below the sum of all shares")


def build_brackets(all_rungs: Sequence[float], reduction: int, field: Sequence[TrialLineage]) -> list[HyperbandBracket]:
    """The ladders of asynchronous Hyperband, each with the trainings that belong to it."""
    levels = len(all_rungs)
    belong = [(bracket_index(line.first, levels, reduction), line) for line in field]
    return [
        HyperbandBracket(tuple(all_rungs[s:]), reduction, tuple(line for s_of, line in belong if s_of == s))
        for s in range(levels + 1)
    ]


def _first_validation_at(curve: Mapping[int, float], rung: float) -> tuple[int, float] | None:
    """The first validation at or behind a rung: rows, loss."""
    found = next(((rows, loss) for rows, loss in curve.items() if rows >= rung), None)
    if found is None:
        return None
    return found if math.isfinite(found[1]) else (found[0], math.inf)


# When a training is ended early, and when one that was is gone on with: functions of the curves so far.


def decide_pruning(pruner: PrunerSettings, history: Sequence[Trial], trial: Trial, longest_rows: int) -> str | None:
    """Why to end this training now; None: go on. To be asked after each of its validations.

    The same history gives the same answer. A training at its end is left alone: one that has learned from
    `longest_rows`, or done all steps of its `cost.planned_steps`.

    Args:
        pruner: Kind and its settings.
        history: All trials of the study; the record of this one may be older than `trial`.
        trial: With its curve up to the validation just done.
        longest_rows: Rows that the longest training of the study learns from.
    """
    if pruner.kind == "none" or not trial.curve or _is_fully_trained(trial, longest_rows):
        return None
    field = _competing_lineages([trial, *(other for other in history if other.number != trial.number)])
    if pruner.kind == "median":
        return _check_median(pruner, field, trial, longest_rows)
    for ladder in _make_brackets(pruner, field, longest_rows):
        competes = any(trial.number in line.numbers for line in ladder.field)
        if competes and (place := ladder.lost(trial)) is not None:
            goes_on = place.among // pruner.reduction
            which = "the best" if goes_on == 1 else f"the best {goes_on}" if goes_on else f"one in {pruner.reduction}"
            return (
                f"validation loss {place.loss:.4g} after {place.rows} rows is number {place.rank} of {place.among}; "
                f"{pruner.kind} goes on with {which}"
            )
    return None


def find_promotable(pruner: PrunerSettings, history: Sequence[Trial], longest_rows: int) -> int | None:
    """Number of a pruned trial that is among the best of its rung by now, to be gone on with from its checkpoint.

    One that is continued already, or was, is not named again; nor does `median` ever change its mind.
    """
    if pruner.kind in ("none", "median"):
        return None
    found = [ladder.promotable() for ladder in _make_brackets(pruner, _competing_lineages(history), longest_rows)]
    return next((number for number in found if number is not None), None)


def find_most_promising(history: Sequence[Trial]) -> int | None:
    """Number of the pruned trial that has come farthest, the best of those, to be gone on with when nothing else is.

    One whose continuation failed is not named again.
    """
    found = []
    for line in group_by_lineage(history):
        last = line.trials[-1]
        if last.state == "pruned" and (curve := replace_non_finite(line.curve)):
            rows = max(curve)
            found.append((-rows, curve[rows], last.number))
    return min(found)[2] if found else None


def describe(pruner: PrunerSettings) -> str:
    """What ends trainings early, for people."""
    if pruner.kind == "none":
        return "none"
    if pruner.kind == "median":
        return f"median, from {pruner.first:g} of the longest training on, after {pruner.startup} trials"
    return f"{pruner.kind}: first rung at {pruner.first:g} of the longest training, one in {pruner.reduction} goes on"


def _is_fully_trained(trial: Trial, longest_rows: int) -> bool:
    cost = trial.cost
    return max(trial.curve) >= longest_rows or 0 < cost.planned_steps <= cost.steps


def _competing_lineages(history: Sequence[Trial]) -> list[TrialLineage]:
    """The trainings that are compared: one that failed would keep a place at each rung that it passed, for nothing."""
    return [line for line in group_by_lineage(history) if line.competes]


def _make_brackets(pruner: PrunerSettings, field: Sequence[TrialLineage], longest_rows: int) -> list[HyperbandBracket]:
    levels = compute_rungs(pruner.first, pruner.reduction, longest_rows)
    if pruner.kind == "hyperband":
        return build_brackets(levels, pruner.reduction, field)
    return [HyperbandBracket(levels, pruner.reduction, tuple(field))]


def _check_median(pruner: PrunerSettings, field: Sequence[TrialLineage], trial: Trial, longest_rows: int) -> str | None:
    """Optuna's rule: the best loss so far is worse than the median of complete trainings at the same number of rows.

    Optuna compares equal steps only, and trainings validate where their batch size lets them: the others' curves are
    read off at the rows of this one's last validation, on a line between theirs.
    """
    rows = max(trial.curve)
    study = create_empty_study(1)
    for line in field:
        if line.told.state == "complete" and not is_infeasible(line.told) and trial.number not in line.numbers:
            value = _interpolate(replace_non_finite(line.curve), rows)
            study.add_trial(create_trial(value=0.0, intermediate_values={} if value is None else {rows: value}))
    judge = MedianPruner(
        n_startup_trials=pruner.startup,
        n_warmup_steps=math.ceil(pruner.first * longest_rows),
        interval_steps=1,
        n_min_trials=1,
    )
    running = create_trial(state=TrialState.RUNNING, intermediate_values=replace_non_finite(trial.curve))
    if not judge.prune(study, running):
        return None
    best = min(replace_non_finite(trial.curve).values())
    return f"best validation loss {best:.4g} after {rows} rows is worse than the median of complete trials"


def _interpolate(curve: Mapping[int, float], rows: int) -> float | None:
    """A curve's value at a number of rows; its last one behind its end, None before its first validation."""
    if not curve or rows < min(curve):
        return None
    before = max(at for at in curve if at <= rows)
    after = min((at for at in curve if at >= rows), default=before)
    share = (rows - before) / (after - before) if after > before else 0.0
    return curve[before] + share * (curve[after] - curve[before])
