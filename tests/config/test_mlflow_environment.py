"""Tests where MLflow's data goes: setting, environment or the project's own store, and what is refused."""

from pathlib import Path

import pytest

from ratchet.cli.main import main
from ratchet.config.machine import Machine
from ratchet.config.mlflow_environment import MlflowAddresses, has_tracking_server, resolve_addresses
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.storage.layout import ProjectLayout

ONE, OTHER = "https://one.example", "http://other.example:5000/path"


def resolve(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    setting: str | None = None,
    root: Path = Path("/project"),
) -> MlflowAddresses:
    for name in ("TRACKING_URI", "REGISTRY_URI", "EXPERIMENT_NAME"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    return resolve_addresses(Settings(machine=Machine(tracking_uri=setting)), Path("/project/mlruns/mlflow.db"))


@pytest.mark.parametrize(
    ("variables", "setting", "tracking", "registry"),
    [
        ({}, None, None, None),
        ({"TRACKING_URI": ""}, None, None, None),
        ({"TRACKING_URI": ONE + "/"}, None, ONE, ONE),
        ({}, OTHER, OTHER, OTHER),
        ({"TRACKING_URI": ONE}, OTHER, OTHER, OTHER),
        ({"REGISTRY_URI": ONE}, None, None, ONE),
        ({"REGISTRY_URI": ONE}, OTHER, OTHER, ONE),
        ({"REGISTRY_URI": "sqlite:////project/mlruns/mlflow.db"}, OTHER, OTHER, None),
        ({"TRACKING_URI": "sqlite:////project/mlruns/../mlruns/mlflow.db"}, None, None, None),
    ],
)
def test_the_first_address_counts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: str | None, tracking: str, registry: str
) -> None:
    found = resolve(monkeypatch, variables, setting)
    assert (found.tracking, found.registry) == (tracking, registry)
    assert bool(found.ignored) == (variables.get("TRACKING_URI") == ONE and setting == OTHER)
    assert has_tracking_server(Machine(tracking_uri=setting)) == (tracking is not None)


def test_the_experiment_has_the_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(monkeypatch, {}).experiment == Settings().promote.model_name
    found = resolve(monkeypatch, {"EXPERIMENT_NAME": "ours", "TRACKING_URI": ONE})
    assert found.experiment == "ours"
    assert found.describe() == (
        f"runs: {ONE} (MLFLOW_TRACKING_URI); registered models: {ONE} (MLFLOW_TRACKING_URI); "
        "experiment: ours (MLFLOW_EXPERIMENT_NAME)"
    )


@pytest.mark.parametrize("name", ["TRACKING_URI", "REGISTRY_URI"])
@pytest.mark.parametrize(
    "value", ["databricks", "sqlite:///other/mlflow.db", "postgresql://me:hidden22@host/x", "http://me:hidden22@host"]
)
def test_other_stores_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^MLFLOW_{name}: ") as refused:
        resolve(monkeypatch, {name: value})
    assert "hidden22" not in str(refused.value)


def test_a_command_with_a_wrong_address_does_nothing(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], calm: None
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlflow.example:5000")
    before = sorted(project.root.rglob("*"))
    assert main(["--project", str(project.root), "promotions"]) == 2
    said = capsys.readouterr().err
    assert "MLFLOW_TRACKING_URI: found 'mlflow.example:5000'; expected the address of an MLflow server" in said
    assert sorted(project.root.rglob("*")) == before
