"""How far one form's next-token distributions are from those of base + adapter, at the same positions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import DamagedFileError
from ratchet.storage.records.export import DistributionDistance

LIKELY_SHARE = 1000.0
"""A token counts as likely above an even share, 1 / vocabulary, divided by this."""
LEAST_NATS = -149 * math.log(2)
"""A probability of nought is taken for the smallest number of float32, 2^-149: a form that rules out what the
reference holds possible is some hundred nats off, a large figure and not infinity, which no record could hold."""

LogProbabilities = NDArray[np.float32]
"""[positions, vocabulary], in nats."""


@dataclass
class _DivergenceTotals:
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


def measure_closeness(
    reference: Iterable[LogProbabilities], found: Iterable[LogProbabilities], targets: Iterable[Sequence[int]]
) -> DistributionDistance:  # fmt: skip
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
        DamagedFileError: the form gives something else than log-probabilities of the same vocabulary.
        ValueError: nothing to compare, or not equally many rows.
    """
    sums = _DivergenceTotals()
    for row, (expected, given, tokens) in enumerate(zip(reference, found, targets, strict=True)):
        if expected.shape != given.shape:
            raise DamagedFileError(
                f"row {row}: log-probabilities of shape {given.shape} where base + adapter has {expected.shape} "
                "(positions, vocabulary): not the same model; export again"
            )
        if np.isnan(given).any() or np.isposinf(given).any():
            raise DamagedFileError(f"row {row}: a log-probability is no number; the form or its runtime is at fault")
        sums.add(expected, given, tokens)
    if not sums.positions:
        raise ValueError("no position to compare")
    return DistributionDistance(
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


# Two outputs held against each other: what is off, by how much of what, and how much of that rounding explains.

SUMS = 1e-4
"""Difference over scale that float32 sums in another order may make: W x + s B A x against (W + s B A) x. Unit
roundoff is 6e-8 and grows with the root of the number of terms, to about 1e-5 for rows of 30,000; ten times that for
sums that nearly cancel. Measured on 24 families of tiny models: 1.5e-5 at most."""
ROUNDINGS = 4
"""Machine epsilons of the stored type: rounding weights, inputs and outputs moves an output by 1.4 of one at most
(measured on five families in bfloat16 and float16)."""
SCORES = 8
"""How much more a whole layer may be off where there are such roundings: attention makes of a score's difference a
factor, and scores are large numbers. In float32 that does not matter."""

CURE = "; a fault of the merge: report it, with the architecture"


def rounding_error(*dtypes: torch.dtype) -> float:
    """What storing and computing in these types makes of a module's output, beyond the order of float32 sums."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return ROUNDINGS * coarsest if coarsest > torch.finfo(torch.float32).eps else 0.0


def module_tolerance(*dtypes: torch.dtype) -> float:
    """Difference over scale that a module is allowed whose weights are stored, and computed with, in these types."""
    return SUMS + rounding_error(*dtypes)


@dataclass(frozen=True)
class ModuleDeviation:
    """One module or layer at the position that speaks for it."""

    name: str
    difference: float
    """Largest of an output."""
    scale: float
    """What that is held against."""
    allowed: float
    """Of the scale."""

    @property
    def excess(self) -> float:
        """Share of what is allowed; above 1 it is off."""
        if not math.isfinite(self.difference):
            return math.inf
        off = self.difference / self.scale if self.scale else math.inf if self.difference else 0.0
        return off / self.allowed


@dataclass
class ModuleComparison:
    """One module or layer at all positions that were compared."""

    name: str
    allowed: float
    typical: bool = False
    """Whether the median position speaks for it instead of the worst: in bfloat16 a router's choice between two experts
    that are nearly as good may fall otherwise, and that token then goes through other weights."""
    differences: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, found: Tensor, scales: Tensor | None = None) -> None:
        """Outputs [positions, features] of base + adapter and of the merged model.

        Args:
            scales: [positions]; None: the largest value at each.

        Raises:
            DamagedFileError: they have not the same shape.
        """
        if expected.shape != found.shape:
            raise DamagedFileError(
                f"{self.name}: {tuple(found.shape)} values in the merged model, {tuple(expected.shape)} in base + "
                f"adapter (positions, features){CURE}"
            )
        self.differences.append((found - expected).abs().amax(-1))
        self.scales.append(expected.abs().amax(-1) if scales is None else scales)

    def part(self) -> ModuleDeviation:
        """The position that speaks for it."""
        differences, scales = torch.cat(self.differences), torch.cat(self.scales)
        scales = scales.clamp(min=1e-3 * float(scales.max()))  # for a position at which next to nothing comes out
        every = [
            ModuleDeviation(self.name, float(d), float(s), self.allowed)
            for d, s in zip(differences, scales, strict=True)
        ]
        every.sort(key=lambda part: part.excess)
        return every[(len(every) - 1) // 2 if self.typical else -1]


def require_within_tolerance(parts: Sequence[ModuleDeviation]) -> None:
    """Raises DamagedFileError, with the one that is furthest off, when any is."""
    off = sorted((part for part in parts if not part.excess <= 1), key=lambda part: (-part.excess, part.name))
    if off:
        worst, others = off[0], len(off) - 1
        raise DamagedFileError(
            f"the merged model is not base + adapter: given the same input, {worst.name} is off by "
            f"{worst.difference:.2g} where base + adapter gives values up to {worst.scale:.2g} (allowed: "
            f"{worst.allowed:.2g} of that)" + (f"; {others} more are off" if others else "") + CURE
        )
