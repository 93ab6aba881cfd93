"""The results of all models as they are sealed: report, samples, answers, documents, pictures; and a table of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.schema import Settings
from ratchet.errors import DataError, MemoryExhaustedError, SettingsError, first_line
from ratchet.evaluation import comparability, harness, judge, metrics, model_loader, rows
from ratchet.evaluation.evaluator import EvaluationResult, Evaluator, Progress
from ratchet.evaluation.model_loader import EvaluationBatchSize, EvaluationModelLoader
from ratchet.evaluation.rows import TestRows
from ratchet.gate import test_set_reuse
from ratchet.models import base_model, loading, oom, teacher_reference
from ratchet.registry import bundle_files
from ratchet.reports import plots
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    ROWS,
    EvaluationNoise,
    EvaluationReport,
    JudgeReport,
    MetricValue,
    ModelScores,
    ObjectiveSet,
    SampleScore,
    Who,
    answers_file,
    curves_file,
    documents_file,
    judged_file,
    sample_file,
)
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import read_champion
from ratchet.tracking.mlflow.client import MlflowTracker


def summarize_scores(who: Who, result: EvaluationResult) -> ModelScores:
    """One model's results without its samples.

    A figure that is not finite has no place in JSON; its samples have, and the gate names the first that is none.
    """
    return ModelScores(
        model_digest=result.subject.model_digest,
        form=result.subject.form,
        contract=digests.hash_json(result.contract),
        metrics=select_finite(result.metrics),
        samples={name: sample_file(who, name) for name in result.samples},
        per_class=result.per_class,
        slices={part: select_finite(found) for part, found in result.slices.items()},
    )


def select_finite(metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    """Those that are numbers; what is none has no place in JSON."""
    return {name: one for name, one in metrics.items() if is_finite(one)}


def is_finite(metric: MetricValue) -> bool:
    """Whether value and interval are numbers."""
    return all(map(math.isfinite, (metric.value, metric.low, metric.high)))


def write_report(
    target: Path,
    report: EvaluationReport,
    results: Mapping[Who, EvaluationResult],
    rows: TestRows,
    settings: Settings,
    judged: Mapping[Who, list[dict[str, Any]]],
) -> None:
    """Seal everything that was found. `judged`: lines behind the judge's figures, by opponent."""
    with files.sealed_directory(target, "evaluation") as scratch:
        asked = [row.model_dump(mode="json", exclude={"format"}) for row in rows.records(settings.evaluate.categories)]
        base.write_lines(scratch / ROWS, asked)
        for who, result in results.items():
            _write_model(scratch, who, result, rows)
        for who, lines in judged.items():
            base.write_lines(scratch / judged_file(who), lines)
        report.save(scratch / "eval.json")


def _write_model(scratch: Path, who: Who, result: EvaluationResult, rows: TestRows) -> None:
    write_samples(scratch, who, result.samples)
    answers = [{"id": key, "answers": given} for key, given in zip(rows.ids, result.answers, strict=False)]
    base.write_lines(scratch / answers_file(who), answers)
    for task, documents in result.documents.items():
        base.write_lines(scratch / documents_file(who, task), documents)
    if result.confusion:
        table = {"labels": result.confusion.labels, "matrix": result.confusion.matrix}
        files.write_json(scratch / f"confusion/{who}.json", table)
        if who == "candidate" or (who == "merged" and not (scratch / "confusion" / "candidate.png").exists()):
            labels = [*result.confusion.labels, metrics.OTHER]
            plots.draw_confusion_matrix(labels, result.confusion.matrix, scratch / f"confusion/{who}.png")
    if result.curves:
        files.write_json(scratch / curves_file(who), result.curves)
        if who in ("candidate", "merged"):
            plots.draw_precision_recall(result.curves, scratch / curves_file(who).with_suffix(".png"))


def write_samples(scratch: Path, who: str, found: Mapping[str, Sequence[SampleScore]]) -> None:
    """Per-sample scores, a file a metric."""
    for name, samples in found.items():
        rows = [sample.model_dump(mode="json", exclude={"format"}) for sample in samples]
        base.write_lines(scratch / sample_file(who, name), rows)


