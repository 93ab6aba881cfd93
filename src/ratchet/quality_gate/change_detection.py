"""Finds a change in a stream of values, compared with a sample of reference values, at a known rate of false alarms.

Each value is ranked among the reference and all values before it, with ties broken at random. Without a change, these
ranks (conformal p-values) are independent and uniform, whatever the distribution and however small the reference is (V.
Vovk, I. Nouretdinov, A. Gammerman, ICML 2003). Bettors bet that they are not. The evidence of a bettor is its
Shiryaev-Roberts statistic: the sum, over all values at which a change may have begun, of the capital that it would have
made since (V. Vovk et al., "Retrain or not retrain", arXiv 2102.10439, 2021; J. Shin, A. Ramdas, A. Rinaldo,
"E-detectors", New England Journal of Statistics in Data Science, 2023, doi 10.51387/23-NEJSDS51). Without a change, the
expected evidence after T values is T. So the probability that it reaches a threshold N within T values is at most T/N.
With a head start of p N, changes that are there from the first value on are found earlier, and the probability is at
most p + T/N (the SR-r procedure: G. Moustakides, A. Polunchenko, A. Tartakovsky, Statistica Sinica 21, 2011, 571-596).

After a change, the changed values become part of what later values are compared with. So evidence grows only for a
while, and a small reference does not show a small change that was there from the first value on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ratchet.quality_gate.statistics import Numbers

Counts = NDArray[np.int64]
Direction = Literal["higher", "lower", "both"]
"""Which change of the values is looked for."""

SHARES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45, 0.6)
FACTORS = (1.3, 2.0, 4.0)
"""Bets that the share of the most extreme ranks, one of SHARES, has grown by one of FACTORS. They find changes of rare
values, such as refusals, and of values with ties."""
SHIFTS = np.array((0.25, 0.5, 1.0))
"""Bets that values have moved by this many standard deviations, if they are normally distributed."""
MAX_EVIDENCE = 1e15
"""Largest evidence that is stored."""
_STEPS = np.array([(share, factor) for share in SHARES for factor in FACTORS if share * factor < 0.9])
_STEP_SHARES, _GAINS = _STEPS.T
_LOSSES = (1 - _STEP_SHARES * _GAINS) / (1 - _STEP_SHARES)


def compute_factors(ranks: Numbers, direction: Direction) -> Numbers:
    """Compute by how much each bettor's capital is multiplied: an axis more than the ranks, which are between 0 and 1.

    The mean of each factor over uniform ranks is 1.
    """
    if direction == "both":
        return np.concatenate([compute_factors(ranks, "lower"), compute_factors(ranks, "higher")], axis=-1)
    low = (ranks if direction == "lower" else 1 - ranks)[..., np.newaxis]
    normal = -special.ndtri(np.clip(low, 1e-12, 1 - 1e-12))
    shifted = np.exp(SHIFTS * normal - SHIFTS**2 / 2)
    return np.concatenate([np.where(low < _STEP_SHARES, _GAINS, _LOSSES), shifted], axis=-1)


def update_evidence(evidence: Numbers, factors: Numbers) -> Numbers:
    """Update the Shiryaev-Roberts statistic of each bettor by the next value."""
    return np.minimum((evidence + 1) * factors, MAX_EVIDENCE)


def compute_rank(counts: Counts, place: int, tie_break: float) -> float:
    """Compute the rank of a value among all values, itself included: the share below it, plus a random part of its
    ties. `counts` has the number of values by place; `tie_break` is uniform between 0 and 1."""
    return float((counts[:place].sum() + tie_break * counts[place]) / counts.sum())


@dataclass
class ChangeDetector:
    """State of the search for a change: the number of values by place, and the evidence of each bettor.

    A place is a value that is rounded to an integer from 0. Values themselves are not stored.
    """

    direction: Direction
    counts: Counts
    """Number of values by place: those of the reference, and those observed."""
    evidence: Numbers
    growth: Numbers
    """Logarithm of the capital since the most likely start of a change, by bettor (Page's CUSUM statistic)."""
    starts: Counts
    """Number of the value at this start, by bettor."""
    start_times: Numbers
    """Unix time of the value at this start, by bettor; 0: unknown."""
    sums: Numbers
    """Sum of the values since this start, by bettor."""
    observed: int = 0
    """Number of values observed."""

    @classmethod
    def start(
        cls, direction: Direction, reference: Sequence[int], places: int, head_start: float = 0.0
    ) -> "ChangeDetector":
        """Begin with the places of the reference values, and evidence of `head_start`.

        `places` is the number of possible places.
        """
        counts = np.bincount(np.asarray(reference, np.int64), minlength=places)
        bettors = compute_factors(np.array(0.5), direction).shape[-1]
        zeros = np.zeros(bettors)
        return cls(direction, counts, zeros + head_start, zeros, np.zeros(bettors, np.int64), zeros, zeros)

    def observe(self, place: int, value: float, tie_break: float, time_s: float = 0.0) -> None:
        """Add the next value, with its Unix time (0: unknown)."""
        self.counts[place] += 1
        self.observed += 1
        factors = compute_factors(np.array(compute_rank(self.counts, place, tie_break)), self.direction)
        self.evidence = update_evidence(self.evidence, factors)
        begins = self.growth <= 0
        self.starts = np.where(begins, self.observed, self.starts)
        self.start_times = np.where(begins, time_s, self.start_times)
        self.sums = np.where(begins, 0.0, self.sums) + value
        self.growth = np.maximum(self.growth, 0) + np.log(factors)

    @property
    def total_evidence(self) -> float:
        """Evidence of all bettors together: the mean of their statistics."""
        return float(self.evidence.mean())

    @property
    def change_start(self) -> int:
        """Number of the value at which a change has most likely begun, by the bettor with the most evidence."""
        return int(self.starts[self.evidence.argmax()])

    @property
    def mean_since_change(self) -> float:
        """Mean of the values since `change_start`; NaN before the first value."""
        best = self.evidence.argmax()
        count = self.observed - int(self.starts[best]) + 1
        return float(self.sums[best]) / count if self.observed else math.nan
