"""Base, candidate, champion and anchor on the test rows, under one contract: what the gate compares."""

from collections.abc import Mapping
from pathlib import Path

from ratchet import digest, files
from ratchet.bundle import artifacts
from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.errors import DataError, MemoryExhaustedError, SettingsError, first_line
from ratchet.evaluation import contract, judge, report, rows, subjects
from ratchet.evaluation.examination import Examination, Progress, Result
from ratchet.evaluation.rows import TestRows
from ratchet.evaluation.subjects import BatchSize, Field
from ratchet.gating import lookups, objectives
from ratchet.layout import Layout
from ratchet.model import lecturer, memory, quantized, source
from ratchet.records import BaseCard, TrainReport
from ratchet.records_evaluation import EvalReport, Noise, Objective, Who, sample_file
from ratchet.records_export import Bundle
from ratchet.records_gate import read_champion
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.services import harness, plots
from ratchet.services.tracking import Tracking


def evaluate(layout: Layout, settings: Settings, progress: Progress) -> str:
    """Run the stage.

    Raises:
        DataError: a stage before has not run, or for other settings (export: where plain weights are to be scored).
        ChampionError: champion.json names a model that is not on this machine.
        SettingsError: a harness task is not defined, evaluate.categories names what is not kept, or the judge refuses.
        MemoryExhaustedError: not even one row fits.
        EndpointError: the judge does not answer; all that was scored and said is kept.
    """
    field, card, test = _inputs(layout, settings)
    if field.needs_export:
        field.require_export()
    asked = judge.Judge.of(layout, settings)  # who is not there is told now, not after an hour of other work
    examination = _examination(layout, settings, card, test, progress)
    results, notes = _examine(field, examination)
    judged, lines = None, judge.Lines()
    if asked is not None:
        judged, lines, more = asked.compare(results, test, progress)
        notes += more
    found = _report(field, card, test, results, notes).model_copy(update={"judged": judged})
    report.write(layout.evaluate, found, results, test, settings, lines)
    lookups.note(layout, found.gate_set, found.adapter_digest, found.run_id)
    seen = lookups.count(layout, found.gate_set, found.adapter_digest)
    _track(layout, settings, found)
    looked = f"  {seen} of {settings.gate.lookups} models looked at with these test rows (gate.lookups)"
    return f"{report.describe(found)}\n{looked}"