def describe(report: EvaluationReport) -> str:
    """A table for the terminal: a row a metric, a column a model, 95 % intervals; then what a reader should know."""
    names = sorted({name for one in report.scores.values() for name in one.metrics})
    rows = [["", *report.scores]]
    for name in names:
        figures = [one.metrics.get(name) for one in report.scores.values()]
        rows.append([name, *(f"{m.value:.4f} [{m.low:.4f}, {m.high:.4f}]" if m else "-" for m in figures)])
    lines = [format_table(rows)]
    for who, cost in report.costs.items():
        lines.append(
            f"  {who}: an answer takes {cost.latency_s:.3g} s (95 % within {cost.latency_p95_s:.3g} s), "
            f"{cost.tokens_per_s:.0f} tokens/s, {cost.memory_bytes / 2**20:,.0f} MiB, on {cost.device}"
        )
    if report.judged is not None:
        lines += [f"  {line}" for line in format_judge_lines(report.judged)]
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)


def format_judge_lines(judged: JudgeReport) -> list[str]:
    """The judge's figures, a line an opponent, and what they cost."""
    lines = []
    for who, one in judged.comparisons.items():
        parts = [f"judge: {judged.candidate} and {who}, {one.rows} rows"]
        if one.win_rate is not None:
            same = f", {one.equal} of them the same text" if one.equal else ""
            parts.append(
                f"win rate {one.win_rate.value:.3f} [{one.win_rate.low:.3f}, {one.win_rate.high:.3f}] "
                f"({one.wins} better, {one.ties} tied{same}, {one.losses} worse)"
            )
        if one.agreement is not None:
            parts.append(f"both orders agree on {one.agreement.value:.1%}")
        if (bias := one.first_bias) is not None:
            parts.append(f"first answer preferred by {bias.value:+.3f} [{bias.low:+.3f}, {bias.high:+.3f}]")
        if one.left_out:
            why = ", ".join(f"{count} {reason}" for reason, count in one.unreadable.items())
            parts.append(f"{one.left_out} rows left out ({why})")
        lines.append("; ".join(parts))
    counts = [f"{judged.questions:,} questions to {judged.model}", f"{judged.requests:,} requests"]
    if judged.prompt_tokens is not None and judged.tokens is not None:
        counts.append(f"{judged.prompt_tokens:,} tokens sent, {judged.tokens:,} written")
    counts += [] if judged.cost is None else [f"price {judged.cost:,.4g}"]
    return [*lines, f"judge: {', '.join(counts)}"]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, two spaces in."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


# Base, candidate, champion and anchor on the test rows, under one contract: what the gate compares.


def evaluate(layout: ProjectLayout, settings: Settings, progress: Progress) -> str:
    """Run the stage.

    Raises:
        DataError: a stage before has not run, or for other settings (export: where plain weights are to be scored).
        ChampionError: champion.json names a model that is not on this machine.
        SettingsError: a harness task is not defined, evaluate.categories names what is not kept, or the judge refuses.
        MemoryExhaustedError: not even one row fits.
        EndpointError: the judge does not answer; all that was scored and said is kept.
    """
    field, card, test = _load_inputs(layout, settings)
    if field.needs_export:
        field.require_export()
    asked = judge.JudgeSession.of(layout, settings)  # who is not there is told now, not after an hour of other work
    examination = _build_evaluator(layout, settings, card, test, progress)
    results, notes = _evaluate_models(field, examination)
    judged, lines = None, judge.Lines()
    if asked is not None:
        judged, lines, more = asked.compare(results, test, progress)
        notes += more
    found = _build_report(field, card, test, results, notes).model_copy(update={"judged": judged})
    write_report(layout.evaluate, found, results, test, settings, lines)
    test_set_reuse.record_look(layout, found.gate_set, found.adapter_digest, found.run_id)
    seen = test_set_reuse.count_models(layout, found.gate_set, found.adapter_digest)
    _log_to_mlflow(layout, settings, found)
    looked = f"  {seen} of {settings.gate.lookups} models looked at with these test rows (gate.lookups)"
    return f"{describe(found)}\n{looked}"


