"""Stage gate: decides from the reports of evaluate and export whether the model may be promoted.

The rules and statistics are in `ratchet.gate`; this module reads and writes files and reports to MLflow. No verdict is
an error of the stage, and no model is loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ratchet.config.settings import Settings
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import DataError, GateError
from ratchet.quality_gate import decision
from ratchet.quality_gate import evidence as reading
from ratchet.quality_gate.decision import MetricNoise, confirm_verdict, decide_verdict
from ratchet.quality_gate.evidence import GateEvidence, IncomparableError, record_verdict
from ratchet.runs.directory import RunPaths
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import EvaluationReport, ModelRole, answers_file, documents_file
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Verdict, read_champion


class NoiseReport(Record):
    """Result of an A/A test: the candidate against itself, scored twice."""

    metrics: tuple[MetricNoise, ...]
    batch_rows: tuple[int, int]
    """Rows in a batch of the first and the second scoring."""
    confidence: float

    @property
    def is_within_limits(self) -> bool:
        """Whether the noise of every metric is smaller than what the rules ask for."""
        return all(metric.is_within_margin for metric in self.metrics)


def gate(project: Project) -> Verdict:
    """Run the stage.

    Raises:
        DataError: evaluate or export have not run.
        DamagedFileError: their output has changed, or the list of test-set uses is damaged.
        SettingsError: a harness task is no longer defined, or the webhook's address is not valid.
        LockHeldError: another process runs this stage.
    """
    from ratchet.stages.callbacks import notify_verdict

    with project.lock("gate"), notify_verdict(project):
        return _decide(project.layout, project.settings)


def _decide(layout: ProjectLayout, settings: Settings) -> Verdict:
    from ratchet.reports import plots, verdict_page
    from ratchet.tracking.mlflow.client import MlflowTracker

    evidence = _load_evidence(layout, settings)
    verdict = decide_verdict(evidence, settings.gate)
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.save(scratch / layout.verdict.name)
    record_verdict(layout, verdict)
    rows = reading.read_rows(layout)
    answers, documents = _read_answers(layout, evidence.report), _read_documents(layout, evidence.report)
    verdict_page.write(verdict, evidence, rows, answers, documents, layout.gate_page)
    tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking_uri)
    run = tracking.create_callback(RunPaths(layout.runs / verdict.run_id), settings, plots.draw_loss_curve)
    shown = [layout.verdict, layout.gate_page]
    tracking.report(
        run, {}, {"gate": shown}, {"ratchet.verdict": verdict.decision}, settings.machine.tracking_timeout_s
    )
    return verdict


def run_aa_test(project: Project, on_progress: Callable[[str], None] = ignore_progress) -> NoiseReport:
    """`ratchet gate --aa`: score the candidate a second time and measure the difference, which is noise.

    Raises:
        DataError: the candidate has not been evaluated, or the evaluation is of another adapter.
    """
    from ratchet.stages.evaluate import evaluate_again

    with project.lock("gate"):
        evaluate_again(project, on_progress)
        return measure_noise(project)


def measure_noise(project: Project) -> NoiseReport:
    """The difference between the two evaluations on file. Raises DataError when they cannot be compared."""
    layout, settings = project.layout, project.settings
    evidence = _load_evidence(layout, settings)
    try:
        metrics = decision.measure_noise(evidence, settings.gate)
    except IncomparableError as error:
        raise DataError(f"{layout.noise}: {error}") from None
    batch_rows = evidence.noise.batch_rows if evidence.noise else (0, 0)
    return NoiseReport(metrics=tuple(metrics), batch_rows=batch_rows, confidence=settings.gate.confidence)


def check_verdict(project: Project) -> Verdict:
    """The verdict on file, if it is about the present model, champion and anchor.

    Raises:
        GateError: there is no verdict; it is about another model, champion or anchor; or today's rules give another.
        DamagedFileError: the file was changed.
        LockHeldError: another process runs this stage.
    """
    with project.lock("gate"):
        return _check_verdict(project.layout, project.settings)


def _check_verdict(layout: ProjectLayout, settings: Settings) -> Verdict:
    if not layout.verdict.exists():
        raise GateError(f"{layout.verdict}: no verdict yet; run `dvc repro`")
    files.verify_sealed(layout.gate, "gate")
    verdict, now = Verdict.load(layout.verdict), read_champion(layout.champion)
    promoted = now.champion_digest == verdict.model_digest  # by this very verdict, or it was champion already
    same_opponents = (now.champion_digest, now.anchor_digest) == (verdict.champion_digest, verdict.anchor_digest)
    same_model = ModelBundle.load(layout.bundle).model_digest == verdict.model_digest
    if not same_model or not (promoted or same_opponents):
        raise GateError(f"{layout.verdict}: is about an earlier model, champion or anchor; run `dvc repro`")
    if not promoted or verdict.is_champion:  # else it was compared with the one that it succeeded
        confirm_verdict(
            layout, settings, fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks), verdict
        )
    return verdict


def _load_evidence(layout: ProjectLayout, settings: Settings) -> GateEvidence:
    tasks = fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
    return reading.read_evidence(layout, settings, tasks)


def _read_answers(layout: ProjectLayout, report: EvaluationReport) -> dict[ModelRole, dict[str, list[str]]]:
    """Generated answers by model and row."""
    found = {who: layout.evaluate / answers_file(who) for who in report.scores}
    return {
        who: {row["id"]: row["answers"] for row in base.read_lines(path)}
        for who, path in found.items()
        if path.exists()
    }


def _read_documents(
    layout: ProjectLayout, report: EvaluationReport
) -> dict[ModelRole, dict[str, list[dict[str, Any]]]]:
    """The harness's documents by model and task."""
    found: dict[ModelRole, dict[str, list[dict[str, Any]]]] = {}
    for who, scores in report.scores.items():
        tasks: Mapping[str, Any] = report.contracts.get(scores.contract, {}).get("harness", {})
        for task in tasks:
            path = layout.evaluate / documents_file(who, task)
            if path.exists():
                found.setdefault(who, {})[task] = base.read_lines(path)
    return found
