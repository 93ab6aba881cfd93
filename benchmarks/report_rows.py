"""Creates the rows that benchmarks report, and computes the spread of repeated measurements."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

BUSY = 0.3
"""Largest accepted spread. With a larger spread, the value depends more on the machine than on the program, and the row
is not ok, unless the value is farther from its target than FAR spreads."""
FAR = 3.0


def at_most(name: str, value: float, target: float, spread: float | None = None) -> Row:
    """Return a row with an upper limit."""
    is_far = value * (1 + FAR * (spread or 0.0)) <= target
    return _judged(name, value, f"<= {target:g}", value <= target, is_far, spread)


def at_least(name: str, value: float, target: float, spread: float | None = None) -> Row:
    """Return a row with a lower limit."""
    is_far = value >= target * (1 + FAR * (spread or 0.0))
    return _judged(name, value, f">= {target:g}", value >= target, is_far, spread)


def _judged(name: str, value: float, target: str, ok: bool, is_far: bool, spread: float | None) -> Row:
    row = {"name": name, "value": value, "target": target, "ok": ok}
    if spread is None:
        return row
    return row | {"spread": spread, "ok": ok and (spread <= BUSY or is_far)}


def count(name: str, value: int) -> Row:
    """Return a row for something that must not occur, with the number of its occurrences."""
    return at_most(name, value, 0)


def told(name: str, value: float, spread: float | None = None) -> Row:
    """Return a row without a target."""
    row = {"name": name, "value": value, "target": "reported", "ok": True}
    return row if spread is None else row | {"spread": spread}


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the spread: the interquartile range as a fraction of the median (0 for a single value)."""
    median = statistics.median(values)
    if len(values) < 2 or not median:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / abs(median)


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Return median and spread of the ratios of measurements that were made in pairs."""
    return middle([a / b for a, b in zip(above, below, strict=True)])
