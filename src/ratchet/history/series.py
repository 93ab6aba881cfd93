"""Curves of any length in bounded memory: mean, least and greatest of each bucket of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ratchet.history.columns import Columns, Numbers

MOST = 1024
"""Buckets; when more are needed, each becomes twice as wide."""


@dataclass(frozen=True)
class Line:
    """A curve. Of each bucket: the last step, and where it stands on the other axes; and its values."""

    width: int
    """Steps of a bucket; 1: nothing was summarised."""
    step: Numbers
    tokens: Numbers
    """Answer tokens learned from until then."""
    seconds: Numbers
    """Spent in steps and validations until then."""
    mean: Columns
    low: Columns
    high: Columns
    """By name of the value."""

    def __len__(self) -> int:
        return len(self.step)


class Series:
    """Buckets of steps, all of one width; `add` puts further steps in. Steps must rise from one call to the next."""

    def __init__(self, names: Sequence[str], most: int = MOST) -> None:
        self._names, self._most, self.width = tuple(names), most, 1
        self._count = np.zeros(most)
        self._ends = {axis: np.zeros(most) for axis in ("step", "tokens", "seconds")}
        self._sums = {name: np.zeros(most) for name in names}
        self._low = {name: np.full(most, np.nan) for name in names}
        self._high = {name: np.full(most, np.nan) for name in names}

    def add(self, axes: Columns, values: Columns) -> None:
        """Put steps in.

        Args:
            axes: step (from 0 on, rising), tokens, seconds of each.
            values: by name, of each step.
        """
        if not len(axes["step"]):
            return
        steps = axes["step"].astype(np.int64)
        while steps[-1] // self.width >= self._most:
            self._widen()
        bucket = steps // self.width
        starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
        ends = np.r_[starts[1:], len(bucket)]
        place = bucket[starts]
        self._count[place] += ends - starts
        for axis, found in self._ends.items():
            found[place] = axes[axis][ends - 1]
        for name in self._names:
            self._sums[name][place] += np.add.reduceat(values[name], starts)
            for kept, join in ((self._low[name], np.fmin), (self._high[name], np.fmax)):
                kept[place] = join(kept[place], join.reduceat(values[name], starts))

    def _widen(self) -> None:
        """Join each bucket with its neighbour."""
        half = self._most // 2
        self.width *= 2
        second = self._count[1::2] > 0
        for found in self._ends.values():
            found[:half] = np.where(second, found[1::2], found[::2])
        for found in (self._count, *self._sums.values()):
            found[:half] = found[::2] + found[1::2]
        for name in self._names:
            self._low[name][:half] = np.fmin(self._low[name][::2], self._low[name][1::2])
            self._high[name][:half] = np.fmax(self._high[name][::2], self._high[name][1::2])
        for found in (self._count, *self._ends.values(), *self._sums.values()):
            found[half:] = 0.0
        for found in (*self._low.values(), *self._high.values()):
            found[half:] = np.nan

    def line(self, most: int | None = None) -> Line:
        """The curve as it is, or of so many buckets at most (two at least)."""
        while most is not None and (self._count > 0).sum() > max(2, most):
            self._widen()
        there = self._count > 0
        mean = {name: found[there] / self._count[there] for name, found in self._sums.items()}
        return Line(
            self.width, self._ends["step"][there], self._ends["tokens"][there], self._ends["seconds"][there], mean,
            {name: found[there] for name, found in self._low.items()},
            {name: found[there] for name, found in self._high.items()},
        )  # fmt: skip


def together(lines: Sequence[Line], points: int) -> Line:
    """Several runs as one: at each of so many steps their mean, and one standard deviation on either side of it.

    It reaches as far as all of them do. Between its points a line is straight.

    Args:
        lines: two at least, none of them empty.
        points: of the result.
    """
    first, last = max(line.step[0] for line in lines), min(line.step[-1] for line in lines)
    grid = np.unique(np.linspace(first, max(first, last), points).round())

    def at(line: Line, values: Numbers) -> Numbers:
        found: Numbers = np.interp(grid, line.step, values)
        return found

    axes = {name: np.mean([at(line, getattr(line, name)) for line in lines], axis=0) for name in ("tokens", "seconds")}
    mean, low, high = {}, {}, {}
    for name in lines[0].mean:
        stacked = np.stack([at(line, line.mean[name]) for line in lines])
        mean[name], spread = stacked.mean(axis=0), stacked.std(axis=0, ddof=1)
        low[name], high[name] = mean[name] - spread, mean[name] + spread
    return Line(max(line.width for line in lines), grid, axes["tokens"], axes["seconds"], mean, low, high)


def empty(names: Sequence[str]) -> Line:
    """A curve without a point."""
    nothing = np.zeros(0)
    values: Mapping[str, Numbers] = dict.fromkeys(names, nothing)
    return Line(1, nothing, nothing, nothing, values, values, values)
