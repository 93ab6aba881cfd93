"""Time in the picture of the workers: hours in which nobody worked are cut out."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

LONG = 0.15
"""Pauses of more than this share of the time in which somebody worked are cut."""

SEAM = 0.02
"""Of the time in which somebody worked: width of what stands for a pause."""


@dataclass(frozen=True)
class Clock:
    """Seconds of work since the sweep began, by Unix time."""

    begun: float
    pauses: tuple[tuple[float, float], ...]
    """Begin and end of each, in Unix time."""
    seam: float
    """Seconds that stand for a pause."""
    end: float
    """The last moment, in seconds of work."""

    @classmethod
    def of(cls, spans: Iterable[tuple[float, float]]) -> "Clock":
        """From when till when anybody worked, in any order."""
        joined: list[tuple[float, float]] = []
        for begin, stop in sorted(spans):
            if joined and begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((begin, max(begin, stop)))
        if not joined:
            return cls(0.0, (), 0.0, 0.0)
        busy = sum(stop - begin for begin, stop in joined)
        pauses = tuple((a[1], b[0]) for a, b in pairwise(joined) if b[0] - a[1] > max(LONG * busy, 1.0))
        made = cls(joined[0][0], pauses, SEAM * busy, 0.0)
        return cls(made.begun, pauses, made.seam, made.at(joined[-1][1]))

    def at(self, moment: float) -> float:
        """Seconds of work until this Unix time."""
        found = moment - self.begun
        for begin, stop in self.pauses:
            if moment >= stop:
                found -= (stop - begin) - self.seam
            elif moment > begin:
                found -= (moment - begin) * (1 - self.seam / (stop - begin))
        return found
