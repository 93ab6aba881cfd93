"""What finalists of a sweep are compared by, and what each of them scored: row by row, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from ratchet.gate import paired_test
from ratchet.gate.paired_test import PairedScores, PairedTestPlan, PairedTestResult
from ratchet.gate.statistics import Numbers, adjust_p_values
from ratchet.storage.records.sweep import Finalist, FinalistComparison, FinalRound, SweepObjective, TrainingCost

RESAMPLES = 9999


@dataclass(frozen=True)
class FinalistComparator:
    """What finalists are compared by."""

    measure: SweepObjective
    confidence: float
    """With which a difference must be real: the chance of a false winner is one minus it at most."""
    weights: Sequence[float] | None = None
    """Only of a loss: answer tokens of each row, whose scores are then nats of the whole row."""
    groups: Sequence[str | None] | None = None
    """Rows of one group are no independent samples; None: a group of its own."""
    resamples: int = RESAMPLES
    seed: int = 0
    """Of the bootstrap."""

    @property
    def sign(self) -> int:
        """Of an improvement."""
        return 1 if self.measure.direction == "maximize" else -1

    def mean(self, scores: Numbers) -> float:
        """Of one seed's rows, or of rows averaged over seeds: a ratio of sums where rows have weights."""
        below = len(scores) if self.weights is None else math.fsum(self.weights)
        return math.fsum(scores) / below

    def order(self, one: "FinalistScores") -> tuple[float, int]:
        """Sorts contenders, the best first; of equals the one that was tried first."""
        return -self.sign * self.mean(one.rows), one.number

    def sums(self, values: Numbers) -> Numbers:
        """Of each group; rows without one stay by themselves."""
        if self.groups is None:
            return values
        names: dict[str | int, int] = {}
        places = [names.setdefault(row if name is None else name, len(names)) for row, name in enumerate(self.groups)]
        return np.bincount(places, weights=values).astype(np.float64)


@dataclass(frozen=True)
class FinalistScores:
    """A finalist and its scores."""

    number: int
    """Of the trial."""
    values: Mapping[str, Any]
    run_ids: tuple[str, ...]
    scores: Sequence[Sequence[float]]
    """Of each seed, of each row; the rows are the same for all."""
    cost: TrainingCost = field(default_factory=TrainingCost)
    dropped: str = ""
    """Why it got no further seeds; it cannot win."""

    @cached_property
    def matrix(self) -> Numbers:
        """[seed, row]."""
        return np.asarray(self.scores, dtype=np.float64)

    @cached_property
    def rows(self) -> Numbers:
        """Mean over seeds of each row."""
        found: Numbers = self.matrix.mean(axis=0)
        return found

    @property
    def seeds(self) -> int:
        """With which it was trained."""
        return len(self.matrix)

    def means(self, contest: FinalistComparator) -> tuple[float, ...]:
        """By seed."""
        return tuple(contest.mean(row) for row in self.matrix)

    def seed_variance(self, contest: FinalistComparator) -> float | None:
        """Of the mean of one seed; None where one seed says nothing of others."""
        return float(np.var(self.means(contest), ddof=1)) if self.seeds > 1 else None


def require_same_rows(contenders: Sequence[FinalistScores]) -> None:
    """Raises ValueError for nobody, scores of different rows, and scores that are not finite."""
    if not contenders:
        raise ValueError("nobody is to be compared")
    for one in contenders:
        if one.matrix.ndim != 2 or one.matrix.shape[1:] != contenders[0].matrix.shape[1:] or not one.matrix.size:
            raise ValueError(f"trial {one.number}: scores of shape {one.matrix.shape}, not of the rows of the others")
        if not np.isfinite(one.matrix).all():
            raise ValueError(f"trial {one.number}: scores that are no numbers")


