"""Versions of the defaults: a newer Ratchet does not change a project that leaves a setting out.

params.yaml says with `version: N` which defaults it means. A file without this line means the first version. If a
default changes, VERSION grows, and CHANGES keeps the old value for files of an earlier version.
"""

from typing import Any, NamedTuple

from ratchet.errors import SettingsError

KEY = "version"
VERSION = 2
"""Version of the defaults of this Ratchet."""


class DefaultChange(NamedTuple):
    """Values of a default, as in params.yaml."""

    before: Any
    after: Any


CHANGES: dict[int, dict[str, DefaultChange]] = {
    2: {
        "sweep.sampler.kind": DefaultChange("tpe", "auto"),
        "sweep.pruner.kind": DefaultChange("asha", "auto"),
        "sweep.pruner.min_resource_fraction": DefaultChange(0.05, 0.1),
    },
}
"""Changed defaults, by the version that changed them and the dotted name of the setting."""


def list_changes(version: int) -> dict[str, DefaultChange]:
    """Return the defaults that differ between a version and VERSION, by dotted name."""
    changes: dict[str, DefaultChange] = {}
    for number in range(version + 1, VERSION + 1):
        for name, change in CHANGES.get(number, {}).items():
            before = changes[name].before if name in changes else change.before
            changes[name] = DefaultChange(before, change.after)
    return {name: change for name, change in changes.items() if change.before != change.after}


def check_version(value: Any, where: str) -> int:
    """Return the version of a params.yaml. Raises SettingsError, which begins with `where`, if it is not known."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{where}: found {value!r}; expected an integer from 1 to {VERSION}")
    if value > VERSION:
        raise SettingsError(
            f"{where}: found {value}; this Ratchet knows defaults up to version {VERSION}: install a newer one"
        )
    return value


def fill_old_defaults(sections: dict[str, Any], version: int) -> dict[str, Any]:
    """Add the defaults of an earlier version where `sections` has no value. Returns the added values by dotted name."""
    added: dict[str, Any] = {}
    for name, change in list_changes(version).items():
        *path, key = name.split(".")
        node: Any = sections
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and key not in node:
            node[key] = added[name] = change.before
    return added
