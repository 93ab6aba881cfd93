"""Pruners: asynchronous successive halving (Li et al. 2020, Algorithm 2), Hyperband and the median rule.

In the paper, workers pause each training at a rung and promote the best of those paused. Here a training that is among
the best when it reaches a rung continues at once, so that the model stays in memory. A training that is not is paused,
and promoted later if enough worse ones have reached that rung. As in the paper, one of `reduction` continues, so the
first ones are paused until there are others. (Optuna's pruner promotes no training later, so it lets the best so far
continue while fewer than `reduction` have come: in a simulated search with TPE, which keeps finding new bests, ten of
24 trainings ran to the end, and a search cost twice as much.) Rungs count processed rows.
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
from ratchet.tuning.samplers import (
    TrialLineage,
    create_empty_study,
    group_by_lineage,
    is_infeasible,
    replace_non_finite,
)

LAST_RUNG = 0.9
"""Share of the longest training above which there is no rung: it would save almost nothing and end a training that is
nearly complete. (Without it, 0.11 with reduction 3 would end two of three trainings after 99 % of their rows.)"""

DECIMALS = 6
"""Decimals of rungs, in rows and in shares of the longest training."""

BRACKETS_OF = "ratchet"
"""Hashed with a trial's number to choose its bracket."""


@dataclass(frozen=True)
class RungPosition:
    """Rank of a training among all that reached a rung."""

    rank: int
    """From 1, the best."""
    count: int
    """Number of trainings that reached the rung."""
    loss: float
    """Validation loss there, in nats per token."""
    rows: int
    """Rows processed when it was measured."""


