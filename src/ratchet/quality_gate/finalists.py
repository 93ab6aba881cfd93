"""Compares the finalists of a sweep, trained with several seeds and scored on the same rows, and chooses the winner."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from ratchet.config.units import format_count
from ratchet.quality_gate import paired_test
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan
from ratchet.quality_gate.statistics import Numbers, adjust_p_values, number_groups
from ratchet.storage.records.sweep import Finalist, FinalistComparison, FinalRound, SweepObjective, TrainingCost

RESAMPLES = 9999
"""Default number of bootstrap resamples."""

POWER, DISCORDANCE = 0.8, 0.1
"""Values that PairedTestPlan requires. They only affect sample sizes, which the final round does not use."""

MIN_P_VALUE = 1e-9
"""Smallest reported p-value; the tails of the distribution beyond this level are unknown."""

_COST_NAMES = ("fewest trainable parameters", "least memory", "shortest training", "tried first")
"""Reasons to call a finalist the cheapest, in the order in which costs are compared."""

StandardError = tuple[float, float]
"""A standard error and its degrees of freedom."""


@dataclass(frozen=True)
class FinalistComparator:
    """Settings and row metadata for comparisons of finalists."""

    objective: SweepObjective
    confidence: float
    """Confidence that the winner is better; a false winner has a probability of 1 - confidence at most."""
    weights: Sequence[float] | None = None
    """Number of answer tokens of each row; for losses only. The scores are then the nats of the whole row."""
    groups: Sequence[str | None] | None = None
    """Group of each row. Rows of one group are not independent; a row without a group (None) is independent."""
    resamples: int = RESAMPLES
    seed: int = 0
    """Seed of the bootstrap."""

    @property
    def sign(self) -> int:
        """Sign of an improvement."""
        return 1 if self.objective.direction == "maximize" else -1

    def mean(self, scores: Numbers) -> float:
        """Return the mean over rows; with weights, a ratio of sums."""
        denominator = len(scores) if self.weights is None else math.fsum(self.weights)
        return math.fsum(scores) / denominator

    def sort_key(self, finalist: "FinalistScores") -> tuple[float, int]:
        """Return a key that sorts the best finalist first, and equal ones by trial number."""
        return -self.sign * self.mean(finalist.row_means), finalist.number

    def sum_groups(self, values: Numbers) -> Numbers:
        """Sum the values of each group; a row without a group is its own group."""
        if self.groups is None:
            return values
        return np.bincount(number_groups(self.groups), weights=values).astype(np.float64)


@dataclass(frozen=True)
class FinalistScores:
    """A finalist and its scores."""

    number: int
    """Trial number."""
    values: Mapping[str, Any]
    """Hyperparameters of the trial."""
    run_ids: tuple[str, ...]
    scores: Sequence[Sequence[float]]
    """Scores by seed and row; all finalists have the same rows."""
    cost: TrainingCost = field(default_factory=TrainingCost)
    dropped: str = ""
    """Reason why the finalist was not trained with further seeds; empty: not dropped. A dropped finalist cannot win."""

    @cached_property
    def matrix(self) -> Numbers:
        """Scores of shape [seeds, rows]."""
        return np.asarray(self.scores, dtype=np.float64)

    @cached_property
    def row_means(self) -> Numbers:
        """Mean over seeds of each row."""
        means: Numbers = self.matrix.mean(axis=0)
        return means

    @property
    def seed_count(self) -> int:
        """Number of seeds with which the finalist was trained."""
        return len(self.matrix)

    def means(self, comparator: FinalistComparator) -> tuple[float, ...]:
        """Return the mean of each seed."""
        return tuple(comparator.mean(seed_scores) for seed_scores in self.matrix)


def choose_winner(comparator: FinalistComparator, finalists: Sequence[FinalistScores]) -> FinalRound:
    """Compare the leader with every other finalist and choose the winner.

    The leader wins if it is significantly better than every other finalist. Otherwise, the cheapest of the leader and
    the finalists that cannot be distinguished from the leader wins: by trainable parameters, then memory, then training
    time, then trial number. Dropped finalists are ranked last and cannot win.

    The leader is selected by the same scores that it is compared by, so its one-sided p-values are doubled. Holm's
    correction then accounts for the number of other finalists.

    Raises:
        ValueError: There are no finalists, or their scores are of different rows or not finite.
    """
    require_same_rows(finalists)
    leader, *others = sorted(finalists, key=lambda finalist: (bool(finalist.dropped), *comparator.sort_key(finalist)))
    comparisons = _compare_with_leader(comparator, leader, others)
    worse = {comparison.other for comparison in comparisons if comparison.better}
    equals = [leader, *(other for other in others if other.number not in worse and not other.dropped)]
    winner = min(equals, key=_cost_order)
    seed_doubt = ""
    if others and all(finalist.seed_count == 1 for finalist in finalists):
        seed_doubt = "; each was trained with one seed, so the variation between seeds is unknown"
    return FinalRound(
        metric=comparator.objective.metric,
        direction=comparator.objective.direction,
        rows=leader.matrix.shape[1],
        finalists=tuple(
            Finalist(
                number=finalist.number,
                values=dict(finalist.values),
                run_ids=finalist.run_ids,
                means=finalist.means(comparator),
                mean=comparator.mean(finalist.row_means),
                cost=finalist.cost,
                dropped=finalist.dropped,
            )
            for finalist in (leader, *others)
        ),
        comparisons=tuple(comparisons),
        winner=winner.number,
        reason=_explain_winner(comparator, winner, equals, comparisons) + seed_doubt,
    )


def find_trailing(
    comparator: FinalistComparator, finalists: Sequence[FinalistScores], threshold: float
) -> dict[int, str]:
    """Find finalists so far behind the leader that further seeds would be wasted.

    A finalist trails if its mean is worse and a one-sided Wilcoxon signed-rank test of the differences of rows (summed
    by group) confirms this (F. Wilcoxon, Biometrics Bulletin 1, 1945, 80-83; zeros are split, as in Optuna's
    WilcoxonPruner). The test ignores the variation between seeds, so it only saves training time and does not decide
    the winner.

    In a simulation with two equally good finalists, one seed each and threshold 0.01, one of them was dropped in 2 % of
    cases if seeds had no effect, and in 19 % if the spread of seeds equalled the error of the rows.

    Args:
        comparator: Settings of the comparison.
        finalists: Finalists trained with the same seeds.
        threshold: p-value below which a finalist is dropped; each call is a separate test without correction.

    Returns:
        The reason to drop each trailing finalist, by trial number.

    Raises:
        ValueError: As in `choose_winner`.
    """
    require_same_rows(finalists)
    leader = min(finalists, key=comparator.sort_key)
    reasons = {}
    for finalist in finalists:
        gains = comparator.sign * (leader.row_means - finalist.row_means)
        if finalist is leader or math.fsum(gains) <= 0:
            continue
        p = float(stats.wilcoxon(comparator.sum_groups(gains), alternative="greater", zero_method="zsplit").pvalue)
        if p < threshold:
            seeds = format_count(finalist.seed_count, "seed")
            reasons[finalist.number] = (
                f"worse than trial {leader.number} after {seeds} (Wilcoxon signed-rank, p = {p:.2g})"
            )
    return reasons


def require_same_rows(finalists: Sequence[FinalistScores]) -> None:
    """Raise ValueError if there are no finalists, or if their scores are of different rows or not finite."""
    if not finalists:
        raise ValueError("there are no finalists to compare")
    for finalist in finalists:
        if (
            finalist.matrix.ndim != 2
            or finalist.matrix.shape[1:] != finalists[0].matrix.shape[1:]
            or not finalist.matrix.size
        ):
            raise ValueError(
                f"trial {finalist.number}: scores of shape {finalist.matrix.shape} do not match the rows of the other "
                "trials"
            )
        if not np.isfinite(finalist.matrix).all():
            raise ValueError(f"trial {finalist.number}: scores are not finite numbers")


def _compare_with_leader(
    comparator: FinalistComparator, leader: FinalistScores, others: Sequence[FinalistScores]
) -> list[FinalistComparison]:
    """Compare the leader with all others.

    The bound of each comparison has the error level that Holm's procedure assigns to this comparison. So the bound is
    above 0 if and only if the corrected p-value is significant.
    """
    alpha = 1 - comparator.confidence
    everyone = [leader, *others]
    differences = [compare_pair(comparator, (leader, other), everyone, alpha / 2) for other in others]
    adjusted = adjust_p_values([min(1.0, 2 * difference.p) for difference in differences])
    comparisons = []
    for other, difference, p in zip(others, differences, adjusted, strict=True):
        level = min(alpha / 2, alpha * difference.p / p) if difference.p > 0 else alpha / (2 * len(others))
        at_level = difference
        if level != alpha / 2:
            at_level = compare_pair(comparator, (leader, other), everyone, level)
        # Near the threshold, numerical errors can make bound and p-value disagree. Then neither counts as significant.
        better = p < alpha and at_level.low > 0
        comparisons.append(
            FinalistComparison(
                other=other.number,
                difference=difference.value,
                low=at_level.low if better else min(at_level.low, 0.0),
                p=p if better else max(p, alpha),
                seed_error=difference.seed_error,
                row_error=difference.row_error,
                better=better,
                method=difference.method,
            )
        )
    return comparisons


def _cost_order(finalist: FinalistScores) -> tuple[float, float, float, int]:
    """Return a sort key with one item for each of _COST_NAMES; an unknown cost is infinite."""
    cost = finalist.cost
    measured = (cost.trainable_parameters, cost.memory_bytes, cost.train_seconds)
    parameters, memory, seconds = (value or math.inf for value in measured)
    return parameters, memory, seconds, finalist.number


def _explain_winner(
    comparator: FinalistComparator,
    winner: FinalistScores,
    equals: Sequence[FinalistScores],
    comparisons: Sequence[FinalistComparison],
) -> str:
    if not comparisons:
        return f"trial {winner.number} is the only finalist"
    if all(comparison.better for comparison in comparisons):
        p = max(comparison.p for comparison in comparisons)
        return f"trial {winner.number} is better than each of the others (p <= {p:.2g} after Holm's correction)"
    if len(equals) == 1:
        if winner.dropped:
            return f"trial {winner.number} has the best mean; all finalists were dropped"
        return f"trial {winner.number} is the best of the finalists that were not dropped"
    others = [_cost_order(finalist) for finalist in equals if finalist is not winner]
    deciding = next(i for i in range(len(_COST_NAMES)) if any(cost[i] != _cost_order(winner)[i] for cost in others))
    numbers = ", ".join(str(finalist.number) for finalist in equals)
    return (
        f"trials {numbers} do not differ significantly at confidence {comparator.confidence:g}, and trial "
        f"{winner.number} is the cheapest of them ({_COST_NAMES[deciding]})"
    )


# Comparison of two finalists, each trained with several seeds.
#
# A different seed often changes a result as much as a different setting (X. Bouthillier et al., "Accounting for
# Variance in Machine Learning Benchmarks", MLSys 2021). So the difference of two means has two sources of error: the
# rows, measured by the gate's paired test of the means over seeds, and the seeds, measured by the spread of each
# finalist's means. Each source has its own bound, and the squares of the bounds' distances from the difference are
# added (G. Y. Zou, A. Donner, Statistics in Medicine 27, 2008, 1693-1702). The interaction of rows and seeds is counted
# in both sources, which is conservative.
#
# Simulations compared two equally good finalists with 60 rows and 1 to 3 seeds at an error level of 5 %; one or both
# had a spread of seeds of up to 12 times the error of the rows. A false winner was found in 0.9-5.0 % of the 3,000
# cases of each simulation. A single t-test of the summed variances, with Satterthwaite's degrees of freedom, finds up
# to 7.7 % false winners, because the means of three seeds can be close together by chance.


@dataclass(frozen=True)
class FinalistDifference:
    """Difference between the leader and another finalist; positive if the leader is better."""

    value: float
    low: float
    """One-sided lower bound."""
    p: float
    """One-sided p-value of the hypothesis of no improvement."""
    seed_error: float
    """Standard error due to seeds; 0 if unknown."""
    row_error: float
    """Standard error due to rows."""
    method: str


def compare_pair(
    comparator: FinalistComparator,
    pair: tuple[FinalistScores, FinalistScores],
    everyone: Sequence[FinalistScores],
    level: float,
) -> FinalistDifference:
    """Compare the means of two finalists, with a lower bound of one-sided confidence 1 - level.

    The error of the rows is derived from the bound of the gate's paired test, which handles skewed scores (BCa) and
    rare changes (Tango), not from the plain standard error. If no finalist has two seeds, only the rows count.

    Args:
        comparator: Settings of the comparison.
        pair: The leader and the other finalist.
        everyone: All finalists; their seeds estimate the spread of a finalist with a single seed.
        level: Error level of the bound, below 0.5.
    """
    leader, other = pair
    plan = PairedTestPlan(1 - level, POWER, DISCORDANCE, comparator.resamples, comparator.seed)
    new, old = leader.row_means.tolist(), other.row_means.tolist()
    if comparator.weights is None:
        pairs = PairedScores(new, old, "higher" if comparator.sign > 0 else "lower", groups=comparator.groups)
    else:  # The paired test requires that a lower loss is better: swap the sides to maximize a loss.
        sides = (old, new) if comparator.sign > 0 else (new, old)
        pairs = PairedScores(*sides, "lower", "perplexity", list(comparator.weights), comparator.groups)
    result = paired_test.compare(pairs, 0.0, plan)
    value = comparator.sign * (comparator.mean(leader.row_means) - comparator.mean(other.row_means))
    low = result.low
    if comparator.weights is not None:  # the bound is the relative decrease of a perplexity
        low = -math.log1p(-min(low, 1 - 1e-15))
    row_error = max(0.0, (value - low) / float(special.ndtri(1 - level)))
    seed_error, freedom = _estimate_seed_error(comparator, pair, everyone)
    if not seed_error:
        return FinalistDifference(value, low, result.p, 0.0, row_error, result.method)
    unit_count = result.groups or result.n
    errors = ((row_error, max(1, unit_count - 1)), (seed_error, freedom))
    return FinalistDifference(
        value=value,
        low=min(low, value - _bound_distance(errors, level)),
        p=max(result.p, _p_value(value, errors)),
        seed_error=seed_error,
        row_error=row_error,
        method=f"{result.method}, plus seeds (t with {freedom:.1f} degrees of freedom)",
    )


def _bound_distance(errors: Sequence[StandardError], level: float) -> float:
    """Return the distance from a difference to its bound: the root of the summed squares of the errors' distances."""
    return math.hypot(*(error * float(special.stdtrit(freedom, 1 - level)) for error, freedom in errors))


