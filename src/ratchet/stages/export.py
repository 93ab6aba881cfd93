"""Adapter → merged model → Hugging Face, GGUF and ONNX, each opened in its own runtime and compared → Bundle."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.console.progress_bars import Bars
from ratchet.evaluation import answer_metrics
from ratchet.export import conversion, inputs, merged_model, summary
from ratchet.export.inputs import Job
from ratchet.export.merged_model import Merged
from ratchet.export.verification.parity import Score
from ratchet.export.verification.probe_inputs import metric_of
from ratchet.registry import bundle_files as forms_of
from ratchet.registry import lineage, pickle_scan, sbom
from ratchet.reports import plots
from ratchet.runs.directory import RunPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import Layout
from ratchet.storage.records.export import Artifact, Bundle, Lineage
from ratchet.tracking.mlflow.client import Tracking


def export(layout: Layout, settings: Settings) -> str:
    """Run the stage. What was exported before stays whole until all of this is.

    Raises:
        DataError: a stage before this one has not run, or is of other settings.
        DamagedError: an input is not what it was, or a merged module does not compute what base + adapter does.
        BaseModelError: the base is gone or changed, or an adapter is of another one.
        SettingsError: a format cannot carry this model, or a tool for it is not here.
    """
    bars = Bars("export")
    try:
        bundle = _exported(inputs.opened(layout, settings, bars))
    finally:
        bars.close()
    _track(layout, settings, bundle)
    return summary.describe(bundle)


def _exported(work: Job) -> Bundle:
    layout = work.layout
    with files.sealed_directory(layout.export, "export") as scratch:
        found = merged_model.make(work, scratch, scorer(work.settings))
        artifacts = [found.artifact]
        artifacts += conversion.convert(found.exam, scratch / layout.merged_model.name, scratch, found.logits)
        model_digest = forms_of.model_digest(artifacts)
        bundle = _bundle(work, found, artifacts, _origin(work, scratch, model_digest), model_digest)
        bundle.save(scratch / layout.bundle.name)
    return bundle


def scorer(settings: Settings) -> Score:
    """How the evaluation scores answers: its own measures, so that what counts as right is defined once."""
    metric = metric_of(settings)
    exact = "exact_match" if metric == "token_f1" else metric
    wanted = tuple(one for one in settings.evaluate.measures if one == metric)
    plain = settings.evaluate.model_copy(update={"measures": wanted, "answer_format": None})

    def score(expected: Sequence[str], answers: Sequence[str]) -> Sequence[float]:
        found = {one.name: one.values for one in answer_metrics.measure(expected, [[a] for a in answers], plain, exact)}
        values = found[metric]
        assert values is not None  # noqa: S101 (both are functions of single answers)
        return values

    return score


def _origin(work: Job, scratch: Path, model_digest: str) -> Lineage:
    """Where the model comes from; writes the bill of materials."""
    name, licence = work.settings.promote.model_name, work.settings.export.data_licence
    base = work.base.model_copy(update={"source": lineage.masked(work.base.source)})
    contents = sbom.Contents(name, model_digest, base, work.card.digest, work.card.splits, licence)
    bill = sbom.write(contents, scratch / work.layout.sbom.name)
    looked = pickle_scan.recorded(work.layout.base) or pickle_scan.scan(work.base_path, work.base)
    recipe = digests.of_json(work.spec.model_dump(mode="json"))
    origin = lineage.Origin(work.base, work.trained, work.card, looked, recipe)
    return lineage.lineage(work.layout, work.settings, origin, bill)


def _bundle(work: Job, found: Merged, artifacts: Sequence[Artifact], origin: Lineage, model_digest: str) -> Bundle:
    export, train = work.settings.export, work.settings.train
    return Bundle(
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


def _track(layout: Layout, settings: Settings, bundle: Bundle) -> None:
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
    tracking = Tracking(layout, settings.promote.model_name, settings.machine.tracking)
    run = tracking.observer(RunPaths(layout.runs / bundle.run_id), settings, plots.loss_curve)
    tracking.report(
        run,
        figures,
        {"export": [layout.bundle]},
        {"ratchet.model_digest": bundle.model_digest},
        settings.machine.tracking_grace_s,
    )
