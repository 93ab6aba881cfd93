"""Figures from per-sample scores, with 95 % intervals. Sums are exact (math.fsum), in whatever order samples come."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ratchet.storage.records.evaluation import MetricValue

SHARE, POINTS = "mean of samples, 0 to 1", "points, 0 to 100"
"""Units of means."""

Better = Literal["higher", "lower", "unknown"]

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

LARGEST = math.log(1.7e308)
"""Beyond it exp overflows; a model that bad has an infinite perplexity."""

DRAWS = 200


def proportion_metric(hits: Sequence[float]) -> MetricValue:
    """Share of ones, with Wilson's 95 % interval (E. B. Wilson, JASA 22, 1927)."""
    n, p = len(hits), math.fsum(hits) / len(hits)
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    low, high = min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))  # rounding: n of n must reach 1
    return MetricValue(value=p, n=n, low=low, high=high, better="higher", unit="proportion")


def mean_metric(values: Sequence[float], better: Better, unit: str) -> MetricValue:
    """Mean with a normal 95 % interval. A NaN among the values makes the figure NaN: none is ever left out."""
    n, middle = len(values), math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((x - middle) ** 2 for x in values) / max(1, n - 1))
    half = Z95 * spread / math.sqrt(n)
    return MetricValue(value=middle, n=n, low=middle - half, high=middle + half, better=better, unit=unit)


def mean_loss_metric(losses: Sequence[float]) -> MetricValue:
    """Mean of per-row losses (nats per token)."""
    return mean_metric(losses, "lower", "nats per token, mean of rows")


def mean_score_metric(values: Sequence[float], better: Better, unit: str = "mean of samples") -> MetricValue:
    """Mean of any per-sample score; a proportion when all are 0 or 1 and 1 is all that there can be, and wanted."""
    if better == "higher" and unit != POINTS and all(value in (0.0, 1.0) for value in values):
        return proportion_metric(values)
    return mean_metric(values, better, unit)


def perplexity_metric(nll: Sequence[float], tokens: Sequence[float]) -> MetricValue:
    """exp(all nats / all tokens), with a 95 % interval of the ratio by its linearisation (samples are the units).

    Args:
        nll: nats of each sample as a whole.
        tokens: tokens of each sample, or whatever the nats are counted per (words, bytes).
    """
    n, total = len(nll), math.fsum(tokens)
    ratio = math.fsum(nll) / total
    residual = math.fsum((x - ratio * t) ** 2 for x, t in zip(nll, tokens, strict=True))
    half = Z95 * math.sqrt(residual * n / max(1, n - 1)) / total
    value, low, high = _saturating_exp(ratio), _saturating_exp(ratio - half), _saturating_exp(ratio + half)
    return MetricValue(value=value, n=n, low=low, high=high, better="lower", unit="1", kind="perplexity")


def _saturating_exp(x: float) -> float:
    return math.inf if x > LARGEST else math.exp(x)


def bootstrap_metric(
    compute: Callable[[Sequence[Any]], float], samples: Sequence[Any], better: Better, unit: str
) -> MetricValue:
    """A figure that is no function of samples' scores, with the percentile interval of a seeded bootstrap.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13; few resamples, for some of these
    figures (BLEU of a corpus) need a second each.
    """
    value, draw = float(compute(samples)), random.Random(0)
    found = sorted(float(compute(draw.choices(samples, k=len(samples)))) for _ in range(DRAWS))
    low, high = found[round(0.025 * DRAWS)], found[round(0.975 * DRAWS) - 1]
    return MetricValue(
        value=value, n=len(samples), low=min(value, low), high=max(value, high), better=better, unit=unit, kind="figure"
    )
