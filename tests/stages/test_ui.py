"""`ratchet ui`: the project's own store, made true, with our columns; whether or not runs are shown on a server."""

import socket
from pathlib import Path

import pytest

import tiny_project
from ratchet.cli.command_line import main


def test_a_port_that_is_taken_is_refused_before_anything_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tiny_project.write(tmp_path / "project")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--project", str(layout.root), "ui", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; name another one" in capsys.readouterr().err
    assert not layout.mlflow_database.exists()
