"""What finalists of a sweep are compared by, and what each of them scored: row by row, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ratchet.gating.bootstrap import Numbers
from ratchet.records_sweep import Cost, Measure

RESAMPLES = 9999


@dataclass(frozen=True)
class Contest:
    """What finalists are compared by."""

    measure: Measure
    confidence: float
    """With which a difference must be real: the chance of a false winner is one minus it at most."""
    weights: Sequence[float] | None = None
    """Only of a loss: answer tokens of each row, whose scores are then nats of the whole row."""
    groups: Sequence[str | None] | None = None
    """Rows of one group are no independent samples; None: a group of its own."""
    resamples: int = RESAMPLES
    seed: int = 0
    """Of the bootstrap."""

    @property
    def sign(self) -> int:
        """Of an improvement."""
        return 1 if self.measure.direction == "maximize" else -1

    def mean(self, scores: Numbers) -> float:
        """Of one seed's rows, or of rows averaged over seeds: a ratio of sums where rows have weights."""
        below = len(scores) if self.weights is None else math.fsum(self.weights)
        return math.fsum(scores) / below

    def order(self, one: "Contender") -> tuple[float, int]:
        """Sorts contenders, the best first; of equals the one that was tried first."""
        return -self.sign * self.mean(one.rows), one.number

    def sums(self, values: Numbers) -> Numbers:
        """Of each group; rows without one stay by themselves."""
        if self.groups is None:
            return values
        names: dict[str | int, int] = {}
        places = [names.setdefault(row if name is None else name, len(names)) for row, name in enumerate(self.groups)]
        return np.bincount(places, weights=values).astype(np.float64)


@dataclass(frozen=True)
class Contender:
    """A finalist and its scores."""

    number: int
    """Of the trial."""
    values: Mapping[str, Any]
    run_ids: tuple[str, ...]
    scores: Sequence[Sequence[float]]
    """Of each seed, of each row; the rows are the same for all."""
    cost: Cost = field(default_factory=Cost)
    dropped: str = ""
    """Why it got no further seeds; it cannot win."""

    @cached_property
    def matrix(self) -> Numbers:
        """[seed, row]."""
        return np.asarray(self.scores, dtype=np.float64)

    @cached_property
    def rows(self) -> Numbers:
        """Mean over seeds of each row."""
        found: Numbers = self.matrix.mean(axis=0)
        return found

    @property
    def seeds(self) -> int:
        """With which it was trained."""
        return len(self.matrix)

    def means(self, contest: Contest) -> tuple[float, ...]:
        """By seed."""
        return tuple(contest.mean(row) for row in self.matrix)

    def seed_variance(self, contest: Contest) -> float | None:
        """Of the mean of one seed; None where one seed says nothing of others."""
        return float(np.var(self.means(contest), ddof=1)) if self.seeds > 1 else None


def require_same_rows(contenders: Sequence[Contender]) -> None:
    """Raises ValueError for nobody, scores of different rows, and scores that are not finite."""
    if not contenders:
        raise ValueError("nobody is to be compared")
    for one in contenders:
        if one.matrix.ndim != 2 or one.matrix.shape[1:] != contenders[0].matrix.shape[1:] or not one.matrix.size:
            raise ValueError(f"trial {one.number}: scores of shape {one.matrix.shape}, not of the rows of the others")
        if not np.isfinite(one.matrix).all():
            raise ValueError(f"trial {one.number}: scores that are no numbers")
