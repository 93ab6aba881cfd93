"""Stage gate: decide from the reports of evaluate and export whether the model may be promoted.

The rules and statistics are in `ratchet.quality_gate`; this module reads and writes files and reports to MLflow. It
loads no model. The stage succeeds with every verdict, also with REJECT.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ratchet.config.settings import Settings
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import DataError, GateError
from ratchet.quality_gate import decision, test_sets
from ratchet.quality_gate.decision import MetricNoise, confirm_verdict, decide_verdict
from ratchet.quality_gate.evidence import GateEvidence, IncomparableError, read_evidence, read_rows
from ratchet.registry import ledger
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import EvaluationReport, ModelRole, answers_file, documents_file
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Verdict, read_champion


class NoiseReport(Record):
    """Result of an A/A test: the candidate compared with itself, scored twice."""

    metrics: tuple[MetricNoise, ...]
    batch_rows: tuple[int, int]
    """Batch size in rows, of the first and the second scoring."""
    confidence: float

    @property
    def is_within_limits(self) -> bool:
        """Whether the noise of every metric is smaller than the margins of the rules."""
        return all(metric.is_within_margin for metric in self.metrics)


def gate(project: Project) -> Verdict:
    """Run the stage.

    Raises:
        DataError: stage evaluate or export has not run.
        DamagedFileError: the output of these stages has changed, or the list of test-set uses is damaged.
        ChampionError: a field of the champion file, such as the anchor, differs from the ledger.
        SettingsError: a harness task is no longer defined, or the webhook's address is not valid.
        LockHeldError: another process runs this stage.
    """
    from ratchet.reports import dvc_files, verdict_page
    from ratchet.stages.callbacks import log_stage, notify_verdict

    layout, settings = project.layout, project.settings
    with project.lock("gate"), notify_verdict(project):
        evidence = _load_evidence(layout, settings)
        verdict = decide_verdict(evidence, settings.gate)
        with files.sealed_directory(layout.gate, "gate") as scratch:
            verdict.save(scratch / layout.verdict.name)
            dvc_files.write_metrics(scratch, {"decision": verdict.decision})
        test_sets.record_verdict(layout, verdict)
        rows = read_rows(layout)
        answers, documents = _read_answers(layout, evidence.report), _read_documents(layout, evidence.report)
        verdict_page.write(verdict, evidence, rows, answers, documents, layout.gate_page)
        log_stage(
            layout,
            settings,
            verdict.run_id,
            figures={},
            artifacts={"gate": [layout.verdict, layout.gate_page]},
            tags={"ratchet.verdict": verdict.decision},
        )
        return verdict


def run_aa_test(project: Project, on_progress: Callable[[str], None] = ignore_progress) -> NoiseReport:
    """Score the candidate a second time for `ratchet gate --aa`, and measure the difference, which is noise.

    Raises:
        DataError: the candidate has not been evaluated, or the evaluation is about another adapter.
    """
    from ratchet.stages.evaluate import evaluate_again

    with project.lock("gate"):
        evaluate_again(project, on_progress)
        return measure_noise(project)


def measure_noise(project: Project) -> NoiseReport:
    """Measure the difference between the two evaluations on file. Raises DataError if they cannot be compared."""
    layout, settings = project.layout, project.settings
    evidence = _load_evidence(layout, settings)
    try:
        metrics = decision.measure_noise(evidence, settings.gate)
    except IncomparableError as error:
        raise DataError(f"{layout.noise}: {error}") from None
    batch_rows = evidence.noise.batch_rows if evidence.noise else (0, 0)
    return NoiseReport(metrics=tuple(metrics), batch_rows=batch_rows, confidence=settings.gate.confidence)


def check_verdict(project: Project) -> Verdict:
    """Check that the verdict on file is about the present model, champion and anchor, and return it.

    Raises:
        GateError: there is no verdict, it is about another model, champion or anchor, or today's rules give another
            verdict.
        DamagedFileError: the file was changed.
        ChampionError: a field of the champion file, such as the anchor, differs from the ledger.
        LockHeldError: another process runs this stage.
    """
    layout, settings = project.layout, project.settings
    with project.lock("gate"):
        if not layout.verdict.exists():
            raise GateError(f"{layout.verdict}: no verdict yet; run `dvc repro`")
        files.verify_sealed(layout.gate, "gate")
        verdict, current = Verdict.load(layout.verdict), read_champion(layout.champion)
        ledger.check_fields(layout, ledger.read_entries(layout.promotions), current)
        # The model may have become champion after this verdict, or may have been champion before it.
        is_champion = current.champion_digest == verdict.model_digest
        opponents = (verdict.champion_digest, verdict.anchor_digest)
        same_opponents = (current.champion_digest, current.anchor_digest) == opponents
        same_model = ModelBundle.load(layout.bundle).model_digest == verdict.model_digest
        if not same_model or not (is_champion or same_opponents):
            raise GateError(f"{layout.verdict}: is about an earlier model, champion or anchor; run `dvc repro`")
        if not is_champion or verdict.is_champion:  # otherwise the verdict is about the champion before this model
            tasks = fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
            confirm_verdict(layout, settings, tasks, verdict)
        return verdict


def find_verdict(project: Project) -> Verdict:
    """Return the verdict on file if it still holds (`check_verdict`); otherwise run the stage. See `gate`."""
    try:
        return check_verdict(project)
    except GateError:
        return gate(project)


def _load_evidence(layout: ProjectLayout, settings: Settings) -> GateEvidence:
    ledger.check_fields(layout, ledger.read_entries(layout.promotions), read_champion(layout.champion))
    tasks = fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
    return read_evidence(layout, settings, tasks)


def _read_answers(layout: ProjectLayout, report: EvaluationReport) -> dict[ModelRole, dict[str, list[str]]]:
    """Read the generated answers, by model and row."""
    paths = {role: layout.evaluate / answers_file(role) for role in report.scores}
    return {
        role: {row["id"]: row["answers"] for row in base.read_lines(path)}
        for role, path in paths.items()
        if path.exists()
    }


def _read_documents(
    layout: ProjectLayout, report: EvaluationReport
) -> dict[ModelRole, dict[str, list[dict[str, Any]]]]:
    """Read the documents of the harness, by model and task."""
    documents: dict[ModelRole, dict[str, list[dict[str, Any]]]] = {}
    for role, scores in report.scores.items():
        tasks: Mapping[str, Any] = report.contracts.get(scores.contract, {}).get("harness", {})
        for task in tasks:
            path = layout.evaluate / documents_file(role, task)
            if path.exists():
                documents.setdefault(role, {})[task] = base.read_lines(path)
    return documents
