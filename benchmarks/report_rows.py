"""Kinds of rows that benchmarks report, and the spread of repeated measurements."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

BUSY = 0.3
"""Spread from which on a figure says more of the machine than of what was measured: such a row is not ok."""


def at_most(name: str, value: float, target: float, spread: float | None = None) -> Row:
    """A figure with a ceiling."""
    return _judged(name, value, f"<= {target:g}", value <= target, spread)


def at_least(name: str, value: float, target: float, spread: float | None = None) -> Row:
    """A figure with a floor."""
    return _judged(name, value, f">= {target:g}", value >= target, spread)


def _judged(name: str, value: float, target: str, ok: bool, spread: float | None) -> Row:
    row = {"name": name, "value": value, "target": target, "ok": ok}
    if spread is None:
        return row
    return row | {"spread": spread, "ok": ok and spread <= BUSY}


def count(name: str, value: int) -> Row:
    """Something that must not happen, and how often it did."""
    return at_most(name, value, 0)


def told(name: str, value: float, spread: float | None = None) -> Row:
    """Return a row without a target."""
    row = {"name": name, "value": value, "target": "reported", "ok": True}
    return row if spread is None else row | {"spread": spread}


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Median, and spread: the distance of the quartiles as a fraction of the median (0 for a single value)."""
    median = statistics.median(values)
    if len(values) < 2 or not median:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / abs(median)


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Median and spread of the ratios of measurements that were made side by side, pair by pair."""
    return middle([a / b for a, b in zip(above, below, strict=True)])
