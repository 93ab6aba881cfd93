"""`ratchet config`: effective settings and their origin; and versions of defaults."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from ratchet.cli.main import main
from ratchet.config import defaults, params_file
from ratchet.config.defaults import DefaultChange
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text("version: 1\n\ntrain:\n  # mine\n  rank: 8\n", encoding="utf-8")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def changed_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2 changed two defaults, version 3 one of them again; today's defaults are those of version 3."""
    monkeypatch.setattr(defaults, "VERSION", 3)
    rank, alpha = Settings().train.rank, Settings().train.alpha
    monkeypatch.setattr(
        defaults,
        "CHANGES",
        {
            2: {"train.rank": DefaultChange(4, 6), "train.alpha": DefaultChange(5, alpha)},
            3: {"train.rank": DefaultChange(6, rank)},
        },
    )


def test_each_setting_has_a_value_and_an_origin(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project), "config", "train", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {entry["name"]: (entry["value"], entry["origin"]) for entry in report["settings"]}
    assert found["train.rank"] == (8, "params.yaml:5")
    assert found["train.alpha"] == (32, "default")
    assert found["train.guards.on_spike"] == ("report", "default")
    assert all(name.startswith("train.") for name in found)


def test_the_table_has_every_setting(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project), "config"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["setting", "from", "value"]
    assert ["train.rank", "params.yaml:5", "8"] in [line.split() for line in lines]
    assert len([line for line in lines if line.startswith("  ")]) == len(params_file.explain("version: 2\n")[1])


def test_an_unknown_name_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project), "config", "rank"]) == 2
    assert "rank: no such setting; expected a section (base, prepare" in capsys.readouterr().err


def test_the_schema_accepts_a_new_params_yaml_and_refuses_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(yaml.safe_load(params_file.dump_short(Settings())), schema)
    jsonschema.validate(yaml.safe_load(params_file.dump(Settings())), schema)
    for wrong in ({"train": {"rank": 0}}, {"train": {"rnk": 8}}, {"version": 99}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert schema["$defs"]["Train"]["properties"]["rank"]["description"].startswith("Rank r of the LoRA matrices")


def test_every_setting_has_a_description_in_the_schema() -> None:
    definitions = params_file.build_json_schema()["$defs"]
    missing = [
        f"{name}.{field}"
        for name, section in definitions.items()
        for field, schema in section.get("properties", {}).items()
        if "description" not in schema and field != "rule"
    ]
    assert missing == []


@pytest.mark.usefixtures("changed_default")
@pytest.mark.parametrize(
    ("text", "rank", "alpha"),
    [
        ("machine: {}\n", 4, 5),
        ("version: 1\n", 4, 5),
        ("version: 2\n", 6, 32),
        ("version: 3\n", 16, 32),
        ("version: 1\ntrain: {rank: 9}\n", 9, 5),
    ],
)
def test_a_file_keeps_the_defaults_of_its_version(text: str, rank: int, alpha: int) -> None:
    settings = params_file.parse(text)
    assert (settings.train.rank, settings.train.alpha) == (rank, alpha)
    assert params_file.parse(params_file.dump(settings)) == settings


@pytest.mark.usefixtures("changed_default")
def test_an_override_replaces_an_old_default() -> None:
    assert params_file.parse("version: 1\n", overrides={"train.rank": 7}).train.rank == 7


@pytest.mark.usefixtures("changed_default")
def test_config_and_doctor_show_the_changed_defaults(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project), "config", "train.alpha"]) == 0
    told = capsys.readouterr().out
    assert "default of version 1" in told
    assert "`ratchet doctor` shows what version 3 changes" in told
    main(["--project", str(project), "doctor"])
    assert (
        "of version 1; version 3 changes train.rank 4 → 16, train.alpha 5 → 32; `version: 3` in params.yaml adopts them"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("3", "found 3; this Ratchet knows defaults up to version 2: install a newer one"),
        ("0", "found 0; expected an integer from 1 to 2"),
        ("new", "found 'new'; expected an integer from 1 to 2"),
        ("true", "found True; expected an integer from 1 to 2"),
    ],
)
def test_an_unknown_version_is_refused(value: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        params_file.parse(f"train: {{}}\nversion: {value}\n")
    assert str(caught.value) == f"params.yaml:2: version: {problem}"