# One finalist against another, each trained with several seeds: what rows and what seeds leave unsure.
#
# What a seed changes is often as much as what a setting changes (X. Bouthillier et al., "Accounting for Variance in
# Machine Learning Benchmarks", MLSys 2021). So the difference of two means has two sources of error: the rows, by the
# gate's paired comparison of the means over seeds, and the seeds, by the spread of each finalist's own means. Each has
# a
# bound of its own, and the squares of their distances are added (G. Y. Zou, A. Donner, Statistics in Medicine 27,
# 2008,
# 1693-1702). What rows and seeds do together is in both, which errs on the safe side.
#
# Simulated (3,000 cases each of two equal finalists, 60 rows, 1 to 3 seeds, spread of seeds from none to 12 times the
# error of rows, of one or of both): a false winner in 0.9-5.0 % of cases instead of 5 %. One t for the sum of
# variances,
# degrees of freedom after Satterthwaite, names one in up to 7.7 %: a spread that three seeds hide makes it too sure.

SURE = 1e-9
"""Smallest p-value that is told: nobody knows tails beyond it."""

Error = tuple[float, float]
"""A standard error and its degrees of freedom."""


@dataclass(frozen=True)
class FinalistDifference:
    """The leader against another; positive: the leader is better."""

    value: float
    low: float
    p: float
    """One-sided, of no improvement."""
    seed_error: float
    """Standard error; 0 where it is not known."""
    row_error: float
    method: str


def compare_pair(
    contest: FinalistComparator,
    pair: tuple[FinalistScores, FinalistScores],
    everyone: Sequence[FinalistScores],
    level: float,
) -> FinalistDifference:
    """Difference of the means of a pair, with a lower bound of one-sided confidence 1 - level.

    The error of the rows is what it takes to reach the gate's bound, which follows skewed scores (BCa) and rare ones
    (Tango), not the plain standard error. Where nobody was trained with two seeds, rows alone are told of.

    Args:
        contest: what they are compared by.
        pair: the leader and the other.
        everyone: all finalists: their seeds tell how much those of a finalist with one seed might vary.
        level: below one half.
    """
    leader, other = pair
    plan = PairedTestPlan(
        1 - level, 0.8, 0.1, contest.resamples, contest.seed
    )  # power and discordance plan samples: not asked
    found = paired_test.compare(_build_pairs(contest, leader, other), 0.0, plan)
    value = contest.sign * (contest.mean(leader.rows) - contest.mean(other.rows))
    low = found.low if contest.weights is None else _fraction_to_nats(found.low)
    row_error = max(0.0, (value - low) / float(special.ndtri(1 - level)))
    seed_error, freedom = _estimate_seed_error(contest, pair, everyone)
    if not seed_error:
        return FinalistDifference(value, low, found.p, 0.0, row_error, found.method)
    errors = ((row_error, max(1, _count_units(found) - 1)), (seed_error, freedom))
    return FinalistDifference(
        value,
        min(low, value - _bound_distance(errors, level)),
        max(found.p, _p_value(value, errors)),
        seed_error,
        row_error,
        f"{found.method}, seeds added (t with {freedom:.1f} degrees of freedom)",
    )


def _build_pairs(contest: FinalistComparator, leader: FinalistScores, other: FinalistScores) -> PairedScores:
    new, old = leader.rows.tolist(), other.rows.tolist()
    if contest.weights is None:
        return PairedScores(new, old, "higher" if contest.sign > 0 else "lower", groups=contest.groups)
    if contest.sign > 0:  # who wants a high loss: the gate's comparison knows none, so they change places
        new, old = old, new
    return PairedScores(new, old, "lower", "perplexity", list(contest.weights), contest.groups)


def _fraction_to_nats(fraction: float) -> float:
    """Difference of losses behind the fraction by which a perplexity fell."""
    return -math.log1p(-min(fraction, 1 - 1e-15))


def _count_units(found: PairedTestResult) -> int:
    return found.groups or found.n


def _bound_distance(errors: Sequence[Error], level: float) -> float:
    """From a difference to its bound: of each error as far as its own t goes, squares added."""
    return math.hypot(*(error * float(special.stdtrit(freedom, 1 - level)) for error, freedom in errors))


