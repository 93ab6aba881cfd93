"""Bounds of a share that was counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats


def wilson_bounds(successes: float, n: int, confidence: float) -> tuple[float, float]:
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


def adjust_p_values(p: Sequence[float]) -> list[float]:
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


def remove_skewness(t: float, skewness: float, n: int) -> float:
    """What a t-statistic (its sample skewed) is worth if there were no skewness."""
    k = skewness / math.sqrt(n)
    return t + k * t * t / 3 + k * k * t**3 / 27 + k / 6


def add_skewness(t: float, skewness: float, n: int) -> float:
    """The statistic that `remove_skewness` would make t of."""
    k = skewness / math.sqrt(n)
    return t if abs(k) < STRAIGHT else 3 / k * (math.cbrt(1 + k * (t - k / 6)) - 1)


# Two models' right and wrong answers, told by the samples that only one of them has right.
#
# `better` and `worse` count those samples; of n in all. They may be fractions: then they are expected counts.


def tango_statistic(better: float, worse: float, n: float, difference: float) -> float:
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


def tango_bounds(better: float, worse: float, n: float, z: float) -> tuple[float, float]:
    """Tango's score interval: the differences whose statistic is z and -z, each a one-sided bound."""
    mean = (better - worse) / n
    low = optimize.brentq(lambda d: tango_statistic(better, worse, n, d) - z, -1.0, mean) if mean > -1 else -1.0
    high = optimize.brentq(lambda d: tango_statistic(better, worse, n, d) + z, mean, 1.0) if mean < 1 else 1.0
    return float(low), float(high)


def tango_p_value(better: float, worse: float, n: float, bound: float) -> float:
    """One-sided p-value of Tango's score test of `difference <= bound`."""
    if bound < -1:
        return 0.0  # shares cannot differ by more than one
    return 1.0 if bound >= 1 else float(special.ndtr(-tango_statistic(better, worse, n, bound)))


def mcnemar_exact_p(better: int, worse: int) -> float:
    """One-sided p-value of the exact test of `difference <= 0` (McNemar 1947): a fair coin for each discordant pair."""
    return float(stats.binom.sf(better - 1, better + worse, 0.5))


def mcnemar_mid_p(better: int, worse: int) -> float:
    """The same, half of the probability of what was seen taken off.

    The exact test rejects far less often than it may; this one keeps its level in practice and is as powerful as the
    asymptotic test (Fagerland, Lydersen, Laake, BMC Medical Research Methodology 13:91, 2013).
    """
    discordant = better + worse
    return float(stats.binom.sf(better, discordant, 0.5) + stats.binom.pmf(better, discordant, 0.5) / 2)


# The bootstrap of a ratio of sums, by units that are resampled whole: bias-corrected and accelerated (BCa).
#
# A unit is a sample, or all samples of one group. The statistic sum(top) / sum(bottom) is a mean where every bottom is
# one, a mean over samples of clusters where it is their size, and a difference of log-perplexities where top is in
# nats
# and bottom in tokens.

Numbers = NDArray[np.float64]

DRAWS_AT_ONCE = 4_000_000
"""Bounds memory: some 100 MB, whatever the number of units and resamples."""
FEW_KINDS = 20
"""With so many times more units than distinct ones, counts of each kind are drawn instead of units: faster."""


