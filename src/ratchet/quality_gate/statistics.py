"""Computes the statistics of the gate: intervals of proportions, paired binary tests, BCa bootstrap, sample sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Numbers = NDArray[np.float64]
MIN_SKEW = 1e-8
"""Smallest absolute value of skewness / sqrt(n) for which `add_skewness` transforms. For smaller values, the
transformation would only add rounding errors."""

MAX_DRAWS_PER_CHUNK = 4_000_000
"""Maximum number of unit indices drawn at once. It limits memory to about 100 MB for any number of resamples and up to
4,000,000 units; with more units, one resample is drawn at a time."""

ALPHA_EXPONENT = 1.6
"""How fast the level of later models falls. A larger exponent limits wrong promotions more, and needs more rows."""

MIN_UNITS_PER_KIND = 20
"""Average number of equal units from which the bootstrap draws the count of each distinct unit instead of single units,
because this is then faster."""


def _check_proportion(name: str, count: float, n: int, confidence: float) -> None:
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"found {count!r} {name} in {n!r} samples; expected 0 <= {name} <= n and n >= 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence!r} is not between 0 and 1")


def wilson_bounds(successes: float, n: int, confidence: float) -> tuple[float, float]:
    """Compute one-sided bounds of a proportion from `successes` in `n` samples.

    Wilson's score interval (E. B. Wilson, Journal of the American Statistical Association 22, 1927, 209-212) stays
    between 0 and 1 and keeps its level for proportions near 0 and 1.

    Args:
        successes: Number of successes; not an integer if the rows of a group count as one sample with their mean.
        n: Number of samples.
        confidence: One-sided confidence of each bound.

    Raises:
        ValueError: n is below 1, `successes` is not between 0 and n, or the confidence is not between 0 and 1.
    """
    _check_proportion("successes", successes, n, confidence)
    z, share = float(stats.norm.ppf(confidence)), successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1.0, 1.0))
    # Remove rounding errors: the lower bound of 0 successes is exactly 0, the upper bound of n successes exactly 1.
    return (0.0 if successes == 0 else max(0.0, low)), (1.0 if successes == n else min(1.0, high))


def bound_unseen_scores(mean: float, largest: float, n: int, confidence: float) -> tuple[float, float]:
    """Compute one-sided bounds of a mean of scores from 0 to `largest`, as if the n independent scores were all equal.

    Scores that were not drawn may make up a share of 1 - (1 - confidence)^(1/n), the bound of Clopper and Pearson for a
    rate without a failure. The bounds are the means if these scores are all 0, or all `largest`. Raises ValueError as
    `clopper_pearson_bounds`.
    """
    _, share = clopper_pearson_bounds(0, n, confidence)
    return mean * (1 - share), mean + (largest - mean) * share


def clopper_pearson_bounds(failures: int, n: int, confidence: float) -> tuple[float, float]:
    """Compute exact one-sided bounds of a rate from `failures` in `n` independent samples.

    Source: C. J. Clopper, E. S. Pearson, Biometrika 26, 1934, 404-413. Without a failure the upper bound is
    1 - (1 - confidence)^(1/n); at 95 % that is about 3/n (Hanley and Lippman-Hand, JAMA 249, 1983, 1743-1745).

    Args:
        failures: Number of failures.
        n: Number of samples.
        confidence: One-sided confidence of each bound.

    Raises:
        ValueError: n is below 1, `failures` is not between 0 and n, or the confidence is not between 0 and 1.
    """
    _check_proportion("failures", failures, n, confidence)
    low = float(stats.beta.ppf(1 - confidence, failures, n - failures + 1)) if failures else 0.0
    high = float(stats.beta.ppf(confidence, failures + 1, n - failures)) if failures < n else 1.0
    return low, high


def required_without_failure(failures: int, max_rate: float, confidence: float) -> int:
    """Return the smallest number of samples for which this number of failures has an upper bound of at most `max_rate`.

    The bound is that of `clopper_pearson_bounds`. Raises ValueError if max_rate is not between 0 and 1.
    """
    if not 0 < max_rate < 1:
        raise ValueError(f"max_rate {max_rate!r} is not between 0 and 1")

    def suffices(n: int) -> bool:
        return clopper_pearson_bounds(failures, n, confidence)[1] <= max_rate

    high = failures + 1
    while not suffices(high):
        high *= 2
    low = max(failures, high // 2)  # too few samples, or as many as failures
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def number_groups(groups: Sequence[str | None]) -> list[int]:
    """Return the number of each row's group, from 0, in order of first occurrence. A row with None is its own group."""
    # A row without a group is named by its index (an int), so it cannot collide with a group name (a str).
    numbers: dict[str | int, int] = {}
    return [numbers.setdefault(row if name is None else name, len(numbers)) for row, name in enumerate(groups)]


