"""Opens the project of `--project`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.config.settings import Settings


def open_project(arguments: argparse.Namespace, **machine: Any) -> Project:
    """Open the project of `--project` with its settings.

    Args:
        arguments: the parsed command line.
        machine: values of command-line options that replace settings of section `machine`; None keeps the setting.
    """
    overrides = {f"machine.{name}": value for name, value in machine.items() if value is not None}
    return Project(arguments.project, overrides)


def open_project_or_defaults(arguments: argparse.Namespace) -> "tuple[ProjectLayout | None, Settings]":
    """Open the project. Outside a project, where some commands also work, return (None, default settings)."""
    from ratchet.config.settings import Settings

    is_given = arguments.project != Path()
    if not is_given and not any((folder / "params.yaml").is_file() for folder in (Path.cwd(), *Path.cwd().parents)):
        return None, Settings()
    project = open_project(arguments)
    return project.layout, project.settings


def find_layout(arguments: argparse.Namespace) -> ProjectLayout:
    """Return the paths of the project, without reading its settings."""
    return ProjectLayout.find(arguments.project)