@dataclass(frozen=True)
class ResamplingUnits:
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
class BootstrapDistribution:
    """Resampled estimates, ascending, and the corrections of BCa (B. Efron, JASA 82, 1987, 171-185)."""

    values: Numbers
    bias: float
    """z0: normal quantile of the share of resamples below the estimate."""
    acceleration: float

    def low(self, z: float) -> float:
        """Lower bound whose one-sided confidence is that of the normal quantile z."""
        share = special.ndtr(self.bias + _remove_acceleration(self.bias - z, self.acceleration))
        return float(self.values[min(int(share * len(self.values)), len(self.values) - 1)])

    def high(self, z: float) -> float:
        """Upper bound whose one-sided confidence is that of the normal quantile z."""
        share = special.ndtr(self.bias + _remove_acceleration(self.bias + z, self.acceleration))
        return float(self.values[max(math.ceil(share * len(self.values)) - 1, 0)])

    def z_above(self, bound: float) -> float:
        """The z for which `low(z)` would be just `bound`: how sure it is that the truth lies above."""
        count = int(np.searchsorted(self.values, bound, side="right"))
        step = float(special.ndtri(_clamp_share(count / len(self.values), len(self.values)))) - self.bias
        bent = 1 + self.acceleration * step
        if bent <= 0:  # beyond what any confidence reaches
            return math.copysign(float(-special.ndtri(_clamp_share(0.0, len(self.values)))), -step)
        return self.bias - step / bent


def _remove_acceleration(step: float, acceleration: float) -> float:
    bent = 1 - acceleration * step
    return step / bent if bent > 0 else math.copysign(math.inf, step)


def bootstrap_units(units: ResamplingUnits, resamples: int, seed: int) -> BootstrapDistribution:
    """Resample two units or more that are not all alike.

    The order of the units changes nothing, and turning the sign of every top turns that of every resample: units are
    sorted first, in that of the two signs whose estimate is not negative.
    """
    sign = -1.0 if (units.estimate or math.fsum(units.top**3)) < 0 else 1.0
    top = sign * units.top
    order = np.lexsort((units.bottom, top))
    values = sign * _draw_resamples(top[order], units.bottom[order], resamples, np.random.default_rng(seed))
    values.sort()
    rounding = 1e-12 * float(np.abs(values).max())
    below = np.searchsorted(values, units.estimate - rounding) + np.searchsorted(values, units.estimate + rounding)
    return BootstrapDistribution(
        values, float(special.ndtri(_clamp_share(below / (2 * resamples), resamples))), units.acceleration
    )


def _clamp_share(share: float, resamples: int) -> float:
    """A share of resamples, never so near to 0 or 1 that they could not tell."""
    return min(max(share, 1 / (resamples + 1)), resamples / (resamples + 1))


def _draw_resamples(top: Numbers, bottom: Numbers, resamples: int, rng: np.random.Generator) -> Numbers:
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


# How small a difference so many samples can show, and how many samples a difference takes.


def normal_quantiles(confidence: float, power: float) -> tuple[float, float]:
    """Normal quantiles: how many standard errors confidence takes, and how many more the power.

    Raises:
        ValueError: not between nought and one.
    """
    for name, value in (("confidence", confidence), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    return float(special.ndtri(confidence)), float(special.ndtri(power))


def detectable_difference(n: float, discordance: float, confidence: float, power: float) -> float:
    """Smallest difference of two shares of right answers that n pairs show, when so many pairs are discordant.

    From the normal approximation of paired counts, (z_a + z_b) sqrt(discordance / n) (R. J. Connor, Biometrics 43,
    1987, with the variance that holds for equal models). Never less than z_a^2 / (n + z_a^2): so far down reaches
    Tango's interval when not a single pair is discordant.
    """
    _check_discordance(n, discordance)
    z, more = normal_quantiles(confidence, power)
    return max((z + more) * math.sqrt(discordance / n), z * z / (n + z * z))


def required_pairs(margin: float, discordance: float, confidence: float, power: float) -> int:
    """Pairs that it takes to show such a difference: the smallest n for which `detectable_difference` is at most that.

    Raises:
        ValueError: a margin that is not positive, or shares that are none.
    """
    _check_discordance(1, discordance)
    if not margin > 0:
        raise ValueError(f"no number of samples shows a difference of {margin!r}")
    z, more = normal_quantiles(confidence, power)
    return max(1, math.ceil(discordance * ((z + more) / margin) ** 2), math.ceil(z * z * (1 / margin - 1)))


def _check_discordance(n: float, discordance: float) -> None:
    if not n > 0 or not 0 <= discordance <= 1:
        raise ValueError(f"{n!r} pairs of which a share of {discordance!r} is discordant: there is no such thing")
