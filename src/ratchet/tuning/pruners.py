"""Pruners: asynchronous successive halving (Li et al. 2020, Algorithm 2), Hyperband and the median rule.

A rung is a number of processed rows at which trainings are compared. In the paper, workers pause each training at a
rung, and promote the best paused trainings. Here, a training that is among the best when it reaches a rung continues at
once, so that the model stays in memory. Any other training is paused (its trial is "pruned"), and promoted later if
enough worse trainings have reached the rung. As in the paper, one of `reduction` trainings continues, so the first
trainings at a rung are paused until `reduction` trainings have reached it. (Optuna's pruner promotes no training later.
So it lets the best training continue while fewer than `reduction` trainings have reached the rung. TPE keeps finding
new bests: in a simulated search with TPE and Optuna's pruner, ten of 24 trainings ran to the end, and the search cost
twice as much.)
"""

import math
from binascii import crc32
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from ratchet.config.sweep import PrunerSettings
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.samplers import (
    TrialLineage,
    group_by_lineage,
    is_infeasible,
    replace_non_finite,
)

LAST_RUNG = 0.9
"""Share of the longest training from which on there is no rung, because pruning there would save almost nothing.
(Without this limit, a first rung at 0.11 with reduction 3 would lead to a rung at 0.99, which would end two of three
trainings after 99 % of their rows.)"""

DECIMALS = 6
"""Number of decimals to which rungs are rounded, both in rows and in shares of the longest training."""

BRACKETS_OF = "ratchet"
"""Text that is hashed with a trial's number to choose its bracket."""


def decide_pruning(pruner: PrunerSettings, history: Sequence[Trial], trial: Trial, longest_rows: int) -> str | None:
    """Return the reason to prune this training now; None to continue it. Call this function after each validation.

    The same history gives the same result. A training that has processed `longest_rows`, or done all of its
    `cost.planned_steps`, is complete, and is not pruned. The record of this trial in `history` may be older than
    `trial`; `longest_rows` is the length of the longest training of the study, in rows.
    """
    if pruner.kind == "none" or not trial.curve:
        return None
    if max(trial.curve) >= longest_rows or 0 < trial.cost.planned_steps <= trial.cost.steps:  # fully trained
        return None
    field = _competing_lineages([trial, *(other for other in history if other.number != trial.number)])
    if pruner.kind == "median":
        return _check_median(pruner, field, trial, longest_rows)
    for bracket in _make_brackets(pruner, field, longest_rows):
        competes = any(trial.number in line.numbers for line in bracket.field)
        if competes and (position := bracket.find_losing_position(trial)) is not None:
            promoted = position.count // pruner.reduction_factor
            winners = f"the best {promoted}" if promoted > 1 else "the best"
            if not promoted:
                winners = f"one in {pruner.reduction_factor}"
            return (
                f"validation loss {position.loss:.4g} after {position.rows} rows is number {position.rank} of "
                f"{position.count}; {pruner.kind} continues {winners}"
            )
    return None


def find_promotable(pruner: PrunerSettings, history: Sequence[Trial], longest_rows: int) -> int | None:
    """Return the number of a pruned trial to continue, because it is now among the best at its rung; None if none is.

    A continued trial is not returned again. The median rule promotes no trial.
    """
    if pruner.kind in ("none", "median", "freeze_thaw"):
        return None
    numbers = [
        bracket.find_promotable() for bracket in _make_brackets(pruner, _competing_lineages(history), longest_rows)
    ]
    return next((number for number in numbers if number is not None), None)


def find_most_promising(history: Sequence[Trial]) -> int | None:
    """Return the number of a pruned trial to continue as a last resort; None if there is no pruned trial.

    It is the trial with the most processed rows; of several trials, the one with the lowest loss after these rows.

    If the continuation of a trial has failed, or if a person has stopped or paused it, the trial is not returned.
    """
    candidates = []
    for line in group_by_lineage(history):
        last = line.trials[-1]
        if last.state == "pruned" and not last.decision and (curve := replace_non_finite(line.curve)):
            rows = max(curve)
            candidates.append((-rows, curve[rows], last.number))
    return min(candidates)[2] if candidates else None


