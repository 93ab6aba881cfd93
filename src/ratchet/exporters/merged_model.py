"""Merges the adapters, verifies each merged model against base + adapter, and keeps the closest one."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedFileError
from ratchet.exporters import conversion, huggingface
from ratchet.exporters.conversion import ExportedFormat, ExportVerifier
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.recipe import MergeBase
from ratchet.exporters.verification import layers, merge_trial, parity, probe_inputs, reference
from ratchet.exporters.verification.layers import ActivationRecording
from ratchet.exporters.verification.merge_trial import Logits
from ratchet.exporters.verification.parity import Score, TorchRuntime
from ratchet.models import model_card, oom, scoring
from ratchet.models.runtimes import tokenizer_probes
from ratchet.storage import digests
from ratchet.storage.records.export import ExportArtifact, MergeReport, MergeTrial
from ratchet.storage.records.training import AdapterAnalysis


@dataclass(frozen=True)
class MergedModel:
    """The merged model on disk and its measurements."""

    verifier: ExportVerifier
    """Verifies the other formats, too."""
    artifact: ExportArtifact
    selected: MergeTrial
    merge: MergeReport
    logits: "ReloadedModelLogits"


@dataclass(frozen=True)
class ReloadedModelLogits:
    """Loads the merged model again to compute its logits, when a second reader of a format is compared with it."""

    job: ExportJob
    directory: Path

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Compute the logits of each row: [positions, vocabulary], in float32."""
        model, _ = huggingface.reopen_model(self.directory, self.job.dtype, self.job.device, self.job.base.remote_code)
        logits = scoring.collect_logits(model, rows)
        del model
        oom.release_memory()
        return logits


def make_merged_model(job: ExportJob, scratch: Path, score: Score) -> MergedModel:
    """Merge into all weights that the settings name, and keep the result closest to the trained model.

    At most one model is in memory at a time.

    Raises:
        DamagedFileError: a merged module computes other values than base + adapter, or the tokenizer changed.
    """
    trained = _measure_trained_model(job, score)
    results = {one: _run_trial(job, trained, one, scratch / f"merged-{one}") for one in job.merge_bases}
    selected = min(results, key=lambda one: (results[one].trial.kl, one))
    for other in results:
        if other != selected:
            shutil.rmtree(scratch / f"merged-{other}")
    directory = scratch / job.layout.merged_model.name
    (scratch / f"merged-{selected}").rename(directory)
    result = results[selected]
    merge = MergeReport(
        adapters=_adapter_weights(job), modules=job.settings.export.modules, changed=result.changed,
        streamed=result.is_streamed, trials=tuple(one.trial for one in results.values()),
    )  # fmt: skip
    artifact = _verify_merged(job, trained, directory)
    return MergedModel(trained.verifier, artifact, result.trial, merge, ReloadedModelLogits(job, directory))


@dataclass(frozen=True)
class _TrainedModelReference:
    """Outputs of base + adapter, kept after the model has left memory."""

    verifier: ExportVerifier
    logits: list[Logits]
    recording: ActivationRecording


def _measure_trained_model(job: ExportJob, score: Score) -> _TrainedModelReference:
    """Run base + adapter on all probe inputs."""
    tokenizer, test = job.tokenizer(), token_files.open_split(job.layout.data, "test")
    model = reference.load_adapted_model(job.recipe("dequantized"), "dequantized")
    end_ids = scoring.list_end_tokens(model.get_base_model(), tokenizer, job.card.end_of_turn)
    inputs = probe_inputs.choose_probe_inputs(test, tokenizer, job.settings, end_ids)

    def progress(activity: str, done: int, total: int) -> None:
        job.progress(f"base + adapter: {activity}", done, total)

    outputs = parity.collect_reference(TorchRuntime(model, tokenizer), inputs, progress)
    logits = merge_trial.reference_logits(model, inputs, progress)
    # This comes last because it converts the model to float32, which shows errors that bfloat16 would hide.
    recording = layers.record_activations(reference.compute_in_float32(model), inputs.rows)
    trained = _TrainedModelReference(ExportVerifier(job, tokenizer, inputs, outputs, score), logits, recording)
    del model
    oom.release_memory()
    return trained


@dataclass(frozen=True)
class _MergeTrialResult:
    trial: MergeTrial
    changed: int
    is_streamed: bool


def _run_trial(
    job: ExportJob, trained: _TrainedModelReference, merge_base: MergeBase, directory: Path
) -> _MergeTrialResult:
    """Merge into one set of base weights, load the result from disk, and measure it."""
    directory.mkdir()
    merged = merger.merge_model(job.recipe(merge_base), directory, job.progress)
    analysis = job.layout.train / "analysis.json"
    card = model_card.render_for_model(
        job.base, job.settings.train, job.trained, job.settings.export.model_copy(update={"merge_base": merge_base}),
        AdapterAnalysis.load(analysis) if analysis.exists() else None,
    )  # fmt: skip
    verifier = trained.verifier
    huggingface.complete_directory(directory, verifier.tokenizer, verifier.inputs.end_ids, card)
    recording = trained.recording if merge_base == "dequantized" else _record_unquantized(job, verifier)
    model, tokenizer = huggingface.reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    _check_tokenizer(job, verifier, tokenizer)
    trial = merge_trial.measure_merge(merge_base, model, job.dtype, trained.logits, recording, verifier.inputs)
    del model
    oom.release_memory()
    return _MergeTrialResult(trial, merged.changed, merged.is_streamed)


def _record_unquantized(job: ExportJob, verifier: ExportVerifier) -> ActivationRecording:
    """Record base + adapter on the unquantized base: a merge into the original weights must reproduce it."""
    model = reference.load_adapted_model(job.recipe("original"), "original")
    recording = layers.record_activations(reference.compute_in_float32(model), verifier.inputs.rows)
    del model
    oom.release_memory()
    return recording


def _check_tokenizer(job: ExportJob, verifier: ExportVerifier, tokenizer: object) -> None:
    """Check that the exported tokenizer encodes a test row as the training tokenizer does."""
    row = token_files.open_split(job.layout.data, "test")[0]
    context = Conversation.from_json(row["conversation"]).context
    if chat_template.encode_prompt(verifier.tokenizer, context) != chat_template.encode_prompt(tokenizer, context):
        raise DamagedFileError(
            "export: the exported tokenizer encodes a test row differently from the base's tokenizer; report this as a "
            "bug, with the name of the base"
        )


def _verify_merged(job: ExportJob, trained: _TrainedModelReference, directory: Path) -> ExportArtifact:
    model, tokenizer = huggingface.reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    runtime, verifier = TorchRuntime(model, tokenizer), trained.verifier
    probes = conversion.collect_probes(runtime, tokenizer, tokenizer_probes.PROBES, verifier.inputs.end_ids)
    artifact = verifier.verify(runtime, ExportedFormat("hf", job.settings.export.dtype, directory), probes=probes)
    del model, runtime
    oom.release_memory()
    return artifact


def _adapter_weights(job: ExportJob) -> dict[str, float]:
    """Weights by adapter digest; the weights of an adapter that is named twice are added."""
    weights: dict[str, float] = {}
    for part in job.recipe("dequantized").adapters:
        names = sorted(p.name for p in part.adapter.iterdir() if p.is_file())
        key = digests.hash_tree(part.adapter, names)
        weights[key] = weights.get(key, 0.0) + part.weight
    return weights
