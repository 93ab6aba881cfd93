"""How far one form's next-token distributions are from those of base + adapter, at the same positions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import DamagedError
from ratchet.records_export import Closeness

LIKELY_SHARE = 1000.0
"""A token counts as likely above an even share, 1 / vocabulary, divided by this."""
LEAST_NATS = -149 * math.log(2)
"""A probability of nought is taken for the smallest number of float32, 2^-149: a form that rules out what the
reference holds possible is some hundred nats off, a large figure and not infinity, which no record could hold."""

LogProbabilities = NDArray[np.float32]
"""[positions, vocabulary], in nats."""


@dataclass
class _Sums:
    """Of everything that was compared so far."""

    rows: int = 0
    positions: int = 0
    likely: int = 0
    difference: float = 0.0
    greatest: float = 0.0
    kl: float = 0.0
    greatest_kl: float = 0.0
    agreeing: int = 0
    nats: float = 0.0
    reference_nats: float = 0.0

    def add(self, reference: LogProbabilities, found: LogProbabilities, targets: Sequence[int]) -> None:
        """One row; a position at a time, so that float64 copies are as long as the vocabulary and no longer."""
        self.rows += 1
        for expected, given, target in zip(reference, found, targets, strict=True):
            p, q = (np.maximum(one.astype(np.float64), LEAST_NATS) for one in (expected, given))
            likely = p > -math.log(LIKELY_SHARE * len(p))
            differences = np.abs(q[likely] - p[likely])
            self.likely += len(differences)
            self.difference += float(differences.sum())
            self.greatest = max(self.greatest, float(differences.max()))
            # Sums of probabilities, both 1 but for float32, take the rounding of their logarithms out again.
            kl = max(0.0, float((np.exp(p) * (p - q) - np.exp(p) + np.exp(q)).sum()))
            self.kl += kl
            self.greatest_kl = max(self.greatest_kl, kl)
            self.agreeing += int(p.argmax() == q.argmax())
            self.nats -= float(q[target])
            self.reference_nats -= float(p[target])
            self.positions += 1


def closeness(
    reference: Iterable[LogProbabilities], found: Iterable[LogProbabilities], targets: Iterable[Sequence[int]]
) -> Closeness:  # fmt: skip
    """Compare two forms' log-probabilities, row by row; either may be a generator, and is then held a row at a time.

    `mean_difference` is the mean of |difference| over the same likely tokens as `max_difference`; the divergence is
    sum p (log p - log q) (Kullback and Leibler 1951), over the whole vocabulary; it is computed with - p + q behind
    each term, which sum to nought for probabilities, and keep what float32 leaves of them from counting. Sums are of
    float64.

    Args:
        reference: of each row, of base + adapter.
        found: of the form that is compared, at the same positions.
        targets: of each row, the token that follows each of its positions.

    Raises:
        DamagedError: the form gives something else than log-probabilities of the same vocabulary.
        ValueError: nothing to compare, or not equally many rows.
    """
    sums = _Sums()
    for row, (expected, given, tokens) in enumerate(zip(reference, found, targets, strict=True)):
        if expected.shape != given.shape:
            raise DamagedError(
                f"row {row}: log-probabilities of shape {given.shape} where base + adapter has {expected.shape} "
                "(positions, vocabulary): not the same model; export again"
            )
        if np.isnan(given).any() or np.isposinf(given).any():
            raise DamagedError(f"row {row}: a log-probability is no number; the form or its runtime is at fault")
        sums.add(expected, given, tokens)
    if not sums.positions:
        raise ValueError("no position to compare")
    return Closeness(
        rows=sums.rows,
        positions=sums.positions,
        max_difference=sums.greatest,
        mean_difference=sums.difference / sums.likely,
        kl=sums.kl / sums.positions,
        max_kl=sums.greatest_kl,
        greedy_agreement=sums.agreeing / sums.positions,
        perplexity=math.exp(sums.nats / sums.positions),
        reference_perplexity=math.exp(sums.reference_nats / sums.positions),
    )
