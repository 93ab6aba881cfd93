"""How fast ranks are beside each other, told now and then: one that others wait for slows all of them."""

import time
from collections.abc import Callable, Sequence

from ratchet.run.journal import Journal

EVERY_S = 5.0
"""Between two events, and at least two steps."""


class Pace:
    """Adds up what ranks did in steps, and tells it.

    Args:
        journal: told events `ranks`.
        clock: monotonic seconds.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._clock = journal, clock
        self._told_s = clock()
        self._steps, self._seconds = 0, 0.0
        self._busy_s: list[float] = []

    def add(self, step: int, seconds: float, busy_s: Sequence[float]) -> None:
        """A step is done.

        Args:
            step: its number.
            seconds: that it took.
            busy_s: of each rank, seconds that it spent on micro-batches of its own; nothing is told of a single one.
        """
        if len(busy_s) < 2:
            return
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        before = self._busy_s or [0.0] * len(busy_s)
        self._busy_s = [whole + one for whole, one in zip(before, busy_s, strict=True)]
        now_s = self._clock()
        if self._steps < 2 or now_s - self._told_s < EVERY_S:
            return
        self._journal.append(
            "ranks", step=step, steps=self._steps, seconds=round(self._seconds, 5),
            busy_s=[round(one, 5) for one in self._busy_s],
        )  # fmt: skip
        self._told_s, self._steps, self._seconds, self._busy_s = now_s, 0, 0.0, []
