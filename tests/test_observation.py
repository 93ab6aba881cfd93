"""`ratchet train` and those who are told of it: a webhook's server and Prometheus's port, both real."""

import socket
from pathlib import Path
from typing import Any

import pytest

from observation_cases import (
    TOKEN,
    project,
    template,  # noqa: F401 (a fixture)
    train,
)
from ratchet.layout import Layout
from ratchet.services.webhook import VARIABLE


@pytest.mark.parametrize("what", ["a port that is taken", "an address that is none", "no folder for the file"])
def test_what_cannot_be_is_said_before_anything_is_begun(what: str, template: Layout, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        machine: dict[str, Any] = {
            "a port that is taken": {"metrics_port": port},
            "an address that is none": {},
            "no folder for the file": {"metrics_file": str(tmp_path / "nowhere" / "run.prom")},
        }[what]
        layout = project(template, tmp_path / "project", **machine)
        done = train(layout, f"http://example.org/{TOKEN}" if what == "an address that is none" else "")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr
    said = {"a port that is taken": f"machine.metrics_port: {port} of 127.0.0.1 is taken",
            "an address that is none": f"{VARIABLE} (in the environment): http to example.org could be read",
            "no folder for the file": "machine.metrics_file: "}[what]  # fmt: skip
    assert done.stderr.startswith(f"ratchet train: {said}")
    assert not layout.runs.exists() or list(layout.runs.iterdir()) == []
