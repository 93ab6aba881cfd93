"""Tests `ratchet train` with a real webhook server and a real Prometheus port."""

import socket
from pathlib import Path

import pytest

from callback_cases import (
    TOKEN,
    project,
    template,  # noqa: F401 (a fixture)
)
from ratchet.cli.main import main
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.webhook import VARIABLE


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("what", ["a port that is taken", "an address that is none", "no folder for the file"])
def test_what_cannot_be_observed_is_refused_before_anything_is_begun(
    what: str,
    template: ProjectLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        machine, address, says = {
            "a port that is taken": (
                {"metrics_port": port},
                "",
                f"machine.metrics_port: {port} of 127.0.0.1 is in use",
            ),
            "an address that is none": (
                {},
                f"http://example.org/{TOKEN}",
                f"{VARIABLE} (in the environment): expected https, because http to example.org",
            ),
            "no folder for the file": (
                {"metrics_file": str(tmp_path / "nowhere" / "run.prom")},
                "",
                "machine.metrics_file: ",
            ),
        }[what]
        layout = project(template, tmp_path / "project", **machine)
        monkeypatch.setenv(VARIABLE, address)
        assert main(["--project", str(layout.root), "train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ratchet train: {says}")
    assert "Traceback" not in said and TOKEN not in said
    assert not layout.runs.exists() or list(layout.runs.iterdir()) == []
