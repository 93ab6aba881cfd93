"""Student's t where scores are skewed: the transformation that removes the skewness from its distribution.

P. Hall, On the removal of skewness by transformation, Journal of the Royal Statistical Society B 54, 1992, 221-228.
Monotone, so that it can be turned around; without skewness it changes nothing. `skewness` is that of the sample, n its
size.
"""

import math

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
