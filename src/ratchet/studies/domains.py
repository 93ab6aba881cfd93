"""Which values a setting can have in some trial: one dimension's values, and what ties and conditions make of them."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ratchet.studies.dimension import Dimension
from ratchet.studies.knobs import shown

ROUNDING = 1e-9
"""By how much of a value (or of a step) arithmetic of samplers may miss what it means."""


def settled(dimension: Dimension, value: Any) -> Any:
    """The one value of the dimension that is meant, as settings hold it.

    Samplers compute in floating point and on logarithms (0.30000000000000004 for the third step of 0.1), and JSON has
    lists only; the same value must be the same text everywhere, for it becomes part of a RunId.

    Raises:
        ValueError: the dimension has no such value.
    """
    found = _choice(dimension, value) if dimension.kind == "choice" else (_number(dimension, value),)
    if not found or not dimension.holds(found[0]):
        raise ValueError(f"{dimension.name}: {shown(value)} is none of {described(dimension)}")
    return found[0]


def _choice(dimension: Dimension, value: Any) -> tuple[Any, ...]:
    meant = tuple(value) if isinstance(value, list) else value
    return tuple(one for one in dimension.choices if one == meant and isinstance(one, bool) == isinstance(meant, bool))


def _number(dimension: Dimension, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = dimension.low, dimension.high
    room = ROUNDING * max(abs(low), abs(high))
    if low - room <= value <= high + room:
        value = min(max(value, low), high)
    if not low <= value <= high:
        return None
    if dimension.kind == "float" and dimension.step is None:
        return float(value)
    steps = (value - low) / (dimension.step or 1)
    return nth(dimension, round(steps)) if abs(steps - round(steps)) <= ROUNDING * max(1.0, steps) else None


def nth(dimension: Dimension, index: int) -> int | float:
    """A value of a stepped range, counted from its lower end, computed in decimals."""
    if dimension.kind == "int":
        return int(dimension.low) + index * int(dimension.step or 1)
    return float(Decimal(repr(float(dimension.low))) + index * Decimal(repr(float(dimension.step or 0))))


def as_written(number: float) -> Fraction:
    """The decimal number that was meant: 3 times 0.3 is 0.9, which floating point misses."""
    return Fraction(repr(number))


def stepped_exactly(low: float, high: float, step: float) -> bool:
    """Whether steps lead from one end to the other as both are written; Optuna counts in decimals, too."""
    first, last, each = (Decimal(repr(float(number))) for number in (low, high, step))
    return (last - first) % each == 0


def described(dimension: Dimension) -> str:
    """For people: `4 to 64`, `lora, dora`."""
    if dimension.kind == "choice":
        return ", ".join(map(shown, dimension.choices))
    whole = "whole numbers " if dimension.kind == "int" else ""
    step = f" in steps of {shown(dimension.step)}" if dimension.step not in (None, 1) else ""
    return f"{whole}{shown(dimension.low)} to {shown(dimension.high)}{step}"


def spread(dimension: Dimension, points: int) -> list[Any]:
    """Values for a grid, smallest first: all of them where they can be counted, else `points` at even distances.

    Distances are even on the dimension's own scale; numbers between the ends are rounded to twelve digits, so that
    every machine's logarithm gives the same. A range of whole numbers that has a step of its own counts as countable.
    """
    count = dimension.points
    if dimension.kind == "choice":
        return list(dimension.choices)
    if count is not None and (dimension.step is not None or count <= points):
        return [nth(dimension, index) for index in range(count)]
    low, high = dimension.low, dimension.high
    shares = [index / (points - 1) for index in range(1, points - 1)]
    inner = [low * (high / low) ** share if dimension.log else low + (high - low) * share for share in shares]
    inner = [round(value) if dimension.kind == "int" else float(f"{value:.12g}") for value in inner]
    return list(dict.fromkeys(settled(dimension, value) for value in (low, *inner, high)))


def all_values(dimension: Dimension) -> list[Any]:
    """Every value of a dimension whose values can be counted."""
    return spread(dimension, dimension.points or 0)


@dataclass(frozen=True)
class Domain:
    """Values that a setting has in some trial of a sweep."""

    dimension: Dimension | None = None
    """Where they are drawn, be it for another setting that this one is tied to."""
    factor: Fraction = Fraction(1)
    """Of the ties that lead there."""
    ends: tuple[Any, ...] = ()
    """The drawn values that tell of all: a tie that is exact and in bounds on them is so everywhere."""
    others: tuple[Any, ...] = ()
    """As in params.yaml, where it is not searched (at all, or in some trials)."""

    @property
    def is_continuous(self) -> bool:
        """Whether it takes values between any two others, so that no whole number can follow it exactly."""
        drawn = self.dimension
        return drawn is not None and drawn.points is None and drawn.low < drawn.high

    def holds(self, value: Any) -> bool:
        """Whether some trial may have this value."""
        if value in self.others:
            return True
        if self.dimension is None:
            return False
        if self.factor != 1:
            value = float(as_written(value) / self.factor)
        try:
            settled(self.dimension, value)
        except ValueError:
            return False
        return True

    def described(self) -> str:
        """For people."""
        drawn = self.dimension
        times = "" if self.factor == 1 else f"{self.factor} times "
        texts = [f"{times}{described(drawn)}"] if drawn else []
        return ", ".join(dict.fromkeys((*texts, *map(shown, self.others))))


def drawn_from(dimension: Dimension) -> Domain:
    """Of a free setting that every trial draws."""
    if dimension.kind == "choice":
        ends = dimension.choices
    else:
        last = dimension.points
        ends = (dimension.low, *((nth(dimension, 1),) if last is not None and last > 1 else ()), dimension.high)
    return Domain(dimension, ends=tuple(ends))