def _p_value(value: float, errors: Sequence[StandardError]) -> float:
    """Return the level at which the lower bound of the difference is 0."""
    if value <= 0:
        return 1.0 if value < 0 else 0.5
    if _bound_distance(errors, MIN_P_VALUE) <= value:
        return MIN_P_VALUE
    return float(optimize.brentq(lambda level: value - _bound_distance(errors, level), MIN_P_VALUE, 0.5))


def _estimate_seed_error(
    comparator: FinalistComparator, pair: tuple[FinalistScores, FinalistScores], everyone: Sequence[FinalistScores]
) -> StandardError:
    """Estimate the standard error of the difference of two means due to seeds; 0 if no finalist has two seeds.

    Degrees of freedom: F. Satterthwaite, Biometrics Bulletin 2, 1946, 110-114. A finalist with one seed is assumed to
    vary as much as the finalist that varies most. If both finalists of the pair use the same estimate, it counts as one
    estimate for the degrees of freedom.
    """
    spreads = {
        finalist.number: (variance, finalist.seed_count - 1)
        for finalist in everyone
        if finalist.seed_count > 1 and (variance := float(np.var(finalist.means(comparator), ddof=1)))
    }
    most_varying = max(spreads, key=lambda number: spreads[number], default=None)
    squares: dict[int, float] = {}
    for finalist in pair:
        source = finalist.number if finalist.seed_count > 1 else most_varying
        if source is not None and source in spreads:
            squares[source] = squares.get(source, 0.0) + spreads[source][0] / finalist.seed_count
    if not squares:
        return 0.0, 1.0
    total = math.fsum(squares.values())
    return math.sqrt(total), total**2 / math.fsum(square**2 / spreads[source][1] for source, square in squares.items())
