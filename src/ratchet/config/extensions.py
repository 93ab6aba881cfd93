"""Finds extensions: functions of other packages that settings name, registered as entry points.

A package registers a function in its pyproject.toml:

    [project.entry-points."ratchet.metrics"]
    keyword_share = "my_package:keyword_share"

and a project names it (`evaluate.metrics: [keyword_share]`). Groups and the signatures of their functions:

    ratchet.metrics    evaluate.metrics        (answers: Sequence[str], references: Sequence[str]) -> Sequence[float]
    ratchet.filters    prepare.filters         (messages: Sequence[Mapping[str, Any]]) -> str | None: reason to drop
    ratchet.rewards    select.reward.function  (prompts, answers, references: Sequence[str]) -> Sequence[float]
    ratchet.callbacks  machine.callbacks       (run: ratchet.Run) -> object with name, on_events(events), on_end(status)
"""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from ratchet.errors import SettingsError

Group = Literal["ratchet.metrics", "ratchet.filters", "ratchet.rewards", "ratchet.callbacks"]


def list_extensions(group: Group) -> dict[str, EntryPoint]:
    """Return the installed extensions of a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_extension(group: Group, name: str, setting: str) -> Any:
    """Import the function that an installed package registered under this name.

    Args:
        group: the entry point group.
        name: name of the entry point.
        setting: the setting that has this name, for the message.

    Raises:
        SettingsError: no package registers the name, or the import fails.
    """
    known = list_extensions(group)
    if name not in known:
        matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {matches[0]}?" if matches else f"installed: {', '.join(sorted(known)) or 'none'}"
        raise SettingsError(f"{setting}: found {name!r}, which no installed package registers in {group}; {hint}")
    try:
        return known[name].load()
    except Exception as error:
        raise SettingsError(
            f"{setting}: {name} ({known[name].value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error


def describe_extension(group: Group, name: str) -> str:
    """Return name, package and version of an extension, for the records of its results."""
    distribution = list_extensions(group)[name].dist
    return f"{name} of {distribution.name} {distribution.version}" if distribution else name
