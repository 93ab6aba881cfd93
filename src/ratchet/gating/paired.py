"""Paired comparison of two models on the same samples: difference with one-sided confidence bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import optimize, stats


@dataclass(frozen=True)
class Difference:
    """new - old over paired samples; `low` and `high` are one-sided bounds, each at the wanted confidence."""

    mean: float
    low: float
    high: float
    n: int


def difference(new: Sequence[float], old: Sequence[float], confidence: float) -> Difference:
    """Compare two models' scores on the same samples, given in the same order; higher is better.

    Scores that are all 0 or 1 (or 0 and -1) are compared by their discordant pairs: the score interval
    (T. Tango, Statistics in Medicine 17, 1998), which keeps its level at a margin too, where all changes go one way,
    and has a width even where no pair is discordant. Others by Student's t on the differences.

    Raises:
        ValueError: no samples, or of different number.
    """
    if len(new) != len(old) or not new:
        raise ValueError(f"{len(new)} and {len(old)} samples cannot be paired")
    changes = [a - b for a, b in zip(new, old, strict=True)]
    mean = sum(changes) / len(changes)
    if {abs(x) for x in (*new, *old)} <= {0.0, 1.0}:
        return _binary(changes, mean, confidence)
    return _continuous(changes, mean, confidence)


def _binary(changes: Sequence[float], mean: float, confidence: float) -> Difference:
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    n, z = len(changes), float(stats.norm.ppf(confidence))
    # The score falls as the supposed difference rises: below `mean` it is positive, above it negative.
    low = optimize.brentq(lambda d: _score(better, worse, n, d) - z, -1.0, mean) if mean > -1 else -1.0
    high = optimize.brentq(lambda d: _score(better, worse, n, d) + z, mean, 1.0) if mean < 1 else 1.0
    return Difference(mean, low, high, n)


def _score(better: int, worse: int, n: int, difference: float) -> float:
    """Tango's score statistic of the supposed difference: normal when it is the true one."""
    b = -better - worse + (2 * n - better + worse) * difference
    c = -worse * difference * (1 - difference)
    q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # likeliest share of `worse` under the difference
    variance = n * (2 * q + difference * (1 - difference))
    excess = better - worse - n * difference
    if variance <= 1e-12:
        return 0.0 if abs(excess) < 1e-9 else math.copysign(1e9, excess)
    return excess / math.sqrt(variance)


def _continuous(changes: Sequence[float], mean: float, confidence: float) -> Difference:
    n = len(changes)
    if n == 1:
        return Difference(mean, -math.inf, math.inf, n)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in changes) / (n - 1))
    half = float(stats.t.ppf(confidence, n - 1)) * deviation / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)
