"""What machines that train one run together must have in common, and how a difference is told. Imports no torch."""

from typing import Any

from ratchet.config.schema import Machine
from ratchet.storage.records.base import find_differing_keys

NEEDED = "Every machine needs the same params.yaml, prepared data, base model and libraries"
NAMES = {
    "run.data_digest": "prepared data (digest)", "run.base_digest": "base model (digest)",
    "run.recipe_version": "recipe of this version of Ratchet", "with.compute_dtype": "compute dtype",
}  # fmt: skip
SHOWN = 12
"""Digits of a digest."""


def describe_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """In words, what two of them say differently; empty where nothing.

    Args:
        first: JSON: `run`, the spec of the run; `with`, versions of libraries and settings of the machine, by name.
        other: the same, of the other one.
    """
    return "; ".join(
        f"{_display_name(name)}: {_value_at(first, name)} and {_value_at(other, name)}"
        for name in find_differing_keys(first, other)
    )


def _display_name(name: str) -> str:
    """As the user knows it."""
    section, _, rest = name.partition(".")
    if name in NAMES:
        return NAMES[name]
    if section == "run":
        return rest
    return f"machine.{rest}" if rest in Machine.model_fields else f"version of {rest}"


def _value_at(told: Any, name: str) -> Any:
    for part in name.split("."):
        told = told.get(part, "nothing") if isinstance(told, dict) else told
    return told[:SHOWN] if name.endswith("_digest") and isinstance(told, str) else told
