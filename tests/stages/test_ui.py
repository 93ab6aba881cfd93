"""`ratchet ui` refuses a port that is in use."""

import socket
from pathlib import Path

import pytest

import tiny_project
from ratchet.cli.main import main


def test_a_port_in_use_is_refused_before_anything_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = tiny_project.write(tmp_path / "project")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--project", str(layout.root), "ui", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; choose another one" in capsys.readouterr().err
    assert not layout.mlflow_database.exists()
