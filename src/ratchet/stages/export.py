"""An export in a few lines, for the terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.config.units import format_bytes
from ratchet.console.progress_bars import ProgressBars
from ratchet.evaluation import answer_metrics
from ratchet.export import conversion, inputs, merged_model
from ratchet.export.inputs import ExportJob
from ratchet.export.merged_model import MergedModel
from ratchet.export.verification.parity import Score
from ratchet.export.verification.probe_inputs import task_metric
from ratchet.registry import bundle_files as forms_of
from ratchet.registry import lineage, pickle_scan
from ratchet.reports import plots
from ratchet.runs.directory import RunPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact, MergeTrial, ModelBundle, ModelLineage
from ratchet.tracking.mlflow.client import MlflowTracker


def describe(bundle: ModelBundle) -> str:
    """What was merged and how close it is, then a line a form."""
    lines = [f"model {bundle.model_digest[:12]}, merged into the {bundle.into} in {bundle.dtype}"]
    if bundle.merge:
        lines += (_format_merge_trial(trial, bundle.merge_base) for trial in bundle.merge.trials)
        if all(trial.check.moved == 0 for trial in bundle.merge.trials):
            lines.append("  what was merged changes nothing: this is the bare base")
        if list(bundle.merge.adapters.values()) != [1.0] or bundle.merge.modules:
            lines.append("  base + adapter: with what export.weight, also and modules make of the adapters")
    return "\n".join([*lines, *_format_table(bundle.artifacts)])


def _format_merge_trial(trial: MergeTrial, taken: str) -> str:
    p, check = trial.parity, trial.check
    worst = f"; furthest off: {check.worst[0].name}, {check.worst[0].max_difference:.2g}" if check.worst else ""
    name = f"{trial.merge_base} (taken)" if trial.merge_base == taken else trial.merge_base
    return (
        f"  {name}: against base + adapter on {p.rows} rows logits"
        f" differ by {p.max_logit_difference:.2g} at most, {p.mean_logit_difference:.2g} on average; same greedy "
        f"token at {p.greedy_agreement:.2%}; {check.modules} modules and {check.layers} layers as they should be{worst}"
    )


def _format_table(artifacts: tuple[ExportArtifact, ...]) -> Iterator[str]:
    heads = ("form", "size", "KL, nats", "same token", "answers", "difference", "same", "texts", "tokens/s", "runs in")
    rows = [heads, *map(_format_row, artifacts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for one in artifacts:
        yield from (f"  {one.name}: {note}" for note in one.notes)


def _format_row(one: ExportArtifact) -> tuple[str, ...]:
    task = one.task
    answers = (f"{task.value:.1%}", f"{task.difference:+.1%} [{task.low:+.1%}, {task.high:+.1%}]",
               f"{task.same_answers:.1%}") if task else ("-", "-", "-")  # fmt: skip
    return (
        one.name, format_bytes(one.size_bytes),
        f"{one.closeness.kl:.2g}", f"{one.closeness.greedy_agreement:.2%}", *answers,
        f"{one.texts_tokenised}/{one.texts}", f"{one.tokens_per_second:.0f}", one.runtime,
    )  # fmt: skip


# Adapter → merged model → Hugging Face, GGUF and ONNX, each opened in its own runtime and compared → Bundle.


def export(layout: ProjectLayout, settings: Settings) -> str:
    """Run the stage. What was exported before stays whole until all of this is.

    Raises:
        DataError: a stage before this one has not run, or is of other settings.
        DamagedFileError: an input is not what it was, or a merged module does not compute what base + adapter does.
        BaseModelError: the base is gone or changed, or an adapter is of another one.
        SettingsError: a format cannot carry this model, or a tool for it is not here.
    """
    bars = ProgressBars("export")
    try:
        bundle = _run_export(inputs.open_job(layout, settings, bars))
    finally:
        bars.close()
    _log_to_mlflow(layout, settings, bundle)
    return describe(bundle)


def _run_export(work: ExportJob) -> ModelBundle:
    layout = work.layout
    with files.sealed_directory(layout.export, "export") as scratch:
        found = merged_model.make_merged_model(work, scratch, build_scorer(work.settings))
        artifacts = [found.artifact]
        artifacts += conversion.convert_formats(found.exam, scratch / layout.merged_model.name, scratch, found.logits)
        model_digest = forms_of.model_digest(artifacts)
        bundle = _build_bundle(work, found, artifacts, _build_lineage(work, scratch, model_digest), model_digest)
        bundle.save(scratch / layout.bundle.name)
    return bundle


def build_scorer(settings: Settings) -> Score:
    """How the evaluation scores answers: its own measures, so that what counts as right is defined once."""
    metric = task_metric(settings)
    exact = "exact_match" if metric == "token_f1" else metric
    wanted = tuple(one for one in settings.evaluate.measures if one == metric)
    plain = settings.evaluate.model_copy(update={"measures": wanted, "answer_format": None})

    def score(expected: Sequence[str], answers: Sequence[str]) -> Sequence[float]:
        found = {
            one.name: one.values for one in answer_metrics.score_answers(expected, [[a] for a in answers], plain, exact)
        }
        values = found[metric]
        assert values is not None  # noqa: S101 (both are functions of single answers)
        return values

    return score


def _build_lineage(work: ExportJob, scratch: Path, model_digest: str) -> ModelLineage:
    """Where the model comes from; writes the bill of materials."""
    name, licence = work.settings.promote.model_name, work.settings.export.data_licence
    base = work.base.model_copy(update={"source": lineage.mask_secrets(work.base.source)})
    contents = lineage.SbomContents(name, model_digest, base, work.card.digest, work.card.splits, licence)
    bill = lineage.write_sbom(contents, scratch / work.layout.sbom.name)
    looked = pickle_scan.load_scan(work.layout.base) or pickle_scan.scan_directory(work.base_path, work.base)
    recipe = digests.hash_json(work.spec.model_dump(mode="json"))
    origin = lineage.ModelOrigin(work.base, work.trained, work.card, looked, recipe)
    return lineage.build_lineage(work.layout, work.settings, origin, bill)


def _build_bundle(
    work: ExportJob, found: MergedModel, artifacts: Sequence[ExportArtifact], origin: ModelLineage, model_digest: str
) -> ModelBundle:
    export, train = work.settings.export, work.settings.train
    return ModelBundle(
        model_digest=model_digest,
        adapter_digest=work.trained.adapter_digest,
        base_digest=work.base.digest,
        data_digest=work.trained.data_digest,
        run_id=work.trained.run_id,
        merge_base=found.taken.merge_base,
        dtype=export.dtype,
        size_bytes=artifacts[0].size_bytes,
        base_form=train.base_form,
        parity=found.taken.parity,
        merge=found.merge,
        artifacts=tuple(artifacts),
        lineage=origin,
    )


def _log_to_mlflow(layout: ProjectLayout, settings: Settings, bundle: ModelBundle) -> None:
    figures = {
        "export/max_logit_difference": bundle.parity.max_logit_difference,
        "export/mean_logit_difference": bundle.parity.mean_logit_difference,
        "export/greedy_agreement": bundle.parity.greedy_agreement,
        "export/size_bytes": float(bundle.size_bytes),
    }
    for one in bundle.artifacts:
        about = f"export/{one.name}"
        figures |= {
            f"{about}/kl": one.closeness.kl, f"{about}/greedy_agreement": one.closeness.greedy_agreement,
            f"{about}/size_bytes": float(one.size_bytes), f"{about}/tokens_per_second": one.tokens_per_second,
        }  # fmt: skip
        if one.task:
            figures[f"{about}/{one.task.metric}"] = one.task.value
    tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking)
    run = tracking.observer(RunPaths(layout.runs / bundle.run_id), settings, plots.draw_loss_curve)
    tracking.report(
        run,
        figures,
        {"export": [layout.bundle]},
        {"ratchet.model_digest": bundle.model_digest},
        settings.machine.tracking_grace_s,
    )
