"""Stage gate: what was evaluated and exported → verdict.json and the evidence page. A "no" is a success of the stage.

`gating` decides; here files are read, written, and told to MLflow. Nothing loads a model.
"""

from collections.abc import Mapping
from typing import Any

from ratchet.config.schema import Settings
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import DataError, GateError
from ratchet.gate import evidence as reading
from ratchet.gate import messages, noise, test_set_reuse
from ratchet.gate.decision import confirm_verdict, decide_verdict
from ratchet.gate.evidence import GateEvidence, IncomparableError
from ratchet.runs.directory import RunPaths
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport, Who, answers_file, documents_file
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Verdict, read_champion


def gate(layout: ProjectLayout, settings: Settings) -> str:
    """Run the stage; returns the verdict in words.

    Raises:
        DataError: evaluate or export have not run.
        DamagedFileError: what they left is not as they wrote it, or the list of look-ups is damaged.
        SettingsError: a harness task is not defined any more.
    """
    from ratchet.reports import plots, verdict_page
    from ratchet.tracking.mlflow.client import MlflowTracker

    evidence = _load_evidence(layout, settings)
    verdict = decide_verdict(evidence, settings.gate)
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.save(scratch / layout.verdict.name)
    test_set_reuse.record_verdict(layout, verdict)
    rows = reading.read_rows(layout)
    answers, documents = _read_answers(layout, evidence.report), _read_documents(layout, evidence.report)
    verdict_page.write(verdict, evidence, rows, answers, documents, layout.gate_page)
    tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking)
    run = tracking.observer(RunPaths(layout.runs / verdict.run_id), settings, plots.draw_loss_curve)
    shown = [layout.verdict, layout.gate_page]
    tracking.report(run, {}, {"gate": shown}, {"ratchet.verdict": verdict.decision}, settings.machine.tracking_grace_s)
    return f"{messages.describe_verdict(verdict)}\n  the evidence: {layout.gate_page}"


def run_aa_test(layout: ProjectLayout, settings: Settings) -> tuple[bool, str]:
    """`ratchet gate --aa`, after the candidate was scored a second time: whether noise is within what the rules allow.

    Raises:
        DataError: nothing was scored twice, or something else than what was evaluated.
    """
    evidence = _load_evidence(layout, settings)
    try:
        lines = noise.measure_noise(evidence, settings.gate)
    except IncomparableError as error:
        raise DataError(f"{layout.noise}: {error}") from None
    batch_rows = evidence.noise.batch_rows if evidence.noise else (0, 0)
    text = noise.format_noise_table(lines, batch_rows, settings.gate.confidence)
    return all(line.within for line in lines), text


def check_verdict(layout: ProjectLayout, settings: Settings) -> tuple[bool, str]:
    """Whether the verdict on file is PROMOTE, and the verdict in words.

    Raises:
        GateError: there is no verdict, or it is about another model, champion or anchor than those on file now, or
            by the rules of now it would be another.
        DamagedFileError: somebody changed it.
    """
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
    return verdict.decision == "PROMOTE", messages.describe_verdict(verdict)


def _load_evidence(layout: ProjectLayout, settings: Settings) -> GateEvidence:
    tasks = fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
    return reading.read_evidence(layout, settings, tasks)


def _read_answers(layout: ProjectLayout, report: EvaluationReport) -> dict[Who, dict[str, list[str]]]:
    """Generated answers by model and row."""
    found = {who: layout.evaluate / answers_file(who) for who in report.scores}
    return {
        who: {row["id"]: row["answers"] for row in base.read_lines(path)}
        for who, path in found.items()
        if path.exists()
    }


def _read_documents(layout: ProjectLayout, report: EvaluationReport) -> dict[Who, dict[str, list[dict[str, Any]]]]:
    """The harness's documents by model and task."""
    found: dict[Who, dict[str, list[dict[str, Any]]]] = {}
    for who, scores in report.scores.items():
        tasks: Mapping[str, Any] = report.contracts.get(scores.contract, {}).get("harness", {})
        for task in tasks:
            path = layout.evaluate / documents_file(who, task)
            if path.exists():
                found.setdefault(who, {})[task] = base.read_lines(path)
    return found