@dataclass(frozen=True)
class HyperbandBracket:
    """Rungs and the trainings that are compared at them."""

    rungs: tuple[float, ...]
    """Processed rows, ascending."""
    reduction: int
    """One training in so many continues."""
    field: tuple[TrialLineage, ...]

    def rank(self, line: TrialLineage, rung: float) -> RungPosition:
        """Return the rank of a training that has reached a rung.

        The first validation at or after the rung is compared. A loss that is not finite is the worst; of equal losses
        the training that began first is better.
        """
        own = _first_validation_at(line.curve, rung)
        if own is None:
            raise ValueError(f"trial {line.first} has not reached {rung:g} rows")
        values = [
            (found[1], other.first)
            for other in self.field
            if (found := _first_validation_at(other.curve, rung)) is not None
        ]
        rank = 1 + sum(value < (own[1], line.first) for value in values if value[1] != line.first)
        count = len({first for _, first in values} | {line.first})
        return RungPosition(rank, count, own[1], own[0])

    def find_losing_position(self, trial: Trial) -> RungPosition | None:
        """Return the position for which this training is pruned: at a rung that it just reached, not among the best.

        Rungs that it was promoted from do not count again.
        """
        line = self._line(trial.number)
        for rung in self._just_reached(line, trial):
            position = self.rank(line, rung)
            if position.rank > position.count // self.reduction:
                return position
        return None

    def find_promotable(self) -> int | None:
        """Return the pruned trial that is now among the best of its rung; of several the best at the highest rung."""
        found = []
        for line in self.field:
            last = line.trials[-1]
            rungs = self._just_reached(line, last) if last.state == "pruned" else []
            positions = [self.rank(line, rung) for rung in rungs]
            if positions and all(one.rank <= one.count // self.reduction for one in positions):
                found.append((-rungs[-1], positions[-1].rank, last.number))
        return min(found)[2] if found else None

    def _line(self, number: int) -> TrialLineage:
        return next(line for line in self.field if number in line.numbers)

    def _just_reached(self, line: TrialLineage, trial: Trial) -> list[float]:
        """Return rungs between the trial's last two validations, without those that it was promoted from."""
        before = [rows for earlier in line.trials if earlier.number < trial.number for rows in earlier.curve]
        now = max(trial.curve, default=0)
        past = max([*before, *(rows for rows in line.curve if rows < now)], default=0)
        return [rung for rung in self.rungs if past < rung <= now]


def compute_rungs(first: float, reduction: int, longest: int) -> tuple[float, ...]:
    """Return the rows at which trainings are compared: `first` x `longest`, times `reduction` from rung to rung.

    All are below `LAST_RUNG`. They are rounded: 3 x 0.05 x 15,000 is 2250.0000000000005 in floating point, and a
    validation after 2,250 rows would miss it.
    """
    shares = [first]
    while round(shares[-1], DECIMALS) < LAST_RUNG:
        shares.append(shares[-1] * reduction)
    return tuple(round(share * longest, DECIMALS) for share in shares[:-1])


def bracket_index(number: int, levels: int, reduction: int) -> int:
    """Return the Hyperband bracket of a training, from 0, by the number of its first trial.

    A training in bracket s skips the lowest s of `levels` rungs; the last bracket prunes nothing, in case the start of
    a curve says little about its end. Each gets its share of n = ceil((levels + 1) / (s + 1) *
    reduction^s) trainings (Li et al. 2018, Algorithm 1; there s counts the other way), distributed by a checksum,
    as in Optuna.
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
    """Return the brackets of asynchronous Hyperband with their trainings."""
    levels = len(all_rungs)
    belong = [(bracket_index(line.first, levels, reduction), line) for line in field]
    return [
        HyperbandBracket(tuple(all_rungs[s:]), reduction, tuple(line for s_of, line in belong if s_of == s))
        for s in range(levels + 1)
    ]


def _first_validation_at(curve: Mapping[int, float], rung: float) -> tuple[int, float] | None:
    """Return rows and loss of the first validation at or after a rung."""
    found = next(((rows, loss) for rows, loss in curve.items() if rows >= rung), None)
    if found is None:
        return None
    return found if math.isfinite(found[1]) else (found[0], math.inf)


# Decisions: pruning and promotion, as functions of the curves so far.


def decide_pruning(pruner: PrunerSettings, history: Sequence[Trial], trial: Trial, longest_rows: int) -> str | None:
    """Return why to prune this training now; None: continue. Call it after each validation.

    The same history gives the same result. A complete training is not pruned: one that has processed `longest_rows`, or
    done all of its `cost.planned_steps`.

    Args:
        pruner: section sweep.pruner.
        history: all trials of the study; the record of this one may be older than `trial`.
        trial: the trial with its curve up to the last validation.
        longest_rows: rows of the longest training of the study.
    """
    if pruner.kind == "none" or not trial.curve or _is_fully_trained(trial, longest_rows):
        return None
    field = _competing_lineages([trial, *(other for other in history if other.number != trial.number)])
    if pruner.kind == "median":
        return _check_median(pruner, field, trial, longest_rows)
    for bracket in _make_brackets(pruner, field, longest_rows):
        competes = any(trial.number in line.numbers for line in bracket.field)
        if competes and (position := bracket.find_losing_position(trial)) is not None:
            promoted = position.count // pruner.reduction_factor
            which = (
                "the best"
                if promoted == 1
                else f"the best {promoted}"
                if promoted
                else f"one in {pruner.reduction_factor}"
            )
            return (
                f"validation loss {position.loss:.4g} after {position.rows} rows is number {position.rank} of "
                f"{position.count}; {pruner.kind} continues {which}"
            )
    return None


def find_promotable(pruner: PrunerSettings, history: Sequence[Trial], longest_rows: int) -> int | None:
    """Return the number of a pruned trial that is now among the best of its rung, to be continued.

    A trial that was continued is not returned again. `median` never promotes.
    """
    if pruner.kind in ("none", "median"):
        return None
    found = [
        bracket.find_promotable() for bracket in _make_brackets(pruner, _competing_lineages(history), longest_rows)
    ]
    return next((number for number in found if number is not None), None)


def find_most_promising(history: Sequence[Trial]) -> int | None:
    """Return the number of the pruned trial with the most rows, the best of those, to be continued as a last resort.

    A trial whose continuation failed is not returned again.
    """
    found = []
    for line in group_by_lineage(history):
        last = line.trials[-1]
        if last.state == "pruned" and (curve := replace_non_finite(line.curve)):
            rows = max(curve)
            found.append((-rows, curve[rows], last.number))
    return min(found)[2] if found else None


def describe(pruner: PrunerSettings) -> str:
    """Return the pruner as text."""
    if pruner.kind == "none":
        return "none"
    if pruner.kind == "median":
        start = f"{pruner.min_resource_fraction:g} of the longest training"
        return f"median, from {start} on, after {pruner.n_startup_trials} trials"
    first_rung = f"first rung at {pruner.min_resource_fraction:g} of the longest training"
    return f"{pruner.kind}: {first_rung}, one in {pruner.reduction_factor} continues"


def _is_fully_trained(trial: Trial, longest_rows: int) -> bool:
    cost = trial.cost
    return max(trial.curve) >= longest_rows or 0 < cost.planned_steps <= cost.steps


def _competing_lineages(history: Sequence[Trial]) -> list[TrialLineage]:
    """Return the trainings that are compared; a failed one would occupy a rank at each rung that it passed."""
    return [line for line in group_by_lineage(history) if line.competes]


def _make_brackets(pruner: PrunerSettings, field: Sequence[TrialLineage], longest_rows: int) -> list[HyperbandBracket]:
    levels = compute_rungs(pruner.min_resource_fraction, pruner.reduction_factor, longest_rows)
    if pruner.kind == "hyperband":
        return build_brackets(levels, pruner.reduction_factor, field)
    return [HyperbandBracket(levels, pruner.reduction_factor, tuple(field))]


def _check_median(pruner: PrunerSettings, field: Sequence[TrialLineage], trial: Trial, longest_rows: int) -> str | None:
    """Apply Optuna's median rule: the best loss is worse than the median of complete trainings after as many rows.

    Optuna compares equal steps only, but trainings validate at rows that depend on their batch size, so the other
    curves are interpolated linearly.
    """
    rows = max(trial.curve)
    study = create_empty_study(1)
    for line in field:
        if line.decisive.state == "complete" and not is_infeasible(line.decisive) and trial.number not in line.numbers:
            value = _interpolate(replace_non_finite(line.curve), rows)
            study.add_trial(create_trial(value=0.0, intermediate_values={} if value is None else {rows: value}))
    median_pruner = MedianPruner(
        n_startup_trials=pruner.n_startup_trials,
        n_warmup_steps=math.ceil(pruner.min_resource_fraction * longest_rows),
        interval_steps=1,
        n_min_trials=1,
    )
    running = create_trial(state=TrialState.RUNNING, intermediate_values=replace_non_finite(trial.curve))
    if not median_pruner.prune(study, running):
        return None
    best = min(replace_non_finite(trial.curve).values())
    return f"best validation loss {best:.4g} after {rows} rows is worse than the median of complete trials"


def _interpolate(curve: Mapping[int, float], rows: int) -> float | None:
    """Return a curve's value at a number of rows; the last one after its end, None before its first validation."""
    if not curve or rows < min(curve):
        return None
    before = max(at for at in curve if at <= rows)
    after = min((at for at in curve if at >= rows), default=before)
    share = (rows - before) / (after - before) if after > before else 0.0
    return curve[before] + share * (curve[after] - curve[before])
