"""Tests the mean change between two models by betting, which stays valid however often anyone looks at the result.

Against the hypothesis "the mean change is at most m", a bettor starts with a capital of 1. Before each unit it chooses
a bet; then it multiplies its capital by 1 + bet * (change - m). If the hypothesis is true, the expected capital never
grows, so it ever reaches 1 / alpha with a probability of at most alpha (J. Ville, 1939). The test may therefore stop
after any unit, and continue with further units later. The lower bound of the mean is the smallest m against which the
capital has not reached 1 / alpha: a confidence sequence (I. Waudby-Smith, A. Ramdas, Journal of the Royal Statistical
Society B 86, 2024, 1-27).

A bet depends on earlier units only. It is close to the best one (J. L. Kelly, 1956, to second order) if the mean change
differs from m by `Hypothesis.effect`, with the variance of the units so far.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from ratchet.quality_gate.statistics import Numbers

PRIOR_UNITS, PRIOR_VARIANCE = 12.0, 0.2
"""Units with this variance (of changes divided by the largest possible one) that bets add to those observed: the models
differ on 20 % of the answers. With less, bets are too large while few units differ."""
BET_FACTOR = 1.25
"""Factor of the bets. Kelly's bets give the largest growth; a bit larger ones reach a given capital earlier (simulated:
5 % fewer units on average)."""
MAX_LOSS = 0.9
"""Largest share of the capital that a bet may lose with the worst possible change."""
UNBOUNDED_START = 20
"""Units without bets if changes have no limit. They show how large changes are."""
UNBOUNDED_WORST = 2.0
"""If changes have no limit, the worst possible one is assumed to be this many times the largest one so far."""
MIN_UNBOUNDED_UNITS = 120
"""Number of units from which a test of changes without a limit may decide. Of losses that rise by one for a twentieth
of the rows, fewer units often contain none (benchmarks/gate_power.py)."""
PRICE = 1.4
"""Rows that this test needs, divided by those of a fixed test with the same power (benchmarks/gate_power.py)."""
SMALLEST_FACTOR = 1e-6
"""Factor of the capital after a change that is worse than the worst that was assumed."""


@dataclass(frozen=True)
class SequentialUnits:
    """Independent units of a comparison, in an order that was fixed before their scores were seen."""

    top: Numbers
    """Sum of the changes of each unit; positive changes are improvements."""
    bottom: Numbers
    """Size of each unit: rows, or tokens. The mean change is sum(top) / sum(bottom)."""
    planned: Numbers
    """Number of units of the test set when each unit was added to it."""
    limit: float | None
    """Largest possible absolute change divided by the size of a unit; None if changes have no limit."""

    @property
    def negated(self) -> "SequentialUnits":
        """The same units with the models exchanged."""
        return SequentialUnits(-self.top, self.bottom, self.planned, self.limit)

    @property
    def first_decision(self) -> int:
        """Number of units from which the test may decide."""
        return 1 if self.limit is not None else MIN_UNBOUNDED_UNITS


@dataclass(frozen=True)
class Hypothesis:
    """The hypothesis "the mean change is at most `bound`", and the alternative for which bets are the best."""

    bound: float
    effect: float | None
    """Distance of the mean from the bound, in units of the change. None: the distance that the planned number of units
    detects."""
    detected: float
    """Detectable distance in standard errors (the quantiles of confidence and power together)."""


def compute_bets(units: SequentialUnits, hypothesis: Hypothesis) -> Numbers:
    """Compute the bet on each unit from the units before it."""
    changes = units.top - hypothesis.bound * units.bottom
    number = np.arange(len(changes))
    squares, fourths = (_sum_before(changes**power) for power in (2, 4))
    if units.limit is not None:
        scale = (units.limit * units.bottom) ** 2
        weight = PRIOR_UNITS * PRIOR_VARIANCE
        variance = (weight * scale + squares) / (PRIOR_UNITS + number)
        fourth = (weight * scale**2 + fourths) / (PRIOR_UNITS + number)
        variance = variance + np.sqrt(fourth / (PRIOR_UNITS + number))
    else:
        seen = np.maximum(number, 1)
        variance = squares / seen + np.sqrt(fourths / seen) / np.sqrt(seen)
    worst = _assume_worst_changes(units, hypothesis.bound)
    size = (_sum_before(units.bottom) + units.bottom) / (number + 1)
    effect = hypothesis.detected * np.sqrt(variance / units.planned)
    if hypothesis.effect is not None:
        effect = hypothesis.effect * size
    with np.errstate(divide="ignore", invalid="ignore"):
        bets = np.minimum(BET_FACTOR * effect / (variance + effect * worst / 2), MAX_LOSS / worst)
    if units.limit is None:
        bets[:UNBOUNDED_START] = 0.0
    return np.nan_to_num(bets, nan=0.0, posinf=0.0)


def _assume_worst_changes(units: SequentialUnits, bound: float) -> Numbers:
    """Return the largest possible (or assumed) distance below the bound for each unit."""
    if units.limit is not None:
        return (units.limit + bound) * units.bottom
    per_size = np.abs(units.top / units.bottom - bound)
    largest = np.concatenate(([0.0], np.maximum.accumulate(per_size)[:-1]))
    worst: Numbers = UNBOUNDED_WORST * largest * units.bottom
    return worst


def _sum_before(values: Numbers) -> Numbers:
    """Return the sum of all earlier values for each value."""
    return np.concatenate(([0.0], np.cumsum(values)[:-1]))


def compute_log_capital(units: SequentialUnits, bets: Numbers, mean: float) -> Numbers:
    """Compute the logarithm of the capital after each unit, against the hypothesis "the mean change is at most `mean`".

    Bets that could lose more than MAX_LOSS against this hypothesis are reduced.
    """
    changes = units.top - mean * units.bottom
    if units.limit is not None:
        worst = np.maximum((units.limit + mean) * units.bottom, 1e-12)
        bets = np.minimum(bets, MAX_LOSS / worst)
    return np.cumsum(np.log(np.maximum(1 + bets * changes, SMALLEST_FACTOR)))


def find_largest_capital(units: SequentialUnits, bets: Numbers, mean: float) -> float:
    """Return the logarithm of the largest capital after any unit from the first that may decide."""
    start = min(units.first_decision, len(units.top)) - 1
    return float(compute_log_capital(units, bets, mean)[start:].max())


def compute_p_value(units: SequentialUnits, hypothesis: Hypothesis) -> float:
    """Compute the p-value of the hypothesis, valid at any time: 1 / the largest capital so far, at most 1."""
    capital = find_largest_capital(units, compute_bets(units, hypothesis), hypothesis.bound)
    return math.exp(-max(0.0, capital))


def compute_lower_bound(units: SequentialUnits, hypothesis: Hypothesis, alpha: float) -> float:
    """Compute the lower bound of the mean change that holds at all times with probability 1 - alpha.

    It exceeds the bound of the hypothesis exactly if the p-value of the hypothesis is below alpha.
    """
    bets, enough = compute_bets(units, hypothesis), math.log(1 / alpha)

    def excess(mean: float) -> float:
        return find_largest_capital(units, bets, mean) - enough

    estimate = math.fsum(units.top) / math.fsum(units.bottom)
    if units.limit is not None:
        lowest, highest = -units.limit, units.limit
    else:
        spread = float(np.abs(units.top / units.bottom - estimate).max()) or abs(estimate) or 1.0
        lowest, highest = min(estimate, hypothesis.bound) - spread, max(estimate, hypothesis.bound) + spread
        while excess(lowest) < 0:
            if lowest < estimate - 1e6 * spread:
                return lowest
            lowest -= 4 * (highest - lowest)
    if excess(lowest) <= 0:
        return lowest
    if excess(highest) >= 0:
        return highest
    return float(optimize.brentq(excess, lowest, highest, xtol=1e-9))
