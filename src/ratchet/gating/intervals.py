"""Bounds of a share that was counted."""

import math

from scipy import stats


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
