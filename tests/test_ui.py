"""`ratchet ui` on the project's own store, whether or not runs are shown on a server as well."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

import mlflow_server
import tiny_project
from ratchet import params
from ratchet.config import Settings
from ratchet.layout import Layout

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def opened(layout: Layout, log: Path) -> str:
    """What it said until MLflow answered. Ends it."""
    port = free_port()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            tiny_project.command("ui", "--port", str(port)), cwd=layout.root, env=tiny_project.environment(),
            stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + mlflow_server.START_S
        while not mlflow_server.answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=30) as reply:
            assert reply.status == 200
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return log.read_text(errors="replace")


def test_with_a_server_it_says_where_runs_are_and_opens_the_project_s_own_store(
    tracked_project: Layout, tmp_path: Path
) -> None:
    server = "http://mlflow.example:5000"
    machine = Settings().machine.model_copy(update={"tracking": server})
    tracked_project.params.write_text(params.dump(Settings(machine=machine)), encoding="utf-8")
    said = opened(tracked_project, tmp_path / "log")
    assert f"runs and sweeps are shown on {server} (machine.tracking); this is the project's own store" in said
