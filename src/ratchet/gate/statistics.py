"""Bounds of a share that was counted."""

import math
from collections.abc import Sequence

from scipy import optimize, special, stats


def wilson(successes: float, n: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds, each at `confidence`, of the share that `successes` of n are a sample of.

    The score interval (E. B. Wilson, Journal of the American Statistical Association 22, 1927, 209-212): it stays
    between 0 and 1 and keeps its level for shares near them. `successes` may be a fraction (k answers a sample).

    Raises:
        ValueError: no samples, more successes than samples, or a confidence that is none.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes!r} of {n!r} is no share")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence!r} is not between 0 and 1")
    z, share = float(stats.norm.ppf(confidence)), successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1.0, 1.0))
    # Rounding must not turn "none of ten" into a share above nought, or all of them into one that is not one.
    return (0.0 if successes == 0 else max(0.0, low)), (1.0 if successes == n else min(1.0, high))


# Several claims at once: p-values made so much larger that the chance of one false claim stays what it was.


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given (S. Holm, Scandinavian Journal of Statistics 6, 1979, 65-70).

    Claims whose adjusted p-value is below alpha include a false one with probability alpha at most, however they
    depend on each other.

    Raises:
        ValueError: a value that is no probability.
    """
    for value in p:
        if not 0 <= value <= 1:
            raise ValueError(f"{value!r} is no p-value")
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


# Student's t where scores are skewed: the transformation that removes the skewness from its distribution.
#
# P. Hall, On the removal of skewness by transformation, Journal of the Royal Statistical Society B 54, 1992, 221-228.
# Monotone, so that it can be turned around; without skewness it changes nothing. `skewness` is that of the sample, n
# its
# size.

STRAIGHT = 1e-8
"""Skewness over root n below which rounding would be all that is changed."""


def straightened(t: float, skewness: float, n: int) -> float:
    """What a t-statistic (its sample skewed) is worth if there were no skewness."""
    k = skewness / math.sqrt(n)
    return t + k * t * t / 3 + k * k * t**3 / 27 + k / 6


def skewed(t: float, skewness: float, n: int) -> float:
    """The statistic that `straightened` would make t of."""
    k = skewness / math.sqrt(n)
    return t if abs(k) < STRAIGHT else 3 / k * (math.cbrt(1 + k * (t - k / 6)) - 1)


# Two models' right and wrong answers, told by the samples that only one of them has right.
#
# `better` and `worse` count those samples; of n in all. They may be fractions: then they are expected counts.


def score(better: float, worse: float, n: float, difference: float) -> float:
    """Tango's statistic of a supposed difference: normal when it is the true one, and falling as it rises.

    The share of pairs that became worse is the likeliest one under the supposed difference, so that the variance is
    not zero where no pair is discordant (T. Tango, Statistics in Medicine 17, 1998, 891-908, eq. 5).
    """
    b = -better - worse + (2 * n - better + worse) * difference
    c = -worse * difference * (1 - difference)
    q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
    variance = n * (2 * q + difference * (1 - difference))
    excess = better - worse - n * difference
    if variance <= 1e-12:
        return 0.0 if abs(excess) < 1e-9 else math.copysign(1e9, excess)
    return excess / math.sqrt(variance)


def bounds(better: float, worse: float, n: float, z: float) -> tuple[float, float]:
    """Tango's score interval: the differences whose statistic is z and -z, each a one-sided bound."""
    mean = (better - worse) / n
    low = optimize.brentq(lambda d: score(better, worse, n, d) - z, -1.0, mean) if mean > -1 else -1.0
    high = optimize.brentq(lambda d: score(better, worse, n, d) + z, mean, 1.0) if mean < 1 else 1.0
    return float(low), float(high)


def score_p(better: float, worse: float, n: float, bound: float) -> float:
    """One-sided p-value of Tango's score test of `difference <= bound`."""
    if bound < -1:
        return 0.0  # shares cannot differ by more than one
    return 1.0 if bound >= 1 else float(special.ndtr(-score(better, worse, n, bound)))


def exact_p(better: int, worse: int) -> float:
    """One-sided p-value of the exact test of `difference <= 0` (McNemar 1947): a fair coin for each discordant pair."""
    return float(stats.binom.sf(better - 1, better + worse, 0.5))


def mid_p(better: int, worse: int) -> float:
    """The same, half of the probability of what was seen taken off.

    The exact test rejects far less often than it may; this one keeps its level in practice and is as powerful as the
    asymptotic test (Fagerland, Lydersen, Laake, BMC Medical Research Methodology 13:91, 2013).
    """
    discordant = better + worse
    return float(stats.binom.sf(better, discordant, 0.5) + stats.binom.pmf(better, discordant, 0.5) / 2)
