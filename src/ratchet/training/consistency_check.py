"""Compares the properties that all machines of one run must share, and describes a difference. Imports no torch."""

from typing import Any

from ratchet.config.machine import Machine
from ratchet.storage.records.base import find_differing_keys

REQUIREMENT = "Every machine needs the same params.yaml, prepared data, base model and libraries"
DISPLAY_NAMES = {
    "run.data_digest": "prepared data (digest)", "run.base_digest": "base model (digest)",
    "run.recipe_version": "training recipe of this version of Ratchet", "environment.compute_dtype": "compute dtype",
}  # fmt: skip
DIGEST_LENGTH = 12
"""Characters of a digest that a message shows."""


def describe_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the differences between two machines as text; empty when there is none.

    Args:
        first: JSON: `run`, the spec of the run; `environment`, versions of libraries and machine settings, by name.
        other: the same, of the other machine.
    """
    return "; ".join(
        f"{_display_name(name)}: {_value_at(first, name)} and {_value_at(other, name)}"
        for name in find_differing_keys(first, other)
    )


def _display_name(name: str) -> str:
    """Return the name that the user knows."""
    section, _, rest = name.partition(".")
    if name in DISPLAY_NAMES:
        return DISPLAY_NAMES[name]
    if section == "run":
        return rest
    return f"machine.{rest}" if rest in Machine.model_fields else f"version of {rest}"


def _value_at(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part, "nothing") if isinstance(value, dict) else value
    return value[:DIGEST_LENGTH] if name.endswith("_digest") and isinstance(value, str) else value
