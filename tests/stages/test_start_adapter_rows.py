"""Tests that a model is not judged by rows that trained its start adapter, although its own split tests by them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny_project
from evaluate_cases import SETTINGS, export_of, keep_as_champion
from ratchet.cli.gate import format_markdown
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.errors import DamagedFileError
from ratchet.models import start_adapter
from ratchet.quality_gate.rules import describe_verdict
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths
from ratchet.stages import evaluate, export, prepare
from ratchet.stages.gate import gate
from ratchet.stages.project import Project
from ratchet.stages.train import train
from ratchet.stages.verify import verify
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.gate import Verdict
from ratchet.training.run_spec import build_run_spec


def with_changes(start: str | None, seed: int) -> Settings:
    """Return settings with a start adapter and a seed of the split."""
    return params_file.apply_changes(SETTINGS, {"train.init_adapter": start, "prepare.split.seed": seed})


def train_run(layout: ProjectLayout, settings: Settings, seed: int = 3) -> RunPaths:
    """Run stage train for a run that is complete: a random adapter and its checkpoint."""
    base = BaseCard.load(layout.base_card).digest
    resolved = start_adapter.resolve(layout, settings.train, base)
    tiny_project.adapted(layout, settings.model_copy(update={"train": resolved}), seed)
    spec = build_run_spec(layout, settings)
    run = RunDirectory.open(layout.runs, spec)
    with files.sealed_directory(run.paths.result, RESULT) as scratch:
        for name in ("adapter", "train.json"):
            (shutil.copytree if name == "adapter" else shutil.copyfile)(layout.train / name, scratch / name)
        kept = scratch / "checkpoints" / "best"
        kept.mkdir(parents=True)
        save_file({"weight": torch.full((2,), float(seed))}, kept / "trainable.safetensors")
        files.write_json(kept / "identity.json", {"spec": spec.model_dump(mode="json")})
    run.close()
    run.paths.page.write_text("a page", encoding="utf-8")
    project = Project.from_parts(layout, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ratchet.stages.train._write_dvc_files", lambda *_: None)
        assert train(project, lambda paths: [], lambda paths, page: None).was_trained_before
    return run.paths


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Create a project with a run, and then data in another split."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("trained") / "project", with_changes(None, 0))
    run = train_run(layout, with_changes(None, 0))
    return layout.root, run.root.name


@pytest.fixture
def layout(trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    for stage in (evaluate, export):
        monkeypatch.setattr(stage, "_log_to_mlflow", lambda *_: None)
    monkeypatch.setattr("ratchet.stages.callbacks.log_stage", lambda *_, **__: None)
    torch.set_num_threads(1)
    shutil.copytree(trained[0], tmp_path / "project")
    return ProjectLayout(tmp_path / "project")


def prompts(layout: ProjectLayout, *splits: token_files.SplitName) -> set[str]:
    return {prompt for split in splits for prompt in token_files.read_prompts(layout.data, split)}


def split_again(layout: ProjectLayout, seed: int) -> None:
    tiny_project.save(layout, with_changes(None, seed))
    prepare.prepare(Project.from_parts(layout, with_changes(None, seed)))


def judge(layout: ProjectLayout, settings: Settings) -> tuple[EvaluationReport, Verdict]:
    """Run export, evaluate and gate."""
    project = Project.from_parts(layout, settings)
    export.export(project)
    evaluate.evaluate(project)
    return EvaluationReport.load(layout.eval_report), gate(project)


def test_test_rows_that_trained_the_start_adapter_make_the_verdict_invalid(
    layout: ProjectLayout, trained: tuple[Path, str]
) -> None:
    first, seen = trained[1], prompts(layout, "train", "validation")
    split_again(layout, 1)
    leaked = len(seen & prompts(layout, "test"))
    assert leaked > 20
    settings = with_changes(first, 1)
    second = train_run(layout, settings, 4)
    report, verdict = judge(layout, settings)
    assert report.start_overlaps == {f"run {first}": leaked}
    assert verdict.decision == "INVALID"
    [reason] = verdict.reasons
    assert reason.rule == "start_adapter"
    assert reason.text.startswith(
        f"{leaked} test rows found among the training and validation rows of run {first}, from which"
    )
    assert "prepare.split.seed of that run" in reason.text
    assert verdict.notes == report.unchecked_starts == ()

    settings = with_changes(second.root.name, 1)  # the split of the second run, and not of the first one
    train_run(layout, settings, 5)
    report, verdict = judge(layout, settings)
    assert (report.start_overlaps, verdict.decision) == ({f"run {second.root.name}": leaked}, "INVALID")

    shutil.rmtree(layout.runs / first)  # the record of the second run has the rows of both
    report, verdict = judge(layout, settings)
    assert (report.start_overlaps, verdict.decision) == ({f"run {second.root.name}": leaked}, "INVALID")


def test_a_start_adapter_with_the_same_split_leaks_nothing(layout: ProjectLayout, trained: tuple[Path, str]) -> None:
    with (layout.raw / "rows.csv").open("a", encoding="utf-8") as stream:  # rows that are added move no row
        stream.writelines(f"a further request number {number},refund\n" for number in range(60))
    split_again(layout, 0)
    settings = with_changes(trained[1], 0)
    run = train_run(layout, settings, 4)
    report, verdict = judge(layout, settings)
    assert (report.start_overlaps, report.unchecked_starts, verdict.notes) == ({}, (), ())
    assert verdict.decision != "INVALID"
    assert run.trained_rows.stat().st_size < 4096
    assert all(finding.status == "ok" for finding in verify([run.root]).findings)


def test_the_champion_as_start(layout: ProjectLayout, trained: tuple[Path, str]) -> None:
    seen = prompts(layout, "train", "validation")
    export_of(layout, 3)
    keep_as_champion(layout, 1)
    split_again(layout, 1)
    leaked = len(seen & prompts(layout, "test"))
    settings = with_changes("champion", 1)
    train_run(layout, settings, 4)
    project = Project.from_parts(layout, settings)
    evaluate.evaluate(project)
    assert EvaluationReport.load(layout.eval_report).start_overlaps == {f"run {trained[1]}": leaked}


def test_a_start_without_a_record_is_reported(layout: ProjectLayout, trained: tuple[Path, str]) -> None:
    """An earlier version of Ratchet trained it."""
    RunPaths(layout.runs / trained[1]).trained_rows.unlink()
    settings = with_changes(trained[1], 0)
    train_run(layout, settings, 4)
    evaluate.evaluate(Project.from_parts(layout, settings))
    assert EvaluationReport.load(layout.eval_report).unchecked_starts == (), "it has the same data"
    split_again(layout, 1)
    settings = with_changes(trained[1], 1)
    train_run(layout, settings, 4)
    report, verdict = judge(layout, settings)
    [note] = verdict.notes
    assert verdict.decision != "INVALID"
    assert note.startswith(f"test rows may be training rows of run {trained[1]}, from which this training starts")
    assert "cannot be checked" in note
    assert note in report.notes
    assert f"note  {note}" in describe_verdict(verdict)
    assert "Note: test rows may be" in format_markdown(verdict)
    assert "cannot be checked" in layout.gate_page.read_text(encoding="utf-8")


def test_an_adapter_from_elsewhere_is_reported_and_a_copied_run_is_checked(
    layout: ProjectLayout, trained: tuple[Path, str], tmp_path: Path
) -> None:
    seen = prompts(layout, "train", "validation")
    shutil.copytree(layout.runs / trained[1], tmp_path / "elsewhere")
    shutil.copytree(layout.runs / trained[1] / "result" / "adapter", tmp_path / "bare" / "adapter")
    split_again(layout, 1)
    shutil.rmtree(layout.runs / trained[1])
    settings = with_changes(str(tmp_path / "bare" / "adapter"), 1)
    train_run(layout, settings, 4)
    evaluate.evaluate(Project.from_parts(layout, settings))
    [note] = EvaluationReport.load(layout.eval_report).unchecked_starts
    assert "no file here says on which rows" in note
    settings = with_changes(str(tmp_path / "elsewhere" / "result" / "adapter"), 1)
    run = train_run(layout, settings, 4)
    evaluate.evaluate(Project.from_parts(layout, settings))
    leaked = len(seen & prompts(layout, "test"))
    assert EvaluationReport.load(layout.eval_report).start_overlaps == {f"run {trained[1]}": leaked}
    content = run.trained_rows.read_bytes()
    os.truncate(run.trained_rows, len(content) - 3)
    with pytest.raises(DamagedFileError, match=r"trained_rows\.bin: not the hashes of training rows"):
        evaluate.evaluate(Project.from_parts(layout, settings))
    tiny_project.save(layout, settings)
    assert main(["--project", str(layout.root), "evaluate"]) == 2
    train_run(layout, settings, 4)
    assert run.trained_rows.read_bytes() == content, "stage train writes it again"
