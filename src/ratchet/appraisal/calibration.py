"""Whether the probabilities that a model gives to labels are what becomes of them.

A label's probability is its share of the probability of all labels together (softmax over their log-probabilities):
what else the model could have said is left out. Expected calibration error: M. P. Naeini, G. F. Cooper and M.
Hauskrecht, AAAI 2015, on the likeliest label as in C. Guo et al., "On Calibration of Modern Neural Networks", ICML
2017, equation 3. Brier score: G. W. Brier, Monthly Weather Review 78, 1950: over all labels, so from 0 to 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.appraisal.intervals import widened
from ratchet.measures.figures import mean, proportion
from ratchet.records_evaluation import Metric

BINS = 10
"""Of equal width, each with its upper edge: (0, 0.1], ..., (0.9, 1]."""


@dataclass(frozen=True)
class Bin:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability of the likeliest label."""
    right: Metric
    """Share of prompts whose likeliest label is the reference."""


@dataclass(frozen=True)
class Calibration:
    """Of one generation."""

    bins: Sequence[Bin]
    """Those that are not empty, in their order."""
    error: float
    """Expected calibration error: mean distance of probability and share, weighted with the prompts of the bins."""
    brier: Metric
    confidence: float
    """Mean probability of the likeliest label."""
    right: Metric
    """Share of prompts whose likeliest label is the reference."""


def probabilities(nats: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Softmax over labels; [prompts, labels]."""
    scores = np.asarray(nats, dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), dtype=np.float64)


def calibration(labels: Sequence[str], expected: Sequence[str], nats: Sequence[Sequence[float]]) -> Calibration:
    """From finite log-probabilities of labels.

    Args:
        labels: in the order of the log-probabilities.
        expected: reference of each prompt, one of the labels; at least one.
        nats: log-probability of each label, for each prompt.
    """
    shares = probabilities(nats)
    place = {label: k for k, label in enumerate(labels)}
    true = np.array([place[label] for label in expected])
    likeliest = shares.argmax(axis=1)  # of equals the first
    confidence = shares.max(axis=1)
    right = likeliest == true
    edges = np.linspace(0.0, 1.0, BINS + 1)
    number = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    bins = [
        Bin(
            float(edges[k]), float(edges[k + 1]), float(confidence[number == k].mean()),
            proportion(right[number == k].astype(float).tolist()),
        )
        for k in range(BINS)
        if (number == k).any()
    ]  # fmt: skip
    error = sum(one.right.n * abs(one.right.value - one.confidence) for one in bins) / len(true)
    wanted = np.zeros_like(shares)
    wanted[np.arange(len(true)), true] = 1.0
    brier = widened(mean(((shares - wanted) ** 2).sum(axis=1).tolist(), "lower", "0 to 2, mean of prompts"), most=2.0)
    return Calibration(bins, error, brier, float(confidence.mean()), proportion(right.astype(float).tolist()))
