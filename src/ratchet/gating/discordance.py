"""Two models' right and wrong answers, told by the samples that only one of them has right.

`better` and `worse` count those samples; of n in all. They may be fractions: then they are expected counts.
"""

import math

from scipy import optimize, special, stats


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
