"""Steps that are taken before the device's memory runs out (`machine.memory_ladder`), with hysteresis."""

from typing import Literal

Rung = Literal["report", "shrink", "free_caches", "checkpoint"]

RUNGS: tuple[tuple[float, Rung], ...] = (
    (0.80, "report"),
    (0.85, "shrink"),
    (0.90, "free_caches"),
    (0.95, "checkpoint"),
)
"""Shares of the device's memory, and the reaction when the used share reaches them. `shrink`: smaller micro-batches.
`checkpoint`: save a checkpoint, and halve micro-batches."""
HYSTERESIS = 0.05
"""A rung can be reached again only after the used share was this much below it. Without it, a share that varies around
a rung would shrink micro-batches at every step."""


class MemoryLadder:
    """Remembers the rungs that have been reached."""

    def __init__(self) -> None:
        self._reached: set[Rung] = set()

    def climb(self, share: float) -> list[Rung]:
        """Return the rungs that are reached now, from the lowest, and were not reached before."""
        self._reached -= {rung for limit, rung in RUNGS if share < limit - HYSTERESIS}
        new = [rung for limit, rung in RUNGS if share >= limit and rung not in self._reached]
        self._reached |= set(new)
        return new
