"""A project: its directory and its settings. Every stage takes a `Project`."""

import os
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.extras import require_libraries
from ratchet.errors import SettingsError
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.config.settings import Settings

HARNESS_METRICS = frozenset({"bleu", "chrf", "rouge"})
"""Names in evaluate.metrics whose libraries come with lm-evaluation-harness."""


class Project:
    """A directory with params.yaml and dvc.yaml, and the settings in params.yaml.

    Environment variables such as `RATCHET__TRAIN__RANK=8` replace settings of params.yaml, and overrides replace both.

    Args:
        path: the project's directory, or a directory inside it.
        overrides: settings to use in place of those in params.yaml, by dotted name: `{"train.rank": 16}`.

    Raises:
        ProjectError: there is no project at this path.
        SettingsError: params.yaml, a variable or an override is not valid; the message lists every problem. Or a
            variable changes results in a stage of DVC, which would not notice it.
    """

    def __init__(self, path: str | Path = ".", overrides: Mapping[str, Any] | None = None) -> None:
        if not isinstance(path, str | os.PathLike):
            raise SettingsError(f"Project: found {path!r}; expected the path of a directory")
        from ratchet.config import params_file  # loads pydantic, which takes 0.1 s that `ratchet --help` saves

        self.layout = ProjectLayout.find(Path(path))
        self.settings = params_file.load(self.layout.params, overrides, os.environ)
        if "DVC_STAGE" in os.environ:
            require_tracked_settings(self.layout, self.settings, overrides)

    @classmethod
    def from_parts(cls, layout: ProjectLayout, settings: "Settings") -> "Project":
        """Create a project from settings that are already loaded."""
        project = cls.__new__(cls)
        project.layout, project.settings = layout, settings
        return project

    def with_overrides(self, overrides: Mapping[str, Any] | None) -> "Project":
        """Return the project with some settings replaced, by dotted name. Raises SettingsError."""
        if not overrides:
            return self
        from ratchet.config import params_file

        settings = params_file.parse(params_file.dump(self.settings), name="", overrides=overrides)
        return self.from_parts(self.layout, settings)

    @property
    def root(self) -> Path:
        """The project's directory, absolute."""
        return self.layout.root

    def lock(self, stage: str) -> AbstractContextManager[object]:
        """Lock a stage, so that only one process writes its output. Raises LockHeldError after a second."""
        return FileLock(self.layout.stage_lock(stage), f"stage {stage} of {self.root}").acquire(wait_s=1.0)

    def __repr__(self) -> str:
        return f"Project({str(self.root)!r})"


def require_tracked_settings(
    layout: ProjectLayout,
    settings: "Settings",
    overrides: Mapping[str, Any] | None = None,
    sections: Container[str] | None = None,
) -> None:
    """Require that environment variables change nothing in these sections (None: all but `machine`).

    DVC compares params.yaml with dvc.lock. It would store the result of another value as that of params.yaml, and
    return it from its cache later.

    Raises:
        SettingsError: a variable changes a setting of these sections.
    """
    from ratchet.config import params_file

    tracked = params_file.load(layout.params, overrides)
    for key in params_file.read_variables(os.environ):
        section, variable = key.partition(".")[0], params_file.name_variable(key)
        is_concerned = section != "machine" if sections is None else section in sections
        if is_concerned and getattr(settings, section) != getattr(tracked, section):
            raise SettingsError(
                f"{variable}: DVC does not see this variable, so it would store the result as that of params.yaml; "
                f"unset it, and change params.yaml or use `dvc exp run -S '{key}={os.environ[variable]}'`"
            )


def open_project_or_defaults(
    path: Path, overrides: Mapping[str, Any] | None = None
) -> "tuple[ProjectLayout | None, Settings]":
    """Open the project of `--project`. Outside a project, where some commands also work, return (None, defaults).

    `overrides` are settings that replace those of the project, by dotted name.
    """
    from ratchet.config import params_file
    from ratchet.config.settings import Settings

    here = Path.cwd()
    if path == Path() and not any((folder / "params.yaml").is_file() for folder in (here, *here.parents)):
        return None, params_file.parse(
            params_file.dump(Settings()), name="", overrides=overrides, environment=os.environ
        )
    project = Project(path, overrides)
    return project.layout, project.settings


def require_extras(settings: "Settings") -> None:
    """Require the optional libraries that later stages need, before a training that takes hours.

    Raises:
        MissingLibraryError: one of them is not installed; the message has the setting and the command that installs it.
    """
    if settings.export.gguf.types:
        require_libraries("export.gguf", "export")
    if settings.export.onnx.types:
        require_libraries("export.onnx", "export")
    if settings.evaluate.harness.tasks or settings.evaluate.harness.builtin_tasks:
        require_libraries("evaluate.harness", "harness")
    if HARNESS_METRICS.intersection(settings.evaluate.metrics):
        require_libraries("evaluate.metrics", "harness")


def ignore_progress(text: str) -> None:
    """Ignore a line of progress."""
