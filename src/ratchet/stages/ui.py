"""`ratchet ui`: runs MLflow's UI for the project's own store on the loopback interface, with Ratchet's columns."""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from ratchet.config.mlflow_environment import resolve_addresses
from ratchet.errors import SettingsError, TrackingError
from ratchet.reports import plots
from ratchet.runs.log import print_message
from ratchet.stages.project import Project, ignore_progress
from ratchet.stages.sweep import is_sweep_running
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker


def ui(project: Project, port: int, on_progress: Callable[[str], None] = ignore_progress) -> NoReturn:
    """Replace this process by MLflow's server at 127.0.0.1. The store is created if it does not exist.

    First, the function ends runs and sweeps that MLflow shows as RUNNING although no process works on them, and reports
    name and address of each of Ratchet's views. If runs are logged to a server, it reports the server's views
    too.

    Raises:
        SettingsError: another process uses the port.
        TrackingSchemaError: another version of MLflow wrote the store.
        TrackingError: the store cannot be read or written.
    """
    with socket.socket() as probe:  # MLflow would report a port in use only in its log, and exit with 0
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as MLflow does: a port just closed is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SettingsError(f"--port {port}: {error.strerror}; choose another one") from None
    layout, settings = project.layout, project.settings
    where = resolve_addresses(settings, layout.mlflow_database)
    local = MlflowTracker(layout, where.experiment)
    _end_dead_runs(local, project)
    addresses = local.views(f"http://127.0.0.1:{port}")
    if (server := where.tracking) is not None:
        models = "earlier runs" if where.registry else "its registered models and earlier runs"
        print_message(
            f"runs and sweeps are shown on {server} ({where.tracking_source}); this is the project's own store, "
            f"with {models}"
        )
        try:
            remote = MlflowTracker.open(layout, settings)
            _end_dead_runs(remote, project)
            addresses |= {f"{view}, on the server": url for view, url in remote.views(server).items()}
        except TrackingError as error:
            print_message(f"the server's views are not available: {error}")
    width = max(map(len, addresses))
    for view, url in addresses.items():
        on_progress(f"  {view:{width}}  {url}")
    store = [f"sqlite:///{layout.mlflow_database}", "--default-artifact-root", layout.artifacts.as_uri()]
    command = [sys.executable, "-m", "mlflow", "ui", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    # MLflow's job execution (scorers of traces) would start eight more processes, which survive if MLflow is killed.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.execv(sys.executable, [*command, "--backend-store-uri", *store])  # noqa: S606 (no shell is wanted)


def _end_dead_runs(tracker: MlflowTracker, project: Project) -> None:
    """End runs and sweeps that are RUNNING although no process works on them, and send their missing data to MLflow."""
    for note in tracker.send_missing(project.layout.runs, project.settings, plots.draw_loss_curve):
        print_message(note)
    for note in MlflowSweepTracker(tracker, lambda _: {}).reconcile(partial(is_sweep_running, project.layout)):
        print_message(note)
