"""`ratchet config`: every setting with its effective value and the place where the value comes from."""

import os
from collections.abc import Mapping
from typing import Any

from ratchet.config import defaults, params_file
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record


class SettingOrigin(Record):
    """A setting of a project."""

    name: str
    value: Any
    text: str
    """The value as in params.yaml."""
    origin: str
    """`default`, `default of version N`, file and line, an environment variable, or `--set`."""


class ConfigReport(Record):
    """All settings of a project, or the defaults."""

    version: int
    """Version of the defaults that params.yaml means."""
    newest_version: int
    settings: tuple[SettingOrigin, ...]


def config(layout: ProjectLayout | None, prefix: str = "", overrides: Mapping[str, Any] | None = None) -> ConfigReport:
    """List the settings of a project.

    Args:
        layout: the project; None outside one: the defaults.
        prefix: dotted name of a section or setting, such as `train`; empty: all.
        overrides: settings of `--set`, by dotted name.

    Raises:
        SettingsError: params.yaml or a replaced value is not valid, or no setting has this name.
    """
    text = f"{defaults.KEY}: {defaults.VERSION}\n"
    if layout is not None:
        params_file.load(layout.params)  # reports a file that cannot be read
        text = layout.params.read_text(encoding="utf-8")
    version, settings = params_file.explain(text, overrides=overrides, environment=os.environ)
    values = params_file.parse(text, overrides=overrides, environment=os.environ).model_dump(mode="json")
    shown = tuple(
        SettingOrigin(name=entry.name, value=find_value(values, entry.name), text=entry.value, origin=entry.origin)
        for entry in settings
        if not prefix or entry.name == prefix or entry.name.startswith(f"{prefix}.")
    )
    if not shown:
        sections = ", ".join(Settings.model_fields)
        raise SettingsError(f"{prefix}: no such setting; expected a section ({sections}) or a name such as train.rank")
    return ConfigReport(version=version, newest_version=defaults.VERSION, settings=shown)


def find_value(values: dict[str, Any], name: str) -> Any:
    """Return the value with a dotted name in nested mappings."""
    node: Any = values
    for part in name.split("."):
        node = node[part]
    return node
