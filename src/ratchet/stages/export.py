"""Stage export: merge the adapter, write every format, open each in its own runtime and compare."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.console.live_region import ProgressBars
from ratchet.evaluation import answer_metrics
from ratchet.exporters import conversion, inputs, merged_model
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merged_model import MergedModel
from ratchet.exporters.verification.parity import Score
from ratchet.exporters.verification.probe_inputs import task_metric
from ratchet.registry import lineage, pickle_scan
from ratchet.registry import model_store as forms_of
from ratchet.reports import plots
from ratchet.runs.directory import RunPaths
from ratchet.stages.project import Project
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact, ModelBundle, ModelLineage
from ratchet.tracking.mlflow.client import MlflowTracker


def export(project: Project) -> ModelBundle:
    """Run the stage. The earlier export stays complete until the new one is.

    Raises:
        DataError: an earlier stage has not run, or ran with other settings.
        DamagedFileError: an input has changed, or a merged module does not compute what base + adapter does.
        BaseModelError: the base is missing or changed, or an adapter belongs to another base.
        SettingsError: a format cannot represent this model, or a tool for it is not installed.
        LockHeldError: another process runs this stage.
    """
    with project.lock("export"):
        return _export(project.layout, project.settings)


def _export(layout: ProjectLayout, settings: Settings) -> ModelBundle:
    bars = ProgressBars("export")
    try:
        bundle = _run_export(inputs.open_job(layout, settings, bars))
    finally:
        bars.close()
    _log_to_mlflow(layout, settings, bundle)
    return bundle


def _run_export(work: ExportJob) -> ModelBundle:
    layout = work.layout
    with files.sealed_directory(layout.export, "export") as scratch:
        found = merged_model.make_merged_model(work, scratch, build_scorer(work.settings))
        artifacts = [found.artifact]
        artifacts += conversion.convert_formats(
            found.verifier, scratch / layout.merged_model.name, scratch, found.logits
        )
        model_digest = forms_of.model_digest(artifacts)
        bundle = _build_bundle(work, found, artifacts, _build_lineage(work, scratch, model_digest), model_digest)
        bundle.save(scratch / layout.bundle.name)
    return bundle


def build_scorer(settings: Settings) -> Score:
    """How the evaluation scores answers: its own measures, so that what counts as right is defined once."""
    metric = task_metric(settings)
    exact = "exact_match" if metric == "token_f1" else metric
    wanted = tuple(one for one in settings.evaluate.metrics if one == metric)
    plain = settings.evaluate.model_copy(update={"metrics": wanted, "answer_format": None})

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
        merge_base=found.selected.merge_base,
        dtype=export.dtype,
        size_bytes=artifacts[0].size_bytes,
        base_weight_format=train.base_weight_format,
        parity=found.selected.parity,
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
            f"{about}/kl": one.distance.kl, f"{about}/greedy_agreement": one.distance.greedy_agreement,
            f"{about}/size_bytes": float(one.size_bytes), f"{about}/tokens_per_second": one.tokens_per_second,
        }  # fmt: skip
        if one.task:
            figures[f"{about}/{one.task.metric}"] = one.task.value
    tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking_uri)
    run = tracking.create_callback(RunPaths(layout.runs / bundle.run_id), settings, plots.draw_loss_curve)
    tracking.report(
        run,
        figures,
        {"export": [layout.bundle]},
        {"ratchet.model_digest": bundle.model_digest},
        settings.machine.tracking_timeout_s,
    )
