"""Settings in environment variables: `RATCHET__TRAIN__RANK=8`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ratchet
import tiny_project
from ratchet.cli.main import main
from ratchet.errors import SettingsError
from ratchet.redaction import redact
from ratchet.stages.sweep import run_outdated_stages
from ratchet.storage.layout import ProjectLayout

pytestmark = pytest.mark.usefixtures("calm")


def origins(
    layout: ProjectLayout, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, tuple[object, str]]:
    assert main(["--project", str(layout.root), "config", "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    return {entry["name"]: (entry["value"], entry["origin"]) for entry in report["settings"]}


def test_an_option_wins_over_a_variable_and_a_variable_over_the_file(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.params.write_text("version: 2\ntrain:\n  rank: 4\n  alpha: 8\n  epochs: 2\n", encoding="utf-8")
    monkeypatch.setenv("RATCHET__TRAIN__RANK", "16")
    monkeypatch.setenv("RATCHET__TRAIN__ALPHA", "32")
    found = origins(project, capsys, "train", "--set", "train.rank=64")
    assert found["train.rank"] == (64, "--set")
    assert found["train.alpha"] == (32, "RATCHET__TRAIN__ALPHA")
    assert found["train.epochs"] == (2, "params.yaml:5")
    assert found["train.seed"][1] == "default"
    assert ratchet.Project(project.root).settings.train.rank == 16
    assert ratchet.Project(project.root, {"train.rank": 2}).settings.train.rank == 2


def test_a_value_may_be_a_list_or_a_section(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET__TRAIN__TARGET_MODULES", "[q_proj, v_proj]")
    monkeypatch.setenv("RATCHET__MACHINE__RAY", "{cpus: 4, resources: {spot: 1}}")
    monkeypatch.setenv("RATCHET__MACHINE__RAY__GPUS", "1")
    monkeypatch.setenv("RATCHET__MACHINE__REPLICA", "null")
    settings = ratchet.Project(project.root).settings
    assert settings.train.target_modules == ("q_proj", "v_proj")
    assert (settings.machine.ray.cpus, settings.machine.ray.gpus) == (4, 1)
    assert settings.machine.ray.resources == {"spot": 1}
    assert origins(project, capsys, "machine.ray.cpus")["machine.ray.cpus"][1] == "RATCHET__MACHINE__RAY"


def test_a_whole_section_keeps_the_settings_that_its_mapping_does_not_name(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ratchet.Project(project.root).settings.train
    monkeypatch.setenv("RATCHET__TRAIN", "{seed: 5, rank: 3}")
    monkeypatch.setenv("RATCHET__TRAIN__RANK", "7")
    expected = plain.model_copy(update={"seed": 5, "rank": 7})
    assert ratchet.Project(project.root).settings.train == expected
    assert ratchet.Project(project.root, {"train": {"rank": 2}}).settings.train.rank == 2
    found = origins(project, capsys, "train")
    assert found["train.seed"][1] == "RATCHET__TRAIN"
    assert found["train.rank"][1] == "RATCHET__TRAIN__RANK"
    assert not found["train.alpha"][1].startswith("RATCHET__")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RATCHET__TRAIN__RANK", "eight", "RATCHET__TRAIN__RANK: found 'eight'; expected an integer >= 1"),
        ("RATCHET__TRAIN__RNK", "8", "RATCHET__TRAIN__RNK: unknown setting; did you mean RATCHET__TRAIN__RANK?"),
        ("RATCHET__TRIAN__RANK", "8", "RATCHET__TRIAN__RANK: unknown setting; did you mean RATCHET__TRAIN?"),
        ("RATCHET__RANK", "8", "RATCHET__RANK: unknown setting; did you mean RATCHET__TRAIN__RANK"),
        ("RATCHET__TRAIN__RANK__MAX", "8", "RATCHET__TRAIN__RANK__MAX: unknown setting; rank is not a section"),
        ("RATCHET__TRAIN__RANK", " ", "RATCHET__TRAIN__RANK: found nothing; unset it, or write null"),
        ("RATCHET__TRAIN__RANK", "[8", "RATCHET__TRAIN__RANK: found '[8'; expected a value as in params.yaml"),
        ("RATCHET_TRAIN__RANK", "8", "RATCHET_TRAIN__RANK: unknown variable; did you mean RATCHET__TRAIN__RANK?"),
        ("RATCHET__TRAIN_RANK", "8", "RATCHET__TRAIN_RANK: unknown variable; did you mean RATCHET__TRAIN__RANK?"),
        ("ratchet__train__rank", "8", "ratchet__train__rank: unknown variable; did you mean RATCHET__TRAIN__RANK?"),
        ("RATCHET__VERSION", "2", "RATCHET__VERSION: unknown setting"),
        ("RATCHET__MACHINE__REPLICA", "s3://user:password@bucket/x", "RATCHET__MACHINE__REPLICA: found"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_refused_in_one_message(
    variable: str,
    value: str,
    message: str,
    project: ProjectLayout,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["--project", str(project.root), "-q", "config"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ratchet config: {message}")
    assert error.count("\n") == 1
    assert "password@" not in error


def test_a_command_reports_its_variables(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET__MACHINE__THREADS", "1")
    main(["--project", str(project.root), "config"])
    assert capsys.readouterr().err == "ratchet config: settings from the environment: RATCHET__MACHINE__THREADS\n"
    monkeypatch.setenv("RATCHET__MACHINE__MICRO_BATCH_TOKENS", "1234567")
    assert redact("1234567 tokens") == "1234567 tokens"


@pytest.mark.long
def test_a_variable_is_recorded_in_the_run_and_reaches_every_process(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    variables = {"RATCHET__TRAIN__RANK": "2", "RATCHET__TRAIN__EPOCHS": "1"}
    done = subprocess.run(
        tiny_project.command("train", "--json"), cwd=layout.root, env=tiny_project.environment() | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [run] = layout.runs.iterdir()
    assert json.loads((run / "spec.json").read_bytes())["train"]["rank"] == 2
    assert json.loads(layout.train_report.read_bytes())["run_id"] == run.name
    config = json.loads((layout.train / "adapter" / "adapter_config.json").read_bytes())
    assert config["r"] == 2


def test_a_stage_of_dvc_refuses_what_dvc_does_not_see(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DVC_STAGE", "prepare")
    for name, other, as_in_file, option in (
        ("RATCHET__TRAIN__RANK", "8", "16", "train.rank=8"),
        ("RATCHET__TRAIN", "{rank: 8}", "{rank: 16}", "train={rank: 8}"),
    ):
        monkeypatch.setenv(name, other)
        assert main(["--project", str(project.root), "prepare"]) == 2
        error = capsys.readouterr().err
        assert f"{name}: DVC does not see this variable" in error
        assert f"`dvc exp run -S '{option}'`" in error
        monkeypatch.setenv(name, as_in_file)
        assert ratchet.Project(project.root).settings.train.rank == 16
        monkeypatch.delenv(name)
    monkeypatch.setenv("RATCHET__MACHINE__THREADS", "1")
    assert ratchet.Project(project.root).settings.machine.threads == 1


def test_dvc_never_stores_the_result_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = tiny_project.write(tmp_path / "project")
    (layout.root / "dvc.yaml").write_text(
        "stages:\n  prepare:\n    cmd: ratchet config train.rank > rank.txt\n    params: [train]\n"
        "    outs: [rank.txt]\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=layout.root, check=True)

    def repro(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dvc", "repro"], cwd=layout.root, env=tiny_project.environment() | variables,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    refused = repro(RATCHET__TRAIN__RANK="8")
    assert refused.returncode != 0
    assert "RATCHET__TRAIN__RANK: DVC does not see this variable" in refused.stderr
    assert not (layout.root / "dvc.lock").exists()
    assert repro(RATCHET__TRAIN__RANK="4", RATCHET__MACHINE__THREADS="2").returncode == 0
    assert (layout.root / "rank.txt").read_text(encoding="utf-8").split()[-2:] == ["RATCHET__TRAIN__RANK", "4"]

    for name in [name for name in os.environ if name.startswith("DVC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RATCHET__PREPARE__MAX_TOKENS", "32")
    with pytest.raises(SettingsError, match="RATCHET__PREPARE__MAX_TOKENS: DVC does not see"):
        run_outdated_stages(ratchet.Project(layout.root), lambda text: None)
    monkeypatch.delenv("RATCHET__PREPARE__MAX_TOKENS")
    monkeypatch.setenv("RATCHET__TRAIN__RANK", "8")
    run_outdated_stages(ratchet.Project(layout.root), lambda text: None)