def _p_value(value: float, errors: Sequence[Error]) -> float:
    """The level at which the bound of a difference is nought."""
    if value <= 0:
        return 1.0 if value < 0 else 0.5
    if _bound_distance(errors, SURE) <= value:
        return SURE
    return float(optimize.brentq(lambda level: value - _bound_distance(errors, level), SURE, 0.5))


def _estimate_seed_error(
    contest: FinalistComparator, pair: tuple[FinalistScores, FinalistScores], everyone: Sequence[FinalistScores]
) -> Error:
    """What seeds leave unsure of the difference of two means; an error of 0 where nobody has two seeds.

    Degrees of freedom: F. Satterthwaite, Biometrics Bulletin 2, 1946, 110-114. A contender with one seed is taken to
    vary as the one that varies most; one spread that stands for two is no independent second one.
    """
    known = {one.number: (variance, one.seeds - 1) for one in everyone if (variance := one.seed_variance(contest))}
    most = max(known, key=lambda number: known[number], default=None)
    squares: dict[int, float] = {}
    for one in pair:
        source = one.number if one.seeds > 1 else most
        if source is not None and source in known:
            squares[source] = squares.get(source, 0.0) + known[source][0] / one.seeds
    if not squares:
        return 0.0, 1.0
    total = math.fsum(squares.values())
    return math.sqrt(total), total**2 / math.fsum(square**2 / known[one][1] for one, square in squares.items())


# Which finalist of a sweep wins: each was trained with several seeds and scored on the same rows.
#
# The leader is whoever these very scores put first, so of two that are equal one leads in any case: its one-sided
# p-values are doubled. Then Holm's correction for the number of the others.


def choose_winner(contest: FinalistComparator, contenders: Sequence[FinalistScores]) -> FinalRound:
    """Compare the leader with each of the others, and name the winner.

    The leader, if it is better than each of the others beyond doubt; else the cheapest of those that cannot be told
    from it: trainable parameters, then memory, then seconds of training, then the number of the trial. Who was dropped
    stands behind all others, and does not win.

    Raises:
        ValueError: no contender, scores of different rows, or scores that are not finite.
    """
    require_same_rows(contenders)
    leader, *others = sorted(contenders, key=lambda one: (bool(one.dropped), *contest.order(one)))
    comparisons = _compare_with_leader(contest, leader, others)
    told_apart = {found.other for found in comparisons if found.better}
    equals = [leader, *(one for one in others if one.number not in told_apart and not one.dropped)]
    winner = min(equals, key=_cost_order)
    return FinalRound(
        metric=contest.measure.metric,
        direction=contest.measure.direction,
        rows=leader.matrix.shape[1],
        finalists=tuple(_build_finalist(contest, one) for one in (leader, *others)),
        comparisons=tuple(comparisons),
        winner=winner.number,
        reason=_explain_winner(contest, winner, equals, comparisons) + _describe_seed_doubt([leader, *others]),
    )


def find_trailing(
    contest: FinalistComparator, contenders: Sequence[FinalistScores], threshold: float
) -> dict[int, str]:
    """Which contenders are so far behind the leader that further seeds would be a waste, and why, by trial number.

    Wilcoxon's signed-rank test (F. Wilcoxon, Biometrics Bulletin 1, 1945, 80-83) of the rows' differences, as Optuna's
    WilcoxonPruner does it: one-sided, zeros split, and the mean must be worse as well. It looks at rows alone: what
    another seed would change it does not know, so it is an economy and no verdict. Simulated, two equal finalists after
    one seed at p = 0.01: 2 % are dropped where seeds change nothing, 19 % where they change as much as the rows leave
    unsure.

    Args:
        contest: what they are compared by.
        contenders: all with the same seeds.
        threshold: p below which one is dropped; of each look, uncorrected.

    Raises:
        ValueError: as `choose_winner`.
    """
    require_same_rows(contenders)
    leader = min(contenders, key=contest.order)
    found = {}
    for one in contenders:
        gains = contest.sign * (leader.rows - one.rows)
        if one is leader or math.fsum(gains) <= 0:
            continue
        p = float(stats.wilcoxon(contest.sums(gains), alternative="greater", zero_method="zsplit").pvalue)
        if p < threshold:
            after = f"{one.seeds} seed{'s' if one.seeds > 1 else ''}"
            found[one.number] = f"worse than trial {leader.number} after {after} (Wilcoxon signed-rank, p = {p:.2g})"
    return found


