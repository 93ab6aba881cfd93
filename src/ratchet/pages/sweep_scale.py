"""Where a knob's value lies in a picture, from 0 to 1, and what stands beside the axis."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.pages.sweep_trials import number, same, shown
from ratchet.records_sweep import Axis, SweepReport

CENTRE = 0.5
"""Where everything lies on an axis without extent."""

STEPS = (1, 2, 5)
"""Round numbers, by power of ten."""

MARGIN, REACH, FEW = 0.06, 3.0, 8
"""Of a frame: left free at both ends; how far it goes beyond the quartiles; values from which on quartiles say much."""

DOUBLINGS = 8
"""Powers of two on a logarithmic axis of whole numbers, at most: ranks are 4, 8, 16 and so on."""


@dataclass(frozen=True)
class Scale:
    """One axis."""

    low: float
    high: float
    """Of numbers; not read where there are choices."""
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, axis: Axis, values: Iterable[Any]) -> "Scale":
        """The scale of a knob: its range in the search space, and what lies outside of it (a forked study's trials)."""
        found = list(values)
        if axis.kind == "choice":
            extra = [item for item in found if not any(same(item, one) for one in axis.choices)]
            unique = [item for place, item in enumerate(extra) if not any(same(item, one) for one in extra[:place])]
            return cls(0.0, 1.0, choices=(*axis.choices, *unique))
        numbers = [float(one) for one in found if _is_number(one)]
        ends = [float(one) for one in (axis.low, axis.high) if one is not None] + numbers
        return cls.around(ends, log=axis.log, whole=axis.kind == "int")

    @classmethod
    def around(cls, numbers: Sequence[float], log: bool = False, whole: bool = False) -> "Scale":
        """From the least to the greatest of these numbers."""
        known = [one for one in numbers if math.isfinite(one) and (one > 0 or not log)]
        return cls(min(known, default=1.0), max(known, default=1.0), log, whole)

    def place(self, item: Any) -> float | None:
        """Where a value lies; None where it lies nowhere."""
        if self.choices is not None:
            rank = next((k for k, one in enumerate(self.choices) if same(one, item)), None)
            return None if rank is None else self._share(rank, 0, len(self.choices) - 1)
        if not _is_number(item) or not math.isfinite(item) or (self.log and item <= 0):
            return None
        low, at, high = (math.log(one) if self.log else one for one in (self.low, float(item), self.high))
        return self._share(at, low, high)

    @staticmethod
    def _share(at: float, low: float, high: float) -> float:
        return CENTRE if high <= low else (at - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Places and texts, so many at most (but two at least), in order."""
        if self.choices is not None:
            return self._choice_ticks(most)
        if self.low >= self.high:
            return [(CENTRE, number(self.low))]
        found = self._log_ticks(most) if self.log else self._linear_ticks(most)
        return [(self.place(one) or 0.0, number(one)) for one in found]

    def _choice_ticks(self, most: int) -> list[tuple[float, str]]:
        choices = self.choices or ()
        every = max(1, math.ceil(len(choices) / most))
        return [(self.place(one) or 0.0, shown(one)) for one in choices[::every]]

    def _linear_ticks(self, most: int) -> list[float]:
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(factor * power for factor in (*STEPS, 10, 20, 50) if span / (factor * power) <= most - 1)
        step = max(1.0, round(step)) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        found = [round(k * step, 12) for k in range(first, last + 1)]
        return found if len(found) > 1 else [self.low, self.high]

    def _log_ticks(self, most: int) -> list[float]:
        doublings = self._powers(2)
        if self.whole and 2 <= len(doublings) <= min(most, DOUBLINGS):
            return doublings
        tens = self._powers(10)
        if len(tens) >= 2:
            every = math.ceil(len(tens) / most)
            found = [factor * ten for ten in self._powers(10, beyond=True) for factor in STEPS]
            finer = [one for one in found if self.low * (1 - 1e-9) <= one <= self.high * (1 + 1e-9)]
            return finer if len(finer) <= most else tens[::every]
        if self.whole and len(doublings) >= 2:
            return doublings[:: math.ceil(len(doublings) / most)]
        return [self.low, self.high]

    def _powers(self, root: int, beyond: bool = False) -> list[float]:
        """Powers of a number on the axis; `beyond`: the next below, too."""
        first, last = math.log(self.low, root), math.log(self.high, root)
        start = math.floor(first + 1e-9) if beyond else math.ceil(first - 1e-9)
        return [float(root) ** k for k in range(start, math.floor(last + 1e-9) + 1)]


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def searched(report: SweepReport) -> list[Axis]:
    """Axes of knobs that were drawn; a tie only repeats another one."""
    return [axis for axis in report.axes if axis.kind != "tie"]


def knob_scales(report: SweepReport) -> dict[str, Scale]:
    """The scale of each searched knob, over all that was tried."""
    return {
        axis.knob: Scale.of(axis, (trial.values[axis.knob] for trial in report.trials if axis.knob in trial.values))
        for axis in searched(report)
    }


def round_ticks(low: float, high: float, most: int, size: float = 1.0) -> list[tuple[float, str]]:
    """Round numbers between two ends and their texts, written in units of `size`."""
    scale = Scale(low / size, high / size)
    span = high - low
    return [(low + share * span, text) for share, text in scale.ticks(most)]


def frame(decisive: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float]:
    """From where to where an axis goes so that what decides can be told apart.

    Values far from the rest (above the third quartile, or below the first, by more than REACH times what lies between
    them) do not stretch it. It goes towards the nearer half of `others`, by its own length at most.
    """
    known = sorted(one for one in decisive if math.isfinite(one))
    more = sorted(one for one in others if math.isfinite(one))
    if not known:
        known, more = more, []
    if not known:
        return 0.0, 1.0
    low, high = _bulk(known)
    if more:
        middle = [one for one in more if low <= one <= high] or more
        span, half = high - low or math.inf, more[len(more) // 2]
        low, high = max(low - span, min(low, middle[0], half)), min(high + span, max(high, half))
    room = MARGIN * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _bulk(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = ordered[0], ordered[-1]
    if len(ordered) < FEW:
        return low, high
    first, third = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    reach = REACH * (third - first) or math.inf
    return max(low, first - reach), min(high, third + reach)
