"""Proves the README's promise "a run never loses a step, and a worse model never ships" for a new user: init, "dvc
repro", promote, change, rollback, with real git and real DVC."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.config import params_file
from ratchet.config.gate import AtLeastRule, ExportParityRule, Gate, MustNotRegressRule
from ratchet.config.settings import Settings
from ratchet.errors import DataError
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Verdict, read_champion
from ratchet.storage.records.training import TrainReport

PACKAGES = ("cli", "stages")
STAGES = ("base", "prepare", "train", "export", "evaluate", "gate")
# A model that trained for seconds passes these rules. This test checks the pipeline; the gate has its own tests.
GATE = Gate(
    rules=(
        AtLeastRule(rule="at_least", metric="perplexity", value=1e9),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", against="champion", margin=5.0),
        ExportParityRule(rule="export_parity", max_logit_difference=1e-3, min_greedy_agreement=0.999),
    )
)


def dvc(layout: ProjectLayout, *arguments: str) -> str:
    done = subprocess.run(
        ["dvc", *arguments],
        cwd=layout.root,
        env=tiny_project.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ran(output: str) -> set[str]:
    return {stage for stage in STAGES if f"Running stage '{stage}'" in output}


def hurried(settings: Settings) -> Settings:
    """Return the settings that `ratchet init` wrote, with the sizes of the test projects."""
    small = tiny_project.SETTINGS
    evaluate = settings.evaluate.model_copy(update={"max_new_tokens": 8, "generation_rows": 16})
    return settings.model_copy(
        update={"base": small.base, "train": small.train, "machine": small.machine, "evaluate": evaluate, "gate": GATE}
    )


def make(directory: Path, data: Path, prompt: str, response: str, mlflow_template: Path) -> ProjectLayout:
    """Run `ratchet init` and reduce the sizes. The empty MLflow database is copied, because creating it is slow."""
    arguments = tiny_project.command(
        "init", str(directory), "--data", str(data), "--prompt", prompt, "--response", response
    )
    done = subprocess.run(arguments, env=tiny_project.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    layout = ProjectLayout(directory)
    tiny_project.save(layout, hurried(params_file.load(layout.params)))
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


def test_from_data_to_a_promoted_model_and_back(tmp_path: Path, mlflow_template: Path) -> None:
    tiny_project.write_rows(tmp_path, 400)
    layout = make(tmp_path / "first light", tmp_path / "rows.jsonl", "request", "intent", mlflow_template)
    assert params_file.load(layout.params).prepare.task == "labels"

    assert ran(dvc(layout, "repro")) == set(STAGES)
    card, report = DatasetCard.load(layout.dataset_card), EvaluationReport.load(layout.eval_report)
    bundle, verdict = ModelBundle.load(layout.bundle), Verdict.load(layout.verdict)
    trained = TrainReport.load(layout.train_report)
    assert card.rows_in == card.rows_out == sum(card.splits.values()) == 200
    assert trained.adapter_digest == report.adapter_digest == bundle.adapter_digest == verdict.adapter_digest
    assert set(report.scores) == {"base", "candidate"}
    assert {"accuracy", "answer_loss", "answer_perplexity"} <= set(report.scores["candidate"].metrics)
    assert any(name.startswith("harness/answers/") for name in report.scores["candidate"].metrics)
    assert bundle.parity.max_logit_difference < 1e-3
    assert verdict.decision == "PROMOTE", verdict
    assert layout.dataset_page.is_file()
    raw = next(layout.raw.glob("*.jsonl"))
    raw.touch()
    assert ran(dvc(layout, "repro")) == set()  # only the time stamp changed
    before = raw.read_text(encoding="utf-8")
    raw.write_text(before.replace("refund", "delivery", 1), encoding="utf-8")  # changes one label of one row
    would_run = dvc(layout, "repro", "--dry")
    raw.write_text(before, encoding="utf-8")
    assert {"base", "prepare"} <= ran(would_run)
    assert ran(dvc(layout, "repro")) == set()

    assert tiny_project.ratchet(layout, "gate", "--check").returncode == 0
    for _ in range(2):  # the second promotion changes nothing
        promoted = tiny_project.ratchet(layout, "promote")
        assert promoted.returncode == 0, promoted.stderr
    first = read_champion(layout.champion).champion
    assert first is not None
    assert first.model_digest == bundle.model_digest
    said = answers_of_one(layout, "merged", "champion", "v1")

    assert ran(dvc(layout, "repro")) == {"evaluate", "gate"}
    verdict = Verdict.load(layout.verdict)
    assert (verdict.is_champion, verdict.decision) == (True, "PROMOTE")

    changed = params_file.load(layout.params)
    faster = changed.train.model_copy(update={"learning_rate": 0.02})
    tiny_project.save(layout, changed.model_copy(update={"train": faster}))
    assert ran(dvc(layout, "repro")) == {"train", "export", "evaluate", "gate"}
    report = EvaluationReport.load(layout.eval_report)
    assert set(report.scores) == {"base", "candidate", "champion", "anchor"}
    assert len({scores.contract for scores in report.scores.values()}) == 1, "the champion was put on the same base"
    assert report.champion_digest == first.model_digest
    assert tiny_project.ratchet(layout, "promote").returncode == 0
    assert len(read_champion(layout.champion).previous) == 1

    assert tiny_project.ratchet(layout, "rollback").returncode == 0
    assert read_champion(layout.champion).champion == first
    shutil.rmtree(layout.root / "answers")
    assert answers_of_one(layout, "champion", "v1") == said != answers_of_one(layout, "merged", "v2")
    assert shown(layout)["model"] == first.model_digest
    assert len(list(layout.runs.iterdir())) == 2


def answers(layout: ProjectLayout, model: str) -> list[dict[str, Any]]:
    """Return the answers of one of the project's models to two prompts."""
    prompts, output = layout.root / "prompts.jsonl", layout.root / "answers" / f"{model}.jsonl"
    if not prompts.exists():
        lines = (json.dumps({"prompt": text}) for text in ("where is my parcel", "give me my money back"))
        prompts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    done = tiny_project.ratchet(layout, "generate", str(prompts), "--output", str(output), "--model", model)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def answers_of_one(layout: ProjectLayout, *models: str) -> list[dict[str, Any]]:
    """Return the answers of a model. Check that each of its names gives the same answers."""
    first, *others = (answers(layout, model) for model in models)
    assert all(other == first for other in others)
    assert len({one["model"] for one in first}) == 1
    return first


