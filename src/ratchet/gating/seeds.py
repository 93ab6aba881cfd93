"""One finalist against another, each trained with several seeds: what rows and what seeds leave unsure.

What a seed changes is often as much as what a setting changes (X. Bouthillier et al., "Accounting for Variance in
Machine Learning Benchmarks", MLSys 2021). So the difference of two means has two sources of error: the rows, by the
gate's paired comparison of the means over seeds, and the seeds, by the spread of each finalist's own means. Each has a
bound of its own, and the squares of their distances are added (G. Y. Zou, A. Donner, Statistics in Medicine 27, 2008,
1693-1702). What rows and seeds do together is in both, which errs on the safe side.

Simulated (3,000 cases each of two equal finalists, 60 rows, 1 to 3 seeds, spread of seeds from none to 12 times the
error of rows, of one or of both): a false winner in 0.9-5.0 % of cases instead of 5 %. One t for the sum of variances,
degrees of freedom after Satterthwaite, names one in up to 7.7 %: a spread that three seeds hide makes it too sure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import optimize, special

from ratchet.gating import paired
from ratchet.gating.contest import Contender, Contest
from ratchet.gating.paired import Found, Pairs, Plan

SURE = 1e-9
"""Smallest p-value that is told: nobody knows tails beyond it."""

Error = tuple[float, float]
"""A standard error and its degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """The leader against another; positive: the leader is better."""

    value: float
    low: float
    p: float
    """One-sided, of no improvement."""
    seed_error: float
    """Standard error; 0 where it is not known."""
    row_error: float
    method: str


def difference(
    contest: Contest, pair: tuple[Contender, Contender], everyone: Sequence[Contender], level: float
) -> Difference:
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
    plan = Plan(1 - level, 0.8, 0.1, contest.resamples, contest.seed)  # power and discordance plan samples: not asked
    found = paired.compare(_pairs(contest, leader, other), 0.0, plan)
    value = contest.sign * (contest.mean(leader.rows) - contest.mean(other.rows))
    low = found.low if contest.weights is None else _nats(found.low)
    row_error = max(0.0, (value - low) / float(special.ndtri(1 - level)))
    seed_error, freedom = _seed_error(contest, pair, everyone)
    if not seed_error:
        return Difference(value, low, found.p, 0.0, row_error, found.method)
    errors = ((row_error, max(1, _units(found) - 1)), (seed_error, freedom))
    return Difference(
        value,
        min(low, value - _distance(errors, level)),
        max(found.p, _p(value, errors)),
        seed_error,
        row_error,
        f"{found.method}, seeds added (t with {freedom:.1f} degrees of freedom)",
    )


def _pairs(contest: Contest, leader: Contender, other: Contender) -> Pairs:
    new, old = leader.rows.tolist(), other.rows.tolist()
    if contest.weights is None:
        return Pairs(new, old, "higher" if contest.sign > 0 else "lower", groups=contest.groups)
    if contest.sign > 0:  # who wants a high loss: the gate's comparison knows none, so they change places
        new, old = old, new
    return Pairs(new, old, "lower", "perplexity", list(contest.weights), contest.groups)


def _nats(fraction: float) -> float:
    """Difference of losses behind the fraction by which a perplexity fell."""
    return -math.log1p(-min(fraction, 1 - 1e-15))


def _units(found: Found) -> int:
    return found.groups or found.n


def _distance(errors: Sequence[Error], level: float) -> float:
    """From a difference to its bound: of each error as far as its own t goes, squares added."""
    return math.hypot(*(error * float(special.stdtrit(freedom, 1 - level)) for error, freedom in errors))


def _p(value: float, errors: Sequence[Error]) -> float:
    """The level at which the bound of a difference is nought."""
    if value <= 0:
        return 1.0 if value < 0 else 0.5
    if _distance(errors, SURE) <= value:
        return SURE
    return float(optimize.brentq(lambda level: value - _distance(errors, level), SURE, 0.5))


def _seed_error(contest: Contest, pair: tuple[Contender, Contender], everyone: Sequence[Contender]) -> Error:
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