def again(layout: Layout, settings: Settings, progress: Progress) -> None:
    """`ratchet gate --aa`: score the candidate a second time, in other batches, with nothing kept from the first.

    What differs from the evaluation on file is noise, not a better or worse model.

    Raises:
        DataError: there is no evaluation of this candidate.
    """
    files.verify(layout.evaluate, "evaluation")
    first = EvalReport.load(layout.eval_report)
    field, card, test = _inputs(layout, settings)
    if first.adapter_digest != field.trained.adapter_digest:
        raise DataError(f"{layout.eval_report}: is about another adapter; run `dvc repro evaluate`")
    who: Who = "candidate" if "candidate" in first.scores else "merged"
    was = first.contracts[first.scores[who].contract]["batch_rows"]
    batch_rows = max(1, was // 2) if was > 1 else 2
    alone = settings.model_copy(
        update={"evaluate": settings.evaluate.model_copy(update={"forms": (first.scores[who].form,)})}
    )
    examination = _examination(layout, alone, card, test, progress, kept=False)
    result = Field(layout, alone, field.base, field.trained, field.model_digest, {}, field.device).again(
        examination, batch_rows
    )
    with files.sealed_directory(layout.noise, "noise") as scratch:
        report.write_samples(scratch, who, result.samples)
        Noise(
            model_digest=result.subject.model_digest,
            form=result.subject.form,
            contract=first.scores[who].contract,
            batch_rows=(was, batch_rows),
            metrics=report.finite(result.metrics),
            samples={name: sample_file(who, name) for name in result.samples},
        ).save(scratch / "noise.json")


def _inputs(layout: Layout, settings: Settings) -> tuple[Field, DatasetCard, TestRows]:
    """What the stages before have left, checked to belong together."""
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    trained = TrainReport.load(layout.train_report)
    train, teaching = lecturer.taught(settings.train, layout, card.digest)
    RunSpec(train=train, data_digest=card.digest, base_digest=base.digest, teaching=teaching).require(trained)
    files.verify(layout.train, "train")
    exported = _exported(layout, trained)
    opponents = subjects.opponents(layout, read_champion(layout.champion))
    test = rows.read(layout, settings)
    source.check(source.locate(layout, base), base.files)
    quantized.use_threads(settings.machine.threads)
    device = quantized.pick_device(settings.machine.device)
    return Field(layout, settings, base, trained, exported, opponents, device), card, test


def _exported(layout: Layout, trained: TrainReport) -> str | None:
    """Digest of the model that was exported from this adapter, every byte checked; None where there is none."""
    if not layout.bundle.exists() or (bundle := Bundle.load(layout.bundle)).adapter_digest != trained.adapter_digest:
        return None
    artifacts.verified(layout)
    return bundle.model_digest


def _examination(
    layout: Layout, settings: Settings, card: DatasetCard, test: TestRows, progress: Progress, *, kept: bool = True
) -> Examination:
    text = rows.general_text(layout, settings)
    wanted = settings.evaluate.harness.tasks
    tasks = harness.fingerprints(wanted, layout.root, layout.tasks)
    if unknown := [name for name in wanted if name not in tasks]:  # told now, not after an hour of other work
        known = ", ".join(path.stem for path in harness.task_files(layout.tasks)) or "none"
        raise SettingsError(f"evaluate.harness.tasks: no task {unknown[0]!r} in {layout.tasks}; there are: {known}")
    terms = contract.terms(settings, card, test, text, tasks)
    return Examination(layout, settings, card, test, text, terms, progress, kept)


def _examine(field: Field, examination: Examination) -> tuple[dict[Who, Result], list[str]]:
    """Every model in batches of one size: where one does not fit, all are examined anew in smaller ones."""
    notes: list[str] = []
    longest = max(map(len, examination.rows.input_ids)) + field.settings.evaluate.max_new_tokens
    size = BatchSize(field.settings.machine.evaluation_rows, longest)
    while True:
        try:
            return field.examine(examination, size), notes
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            was, cause = size.rows, first_line(error)
        if not size.halve():
            what, cure = "a single row", "lower evaluate.max_new_tokens or prepare.max_tokens, or"
            if was is None:
                what, cure = "the model itself", "evaluate adapters alone (evaluate.forms), or"
            raise MemoryExhaustedError(
                f"evaluate: memory does not suffice for {what} ({cause}); {cure} take a machine with more memory"
            )
        memory.release()
        notes.append(f"memory did not suffice for {was} rows at once; all models were scored by {size.rows}")
        examination.progress(f"{notes[-1]}: starting over")


def _report(
    field: Field, card: DatasetCard, test: TestRows, results: Mapping[Who, Result], notes: list[str]
) -> EvalReport:
    some = next(iter(results.values()))
    documents = {task: [str(one["id"]) for one in found] for task, found in some.documents.items()}
    known = {digest.of_json(result.contract): result.contract for result in results.values()}
    notes += [note for result in results.values() for note in result.notes]
    notes += [
        f"{who}: {name} is not a finite number, so there is no figure; the gate names the sample"
        for who, result in results.items()
        for name, metric in result.metrics.items()
        if not report.is_finite(metric)
    ]
    if field.model_digest is None:
        notes.append(
            "this adapter was not exported yet; the gate wants the export, and an evaluation after it: `dvc repro`"
        )
    validation = Objective(name="validation rows", sample_ids=rows.validation_ids(field.layout))
    champion, anchor = field.opponents.get("champion"), field.opponents.get("anchor")
    return EvalReport(
        adapter_digest=field.trained.adapter_digest,
        base_digest=field.base.digest,
        data_digest=card.digest,
        run_id=field.trained.run_id,
        model_digest=field.model_digest,
        champion_digest=champion.champion.model_digest if champion else None,
        anchor_digest=anchor.champion.model_digest if anchor else None,
        gate_set=rows.gate_set(test.ids, documents),
        contracts=known,
        scores={who: report.scores(who, result) for who, result in results.items()},
        costs={who: result.cost for who, result in results.items() if result.cost},
        chosen_by=objectives.shared(field.layout, test.ids, documents, [validation]),
        notes=tuple(dict.fromkeys(notes)),
    )


def _track(layout: Layout, settings: Settings, found: EvalReport) -> None:
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
    tracking = Tracking(layout, settings.promote.model_name, settings.machine.tracking)
    run = tracking.observer(RunPaths(layout.runs / found.run_id), settings, plots.loss_curve)
    tags = {"ratchet.eval_contract": ", ".join(sorted(name[:12] for name in found.contracts))}
    tracking.report(
        run, figures, {"evaluate": [layout.eval_report, *pictures]}, tags, settings.machine.tracking_grace_s
    )
