"""Finds extensions: functions of other packages that settings name, registered as entry points.

A package registers a function in its pyproject.toml:

    [project.entry-points."ratchet.metrics"]
    keyword_share = "my_package:keyword_share"

and a project names it (`evaluate.metrics: [keyword_share]`). Groups and the signatures of their functions:

    ratchet.metrics    evaluate.metrics        (answers: Sequence[str], references: Sequence[str]) -> Sequence[float]
    ratchet.filters    prepare.filters         (messages: Sequence[Mapping[str, Any]]) -> str | None: reason to drop
    ratchet.rewards    select.reward.function  (prompts, answers, references: Sequence[str]) -> Sequence[float]
    ratchet.loggers    machine.loggers         (run: LoggedRun) -> object with log(rows), finish(status)
    ratchet.callbacks  machine.callbacks       (run: ratchet.Run) -> object with name, on_events(events), on_end(status)
"""

import difflib
import math
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import AfterValidator, ValidationInfo

from ratchet.config.fields import CHECK_ENVIRONMENT
from ratchet.errors import SettingsError

Group = Literal["ratchet.metrics", "ratchet.filters", "ratchet.rewards", "ratchet.loggers", "ratchet.callbacks"]


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
    entry = list_extensions(group).get(name)
    if entry is None:
        raise SettingsError(f"{setting}: found {name!r}; {_find_name_problem(group, name)}")
    try:
        return entry.load()
    except Exception as error:
        raise SettingsError(
            f"{setting}: {name} ({entry.value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error


def compute_extension_scores(
    function: Callable[..., Any], name: str, setting: str, *columns: Sequence[str]
) -> list[float]:
    """Return one score per answer of a metric or reward.

    Args:
        function: the extension.
        name: its name.
        setting: the setting that has this name, for the message.
        columns: arguments of the function, each with one text per answer.

    Raises:
        SettingsError: the function fails, or does not return a finite number for each answer.
    """
    try:
        scores = [float(score) for score in function(*columns)]
    except Exception as error:
        raise SettingsError(f"{setting}: {name} failed: {type(error).__name__}: {error}") from error
    if len(scores) != len(columns[0]) or not all(map(math.isfinite, scores)):
        raise SettingsError(
            f"{setting}: {name} returned {len(scores)} numbers for {len(columns[0])} answers, or one that is not "
            "finite; it must return a finite number for each answer"
        )
    return scores


def make_name_validator(group: Group, builtin: Collection[str] = ()) -> AfterValidator:
    """Return a validator of names in params.yaml: each must be built in or installed."""

    def validate(name: str, info: ValidationInfo) -> str:
        if (info.context or {}).get(CHECK_ENVIRONMENT) and (problem := _find_name_problem(group, name, builtin)):
            raise ValueError(problem)
        return name

    return AfterValidator(validate)


def _find_name_problem(group: Group, name: str, builtin: Collection[str] = ()) -> str:
    """Return why no extension has this name, with the nearest name; empty if one has it."""
    installed = sorted(list_extensions(group))
    if name in (known := [*builtin, *installed]):
        return ""
    own = f"one of {', '.join(builtin)}, or " if builtin else ""
    found = f"installed: {', '.join(installed)}" if installed else "none is installed"
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]}?" if matches else found
    return f"expected {own}a name that an installed package registers in {group}; {hint}"


def describe_extension(group: Group, name: str) -> str:
    """Return name, package and version of an extension, for the records of its results."""
    distribution = list_extensions(group)[name].dist
    return f"{name} of {distribution.name} {distribution.version}" if distribution else name
