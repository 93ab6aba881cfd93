"""A promoted and deployed model whose base, data, run, evaluation and verdict are complete, and agree. Takes seconds:
base and data are real, the weights are a few bytes."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import gate_cases
import promotion_project
import tiny_project
from promoted_models import artifact, write_fake_export
from ratchet.config.settings import Settings
from ratchet.models import base_model
from ratchet.quality_gate import decision, evidence, test_sets
from ratchet.registry import lineage, model_store, pickle_scan
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths
from ratchet.stages.deploy import DeployOptions, deploy
from ratchet.stages.project import Project
from ratchet.stages.promote import promote
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import MergeParity, ModelBundle
from ratchet.storage.records.training import TrainReport
from ratchet.training.run_spec import build_run_spec

SETTINGS = tiny_project.SETTINGS.model_copy(
    update={"evaluate": promotion_project.SETTINGS.evaluate, "gate": promotion_project.SETTINGS.gate}
)
COMMIT = "c0ffee" * 6 + "c0de"


def make(root: Path, prepared: Path, mlflow_template: Path, served: Path) -> ProjectLayout:
    """Write the outputs of all stages, promote the model and deploy it into the directory `served`."""
    shutil.copytree(prepared, root, dirs_exist_ok=True)
    layout = ProjectLayout(root)
    tiny_project.save(layout, SETTINGS)
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    report = write_run(layout, SETTINGS)
    log_run(layout, report.run_id)
    write_export(layout, SETTINGS, report)
    judge(layout, SETTINGS)
    project = Project.from_parts(layout, SETTINGS)
    promote(project)
    deploy(project, served, DeployOptions(smoke_test=False))
    return layout


def write_run(layout: ProjectLayout, settings: Settings) -> TrainReport:
    """Write a run with two attempts, and the output of stage train."""
    spec = build_run_spec(layout, settings)
    adapter = b"weights of the adapter"
    report = TrainReport(
        run_id=spec.run_id, adapter_digest=digests.hash_files({"adapter.safetensors": digests.hash_bytes(adapter)}),
        base_digest=spec.base_digest, data_digest=spec.data_digest, steps=3, planned_steps=3, best_step=3, kept_step=3,
        validation_loss={3: 1.25}, final_train_loss=1.5, trained_tokens=30, input_tokens=90, trainable_parameters=8,
        total_parameters=900,
    )  # fmt: skip
    opened = RunDirectory.open(layout.runs, spec)
    ready = {"planned_steps": 3, "device": "cpu", "compute_dtype": "float32", "threads": 1, "hosts": ["trainer-7"]}
    for attempt, (first, last) in enumerate([(1, 2), (2, 3)], start=1):
        opened.journal.attempt = attempt
        opened.journal.append("attempt_started", pid=attempt, code_version="0.1.0+12345678")
        opened.journal.append("worker_ready", start_step=first - 1, **ready)
        for step in range(first, last + 1):
            sizes = {"trained_tokens": 10, "input_tokens": 30, "step_s": 0.5}
            opened.journal.append("step", step=step, loss=2.5 - step / 4, learning_rate=0.01, **sizes)
        if attempt == 1:
            end: dict[str, Any] = {"exit_code": -9, "failure_class": "killed", "text": "killed by signal 9"}
            opened.journal.append("worker_exited", **end, decision="Retry")
    opened.journal.append("finished", step=3, reason="completed", adapter_digest=report.adapter_digest)
    opened.close()
    for target, kind in ((RunPaths(opened.paths.root).result, RESULT), (layout.train, "train")):
        with files.sealed_directory(target, kind) as scratch:
            report.save(scratch / "train.json")
            files.write_atomic(scratch / "adapter" / "adapter.safetensors", adapter)
    return report


def log_run(layout: ProjectLayout, run_id: str) -> None:
    """Create the MLflow run of the training, with the tags that the tracker writes."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{layout.mlflow_database}")
    experiment = client.create_experiment(SETTINGS.promote.model_name)
    tags = {"git.revision": COMMIT, "git.branch": "main", "git.dirty": "true", "ratchet.actor": "grace@example.org"}
    client.create_run(experiment, tags=tags | {"ratchet.run_id": run_id})


def write_export(layout: ProjectLayout, settings: Settings, report: TrainReport) -> None:
    """Write the output of stage export, with lineage and bill of materials."""
    base, data = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    with files.sealed_directory(layout.export, "export") as scratch:
        write_fake_export(scratch, "a")
        made = [artifact(scratch, name) for name in ("hf", "gguf/q8_0")]
        digest = model_store.model_digest(made)
        bill = lineage.write_sbom(scratch / "sbom.json", settings.promote.model_name, digest, base, data, None)
        scan = pickle_scan.scan_directory(base_model.locate(layout, base), base)
        origin = lineage.ModelOrigin(base, report, data, scan, "f" * 64)
        parity = MergeParity(rows=1, tokens=2, max_logit_difference=0, mean_logit_difference=0, greedy_agreement=1)
        ModelBundle(
            model_digest=digest, adapter_digest=report.adapter_digest, base_digest=base.digest, data_digest=data.digest,
            run_id=report.run_id, merge_base="original", dtype="float32", size_bytes=1, parity=parity,
            artifacts=tuple(made), lineage=lineage.build_lineage(settings, origin, bill),
        ).save(scratch / "bundle.json")  # fmt: skip


def judge(layout: ProjectLayout, settings: Settings) -> None:
    """Write evaluation, uses of the test set, and verdict."""
    bundle = ModelBundle.load(layout.bundle)
    scores = {"accuracy": gate_cases.right(190)}
    found = gate_cases.evidence({"merged": scores}, bundle=bundle, current_task_digests={})
    ids = {test_sets.TEST_ROWS: sorted(scores["accuracy"])}
    test_sets.register_test_set(layout, ids)
    digest = test_sets.compute_digest(ids)
    report = gate_cases.report(
        {"merged": scores}, model_digest=bundle.model_digest, adapter_digest=bundle.adapter_digest,
        run_id=bundle.run_id, base_digest=bundle.base_digest, data_digest=bundle.data_digest,
        contracts={"k2": {"model_format": "merged", "tasks": {}}}, test_set_digest=digest,
    )  # fmt: skip
    merged = report.scores["merged"].model_copy(update={"model_digest": bundle.model_digest})
    report = report.model_copy(update={"scores": {"merged": merged}})
    gate_cases.write_evaluation(layout, dataclasses.replace(found, report=report))
    test_sets.record_test_set_use(layout, digest, bundle.adapter_digest, bundle.run_id)
    verdict = decision.decide_verdict(evidence.read_evidence(layout, settings, {}), settings.gate)
    test_sets.record_verdict(layout, verdict)
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.save(scratch / layout.verdict.name)
    files.write_atomic(layout.gate_page, "<p>PROMOTE</p>")
