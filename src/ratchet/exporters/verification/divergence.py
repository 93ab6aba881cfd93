"""Measures how far a format's next-token distributions are from those of base + adapter, at the same positions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import DamagedFileError
from ratchet.storage.records.export import DistributionDistance

LIKELY_SHARE = 1000.0
"""A token counts as likely if its probability exceeds 1 / (vocabulary size * this)."""
MIN_LOG_PROBABILITY = -149 * math.log(2)
"""Logarithm of 2^-149, the smallest float32 number. A probability of zero counts as this: if a format excludes a token
that the reference considers possible, the divergence is some hundred nats instead of infinity, which no JSON record can
store."""

LogProbabilities = NDArray[np.float32]
"""[positions, vocabulary], in nats."""


@dataclass
class _DivergenceTotals:
    """Running sums over the rows compared so far."""

    rows: int = 0
    positions: int = 0
    likely: int = 0
    difference: float = 0.0
    max_difference: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    agreements: int = 0
    nats: float = 0.0
    reference_nats: float = 0.0

    def add(self, reference: LogProbabilities, compared: LogProbabilities, targets: Sequence[int]) -> None:
        """Add one row, position by position, so that float64 copies have the size of the vocabulary."""
        self.rows += 1
        for reference_position, compared_position, target in zip(reference, compared, targets, strict=True):
            p, q = (
                np.maximum(one.astype(np.float64), MIN_LOG_PROBABILITY)
                for one in (reference_position, compared_position)
            )
            is_likely = p > -math.log(LIKELY_SHARE * len(p))
            differences = np.abs(q[is_likely] - p[is_likely])
            self.likely += len(differences)
            self.difference += float(differences.sum())
            self.max_difference = max(self.max_difference, float(differences.max()))
            # The terms -p + q cancel the float32 rounding of the probabilities, whose exact sums are 1.
            kl = max(0.0, float((np.exp(p) * (p - q) - np.exp(p) + np.exp(q)).sum()))
            self.kl += kl
            self.max_kl = max(self.max_kl, kl)
            self.agreements += int(p.argmax() == q.argmax())
            self.nats -= float(q[target])
            self.reference_nats -= float(p[target])
            self.positions += 1


def measure_distance(
    reference: Iterable[LogProbabilities], compared: Iterable[LogProbabilities], targets: Iterable[Sequence[int]]
) -> DistributionDistance:  # fmt: skip
    """Compare the log-probabilities of two models row by row. Generators are consumed one row at a time.

    `mean_difference` is the mean of |difference| over the same likely tokens as `max_difference`. The divergence is
    sum p (log p - log q) over the whole vocabulary (Kullback and Leibler 1951). It is computed with - p + q behind each
    term; these terms add up to zero for probabilities, and remove the effect of float32 rounding. Sums are float64.

    Args:
        reference: log-probabilities of base + adapter for each row.
        compared: log-probabilities of the other model at the same positions.
        targets: for each row, the token that follows each of its positions.

    Raises:
        DamagedFileError: the other model returns NaN, or values for another vocabulary.
        ValueError: there is no position, or the numbers of rows differ.
    """
    totals = _DivergenceTotals()
    for row, (expected, values, tokens) in enumerate(zip(reference, compared, targets, strict=True)):
        if expected.shape != values.shape:
            raise DamagedFileError(
                f"row {row}: log-probabilities: found shape {values.shape}; expected {expected.shape} (positions, "
                "vocabulary) as in base + adapter; export again"
            )
        if np.isnan(values).any() or np.isposinf(values).any():
            raise DamagedFileError(
                f"row {row}: log-probabilities: found NaN or infinity; the exported format or its runtime is faulty"
            )
        totals.add(expected, values, tokens)
    if not totals.positions:
        raise ValueError("no position to compare")
    return DistributionDistance(
        rows=totals.rows,
        positions=totals.positions,
        max_difference=totals.max_difference,
        mean_difference=totals.difference / totals.likely,
        kl=totals.kl / totals.positions,
        max_kl=totals.max_kl,
        greedy_agreement=totals.agreements / totals.positions,
        perplexity=math.exp(totals.nats / totals.positions),
        reference_perplexity=math.exp(totals.reference_nats / totals.positions),
    )