def _compare_with_leader(
    contest: FinalistComparator, leader: FinalistScores, others: Sequence[FinalistScores]
) -> list[FinalistComparison]:
    """Each bound at the level at which Holm's procedure judges it, so that bound and p-value say the same."""
    alpha = 1 - contest.confidence
    everyone = [leader, *others]
    first = [compare_pair(contest, (leader, one), everyone, alpha / 2) for one in others]
    adjusted = adjust_p_values([min(1.0, 2 * found.p) for found in first])
    comparisons = []
    for one, found, p in zip(others, first, adjusted, strict=True):
        level = min(alpha / 2, alpha * found.p / p) if found.p > 0 else alpha / (2 * len(others))
        low = (found if level == alpha / 2 else compare_pair(contest, (leader, one), everyone, level)).low
        better = p < alpha and low > 0  # close to the edge the two may differ by a hair: then neither is told as sure
        comparisons.append(
            FinalistComparison(
                other=one.number,
                difference=found.value,
                low=low if better else min(low, 0.0),
                p=p if better else max(p, alpha),
                seed_error=found.seed_error,
                row_error=found.row_error,
                better=better,
                method=found.method,
            )
        )
    return comparisons


# ------------------------------------------------------------------------------------------------------------- words


def _build_finalist(contest: FinalistComparator, one: FinalistScores) -> Finalist:
    return Finalist(
        number=one.number,
        values=dict(one.values),
        run_ids=one.run_ids,
        means=one.means(contest),
        mean=contest.mean(one.rows),
        cost=one.cost,
        dropped=one.dropped,
    )


_PRICES = ("fewest trainable parameters", "least memory", "shortest training", "tried first")


def _cost_order(one: FinalistScores) -> tuple[float, float, float, int]:
    """In the order of _PRICES; what nobody measured is not cheap."""
    cost = one.cost
    measured = (cost.trainable_parameters, cost.memory_bytes, cost.train_seconds)
    parameters, memory, seconds = (value or math.inf for value in measured)
    return parameters, memory, seconds, one.number


def _explain_winner(
    contest: FinalistComparator,
    winner: FinalistScores,
    equals: Sequence[FinalistScores],
    comparisons: Sequence[FinalistComparison],
) -> str:
    if not comparisons:
        return f"trial {winner.number} is the only finalist"
    if all(found.better for found in comparisons):
        p = max(found.p for found in comparisons)
        return f"trial {winner.number} is better than each of the others (p = {p:.2g} at most, after Holm's correction)"
    if len(equals) == 1:
        among = "all, and each was dropped" if winner.dropped else "those that were not dropped"
        return f"trial {winner.number} is best of {among}"
    others = [_cost_order(one) for one in equals if one is not winner]
    by = next(i for i in range(len(_PRICES)) if any(price[i] != _cost_order(winner)[i] for price in others))
    named = ", ".join(str(one.number) for one in equals)
    return (
        f"trials {named} cannot be told apart with confidence {contest.confidence:g}, and trial {winner.number} is the "
        f"cheapest of them ({_PRICES[by]})"
    )


def _describe_seed_doubt(contenders: Sequence[FinalistScores]) -> str:
    if len(contenders) < 2 or any(one.seeds > 1 for one in contenders):
        return ""
    return "; each was trained with one seed, so what another seed would change is not known"
