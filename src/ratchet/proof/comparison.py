"""Two outputs held against each other: what is off, by how much of what, and how much of that rounding explains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratchet.errors import DamagedError

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


def rounding(*dtypes: torch.dtype) -> float:
    """What storing and computing in these types makes of a module's output, beyond the order of float32 sums."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return ROUNDINGS * coarsest if coarsest > torch.finfo(torch.float32).eps else 0.0


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Difference over scale that a module is allowed whose weights are stored, and computed with, in these types."""
    return SUMS + rounding(*dtypes)


@dataclass(frozen=True)
class Part:
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
class Compared:
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
            DamagedError: they have not the same shape.
        """
        if expected.shape != found.shape:
            raise DamagedError(
                f"{self.name}: {tuple(found.shape)} values in the merged model, {tuple(expected.shape)} in base + "
                f"adapter (positions, features){CURE}"
            )
        self.differences.append((found - expected).abs().amax(-1))
        self.scales.append(expected.abs().amax(-1) if scales is None else scales)

    def part(self) -> Part:
        """The position that speaks for it."""
        differences, scales = torch.cat(self.differences), torch.cat(self.scales)
        scales = scales.clamp(min=1e-3 * float(scales.max()))  # for a position at which next to nothing comes out
        every = [Part(self.name, float(d), float(s), self.allowed) for d, s in zip(differences, scales, strict=True)]
        every.sort(key=lambda part: part.excess)
        return every[(len(every) - 1) // 2 if self.typical else -1]


def refuse(parts: Sequence[Part]) -> None:
    """Raises DamagedError, with the one that is furthest off, when any is."""
    off = sorted((part for part in parts if not part.excess <= 1), key=lambda part: (-part.excess, part.name))
    if off:
        worst, others = off[0], len(off) - 1
        raise DamagedError(
            f"the merged model is not base + adapter: given the same input, {worst.name} is off by "
            f"{worst.difference:.2g} where base + adapter gives values up to {worst.scale:.2g} (allowed: "
            f"{worst.allowed:.2g} of that)" + (f"; {others} more are off" if others else "") + CURE
        )
