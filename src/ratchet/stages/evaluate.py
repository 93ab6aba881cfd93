"""Stage evaluate: score base, candidate, champion and anchor on the test rows under one contract.

`ratchet evaluate --quantization` is a separate measurement: the cost of 4-bit weights for the base.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.errors import BaseModelError, DataError, MemoryExhaustedError, SettingsError, first_line
from ratchet.evaluation import (
    comparability,
    harness,
    instruction_following,
    judge,
    model_loader,
    rows,
    safety,
    safety_suite,
    semantic_similarity,
)
from ratchet.evaluation.evaluator import EvaluationResult, Evaluator, Progress
from ratchet.evaluation.model_loader import EvaluationBatchSize, EvaluationModelLoader
from ratchet.evaluation.perturbations import PARAPHRASE
from ratchet.evaluation.rows import TestRows
from ratchet.models import base_model, loading, oom, quantization_error
from ratchet.quality_gate import evidence, test_sets
from ratchet.quality_gate.decision import decide_verdict
from ratchet.registry import ledger, model_store
from ratchet.reports import dvc_files, plots
from ratchet.stages.callbacks import log_answers, log_stage
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import BaseCard, Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    ROWS,
    EvaluationNoise,
    EvaluationReport,
    MetricValue,
    ModelRole,
    ModelScores,
    ObjectiveSet,
    SampleScore,
    answers_file,
    curves_file,
    documents_file,
    judge_file,
    safety_file,
    sample_file,
)
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import read_champion
from ratchet.storage.records.training import QuantizationReport, TrainReport
from ratchet.tracking.mlflow.registry import fetch_missing_models
from ratchet.tracking.mlflow.traces import EvaluatedAnswer, JudgeVerdict
from ratchet.training import trained_rows
from ratchet.training.run_spec import build_run_spec

LOOKS = (0.125, 0.25, 0.5)
"""Shares of the test rows after which a sequential gate may end the evaluation. Models are loaded again for each."""
MIN_LOOK_ROWS = 50


class EvaluateResult(Record):
    """Result of the stage."""

    report: EvaluationReport
    test_set_uses: int
    """Number of models that have been evaluated on this test set, the present one included."""
    max_test_set_uses: int
    """Setting gate.max_test_set_uses; 0 for sequential tests, which have no such limit."""


def evaluate(project: Project, on_progress: Progress = ignore_progress) -> EvaluateResult:
    """Run the stage.

    Raises:
        DataError: an earlier stage has not run, or ran with other settings (export: only if merged weights are scored).
        ChampionError: champion.json names a model that is not on this machine.
        SettingsError: a harness task is not defined, evaluate.slice_by names an unknown field, or the judge refuses
            access.
        MemoryExhaustedError: not even one row fits into memory.
        EndpointError: the judge does not answer; scores and judgements so far are kept.
        LockHeldError: another process runs this stage.
    """
    layout, settings = project.layout, project.settings
    with project.lock("evaluate"):
        loader, card, test = _load_inputs(layout, settings)
        if loader.needs_export:
            loader.require_export()
        judge_sessions = judge.JudgeSession.list_from_settings(layout, settings)
        suite = safety_suite.read_suite(layout, settings, card)
        scorer = safety.describe_scorer(settings.evaluate.safety.scorer, layout.root, judge_sessions)
        _check_rows(settings, test)
        looks, size, changed = _list_looks(loader, test), _choose_batch_size(settings, test), ""
        for count in looks:
            part = test.first(count)
            evaluator = _build_evaluator(layout, settings, card, part, on_progress)
            evaluator = dataclasses.replace(evaluator, looks=tuple(looks[:-1]))
            if suite:  # without tests, contracts keep their digests
                terms = {**evaluator.terms, "safety": suite.describe(scorer)}
                evaluator = dataclasses.replace(evaluator, safety=suite, terms=terms)
            results, notes = _evaluate_models(loader, evaluator, size)
            _add_similarity(loader, part, results, on_progress)
            safety_report, safety_lines = None, safety.Lines()
            if suite:
                safety_judge = _open_safety_judge(loader, judge_sessions)
                safety_report, safety_lines = safety.score_suite(
                    suite, results, settings.evaluate, scorer, safety_judge, on_progress
                )
            judge_report, judge_lines = None, judge.Lines()
            if judge_sessions:
                judge_report, judge_lines, judge_notes = judge.judge_answers(judge_sessions, results, part, on_progress)
                notes += judge_notes
            changed = test_sets.register_test_set(layout, _list_sample_ids(test, results)) or changed
            report = _build_report(loader, card, test, results, [*notes, *filter(None, [changed])])
            report = report.model_copy(
                update={
                    "judge_report": judge_report, "safety": safety_report, "remaining_rows": len(test.ids) - count,
                }
            )  # fmt: skip
            lines = {safety_file(role): part for role, part in safety_lines.items()}
            lines |= {judge_file(role): part for role, part in judge_lines.items()}
            write_report(layout.evaluate, report, results, part, settings, lines)
            test_sets.record_test_set_use(layout, report.test_set_digest, report.adapter_digest, report.run_id)
            if report.remaining_rows and _is_decided(layout, settings, count, on_progress):
                break
        uses = test_sets.count_models(layout, report.test_set_digest, report.adapter_digest)
        _log_to_mlflow(layout, settings, report)
        limit = settings.gate.max_test_set_uses if settings.gate.test == "fixed" else 0
        return EvaluateResult(report=report, test_set_uses=uses, max_test_set_uses=limit)


def _list_looks(loader: EvaluationModelLoader, test: TestRows) -> list[int]:
    """Return the numbers of first rows after which a sequential gate may end the evaluation, and that of all rows.

    A fixed gate needs all rows, and the gate decides nothing about a model that is not exported. Rows of one group are
    one unit of the tests, which a look must not divide.
    """
    n = len(test.ids)
    groups = [group for group in test.groups if group is not None]
    if loader.settings.gate.test == "fixed" or loader.model_digest is None or len({*groups}) < len(groups):
        return [n]
    return sorted({min(n, max(MIN_LOOK_ROWS, round(n * share))) for share in LOOKS} | {n})


def _is_decided(layout: ProjectLayout, settings: Settings, count: int, progress: Progress) -> bool:
    """Return whether the gate promotes or rejects the model by the rows scored so far."""
    tasks = harness.fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
    decision = decide_verdict(evidence.read_evidence(layout, settings, tasks), settings.gate).decision
    progress(f"the gate decides {decision} by the first {count} test rows")
    return decision in ("PROMOTE", "REJECT")


def evaluate_again(project: Project, progress: Progress) -> None:
    """Score the candidate a second time for `ratchet gate --aa`: in batches of another size, without cached scores.

    The difference from the evaluation on file is noise. Raises DataError if this candidate has not been evaluated.
    """
    layout, settings = project.layout, project.settings
    files.verify_sealed(layout.evaluate, "evaluation")
    first = EvaluationReport.load(layout.eval_report)
    loader, card, test = _load_inputs(layout, settings)
    test = test.with_ids([row.id for row in evidence.read_rows(layout)])
    _check_rows(settings, test)
    if first.adapter_digest != loader.trained.adapter_digest:
        raise DataError(f"{layout.eval_report}: is about another adapter; run `dvc repro evaluate`")
    role: ModelRole = "candidate" if "candidate" in first.scores else "merged"
    first_batch_rows = first.contracts[first.scores[role].contract]["batch_rows"]
    batch_rows = max(1, first_batch_rows // 2) if first_batch_rows > 1 else 2
    formats = settings.evaluate.model_copy(update={"formats": (first.scores[role].model_format,)})
    candidate_settings = settings.model_copy(update={"evaluate": formats})
    evaluator = _build_evaluator(layout, candidate_settings, card, test, progress, use_cache=False)
    result = EvaluationModelLoader(
        layout, candidate_settings, loader.base, loader.trained, loader.model_digest, {}, loader.device
    ).evaluate_candidate_again(evaluator, batch_rows)
    _add_similarity(loader, test, {role: result}, progress)
    with files.sealed_directory(layout.noise, "noise") as scratch:
        write_samples(scratch, role, result.samples)
        EvaluationNoise(
            model_digest=result.subject.model_digest,
            model_format=result.subject.model_format,
            contract=first.scores[role].contract,
            batch_rows=(first_batch_rows, batch_rows),
            metrics=select_finite(result.metrics),
            samples={name: sample_file(role, name) for name in result.samples},
        ).save(scratch / "noise.json")


def _load_inputs(layout: ProjectLayout, settings: Settings) -> tuple[EvaluationModelLoader, DatasetCard, TestRows]:
    """Load the outputs of earlier stages and check that they belong together."""
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    trained = TrainReport.load(layout.train_report)
    build_run_spec(layout, settings).require(trained)
    files.verify_sealed(layout.train, "train")
    exported: str | None = None  # digest of the model that was exported from this adapter
    if layout.bundle.exists() and (bundle := ModelBundle.load(layout.bundle)).adapter_digest == trained.adapter_digest:
        model_store.verify_export(layout)
        exported = bundle.model_digest
    champions = read_champion(layout.champion)
    ledger.check_fields(layout, ledger.read_entries(layout.promotions), champions)
    fetch_missing_models(layout, settings, filter(None, (champions.champion, champions.anchor)))
    opponents = model_loader.verify_references(layout, champions)
    test = rows.read(layout, settings)
    if settings.gate.test == "sequential":
        test = test.with_ids(test_sets.sort_rows(layout, test.ids))
    base_model.verify_files(base_model.locate(layout, base), base.files)
    loading.use_threads(settings.machine.threads)
    device = loading.pick_device(settings.machine.device)
    return EvaluationModelLoader(layout, settings, base, trained, exported, opponents, device), card, test


def _build_evaluator(
    layout: ProjectLayout,
    settings: Settings,
    card: DatasetCard,
    test: TestRows,
    progress: Progress,
    *,
    use_cache: bool = True,
) -> Evaluator:
    text = rows.read_general_text(layout, settings)
    names = settings.evaluate.harness.tasks
    tasks = harness.fingerprint_tasks(names, layout.root, layout.tasks)
    if unknown := [name for name in names if name not in tasks]:  # reported now, not after an hour of other work
        known = ", ".join(path.stem for path in harness.find_task_files(layout.tasks)) or "none"
        raise SettingsError(f"evaluate.harness.tasks: no task {unknown[0]!r} in {layout.tasks}; known tasks: {known}")
    encoder = None
    if semantic_similarity.NAME in settings.evaluate.metrics:
        encoder = semantic_similarity.describe_encoder(find_encoder(layout, settings), card.base_digest)
    terms = comparability.comparison_terms(settings, card, test, text, tasks, encoder)
    return Evaluator(layout, settings, card, test, text, terms, progress, use_cache)


def _check_rows(settings: Settings, test: TestRows) -> None:
    """Raise SettingsError if the rows lack fields that the settings need."""
    if "ifeval" in settings.evaluate.metrics:
        count = test.generation_count
        instruction_following.require_valid_instructions(test.ids[:count], test.fields[:count])
    if "paraphrase" in settings.evaluate.perturbations and not any(row.get(PARAPHRASE) for row in test.fields):
        raise SettingsError(
            f"evaluate.perturbations: paraphrase needs rows with a field {PARAPHRASE!r}, another wording of the last "
            "message; found none, so list the field in prepare.extra_fields"
        )


def _open_safety_judge(
    loader: EvaluationModelLoader, sessions: Sequence[judge.JudgeSession]
) -> judge.JudgeSession | safety.AnswerClassifier | None:
    """Return the judge or classifier of the safety tests; None for patterns. The models were released before."""
    setting = loader.settings.evaluate.safety.scorer
    if setting == safety.JUDGE:
        return sessions[0]
    if setting == safety.PATTERNS:
        return None
    oom.release_memory()
    return safety.AnswerClassifier(loader.layout.root / setting, loader.device)


def find_encoder(layout: ProjectLayout, settings: Settings) -> Path | None:
    """Return the directory of evaluate.embedding_model; None for the base."""
    name = settings.evaluate.embedding_model
    return None if name is None else layout.root / name


def _add_similarity(
    loader: EvaluationModelLoader, test: TestRows, results: Mapping[ModelRole, EvaluationResult], progress: Progress
) -> None:
    """Add semantic_similarity, if it is wanted. The models were released, so the encoder has their memory."""
    settings = loader.settings
    if semantic_similarity.NAME not in settings.evaluate.metrics:
        return
    oom.release_memory()
    directory = find_encoder(loader.layout, settings)
    progress(f"semantic similarity, with {'the base' if directory is None else directory} as encoder")
    if directory is None:
        encoder = semantic_similarity.TextEncoder(loader.load_base(), loader.load_tokenizer())
    else:
        encoder = semantic_similarity.load_encoder(directory, loader.device)
    semantic_similarity.add_similarity(results, test.ids, test.expected, encoder)
    del encoder
    oom.release_memory()


def _choose_batch_size(settings: Settings, test: TestRows) -> EvaluationBatchSize:
    longest = max(map(len, test.input_ids)) + settings.evaluate.max_new_tokens
    return EvaluationBatchSize(settings.machine.evaluation_batch_size, longest)


def _evaluate_models(
    loader: EvaluationModelLoader, evaluator: Evaluator, size: EvaluationBatchSize
) -> tuple[dict[ModelRole, EvaluationResult], list[str]]:
    """Evaluate all models with one batch size. If memory runs out for one, halve the size and evaluate all again."""
    notes: list[str] = []
    while True:
        try:
            return loader.evaluate_models(evaluator, size), notes
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            failed_rows, cause = size.rows, first_line(error)
        if not size.halve():
            load, advice = "a single row", "lower evaluate.max_new_tokens or prepare.max_tokens, or"
            if failed_rows is None:
                load, advice = "the model itself", "evaluate adapters alone (evaluate.formats), or"
            raise MemoryExhaustedError(
                f"evaluate: memory does not suffice for {load} ({cause}); {advice} take a machine with more memory"
            )
        oom.release_memory()
        notes.append(f"memory did not suffice for {failed_rows} rows at once; all models were scored by {size.rows}")
        evaluator.progress(f"{notes[-1]}: starting over")


def _list_sample_ids(test: TestRows, results: Mapping[ModelRole, EvaluationResult]) -> dict[str, list[str]]:
    """Return the ids of all test rows, and of the scored documents by harness task."""
    documents = next(iter(results.values())).documents
    return {test_sets.TEST_ROWS: list(test.ids)} | {
        task: [str(document["id"]) for document in found] for task, found in documents.items()
    }


def _build_report(
    loader: EvaluationModelLoader,
    card: DatasetCard,
    test: TestRows,
    results: Mapping[ModelRole, EvaluationResult],
    notes: list[str],
) -> EvaluationReport:
    ids = _list_sample_ids(test, results)
    contracts = {digests.hash_json(result.contract): result.contract for result in results.values()}
    notes += [note for result in results.values() for note in result.notes]
    notes += [
        f"{role}: {name} is not a finite number, so it is left out; the gate names the sample"
        for role, result in results.items()
        for name, metric in result.metrics.items()
        if not is_finite(metric)
    ]
    if loader.model_digest is None:
        notes.append(
            "this adapter was not exported yet; the gate requires an export and an evaluation after it: `dvc repro`"
        )
    validation = ObjectiveSet(name="validation rows", sample_ids=rows.read_validation_ids(loader.layout))
    start_overlaps, unchecked_starts = trained_rows.count_trained_rows(
        loader.layout, loader.settings.train, loader.trained.run_id, card.digest,
        (conversation.prompt for conversation in test.conversations),
    )  # fmt: skip
    notes += unchecked_starts
    champion, anchor = loader.opponents.get("champion"), loader.opponents.get("anchor")
    return EvaluationReport(
        adapter_digest=loader.trained.adapter_digest,
        base_digest=loader.base.digest,
        data_digest=card.digest,
        run_id=loader.trained.run_id,
        model_digest=loader.model_digest,
        champion_digest=champion.champion.model_digest if champion else None,
        anchor_digest=anchor.champion.model_digest if anchor else None,
        test_set_digest=test_sets.compute_digest(ids),
        contracts=contracts,
        scores={role: summarize_scores(role, result) for role, result in results.items()},
        costs={role: result.cost for role, result in results.items() if result.cost},
        selection_overlaps=evidence.count_overlaps(loader.layout, test.ids, filter(None, ids), [validation]),
        start_overlaps=start_overlaps,
        unchecked_starts=unchecked_starts,
        notes=tuple(dict.fromkeys(notes)),
    )


def summarize_scores(role: ModelRole, result: EvaluationResult) -> ModelScores:
    """Summarize the results of a model, without its samples.

    JSON has no value for a figure that is not finite, so such figures are left out. The gate finds the cause in the
    samples.
    """
    return ModelScores(
        model_digest=result.subject.model_digest,
        model_format=result.subject.model_format,
        contract=digests.hash_json(result.contract),
        metrics=select_finite(result.metrics),
        samples={name: sample_file(role, name) for name in result.samples},
        per_class=result.per_class,
        slices={name: select_finite(metrics) for name, metrics in result.slices.items()},
    )


def select_finite(metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    """Return the metrics that are finite numbers, because JSON has no value for the others."""
    return {name: metric for name, metric in metrics.items() if is_finite(metric)}


def is_finite(metric: MetricValue) -> bool:
    """Return whether value and interval are finite numbers."""
    return all(map(math.isfinite, (metric.value, metric.low, metric.high)))


def write_report(
    target: Path,
    report: EvaluationReport,
    results: Mapping[ModelRole, EvaluationResult],
    rows: TestRows,
    settings: Settings,
    lines: Mapping[Path, list[dict[str, Any]]],
) -> None:
    """Write and seal all results. `lines` has further files: judgements and answers, by relative name."""
    with files.sealed_directory(target, "evaluation") as scratch:
        records = rows.iterate_records(settings.evaluate.slice_by)
        base.write_lines(scratch / ROWS, [row.model_dump(mode="json", exclude={"format"}) for row in records])
        for role, result in results.items():
            _write_model(scratch, role, result, rows)
        for name, part in lines.items():
            base.write_lines(scratch / name, part)
        candidate = results.get("candidate") or results["merged"]
        dvc_files.write_label_plots(scratch, candidate.confusion, candidate.calibration)
        values = {name: metric.value for name, metric in candidate.metrics.items()}
        chosen = dvc_files.select_test_figures(values, settings.evaluate.metrics)
        dvc_files.write_metrics(scratch, chosen)
        report.save(scratch / "eval.json")


def _write_model(scratch: Path, role: ModelRole, result: EvaluationResult, rows: TestRows) -> None:
    write_samples(scratch, role, result.samples)
    answers = [{"id": row_id, "answers": texts} for row_id, texts in zip(rows.ids, result.answers, strict=False)]
    base.write_lines(scratch / answers_file(role), answers)
    for task, documents in result.documents.items():
        base.write_lines(scratch / documents_file(role, task), documents)
    if table := result.confusion:
        files.write_json(scratch / f"confusion/{role}.json", {"labels": table.labels, "matrix": table.matrix})
        if role == "candidate" or (role == "merged" and not (scratch / "confusion" / "candidate.html").exists()):
            plots.draw_confusion_matrix(table.labels, table.matrix, scratch / f"confusion/{role}.html")
    if result.curves:
        files.write_json(scratch / curves_file(role), result.curves)
        if role in ("candidate", "merged"):
            plots.draw_precision_recall(result.curves, scratch / curves_file(role).with_suffix(".html"))


def write_samples(scratch: Path, role: str, samples_by_metric: Mapping[str, Sequence[SampleScore]]) -> None:
    """Write the scores of every sample, in one file per metric."""
    for name, samples in samples_by_metric.items():
        rows = [sample.model_dump(mode="json", exclude={"format"}) for sample in samples]
        base.write_lines(scratch / sample_file(role, name), rows)


def _log_to_mlflow(layout: ProjectLayout, settings: Settings, report: EvaluationReport) -> None:
    figures = {
        f"test/{role}/{name}": metric.value
        for role, scores in report.scores.items()
        for name, metric in scores.metrics.items()
    }
    if report.judge_report is not None:
        rates = {role: comparison.win_rate for role, comparison in report.judge_report.comparisons.items()}
        figures |= {f"judge/{role}/win_rate": rate.value for role, rate in rates.items() if rate is not None}
        for role, found in report.judge_report.panel.items():
            panel = {"panel_win_rate": found.win_rate, "alpha": found.alpha}
            figures |= {f"judge/{role}/{name}": metric.value for name, metric in panel.items() if metric is not None}
    pictures = sorted((layout.evaluate / "confusion").glob("*")) + sorted((layout.evaluate / "curves").glob("*"))
    log_stage(
        layout,
        settings,
        report.run_id,
        figures=figures,
        artifacts={"evaluate": [layout.eval_report, *pictures]},
        tags={"ratchet.eval_contract": ", ".join(sorted(name[:12] for name in report.contracts))},
    )
    log_answers(
        layout, settings, report.run_id, collect_answers(layout.evaluate, report, settings.machine.logged_answers)
    )


def collect_answers(folder: Path, report: EvaluationReport, limit: int) -> list[EvaluatedAnswer]:
    """Collect the candidate's first generated answers with their scores and the judge's verdicts, for MLflow.

    Args:
        folder: the stage's output.
        report: its report.
        limit: number of rows.
    """
    role: ModelRole = "candidate" if "candidate" in report.scores else "merged"
    if not limit or role not in report.scores:
        return []
    rows = {row["id"]: row for row in base.read_lines(folder / ROWS)}
    answers = {line["id"]: line["answers"] for line in base.read_lines(folder / answers_file(role))}
    chosen, metrics = list(answers)[:limit], report.scores[role].metrics
    scores = {
        metric: {line["id"]: line["value"] for line in base.read_lines(folder / file)}
        for metric, file in report.scores[role].samples.items()
        if metric in metrics and metrics[metric].kind != "perplexity"  # metrics that are not finite are left out
    }
    comparisons = report.judge_report.comparisons if report.judge_report is not None else ()
    judged = {
        other: {line["id"]: line for line in base.read_lines(folder / judge_file(other))} for other in comparisons
    }
    return [
        EvaluatedAnswer(
            row_id=row_id, model=role, prompt=rows[row_id]["prompt"], answer=answers[row_id][0],
            expected=rows[row_id]["expected"],
            scores={metric: values[row_id] for metric, values in scores.items() if row_id in values},
            verdicts={
                other: JudgeVerdict(lines[row_id]["score"], "\n\n".join(lines[row_id]["replies"]))
                for other, lines in judged.items()
                if row_id in lines and lines[row_id]["score"] is not None
            },
        )
        for row_id in chosen
    ]  # fmt: skip


class QuantizationResult(Record):
    """Result of `ratchet evaluate --quantization`."""

    report: QuantizationReport
    picture: Path


def measure_quantization(project: Project, on_progress: Callable[[str], None] = ignore_progress) -> QuantizationResult:
    """Compare full precision with 4 bits on a fixed sample of the validation rows.

    Raises:
        BaseModelError: the base is stored in 4 bits, or the data were prepared for another base.
        LockHeldError: another process evaluates this project.
    """
    layout, settings = project.layout, project.settings
    with project.lock("evaluate"):
        base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
        if card.base_digest != base.digest:
            raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
        path = base_model.locate(layout, base)
        base_model.verify_files(path, base.files)
        if (stored := base_model.detect_stored_quantization(base_model.read_config(path), str(path))) is not None:
            raise BaseModelError(
                f"base.source: {base.source} is stored in {stored.kind} already, so there is no full precision to "
                "compare with; use the model from which it was quantized"
            )
        files.verify_sealed(layout.data, "data")
        dataset = token_files.open_split(layout.data, "validation").select_columns(["input_ids", "labels"])
        # Rows are sorted by a hash of their content, so the first rows are a random sample.
        sample = dataset[: settings.evaluate.quantization_rows]
        rows = list(zip(sample["input_ids"], sample["labels"], strict=True))
        loading.use_threads(settings.machine.threads)
        device = loading.pick_device(settings.machine.device)
        costs = quantization_error.measure_cost(
            lambda train: loading.load(path, base, train, device), settings.train, rows, on_progress
        )
        report = QuantizationReport(
            base_digest=base.digest,
            data_digest=card.digest,
            rows=len(rows),
            tokens=quantization_error.count_answer_tokens(rows),
            costs=costs,
            dtype=str(loading.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        )
        with files.sealed_directory(layout.quantization, "quantization") as scratch:
            report.save(scratch / "quantization.json")
            plots.draw_quantization_report(report, scratch / "quantization.html")
        return QuantizationResult(report=report, picture=layout.quantization / "quantization.html")
