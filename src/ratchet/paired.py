"""Paired comparison of two models on the same samples: difference with one-sided confidence bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Difference:
    """new - old over paired samples; `low` and `high` are one-sided bounds, each at the wanted confidence."""

    mean: float
    low: float
    high: float
    n: int


def difference(new: Sequence[float], old: Sequence[float], confidence: float) -> Difference:
    """Compare two models' scores on the same samples, given in the same order; higher is better.

    Scores that are all 0 or 1 (or 0 and -1) are compared by their discordant pairs: Wald's interval after adding half
    a pair to each cell of the 2x2 table, which keeps its level for small counts and has a width even where no pair is
    discordant (A. Agresti and Y. Min, Statistics in Medicine 24, 2005). Others by Student's t on the differences.

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
    total = len(changes) + 2.0
    better = sum(change > 0 for change in changes) + 0.5
    worse = sum(change < 0 for change in changes) + 0.5
    middle = (better - worse) / total
    deviation = math.sqrt(((better + worse) - (better - worse) ** 2 / total) / total**2)
    half = float(stats.norm.ppf(confidence)) * deviation
    return Difference(mean, max(-1.0, middle - half), min(1.0, middle + half), len(changes))


def _continuous(changes: Sequence[float], mean: float, confidence: float) -> Difference:
    n = len(changes)
    if n == 1:
        return Difference(mean, -math.inf, math.inf, n)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in changes) / (n - 1))
    half = float(stats.t.ppf(confidence, n - 1)) * deviation / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)
