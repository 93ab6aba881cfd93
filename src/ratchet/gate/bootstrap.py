"""The bootstrap of a ratio of sums, by units that are resampled whole: bias-corrected and accelerated (BCa).

A unit is a sample, or all samples of one group. The statistic sum(top) / sum(bottom) is a mean where every bottom is
one, a mean over samples of clusters where it is their size, and a difference of log-perplexities where top is in nats
and bottom in tokens.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

Numbers = NDArray[np.float64]

DRAWS_AT_ONCE = 4_000_000
"""Bounds memory: some 100 MB, whatever the number of units and resamples."""
FEW_KINDS = 20
"""With so many times more units than distinct ones, counts of each kind are drawn instead of units: faster."""


@dataclass(frozen=True)
class Units:
    """What is resampled. Both arrays have one number a unit; bottoms are positive."""

    top: Numbers
    bottom: Numbers

    @cached_property
    def estimate(self) -> float:
        """sum(top) / sum(bottom)."""
        return math.fsum(self.top) / math.fsum(self.bottom)

    @cached_property
    def residuals(self) -> Numbers:
        """Influence of each unit on the estimate (first order); they sum to nought."""
        found: Numbers = (self.top - self.estimate * self.bottom) / self.bottom.mean()
        return found

    @cached_property
    def alike(self) -> bool:
        """Whether no unit differs from the estimate, rounding aside: nothing varies."""
        return bool(np.abs(self.residuals).max() <= 1e-12 * np.abs(self.top / self.bottom).max(initial=0.0))

    @cached_property
    def standard_error(self) -> float:
        """Of the estimate, from the residuals; needs two units or more."""
        n = len(self.top)
        return math.sqrt(math.fsum(self.residuals**2) / (n * (n - 1)))

    @cached_property
    def skewness(self) -> float:
        """Of the residuals; needs units that are not all alike."""
        return float((self.residuals**3).mean() / (self.residuals**2).mean() ** 1.5)

    @cached_property
    def acceleration(self) -> float:
        """Rate at which the standard error changes with the truth (Efron 1987, eq. 6.6), by the jackknife."""
        left_out = (math.fsum(self.top) - self.top) / (math.fsum(self.bottom) - self.bottom)
        change = left_out.mean() - left_out
        spread = math.fsum(change**2)
        return math.fsum(change**3) / (6 * spread**1.5) if spread > 0 else 0.0


@dataclass(frozen=True)
class Distribution:
    """Resampled estimates, ascending, and the corrections of BCa (B. Efron, JASA 82, 1987, 171-185)."""

    values: Numbers
    bias: float
    """z0: normal quantile of the share of resamples below the estimate."""
    acceleration: float

    def low(self, z: float) -> float:
        """Lower bound whose one-sided confidence is that of the normal quantile z."""
        share = special.ndtr(self.bias + _straight(self.bias - z, self.acceleration))
        return float(self.values[min(int(share * len(self.values)), len(self.values) - 1)])

    def high(self, z: float) -> float:
        """Upper bound whose one-sided confidence is that of the normal quantile z."""
        share = special.ndtr(self.bias + _straight(self.bias + z, self.acceleration))
        return float(self.values[max(math.ceil(share * len(self.values)) - 1, 0)])

    def z_above(self, bound: float) -> float:
        """The z for which `low(z)` would be just `bound`: how sure it is that the truth lies above."""
        count = int(np.searchsorted(self.values, bound, side="right"))
        step = float(special.ndtri(_inside(count / len(self.values), len(self.values)))) - self.bias
        bent = 1 + self.acceleration * step
        if bent <= 0:  # beyond what any confidence reaches
            return math.copysign(float(-special.ndtri(_inside(0.0, len(self.values)))), -step)
        return self.bias - step / bent


def _straight(step: float, acceleration: float) -> float:
    bent = 1 - acceleration * step
    return step / bent if bent > 0 else math.copysign(math.inf, step)


def distribution(units: Units, resamples: int, seed: int) -> Distribution:
    """Resample two units or more that are not all alike.

    The order of the units changes nothing, and turning the sign of every top turns that of every resample: units are
    sorted first, in that of the two signs whose estimate is not negative.
    """
    sign = -1.0 if (units.estimate or math.fsum(units.top**3)) < 0 else 1.0
    top = sign * units.top
    order = np.lexsort((units.bottom, top))
    values = sign * _resampled(top[order], units.bottom[order], resamples, np.random.default_rng(seed))
    values.sort()
    rounding = 1e-12 * float(np.abs(values).max())
    below = np.searchsorted(values, units.estimate - rounding) + np.searchsorted(values, units.estimate + rounding)
    return Distribution(values, float(special.ndtri(_inside(below / (2 * resamples), resamples))), units.acceleration)


def _inside(share: float, resamples: int) -> float:
    """A share of resamples, never so near to 0 or 1 that they could not tell."""
    return min(max(share, 1 / (resamples + 1)), resamples / (resamples + 1))


def _resampled(top: Numbers, bottom: Numbers, resamples: int, rng: np.random.Generator) -> Numbers:
    n = len(top)
    kinds, counts = np.unique(np.stack((top, bottom)), axis=1, return_counts=True)
    if len(counts) * FEW_KINDS <= n:
        drawn = rng.multinomial(n, counts / n, size=resamples).astype(np.float64)
        found: Numbers = (drawn @ kinds[0]) / (drawn @ kinds[1])
        return found
    same = bool((bottom == bottom[0]).all())
    found = np.empty(resamples)
    at_once = max(1, DRAWS_AT_ONCE // n)
    for start in range(0, resamples, at_once):
        drawn_units = rng.integers(0, n, size=(min(at_once, resamples - start), n), dtype=np.int32)
        sums = top[drawn_units].sum(axis=1)
        below = n * bottom[0] if same else bottom[drawn_units].sum(axis=1)
        found[start : start + len(sums)] = sums / below
    return found
