"""Starts real servers on loopback: MLflow's server on a SQLite file, with users if wanted, or another server that
answers a URL when it is ready."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tiny_project
from ports import free_port
from ratchet.storage.layout import ProjectLayout

START_S = 180.0
"""Timeout in seconds. MLflow's server needs 10 s to import its modules and create its tables, and longer on a busy
machine."""


def command(address: str) -> list[str]:
    """Return the command for MLflow's server at HOST:PORT. Environment variables set its storage locations."""
    host, _, port = address.rpartition(":")
    return [sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={port}", "--workers=1"]


@contextmanager
def running(line: list[str], url: str, log: Path, extra: Mapping[str, str]) -> Iterator[None]:
    """Run a server process. The block begins after the first answer of the server."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            line, stdout=stream, stderr=stream, env=tiny_project.environment() | extra, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


ADMIN, PASSWORD = "root", "planted-password-of-users"
"""The administrator of a server with users, and the password of everyone."""


@contextmanager
def serve(folder: Path, port: int, database: Path, default_permission: str | None = None) -> Iterator[str]:
    """Run MLflow's server on a copy of `database`, with all of its files in `folder`. Yields the URL of the server.

    The server ends by SIGKILL. If `folder` already has a database, a new server continues with it. With a
    `default_permission`, the server has users (ADMIN, PASSWORD) and workspaces.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "mlflow.db").exists():
        shutil.copyfile(database, folder / "mlflow.db")
    address = f"127.0.0.1:{port}"
    extra = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": (folder / "artifacts").as_uri(),
        "MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1:*",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight more processes
    }
    line = command(address)
    if default_permission is not None:
        line += ["--app-name=basic-auth", "--enable-workspaces"]
        auth = folder / "basic_auth.ini"
        auth.write_text(
            f"[mlflow]\ndefault_permission = {default_permission}\nadmin_username = {ADMIN}\n"
            f"admin_password = {PASSWORD}\nauth_cache_ttl_seconds = 60\n"
            f"database_uri = sqlite:///{folder / 'users.db'}\n"
        )
        extra |= {"MLFLOW_AUTH_CONFIG_PATH": str(auth), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test"}
    with running(line, f"http://{address}/health", folder / "log", extra):
        yield f"http://{address}"


def answers(url: str) -> bool:
    """Return whether a server answers the URL with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310 (our own loopback)
            return bool(reply.status == 200)
    except OSError:
        return False


@dataclass
class Opened:
    """A running MLflow UI."""

    url: str
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def opened_ui(layout: ProjectLayout, log: Path) -> Iterator[Opened]:
    """Run `ratchet ui`. The block begins after MLflow's first answer."""
    port = free_port()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            tiny_project.command("ui", "--port", str(port)), cwd=layout.root, env=tiny_project.environment(),
            stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.2)
        yield Opened(f"http://127.0.0.1:{port}", log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
