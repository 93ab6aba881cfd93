"""Real servers on loopback: MLflow's on a SQLite file, or any other that answers a URL when it is ready."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tiny_project
from ratchet.storage.layout import ProjectLayout

START_S = 180.0
"""MLflow's server takes 10 s to import and to make its tables, on a busy machine more."""


def command(address: str) -> list[str]:
    """MLflow's server at HOST:PORT; the environment says where it keeps what."""
    host, _, port = address.rpartition(":")
    return [sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={port}", "--workers=1"]


@contextmanager
def running(line: list[str], url: str, log: Path, extra: Mapping[str, str]) -> Iterator[None]:
    """A server process, from its first answer on."""
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


@contextmanager
def serve(folder: Path, port: int, database: Path) -> Iterator[str]:
    """MLflow's server on a copy of `database`, with all that it keeps in `folder`; gives its URL.

    Where it was before, it goes on with what it left: it ends by SIGKILL.
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
    }
    with running(command(address), f"http://{address}/health", folder / "log", extra):
        yield f"http://{address}"


def answers(url: str) -> bool:
    """Whether there is a server, and it is ready."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310 (our own loopback)
            return bool(reply.status == 200)
    except OSError:
        return False


@dataclass
class Opened:
    """MLflow's UI that answers."""

    url: str
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def opened_ui(layout: ProjectLayout, log: Path) -> Iterator[Opened]:
    """`ratchet ui`, from MLflow's first answer on."""
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


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
