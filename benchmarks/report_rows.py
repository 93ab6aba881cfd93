"""The kinds of row that benchmarks/chaos.py reports."""

from typing import Any

Row = dict[str, Any]


def at_most(name: str, value: float, target: float) -> Row:
    """A figure with a ceiling."""
    return {"name": name, "value": value, "target": f"<= {target:g}", "ok": value <= target}


def at_least(name: str, value: float, target: float) -> Row:
    """A figure with a floor."""
    return {"name": name, "value": value, "target": f">= {target:g}", "ok": value >= target}


def count(name: str, value: int) -> Row:
    """Something that must not happen, and how often it did."""
    return at_most(name, value, 0)


def told(name: str, value: float) -> Row:
    """A figure that is reported and judged by nobody."""
    return {"name": name, "value": value, "target": "reported", "ok": True}
