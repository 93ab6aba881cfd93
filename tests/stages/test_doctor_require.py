"""Tests of `ratchet doctor --require`, called as an orchestrator calls it: exit codes, table and JSON record."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.stages import machine_check
from ratchet.stages.machine_check import MachineCheckReport
from ratchet.storage.layout import ProjectLayout

MODEST = "ram=1MiB,cpus=1,disk=1kB,python=3.11"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    layout = ProjectLayout(tmp_path / "project")
    layout.experiments.mkdir(parents=True)
    (layout.root / "dvc.yaml").write_text("stages: {}\n")
    replica = Machine(replica=(tmp_path / "replica").as_uri())
    layout.params.write_text(params_file.dump(Settings(machine=replica)))
    monkeypatch.chdir(layout.root)
    return layout


def test_a_sufficient_machine_is_admitted(project: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--require", MODEST, "--output", "found.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" is admitted")
    assert [line.split()[:3] for line in lines[1:]] == [
        ["ram", "1MiB", "ok"], ["cpus", "1", "ok"], ["disk", "1kB", "ok"], ["python", "3.11", "ok"],
    ]  # fmt: skip
    record = MachineCheckReport.load(project.admission)
    assert record.admitted
    assert [one.name for one in record.findings] == ["ram", "cpus", "disk", "python"]
    assert MachineCheckReport.load(Path("found.json")) == record


def test_an_insufficient_machine_is_refused_and_recorded(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--require", f"{MODEST},driver=99999"]) == 69
    said = capsys.readouterr()
    assert "is not good enough: driver" in said.err
    assert "99999  NOT OK" in said.err
    record = json.loads(project.admission.read_text())
    assert record["admitted"] is False
    assert [one["name"] for one in record["findings"] if not one["ok"]] == ["driver"]


def test_the_network_is_measured_with_the_replica(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_check, "SIZES", (1 << 12, 1 << 14))
    assert main(["doctor", "--require", "upload=1kbps,download=1kbps"]) == 0
    assert main(["doctor", "--require", "upload=1000000Gbps,download=1kbps"]) == 69
    assert [one.ok for one in MachineCheckReport.load(project.admission).findings] == [True, False]
    assert [path for path in (tmp_path / "replica").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--require", "vrm=22GB"], "did you mean vram?"),
        (["--require", "upload=1kbps"], "nothing to measure against; set machine.replica, or name a place"),
        (["--require", "upload=1kbps", "--replica", "nonsense://place"], "nonsense"),
        (["--replica", "file:///tmp"], "need --require"),
        (["--output", "found.json"], "need --require"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_failed_measurement_leaves_nothing_in_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ReplicaStore((tmp_path / "replica").as_uri(), TransferLimits(retry_timeout_s=0.0), lambda: False)

    def broken(*given: Any) -> Any:
        raise ConnectionResetError("reset")

    monkeypatch.setattr(store, "blocks", broken)
    with pytest.raises(ConnectionResetError):
        machine_check.measure_transfer_speed(store)
    assert store.list("speed") == {}


def test_an_unwritable_record_changes_no_verdict(project: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--require", "cpus=1", "--output", "params.yaml/found.json"]) == 0
    assert "params.yaml/found.json: not written (" in capsys.readouterr().out
    assert MachineCheckReport.load(project.admission).admitted


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from ratchet.cli import main as cli; "
        f"code = cli.main(['doctor', '--require', '{MODEST},gpus=1']); "
        "print(code, *(name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[1:] == []
