"""The merged model: made in every way that is to be tried, reopened, verified by module, and the closest one kept."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedFileError
from ratchet.export import huggingface, smoke_prompts
from ratchet.export.conversion import ExportedFormat, ExportVerifier
from ratchet.export.inputs import ExportJob
from ratchet.export.merge import streaming
from ratchet.export.merge.recipe import MergeBase
from ratchet.export.verification import layers, parity, reference
from ratchet.export.verification import merge_trial as trials
from ratchet.export.verification import probe_inputs as materials
from ratchet.export.verification.layers import ActivationRecording
from ratchet.export.verification.merge_trial import Logits
from ratchet.export.verification.parity import Score, TorchRuntime
from ratchet.models import model_card, oom, scoring
from ratchet.models.runtimes import tokenizer_probes
from ratchet.storage import digests
from ratchet.storage.records.export import ExportArtifact, MergeReport, MergeTrial
from ratchet.storage.records.training import AdapterAnalysis


@dataclass(frozen=True)
class MergedModel:
    """The merged model on disk, and what was found."""

    exam: ExportVerifier
    """What the other forms are asked, too."""
    artifact: ExportArtifact
    taken: MergeTrial
    merge: MergeReport
    logits: "ReloadedModelLogits"


@dataclass(frozen=True)
class ReloadedModelLogits:
    """The merged model, loaded again when a second reader of a form wants to be compared with it."""

    job: ExportJob
    directory: Path

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[positions, vocabulary] of each row, in float32."""
        model, _ = huggingface.reopen_model(self.directory, self.job.dtype, self.job.device, self.job.base.remote_code)
        found = scoring.collect_logits(model, rows)
        del model
        oom.release_memory()
        return found


def make_merged_model(job: ExportJob, scratch: Path, score: Score) -> MergedModel:
    """Merge in every way that the settings ask for, and keep the one that is closest to the model that was trained.

    Never more than one model is in memory.

    Raises:
        DamagedFileError: a merged module computes other numbers than base + adapter, or the tokenizer changed.
    """
    trained = _measure_trained_model(job, score)
    found = {way: _run_trial(job, trained, way, scratch / f"merged-{way}") for way in job.ways}
    way = min(found, key=lambda way: (found[way].trial.kl, way))
    for other in found:
        if other != way:
            shutil.rmtree(scratch / f"merged-{other}")
    directory = scratch / job.layout.merged_model.name
    (scratch / f"merged-{way}").rename(directory)
    merge = MergeReport(
        adapters=_adapter_weights(job), modules=job.settings.export.modules, changed=found[way].changed,
        streamed=found[way].streamed, trials=tuple(one.trial for one in found.values()),
    )  # fmt: skip
    artifact = _examine_merged(job, trained, directory)
    return MergedModel(trained.exam, artifact, found[way].trial, merge, ReloadedModelLogits(job, directory))


@dataclass(frozen=True)
class _TrainedModelReference:
    """The model that was trained, as far as it is needed once it is no longer in memory."""

    exam: ExportVerifier
    logits: list[Logits]
    recording: ActivationRecording


def _measure_trained_model(job: ExportJob, score: Score) -> _TrainedModelReference:
    """Ask base + adapter everything that the forms will be asked."""
    tokenizer, test = job.tokenizer(), token_files.open_split(job.layout.data, "test")
    model = reference.load_adapted_model(job.recipe("dequantized"), "dequantized")
    ends = scoring.list_end_tokens(model.get_base_model(), tokenizer, job.card.end_of_turn)
    material = materials.choose_probe_inputs(test, tokenizer, job.settings, ends)

    def progress(what: str, done: int, total: int) -> None:
        job.progress(f"base + adapter: {what}", done, total)

    asked = parity.collect_reference(TorchRuntime(model, tokenizer), material, progress)
    logits = trials.reference_logits(model, material, progress)
    # Last: it switches the model to float32, in which a fault shows that bfloat16 would hide.
    recording = layers.record_activations(reference.compute_in_float32(model), material.rows)
    found = _TrainedModelReference(ExportVerifier(job, tokenizer, material, asked, score), logits, recording)
    del model
    oom.release_memory()
    return found


@dataclass(frozen=True)
class _MergeTrialResult:
    trial: MergeTrial
    changed: int
    streamed: bool


def _run_trial(job: ExportJob, trained: _TrainedModelReference, way: MergeBase, directory: Path) -> _MergeTrialResult:
    """Merge into one base, reopen what was written, and measure."""
    directory.mkdir()
    done = streaming.merge_model(job.recipe(way), directory, job.progress)
    analysis = job.layout.train / "analysis.json"
    card = model_card.render_for_model(
        job.base, job.settings.train, job.trained, job.settings.export.model_copy(update={"merge_base": way}),
        AdapterAnalysis.load(analysis) if analysis.exists() else None,  # a run of an earlier version has none
    )  # fmt: skip
    exam = trained.exam
    huggingface.complete_directory(directory, exam.tokenizer, exam.material.ends, card)
    recording = trained.recording if way == "dequantized" else _record_unquantized(job, exam)
    model, tokenizer = huggingface.reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    _check_tokenizer(job, exam, tokenizer)
    found = trials.measure_merge(way, model, job.dtype, trained.logits, recording, exam.material)
    del model
    oom.release_memory()
    return _MergeTrialResult(found, done.changed, done.streamed)


def _record_unquantized(job: ExportJob, exam: ExportVerifier) -> ActivationRecording:
    """Of base + adapter where the base is not quantised: what a merge into it must compute."""
    model = reference.load_adapted_model(job.recipe("original"), "original")
    found = layers.record_activations(reference.compute_in_float32(model), exam.material.rows)
    del model
    oom.release_memory()
    return found


def _check_tokenizer(job: ExportJob, exam: ExportVerifier, tokenizer: object) -> None:
    """A test row must be asked as in training."""
    row = token_files.open_split(job.layout.data, "test")[0]
    question = Conversation.from_json(row["conversation"]).question
    if chat_template.encode_prompt(exam.tokenizer, question) != chat_template.encode_prompt(tokenizer, question):
        raise DamagedFileError("the exported tokenizer encodes a test row differently from the base's")


def _examine_merged(job: ExportJob, trained: _TrainedModelReference, directory: Path) -> ExportArtifact:
    model, tokenizer = huggingface.reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    runtime, exam = TorchRuntime(model, tokenizer), trained.exam
    asked = smoke_prompts.ask_probes(runtime, tokenizer, tokenizer_probes.PROBES, exam.material.ends)
    found = exam.examine(runtime, ExportedFormat("hf", job.settings.export.dtype, directory), probes=asked)
    del model, runtime
    oom.release_memory()
    return found


def _adapter_weights(job: ExportJob) -> dict[str, float]:
    """Weights by digest; an adapter that is named twice counts twice."""
    found: dict[str, float] = {}
    for part in job.recipe("dequantized").parts:
        names = sorted(p.name for p in part.adapter.iterdir() if p.is_file())
        key = digests.hash_tree(part.adapter, names)
        found[key] = found.get(key, 0.0) + part.weight
    return found