def describe(pruner: PrunerSettings) -> str:
    """Return the pruner as text."""
    if pruner.kind == "none":
        return "none"
    if pruner.kind == "median":
        start = f"{pruner.min_resource_fraction:g} of the longest training"
        return f"median, from {start} on, after {pruner.n_startup_trials} trials"
    first_rung = f"first rung at {pruner.min_resource_fraction:g} of the longest training"
    if pruner.kind == "freeze_thaw":
        return f"freeze-thaw: {first_rung}, each later one after twice as many rows"
    return f"{pruner.kind}: {first_rung}, one in {pruner.reduction_factor} continues"


def _competing_lineages(history: Sequence[Trial]) -> list[TrialLineage]:
    """Return the trainings that are compared, without failed and infeasible ones, which would occupy ranks."""
    return [line for line in group_by_lineage(history) if line.competes]


# Successive halving and Hyperband: rungs, brackets and ranks.


@dataclass(frozen=True)
class RungPosition:
    """Rank of a training among all that reached a rung."""

    rank: int
    """Rank from 1, the best."""
    count: int
    """Number of trainings that reached the rung."""
    loss: float
    """Loss of the training's first validation at or after the rung, in nats per token."""
    rows: int
    """Number of processed rows at this validation."""


@dataclass(frozen=True)
class HyperbandBracket:
    """Rungs, and the trainings that are compared at them."""

    rungs: tuple[float, ...]
    """Rungs in processed rows, ascending."""
    reduction: int
    """One of this number of trainings continues at each rung."""
    field: tuple[TrialLineage, ...]
    """Trainings that are compared at the rungs."""

    def rank(self, line: TrialLineage, rung: float) -> RungPosition:
        """Return the rank of a training that has reached a rung.

        The first validation at or after the rung is compared. A loss that is not finite is the worst. If losses are
        equal, the training that began first is better.
        """
        own = _first_validation_at(line.curve, rung)
        if own is None:
            raise ValueError(f"trial {line.first} has not reached {rung:g} rows")
        values = [
            (validation[1], other.first)
            for other in self.field
            if (validation := _first_validation_at(other.curve, rung)) is not None
        ]
        rank = 1 + sum(value < (own[1], line.first) for value in values if value[1] != line.first)
        count = len({first for _, first in values} | {line.first})
        return RungPosition(rank, count, own[1], own[0])

    def find_losing_position(self, trial: Trial) -> RungPosition | None:
        """Return the position because of which a trial must be pruned; None if it is among the best at all its rungs.

        Only rungs that the trial has just reached count, not those from which it was promoted.
        """
        line = next(line for line in self.field if trial.number in line.numbers)
        for rung in self._just_reached(line, trial):
            position = self.rank(line, rung)
            if position.rank > position.count // self.reduction:
                return position
        return None

    def find_promotable(self) -> int | None:
        """Return the number of a pruned trial that is now among the best at its rung; None if there is none.

        Of several trials, it is the best one at the highest rung.
        """
        promotable = []
        for line in self.field:
            last = line.trials[-1]
            rungs = self._just_reached(line, last) if last.state == "pruned" and not last.decision else []
            positions = [self.rank(line, rung) for rung in rungs]
            if positions and all(position.rank <= position.count // self.reduction for position in positions):
                promotable.append((-rungs[-1], positions[-1].rank, last.number))
        return min(promotable)[2] if promotable else None

    def _just_reached(self, line: TrialLineage, trial: Trial) -> list[float]:
        """Return the rungs between the trial's last two validations, without rungs from which it was promoted."""
        before = [rows for earlier in line.trials if earlier.number < trial.number for rows in earlier.curve]
        now = max(trial.curve, default=0)
        past = max([*before, *(rows for rows in line.curve if rows < now)], default=0)
        return [rung for rung in self.rungs if past < rung <= now]


def compute_rungs(first: float, reduction: int, longest: int) -> tuple[float, ...]:
    """Return the rows at which trainings are compared: `first` x `longest`, times `reduction` from rung to rung.

    All rungs are below `LAST_RUNG` x `longest`. They are rounded, because 3 x 0.05 x 15,000 is 2250.0000000000005 in
    floating point, and a validation after 2,250 rows would be too early.
    """
    shares = [first]
    while round(shares[-1], DECIMALS) < LAST_RUNG:
        shares.append(shares[-1] * reduction)
    return tuple(round(share * longest, DECIMALS) for share in shares[:-1])


def bracket_index(number: int, levels: int, reduction: int) -> int:
    """Return the Hyperband bracket of a training, from 0, by the number of its first trial.

    A training in bracket s skips the lowest s of `levels` rungs. The last bracket prunes nothing, in case the start of
    a curve does not predict its end. The share of a bracket is n = ceil((levels + 1) / (s + 1) * reduction^s) trainings
    (Li et al. 2018, Algorithm 1; there s counts in the other direction). A checksum distributes trainings to brackets,
    as in Optuna.
    """
    count = levels + 1
    shares = [ceil(count * reduction ** (count - 1 - s) / (count - s)) for s in range(count)]
    remainder = crc32(f"{BRACKETS_OF}_{number}".encode()) % sum(shares)
    for s, share in enumerate(shares):
        if remainder < share:
            return s
        remainder -= share
    raise AssertionError("unreachable: the remainder is below the sum of all shares")


def build_brackets(all_rungs: Sequence[float], reduction: int, field: Sequence[TrialLineage]) -> list[HyperbandBracket]:
    """Return the brackets of asynchronous Hyperband with their trainings."""
    levels = len(all_rungs)
    with_bracket = [(bracket_index(line.first, levels, reduction), line) for line in field]
    return [
        HyperbandBracket(tuple(all_rungs[s:]), reduction, tuple(line for s_of, line in with_bracket if s_of == s))
        for s in range(levels + 1)
    ]


def _make_brackets(pruner: PrunerSettings, field: Sequence[TrialLineage], longest_rows: int) -> list[HyperbandBracket]:
    levels = compute_rungs(pruner.min_resource_fraction, pruner.reduction_factor, longest_rows)
    if pruner.kind == "hyperband":
        return build_brackets(levels, pruner.reduction_factor, field)
    return [HyperbandBracket(levels, pruner.reduction_factor, tuple(field))]


def _first_validation_at(curve: Mapping[int, float], rung: float) -> tuple[int, float] | None:
    """Return rows and loss of the first validation at or after a rung; None if there is none yet."""
    validation = next(((rows, loss) for rows, loss in curve.items() if rows >= rung), None)
    if validation is None:
        return None
    return validation if math.isfinite(validation[1]) else (validation[0], math.inf)


# The median rule.


def _check_median(pruner: PrunerSettings, field: Sequence[TrialLineage], trial: Trial, longest_rows: int) -> str | None:
    """Return the reason to prune a trial by the median rule of Golovin et al. 2017, as in Optuna; None to continue it.

    A trial is pruned if its best loss is worse than the median loss of complete trainings after the same number of
    rows. The rows at which a training is validated depend on its batch size, so the curves of the complete trainings
    are interpolated linearly: there is no value before the first validation, and the last one counts after the end.
    """
    rows, best = max(trial.curve), min(replace_non_finite(trial.curve).values())
    curves = [
        replace_non_finite(line.curve)
        for line in field
        if line.decisive.state == "complete" and not is_infeasible(line.decisive) and trial.number not in line.numbers
    ]
    if len(curves) < pruner.n_startup_trials or rows < math.ceil(pruner.min_resource_fraction * longest_rows):
        return None
    values = [np.interp(rows, list(curve), list(curve.values())) for curve in curves if curve and rows >= min(curve)]
    if not values or best <= np.percentile(values, 50):
        return None
    return f"best validation loss {best:.4g} after {rows} rows is worse than the median of complete trials"