def evaluate_again(layout: ProjectLayout, settings: Settings, progress: Progress) -> None:
    """`ratchet gate --aa`: score the candidate a second time, in other batches, with nothing kept from the first.

    What differs from the evaluation on file is noise, not a better or worse model.

    Raises:
        DataError: there is no evaluation of this candidate.
    """
    files.verify_sealed(layout.evaluate, "evaluation")
    first = EvaluationReport.load(layout.eval_report)
    field, card, test = _load_inputs(layout, settings)
    if first.adapter_digest != field.trained.adapter_digest:
        raise DataError(f"{layout.eval_report}: is about another adapter; run `dvc repro evaluate`")
    who: Who = "candidate" if "candidate" in first.scores else "merged"
    was = first.contracts[first.scores[who].contract]["batch_rows"]
    batch_rows = max(1, was // 2) if was > 1 else 2
    alone = settings.model_copy(
        update={"evaluate": settings.evaluate.model_copy(update={"forms": (first.scores[who].form,)})}
    )
    examination = _build_evaluator(layout, alone, card, test, progress, kept=False)
    result = EvaluationModelLoader(
        layout, alone, field.base, field.trained, field.model_digest, {}, field.device
    ).again(examination, batch_rows)
    with files.sealed_directory(layout.noise, "noise") as scratch:
        write_samples(scratch, who, result.samples)
        EvaluationNoise(
            model_digest=result.subject.model_digest,
            form=result.subject.form,
            contract=first.scores[who].contract,
            batch_rows=(was, batch_rows),
            metrics=select_finite(result.metrics),
            samples={name: sample_file(who, name) for name in result.samples},
        ).save(scratch / "noise.json")


def _load_inputs(layout: ProjectLayout, settings: Settings) -> tuple[EvaluationModelLoader, DatasetCard, TestRows]:
    """What the stages before have left, checked to belong together."""
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    trained = TrainReport.load(layout.train_report)
    train, teaching = teacher_reference.resolve_teacher(settings.train, layout, card.digest)
    RunSpec(train=train, data_digest=card.digest, base_digest=base.digest, teaching=teaching).require(trained)
    files.verify_sealed(layout.train, "train")
    exported = _exported_digest(layout, trained)
    opponents = model_loader.verify_references(layout, read_champion(layout.champion))
    test = rows.read(layout, settings)
    base_model.verify_files(base_model.locate(layout, base), base.files)
    loading.use_threads(settings.machine.threads)
    device = loading.pick_device(settings.machine.device)
    return EvaluationModelLoader(layout, settings, base, trained, exported, opponents, device), card, test


def _exported_digest(layout: ProjectLayout, trained: TrainReport) -> str | None:
    """Digest of the model that was exported from this adapter, every byte checked; None where there is none."""
    if (
        not layout.bundle.exists()
        or (bundle := ModelBundle.load(layout.bundle)).adapter_digest != trained.adapter_digest
    ):
        return None
    bundle_files.verify_export(layout)
    return bundle.model_digest


def _build_evaluator(
    layout: ProjectLayout,
    settings: Settings,
    card: DatasetCard,
    test: TestRows,
    progress: Progress,
    *,
    kept: bool = True,
) -> Evaluator:
    text = rows.read_general_text(layout, settings)
    wanted = settings.evaluate.harness.tasks
    tasks = harness.fingerprint_tasks(wanted, layout.root, layout.tasks)
    if unknown := [name for name in wanted if name not in tasks]:  # told now, not after an hour of other work
        known = ", ".join(path.stem for path in harness.find_task_files(layout.tasks)) or "none"
        raise SettingsError(f"evaluate.harness.tasks: no task {unknown[0]!r} in {layout.tasks}; there are: {known}")
    terms = comparability.comparison_terms(settings, card, test, text, tasks)
    return Evaluator(layout, settings, card, test, text, terms, progress, kept)


def _evaluate_models(
    field: EvaluationModelLoader, examination: Evaluator
) -> tuple[dict[Who, EvaluationResult], list[str]]:
    """Every model in batches of one size: where one does not fit, all are examined anew in smaller ones."""
    notes: list[str] = []
    longest = max(map(len, examination.rows.input_ids)) + field.settings.evaluate.max_new_tokens
    size = EvaluationBatchSize(field.settings.machine.evaluation_rows, longest)
    while True:
        try:
            return field.examine(examination, size), notes
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            was, cause = size.rows, first_line(error)
        if not size.halve():
            what, cure = "a single row", "lower evaluate.max_new_tokens or prepare.max_tokens, or"
            if was is None:
                what, cure = "the model itself", "evaluate adapters alone (evaluate.forms), or"
            raise MemoryExhaustedError(
                f"evaluate: memory does not suffice for {what} ({cause}); {cure} take a machine with more memory"
            )
        oom.release_memory()
        notes.append(f"memory did not suffice for {was} rows at once; all models were scored by {size.rows}")
        examination.progress(f"{notes[-1]}: starting over")


def _build_report(
    field: EvaluationModelLoader,
    card: DatasetCard,
    test: TestRows,
    results: Mapping[Who, EvaluationResult],
    notes: list[str],
) -> EvaluationReport:
    some = next(iter(results.values()))
    documents = {task: [str(one["id"]) for one in found] for task, found in some.documents.items()}
    known = {digests.hash_json(result.contract): result.contract for result in results.values()}
    notes += [note for result in results.values() for note in result.notes]
    notes += [
        f"{who}: {name} is not a finite number, so there is no figure; the gate names the sample"
        for who, result in results.items()
        for name, metric in result.metrics.items()
        if not is_finite(metric)
    ]
    if field.model_digest is None:
        notes.append(
            "this adapter was not exported yet; the gate wants the export, and an evaluation after it: `dvc repro`"
        )
    validation = ObjectiveSet(name="validation rows", sample_ids=rows.validation_ids(field.layout))
    champion, anchor = field.opponents.get("champion"), field.opponents.get("anchor")
    return EvaluationReport(
        adapter_digest=field.trained.adapter_digest,
        base_digest=field.base.digest,
        data_digest=card.digest,
        run_id=field.trained.run_id,
        model_digest=field.model_digest,
        champion_digest=champion.champion.model_digest if champion else None,
        anchor_digest=anchor.champion.model_digest if anchor else None,
        gate_set=rows.gate_set_digest(test.ids, documents),
        contracts=known,
        scores={who: summarize_scores(who, result) for who, result in results.items()},
        costs={who: result.cost for who, result in results.items() if result.cost},
        chosen_by=test_set_reuse.count_overlaps(field.layout, test.ids, documents, [validation]),
        notes=tuple(dict.fromkeys(notes)),
    )


def _log_to_mlflow(layout: ProjectLayout, settings: Settings, found: EvaluationReport) -> None:
    """Add the figures to the run in MLflow."""
    figures = {
        f"test/{who}/{name}": metric.value for who, one in found.scores.items() for name, metric in one.metrics.items()
    }
    if found.judged is not None:
        rates = {who: one.win_rate for who, one in found.judged.comparisons.items()}
        figures |= {f"judge/{who}/win_rate": rate.value for who, rate in rates.items() if rate is not None}
    pictures: list[Path] = [
        path for folder in ("confusion", "curves") for path in sorted((layout.evaluate / folder).glob("*"))
    ]
    tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking)
    run = tracking.observer(RunPaths(layout.runs / found.run_id), settings, plots.draw_loss_curve)
    tags = {"ratchet.eval_contract": ", ".join(sorted(name[:12] for name in found.contracts))}
    tracking.report(
        run, figures, {"evaluate": [layout.eval_report, *pictures]}, tags, settings.machine.tracking_grace_s
    )