def adjust_p_values(p: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple claims by Holm's method; the order is kept.

    If every claim with an adjusted p-value below alpha is accepted, the probability that any accepted claim is false is
    at most alpha, whatever the dependence between the claims (S. Holm, Scandinavian Journal of Statistics 6, 1979,
    65-70).

    Raises:
        ValueError: A value is not between 0 and 1.
    """
    for value in p:
        if not 0 <= value <= 1:
            raise ValueError(f"p-value {value!r} is not between 0 and 1")
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def compute_alpha_share(number: int) -> float:
    """Return the share of alpha at which one of many models on the same test set is tested: number^-1.6.

    The probability that any of the models is promoted wrongly is then at most 2.3 alpha, the sum of these levels,
    however many models there are and however the tests depend on each other (alpha spending; D. Foster, R. Stine,
    Journal of the Royal Statistical Society B 70, 2008, 429-444).

    Args:
        number: Number of this model among those tested, from 1.
    """
    return float(number**-ALPHA_EXPONENT)


# Student's t for skewed scores. Hall's transformation removes the skewness from the distribution of the t-statistic.
# P. Hall, "On the removal of skewness by transformation", Journal of the Royal Statistical Society B 54, 1992, 221-228.
# The transformation is monotone, so it can be inverted, and it is the identity for scores without skewness.


def remove_skewness(t: float, skewness: float, n: int) -> float:
    """Transform the t-statistic of `n` samples with this skewness into the t-statistic of samples without skewness."""
    k = skewness / math.sqrt(n)
    return t + k * t * t / 3 + k * k * t**3 / 27 + k / 6


def add_skewness(t: float, skewness: float, n: int) -> float:
    """Invert `remove_skewness`: transform a t-statistic back to samples with this skewness."""
    k = skewness / math.sqrt(n)
    return t if abs(k) < MIN_SKEW else 3 / k * (math.cbrt(1 + k * (t - k / 6)) - 1)


# Paired binary scores. Of n samples, `better` are right for the new model only and `worse` for the old model only
# (the discordant pairs). Both may be fractions where they are expected counts.


def tango_statistic(better: float, worse: float, n: float, difference: float) -> float:
    """Compute Tango's score statistic of a hypothesized difference of two paired proportions.

    The statistic is standard normal if the hypothesis is true, and decreases as the hypothesized difference increases.
    Its variance uses the maximum likelihood estimate, under the hypothesis, of the proportion of pairs that became
    worse. So the variance is positive even without discordant pairs (T. Tango, Statistics in Medicine 17, 1998,
    891-908, eq. 5).
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
    """Compute Tango's score interval. Its ends, two one-sided bounds, are the differences with statistics z and -z."""
    mean = (better - worse) / n
    low = optimize.brentq(lambda d: tango_statistic(better, worse, n, d) - z, -1.0, mean) if mean > -1 else -1.0
    high = optimize.brentq(lambda d: tango_statistic(better, worse, n, d) + z, mean, 1.0) if mean < 1 else 1.0
    return float(low), float(high)


def tango_p_value(better: float, worse: float, n: float, bound: float) -> float:
    """Compute the one-sided p-value of Tango's score test of the hypothesis `difference <= bound`."""
    if bound < -1:
        return 0.0  # Proportions cannot differ by more than 1.
    return 1.0 if bound >= 1 else float(special.ndtr(-tango_statistic(better, worse, n, bound)))


def mcnemar_mid_p(better: int, worse: int) -> float:
    """Compute the one-sided mid-p value of McNemar's test of `difference <= 0` (Q. McNemar, 1947).

    Under the hypothesis, each discordant pair is a fair coin toss. The mid-p value is the exact p-value minus half the
    probability of the observation. The exact test rejects far less often than its level allows. The mid-p test keeps
    its level in practice and is as powerful as the asymptotic test (Fagerland, Lydersen, Laake, BMC Medical Research
    Methodology 13:91, 2013).
    """
    discordant = better + worse
    return float(stats.binom.sf(better, discordant, 0.5) + stats.binom.pmf(better, discordant, 0.5) / 2)


# Bootstrap of a ratio of sums over resampling units, bias-corrected and accelerated (BCa). A unit is a sample, or all
# samples of one group. The statistic sum(top) / sum(bottom) is a mean where every bottom is 1, a mean over samples of
# clusters where bottom is the cluster size, and a difference of log-perplexities where top is in nats and bottom in
# tokens.


@dataclass(frozen=True)
class ResamplingUnits:
    """The independent units that the bootstrap draws; both arrays have one entry per unit."""

    top: Numbers
    bottom: Numbers
    """Denominators; all are positive."""

    @cached_property
    def estimate(self) -> float:
        """sum(top) / sum(bottom)."""
        return math.fsum(self.top) / math.fsum(self.bottom)

    @cached_property
    def residuals(self) -> Numbers:
        """First-order influence of each unit on the estimate; the influences sum to zero."""
        residuals: Numbers = (self.top - self.estimate * self.bottom) / self.bottom.mean()
        return residuals

    @cached_property
    def is_constant(self) -> bool:
        """Whether every unit equals the estimate up to rounding, so nothing varies."""
        return bool(np.abs(self.residuals).max() <= 1e-12 * np.abs(self.top / self.bottom).max(initial=0.0))

    @cached_property
    def standard_error(self) -> float:
        """Standard error of the estimate from the residuals; needs at least two units."""
        n = len(self.top)
        return math.sqrt(math.fsum(self.residuals**2) / (n * (n - 1)))

    @cached_property
    def skewness(self) -> float:
        """Skewness of the residuals; undefined if `is_constant`."""
        return float((self.residuals**3).mean() / (self.residuals**2).mean() ** 1.5)

    @cached_property
    def acceleration(self) -> float:
        """Rate of change of the standard error with the true value (Efron 1987, eq. 6.6), by the jackknife."""
        leave_one_out = (math.fsum(self.top) - self.top) / (math.fsum(self.bottom) - self.bottom)
        change = leave_one_out.mean() - leave_one_out
        spread = math.fsum(change**2)
        return math.fsum(change**3) / (6 * spread**1.5) if spread > 0 else 0.0


@dataclass(frozen=True)
class BootstrapDistribution:
    """Resampled estimates in ascending order with the BCa corrections (B. Efron, JASA 82, 1987, 171-185)."""

    values: Numbers
    bias: float
    """Efron's z0: the normal quantile of the share of resamples below the estimate."""
    acceleration: float

    def low(self, z: float) -> float:
        """Return the lower bound with one-sided confidence Phi(z), where Phi is the normal distribution function."""
        share = special.ndtr(self.bias + _remove_acceleration(self.bias - z, self.acceleration))
        return float(self.values[min(int(share * len(self.values)), len(self.values) - 1)])

    def high(self, z: float) -> float:
        """Return the upper bound with one-sided confidence Phi(z), where Phi is the normal distribution function."""
        share = special.ndtr(self.bias + _remove_acceleration(self.bias + z, self.acceleration))
        return float(self.values[max(math.ceil(share * len(self.values)) - 1, 0)])

    def z_above(self, bound: float) -> float:
        """Return the z for which `low(z)` equals `bound`: the evidence that the true value is above `bound`."""
        count = int(np.searchsorted(self.values, bound, side="right"))
        step = float(special.ndtri(_clamp_share(count / len(self.values), len(self.values)))) - self.bias
        scale = 1 + self.acceleration * step
        if scale <= 0:  # No confidence level has this bound.
            return math.copysign(float(-special.ndtri(_clamp_share(0.0, len(self.values)))), -step)
        return self.bias - step / scale


def _remove_acceleration(step: float, acceleration: float) -> float:
    scale = 1 - acceleration * step
    return step / scale if scale > 0 else math.copysign(math.inf, step)


def bootstrap_units(units: ResamplingUnits, resamples: int, seed: int) -> BootstrapDistribution:
    """Draw bootstrap resamples of at least two units that are not constant.

    The units are sorted first, so the result does not depend on their order. Before that, every `top` is multiplied by
    the sign that makes the estimate positive (for an estimate of 0, the sum of cubes of `top`), so negating every `top`
    negates every resample.
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
    """Limit a share to the range that this many resamples can distinguish from 0 and 1."""
    return min(max(share, 1 / (resamples + 1)), resamples / (resamples + 1))


def _draw_resamples(top: Numbers, bottom: Numbers, resamples: int, rng: np.random.Generator) -> Numbers:
    n = len(top)
    kinds, counts = np.unique(np.stack((top, bottom)), axis=1, return_counts=True)
    if len(counts) * MIN_UNITS_PER_KIND <= n:
        drawn_counts = rng.multinomial(n, counts / n, size=resamples).astype(np.float64)
        ratios: Numbers = (drawn_counts @ kinds[0]) / (drawn_counts @ kinds[1])
        return ratios
    has_equal_bottoms = bool((bottom == bottom[0]).all())
    ratios = np.empty(resamples)
    chunk = max(1, MAX_DRAWS_PER_CHUNK // n)
    for start in range(0, resamples, chunk):
        drawn = rng.integers(0, n, size=(min(chunk, resamples - start), n), dtype=np.int32)
        sums = top[drawn].sum(axis=1)
        denominators = n * bottom[0] if has_equal_bottoms else bottom[drawn].sum(axis=1)
        ratios[start : start + len(sums)] = sums / denominators
    return ratios


# Power: the smallest difference that n pairs detect, and the number of pairs that is required to detect a difference.


def normal_quantiles(confidence: float, power: float) -> tuple[float, float]:
    """Return the normal quantiles of confidence and power: the number of standard errors that each requires.

    Raises:
        ValueError: A value is not between 0 and 1.
    """
    for name, value in (("confidence", confidence), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    return float(special.ndtri(confidence)), float(special.ndtri(power))


def detectable_difference(n: float, discordance: float, confidence: float, power: float) -> float:
    """Compute the smallest difference of two proportions that `n` pairs detect, given the share of discordant pairs.

    The result is the normal approximation for paired counts, (z_a + z_b) sqrt(discordance / n), where z_a and z_b are
    the quantiles of confidence and power (R. J. Connor, Biometrics 43, 1987, with the variance for equal models). It is
    at least z_a^2 / (n + z_a^2), because Tango's interval extends to minus this value even without any discordant pair.
    """
    _check_discordance(n, discordance)
    z_confidence, z_power = normal_quantiles(confidence, power)
    tango_limit = z_confidence * z_confidence / (n + z_confidence * z_confidence)
    return max((z_confidence + z_power) * math.sqrt(discordance / n), tango_limit)


def required_pairs(margin: float, discordance: float, confidence: float, power: float) -> int:
    """Compute the smallest n for which `detectable_difference` is at most `margin`.

    Raises:
        ValueError: The margin is not positive, or a share is not between 0 and 1.
    """
    _check_discordance(1, discordance)
    if not margin > 0:
        raise ValueError(f"margin {margin!r} is not positive: no number of samples can show such a difference")
    z_confidence, z_power = normal_quantiles(confidence, power)
    return max(
        1,
        math.ceil(discordance * ((z_confidence + z_power) / margin) ** 2),
        math.ceil(z_confidence * z_confidence * (1 / margin - 1)),
    )


def _check_discordance(n: float, discordance: float) -> None:
    if not n > 0 or not 0 <= discordance <= 1:
        raise ValueError(f"found {n!r} pairs, discordance {discordance!r}; expected n > 0 and 0 <= discordance <= 1")
