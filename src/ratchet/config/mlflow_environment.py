"""Addresses of MLflow: `machine.tracking_uri`, and the environment variables that every program with MLflow reads.

    runs and sweeps     machine.tracking_uri, else MLFLOW_TRACKING_URI, else the project's own store
    registered models   MLFLOW_REGISTRY_URI, else where runs and sweeps are
    experiment          MLFLOW_EXPERIMENT_NAME, else promote.model_name

A setting wins over the environment, as an address in code does in MLflow. User, password and token are read by MLflow
itself (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN); Ratchet neither reads nor stores
them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.machine import Machine, find_server_problem
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError

TRACKING, REGISTRY, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_NAME"
_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class MlflowAddresses:
    """Where a project's runs and registered models are."""

    tracking: str | None
    """Server of runs and sweeps; None: the project's own store."""
    tracking_source: str
    """Setting or variable that names `tracking`."""
    registry: str | None
    """Server of registered models; None: the project's own store."""
    registry_source: str
    """Setting or variable that names `registry`."""
    experiment: str
    """Name of the experiment."""
    experiment_source: str
    """Setting or variable that names `experiment`."""
    ignored: str | None = None
    """A variable that a setting overrides, for the user; None: there is none."""

    def describe(self) -> str:
        """Describe the addresses for the user, with the origin of each."""
        own = "the project's mlruns/"
        return (
            f"runs: {self.tracking or own} ({self.tracking_source}); registered models: {self.registry or own} "
            f"({self.registry_source}); experiment: {self.experiment} ({self.experiment_source})"
            + (f"; {self.ignored}" if self.ignored else "")
        )


def resolve_addresses(settings: Settings, database: Path | None) -> MlflowAddresses:
    """Resolve the addresses of MLflow.

    Args:
        settings: the settings of the project.
        database: the project's own MLflow database, which a variable may name, too; None outside a project.

    Raises:
        SettingsError: a variable is not the address of a server; the message names the variable.
    """
    setting, default = settings.machine.tracking_uri, "default"
    tracking, source = (setting, "machine.tracking_uri") if setting else _read_server(TRACKING, database)
    ignored = os.environ.get(TRACKING)
    is_ignored = bool(setting and ignored and ignored.rstrip("/") != setting.rstrip("/"))
    registry, registry_source = _read_server(REGISTRY, database)
    if registry_source == default:
        registry, registry_source = tracking, source
    name = os.environ.get(EXPERIMENT)
    return MlflowAddresses(
        tracking, source, registry, registry_source, name or settings.promote.model_name,
        EXPERIMENT if name else "promote.model_name",
        f"{TRACKING} names another server and is ignored: machine.tracking_uri is set" if is_ignored else None,
    )  # fmt: skip


def has_tracking_server(machine: Machine) -> bool:
    """Return whether runs are logged to a server, which other machines may share."""
    return bool(machine.tracking_uri) or os.environ.get(TRACKING, "").startswith(("http://", "https://"))


def _read_server(name: str, database: Path | None) -> tuple[str | None, str]:
    """Return the server in a variable, and the name of the variable; (None, "default") if it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        return None, "default"
    path = value.removeprefix(_SQLITE)
    if database is not None and path != value and Path(path).resolve() == database.resolve():
        return None, name
    if problem := find_server_problem(value):
        found = "" if "@" in value or "?" in value else f"found {value!r}; "  # either may contain a password
        raise SettingsError(
            f"{name}: {found}{problem}. Ratchet uses MLflow servers, and in a project its own store; start a server on "
            "another store with `mlflow server --backend-store-uri ADDRESS`, or unset the variable"
        )
    return value.rstrip("/"), name
