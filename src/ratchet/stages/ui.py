"""MLflow's UI on the project's own store, on loopback: first made true, and with our columns."""

import os
import socket
import sys
from functools import partial
from typing import NoReturn

from ratchet.config.schema import Settings
from ratchet.errors import SettingsError, TrackingError
from ratchet.reports import plots
from ratchet.runs.log import print_message
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker


def ui(layout: ProjectLayout, settings: Settings, port: int) -> NoReturn:
    """Become MLflow's UI, making the store if it is not there. Runs that nobody trains any more are ended before.

    Where runs and sweeps are shown on a server, it says so: registered models are in the project's store alone.

    Raises:
        SettingsError: another process has the port.
        TrackingSchemaError: the store is another MLflow's.
        TrackingError: it cannot be read or written.
    """
    _require_free_port(port)
    name, here = settings.promote.model_name, f"http://127.0.0.1:{port}"
    own = MlflowTracker(layout, name)
    _end_dead_runs(own, layout, settings)
    addresses = own.views(here)
    if (server := settings.machine.tracking) is not None:
        print_message(
            f"runs and sweeps are shown on {server} (machine.tracking); this is the project's own store, with its "
            "registered models and what was trained before"
        )
        try:
            shared = MlflowTracker(layout, name, server)
            _end_dead_runs(shared, layout, settings)
            addresses |= {f"{view}, on the server": url for view, url in shared.views(server).items()}
        except TrackingError as error:
            print_message(f"the server's views were not looked at: {error}")
    width = max(map(len, addresses))
    for view, url in addresses.items():
        print(f"  {view:{width}}  {url}", flush=True)
    store = [f"sqlite:///{layout.mlflow_database}", "--default-artifact-root", layout.artifacts.as_uri()]
    command = [sys.executable, "-m", "mlflow", "ui", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    # Jobs of its own (scorers of traces) would be eight more processes, which outlive it when it is killed.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.execv(sys.executable, [*command, "--backend-store-uri", *store])  # noqa: S606 (no shell is wanted)


def _require_free_port(port: int) -> None:
    """Raise SettingsError where MLflow could not listen: it would say so in the middle of its log, and exit with 0."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as its server does: a port just left is free
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise SettingsError(f"--port {port}: {error.strerror}; name another one") from None


def _end_dead_runs(tracking: MlflowTracker, layout: ProjectLayout, settings: Settings) -> None:
    """End runs and sweeps that are RUNNING though nobody works on them, and send what the runs lack."""
    for note in tracking.complete(layout.runs, settings, plots.draw_loss_curve):
        print_message(note)
    for note in MlflowSweepTracker(tracking, lambda _: {}).reconcile(partial(_is_sweep_alive, layout)):
        print_message(note)


def _is_sweep_alive(layout: ProjectLayout, study: str) -> bool:
    """Whether a sweep of this project works on a study."""
    return FileLock(layout.stage_lock(f"sweep-{study}"), study).held_elsewhere()
