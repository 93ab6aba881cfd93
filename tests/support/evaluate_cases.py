"""Stage evaluate on a real small project: models and their formats, stored scores, and the cost of a kill."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_project
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.stages import evaluate, export
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile

SETTINGS: Settings = params_file.apply_changes(
    tiny_project.SETTINGS,
    {
        "evaluate.harness.limit": 4,
        "evaluate.generation_rows": 12,
        "evaluate.latency_rows": 0,
        "evaluate.general_text.max_blocks": 6,
    },
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a project with completed stages up to evaluate."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("evaluate") / "project", SETTINGS)
    torch.set_num_threads(1)
    export_of(layout, 3)
    before = evaluate._log_to_mlflow
    evaluate._log_to_mlflow = lambda *_: None
    try:
        evaluated(layout)
    finally:
        evaluate._log_to_mlflow = before
    return layout.root


def export_of(layout: ProjectLayout, seed: int, strength: float = 0.2) -> ModelBundle:
    """Create a candidate: the outputs of the stages train and export."""
    tiny_project.adapted(layout, SETTINGS, seed, strength)
    before = export._log_to_mlflow
    export._log_to_mlflow = lambda *_: None  # logging to MLflow is slow and has its own tests
    try:
        export.export(Project.from_parts(layout, SETTINGS))
    finally:
        export._log_to_mlflow = before
    return ModelBundle.load(layout.bundle)


@pytest.fixture
def layout(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    monkeypatch.setattr(evaluate, "_log_to_mlflow", lambda *_: None)
    torch.set_num_threads(1)
    root = tmp_path / "project"
    subprocess.run(["cp", "-r", str(made), str(root)], check=True)
    return ProjectLayout(root)


@pytest.fixture
def cold(layout: ProjectLayout) -> ProjectLayout:
    """Remove the results of all evaluations from the project."""
    for folder in (layout.scores, layout.evaluate):
        subprocess.run(["rm", "-r", str(folder)], check=True)
    return layout


def evaluated(layout: ProjectLayout, settings: Settings = SETTINGS) -> EvaluationReport:
    evaluate.evaluate(Project.from_parts(layout, settings))
    files.verify_sealed(layout.evaluate, "evaluation")
    return EvaluationReport.load(layout.eval_report)


def keep_as_champion(layout: ProjectLayout, version: int, *, with_adapter: bool = True) -> Champion:
    """Store the current export as a promoted model, as `ratchet promote` does."""
    bundle = ModelBundle.load(layout.bundle)
    with files.sealed_directory(layout.promoted_model(bundle.model_digest), "model") as scratch:
        files.link_tree(layout.merged_model, scratch / "hf")
        files.link_or_copy(layout.bundle, scratch / "bundle.json")
        if with_adapter:
            files.link_tree(layout.adapter, scratch / "adapter")
    champion = Champion(
        version=version, model_digest=bundle.model_digest, adapter_digest=bundle.adapter_digest, run_id=bundle.run_id
    )
    anchor = champion if version == 1 else None
    ChampionFile(champion=champion, anchor=anchor).save(layout.champion)
    return champion


def samples(layout: ProjectLayout, report: EvaluationReport, who: Any, metric: str) -> dict[str, float]:
    lines = base.read_lines(layout.evaluate / report.scores[who].samples[metric])
    return {line["id"]: line["value"] for line in lines}


@pytest.fixture
def forwards() -> Iterator[list[int]]:
    """Return a list that receives one entry for each forward pass of a causal language model."""
    seen: list[int] = []

    def note(module: torch.nn.Module, arguments: Any) -> None:
        if type(module).__name__.endswith("ForCausalLM"):
            seen.append(1)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield seen
    hook.remove()
