"""Stage export: merge the adapter, write every format, run each of them in its own runtime and compare."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.evaluation import answer_metrics
from ratchet.exporters import conversion, inputs, merged_model
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merged_model import MergedModel
from ratchet.exporters.verification.parity import Score
from ratchet.exporters.verification.probe_inputs import task_metric
from ratchet.registry import lineage, model_store, pickle_scan
from ratchet.reports import dvc_files
from ratchet.stages.callbacks import log_stage
from ratchet.stages.project import Project
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import report_progress
from ratchet.storage.records.export import ExportArtifact, ModelBundle, ModelLineage


def export(project: Project) -> ModelBundle:
    """Run the stage. The earlier export is kept until the new one is complete.

    Raises:
        DataError: an earlier stage has not run, or ran with other settings.
        DamagedFileError: an input has changed, or a merged module differs from base + adapter in its results.
        BaseModelError: the base is missing or changed, or an adapter belongs to another base.
        SettingsError: a format cannot represent this model, or a tool for it is not installed.
        LockHeldError: another process runs this stage.
    """
    layout, settings = project.layout, project.settings
    with project.lock("export"):
        with files.sealed_directory(layout.export, "export") as scratch:
            job = inputs.open_job(layout, settings, report_progress)
            merged = merged_model.make_merged_model(job, scratch, build_scorer(settings))
            folder = scratch / layout.merged_model.name
            converted = conversion.convert_formats(merged.verifier, folder, scratch, merged.logits)
            bundle = _build_bundle(job, merged, [merged.artifact, *converted], scratch)
            bundle.save(scratch / layout.bundle.name)
            dvc_files.write_metrics(scratch, {"merged_model_bytes": bundle.size_bytes})
        _log_to_mlflow(layout, settings, bundle)
        return bundle


def build_scorer(settings: Settings) -> Score:
    """Build a function that scores answers exactly as stage evaluate does."""
    metric = task_metric(settings)
    exact = "exact_match" if metric == "token_f1" else metric
    names = tuple(name for name in settings.evaluate.metrics if name == metric)
    metric_settings = settings.evaluate.model_copy(update={"metrics": names, "answer_format": None})

    def score(expected: Sequence[str], answers: Sequence[str]) -> Sequence[float]:
        scores = answer_metrics.score_answers(expected, [[answer] for answer in answers], metric_settings, exact)
        values = {result.name: result.values for result in scores}[metric]
        assert values is not None  # noqa: S101 (both metrics are functions of single answers)
        return values

    return score


def _build_lineage(job: ExportJob, scratch: Path, model_digest: str) -> ModelLineage:
    """Write the bill of materials, and return the origin of the model."""
    name, licence = job.settings.promote.model_name, job.settings.export.data_licence
    base = job.base.model_copy(update={"source": lineage.mask_secrets(job.base.source)})
    bill = lineage.write_sbom(scratch / job.layout.sbom.name, name, model_digest, base, job.card, licence)
    scan = pickle_scan.load_scan(job.layout.base) or pickle_scan.scan_directory(job.base_path, job.base)
    recipe = digests.hash_json(job.spec.model_dump(mode="json"))
    origin = lineage.ModelOrigin(job.base, job.trained, job.card, scan, recipe)
    return lineage.build_lineage(job.settings, origin, bill)


def _build_bundle(
    job: ExportJob, merged: MergedModel, artifacts: Sequence[ExportArtifact], scratch: Path
) -> ModelBundle:
    model_digest = model_store.model_digest(artifacts)
    return ModelBundle(
        model_digest=model_digest,
        adapter_digest=job.trained.adapter_digest,
        base_digest=job.base.digest,
        data_digest=job.trained.data_digest,
        run_id=job.trained.run_id,
        merge_base=merged.selected.merge_base,
        dtype=job.settings.export.dtype,
        size_bytes=artifacts[0].size_bytes,
        base_weight_format=job.settings.train.base_weight_format,
        parity=merged.selected.parity,
        merge=merged.merge,
        artifacts=tuple(artifacts),
        lineage=_build_lineage(job, scratch, model_digest),
    )


def _log_to_mlflow(layout: ProjectLayout, settings: Settings, bundle: ModelBundle) -> None:
    figures = {
        "export/max_logit_difference": bundle.parity.max_logit_difference,
        "export/mean_logit_difference": bundle.parity.mean_logit_difference,
        "export/greedy_agreement": bundle.parity.greedy_agreement,
        "export/size_bytes": float(bundle.size_bytes),
    }
    for artifact in bundle.artifacts:
        prefix = f"export/{artifact.name}"
        figures |= {
            f"{prefix}/kl": artifact.distance.kl, f"{prefix}/greedy_agreement": artifact.distance.greedy_agreement,
            f"{prefix}/size_bytes": float(artifact.size_bytes),
            f"{prefix}/tokens_per_second": artifact.tokens_per_second,
        }  # fmt: skip
        if artifact.task:
            figures[f"{prefix}/{artifact.task.metric}"] = artifact.task.value
    log_stage(
        layout,
        settings,
        bundle.run_id,
        figures=figures,
        artifacts={"export": [layout.bundle]},
        tags={"ratchet.model_digest": bundle.model_digest},
    )