def shown(layout: ProjectLayout) -> dict[str, str]:
    """Check the contents of MLflow: two finished runs with metrics and a dataset. Return the model digest of the
    champion."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{layout.mlflow_database}", f"sqlite:///{layout.mlflow_database}")
    name = params_file.load(layout.params).promote.model_name
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    for run in runs:
        steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
        assert steps == list(range(1, len(steps) + 1))
        assert run.inputs.dataset_inputs[0].dataset.digest
        assert "test/candidate/accuracy" in run.data.metrics
        assert run.data.tags["ratchet.verdict"] == "PROMOTE"
        assert len(run.data.tags["dvc.prepare"]) >= 32
    version = client.get_model_version_by_alias(name, "champion")
    return {"model": version.tags["ratchet.model_digest"]}


def test_the_exported_model_loads_without_us_peft_or_bitsandbytes(tmp_path: Path) -> None:
    from ratchet.stages import evaluate, export, train

    layout = tiny_project.prepared(tmp_path / "project")
    train.train(Project.from_parts(layout, tiny_project.SETTINGS), lambda _: [], lambda *_: None)
    export.export(Project.from_parts(layout, tiny_project.SETTINGS))
    evaluate.evaluate(Project.from_parts(layout, tiny_project.SETTINGS))
    other = tiny_project.SETTINGS.model_copy(update={"train": tiny_project.TRAIN.model_copy(update={"rank": 2})})
    for verb in (
        lambda: evaluate.evaluate(Project.from_parts(layout, other)),
        lambda: export.export(Project.from_parts(layout, other)),
    ):
        with pytest.raises(DataError, match="run `dvc repro`"):  # other settings made the adapter on the disk
            verb()
    script = """
import json, sys
sys.modules.update({name: None for name in ("ratchet", "peft", "bitsandbytes")})
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], use_safetensors=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=8, do_sample=False)
print(json.dumps(tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True).strip()))
"""
    asked = base.read_lines(layout.evaluate / "rows.jsonl")
    answered = base.read_lines(layout.evaluate / "answers" / "candidate.jsonl")
    arguments = [tiny_project.command()[0], "-c", script, str(layout.merged_model), asked[0]["prompt"]]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=tiny_project.environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == answered[0]["answers"][0]


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not REAL.is_dir(), reason="no folder of real data sets beside the project (../shared/data)")
@pytest.mark.parametrize(
    ("name", "rows", "prompt", "response", "task"),
    [
        ("banking77_train.csv", 400, "text", "category", "labels"),
        ("gsm8k_train.jsonl", 200, "question", "answer", "text"),
    ],
)
def test_real_data_goes_all_the_way_to_a_verdict(
    tmp_path: Path, mlflow_template: Path, name: str, rows: int, prompt: str, response: str, task: str
) -> None:
    some = tmp_path / name
    some.write_text("".join(f"{line}\n" for line in (REAL / name).read_text().splitlines()[:rows]), encoding="utf-8")
    layout = make(tmp_path / "real", some, prompt, response, mlflow_template)
    assert params_file.load(layout.params).prepare.task == task
    assert ran(dvc(layout, "repro")) == set(STAGES)
    card = DatasetCard.load(layout.dataset_card)
    assert card.rows_in == card.rows_out + sum(drop.count for drop in card.dropped.values())
    assert Verdict.load(layout.verdict).decision in ("PROMOTE", "HOLD", "REJECT")
