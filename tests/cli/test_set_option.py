"""`--set KEY=VALUE`: settings of one run, which never replace the result of params.yaml unnoticed."""

import json
from pathlib import Path

import pytest

import tiny_project
from ratchet.cli.main import main
from ratchet.storage.layout import ProjectLayout

pytestmark = pytest.mark.usefixtures("calm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--set", "train.rank=eight"], "override train.rank: found 'eight'; expected an integer >= 1"),
        (["train", "--set", "train.rnk=8"], "override train.rnk: unknown setting; did you mean rank?"),
        (["train", "--set", "train.rank"], "--set train.rank: expected KEY=VALUE"),
        (["train", "--set", "train.rank=8", "--set", "train.rank=9"], "found train.rank twice"),
        (["train", "--set", "gate.confidence=0.9"], "--set gate.confidence: `ratchet train` takes"),
        (["train", "--set", "prepare.max_tokens=9"], "--set prepare.max_tokens: `ratchet train` takes"),
        (["forecast", "--set", "sweep.trials=9"], "--set sweep.trials: `ratchet forecast` takes"),
        (["chat", "--set", "generate.temperature=-1"], "override generate.temperature: found -1"),
        (["generate", "p.jsonl", "--set", "train.rank=8"], "takes settings of section generate or machine"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_key(
    arguments: list[str], message: str, project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--project", str(project.root), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_forecast_is_one_of_these_values(
    prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parameters(*options: str) -> int:
        assert main(["--project", str(prepared), "forecast", "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["forecast"]["trainable_parameters"])

    before = (prepared / "params.yaml").read_bytes()
    assert parameters("--set", "train.rank=8") == 2 * parameters()
    assert (prepared / "params.yaml").read_bytes() == before


def test_a_value_that_dvc_does_not_know_is_refused_in_its_stage(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_STAGE", "train")
    assert main(["--project", str(project.root), "train", "--set", "train.rank=8"]) == 2
    assert "use `dvc exp run -S train.rank=8`" in capsys.readouterr().err
    assert main(["--project", str(project.root), "train", "--set", "machine.threads=1"]) == 2
    assert "--set" not in capsys.readouterr().err  # refused because there are no data


@pytest.mark.long
def test_a_run_with_other_values_leaves_the_output_of_the_stage_as_it_was(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    options = ("--set", "train.rank=2", "--set", "train.epochs=1", "--set", "machine.keep_checkpoints=3")
    done = tiny_project.ratchet(layout, "train", "--json", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["is_output"]
    assert not layout.train.exists()
    [run] = layout.runs.iterdir()
    assert run.name == result["report"]["run_id"]
    again = tiny_project.ratchet(layout, "train", *options[:4])
    assert "trained before" in again.stdout
    assert "experiments/train is unchanged" in again.stdout

    settings = tiny_project.SETTINGS
    train = settings.train.model_copy(update={"rank": 2, "epochs": 1})
    tiny_project.save(layout, settings.model_copy(update={"train": train}))
    done = tiny_project.ratchet(layout, "train", "-q")
    assert "trained before" in done.stdout
    assert done.stderr == ""
    assert json.loads(layout.train_report.read_bytes())["run_id"] == run.name
