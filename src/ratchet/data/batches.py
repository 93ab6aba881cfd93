"""Which rows the i-th optimizer step learns from: a pure function of (number of rows, seed, i).

Rows come as one endless stream of epochs, each a permutation seeded by (seed, epoch); step i takes the next
`batch_rows` of it. Every row therefore comes exactly once an epoch, a batch may reach over the end of an epoch, and
nothing about the order has to be saved in a checkpoint or replayed after a restart.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class BatchPlan:
    """The order of rows for a whole training.

    Args:
        rows: rows in the training split.
        batch_rows: rows of one optimizer step.
        epochs: passes over the rows; the last batch is smaller when it does not come out even.
        seed: seed of the permutations.
    """

    def __init__(self, rows: int, batch_rows: int, epochs: float, seed: int) -> None:
        self.rows = rows
        self.batch_rows = batch_rows
        self.seed = seed
        self.total_rows = max(1, round(rows * epochs))
        self.steps = math.ceil(self.total_rows / batch_rows)
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int) -> list[int]:
        """Row indices of step `step` (from 0), in stream order."""
        start = step * self.batch_rows
        stop = min(start + self.batch_rows, self.total_rows)
        return [int(self._permutation(p // self.rows)[p % self.rows]) for p in range(start, stop)]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)


def micro_batches(indices: list[int], lengths: list[int], micro_batch_rows: int) -> list[list[int]]:
    """A batch in pieces of at most `micro_batch_rows`, rows of like length together so that little is padded.

    `lengths` are those of `indices`, in tokens. Which rows a *step* learns from does not depend on this.
    """
    order = sorted(range(len(indices)), key=lambda k: (-lengths[k], k))
    ordered = [indices[k] for k in order]
    return [ordered[k : k + micro_batch_rows] for k in range(0, len(ordered), micro_batch_rows)]
