"""Merges the adapters, verifies each merged model against base + adapter, and keeps the closest merged model."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.data import token_files, tokenization
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedFileError
from ratchet.exporters import conversion
from ratchet.exporters.conversion import ExportedFormat, ExportVerifier
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.merger import MergeResult
from ratchet.exporters.merge.recipe import MergeBase
from ratchet.exporters.verification import layers, parity, probe_inputs, reference, retention
from ratchet.exporters.verification.layers import ActivationRecording, check_merge
from ratchet.exporters.verification.parity import Score, TorchRuntime, log_softmax, logits_at, measure_distance
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.models import base_model, loading, model_card, oom, scoring
from ratchet.models.device import Model
from ratchet.storage import digests, files
from ratchet.storage.records.export import ExportArtifact, MergeParity, MergeReport, MergeTrial, Progress
from ratchet.storage.records.training import AdapterAnalysis

MODEL_CARD = "README.md"
_PATH_KEYS = ("_name_or_path", "name_or_path")
"""Config keys that contain the path of the model on one machine; an export does not contain these keys."""
Logits = NDArray[np.float32]
"""Logits of one row: [positions, vocabulary]."""


@dataclass(frozen=True)
class MergedModel:
    """The merged model on disk and its measurements."""

    verifier: ExportVerifier
    """Verifier of this model and of the other formats."""
    artifact: ExportArtifact
    selected: MergeTrial
    merge: MergeReport
    logits: Callable[[Sequence[Sequence[int]]], Sequence[torch.Tensor]]
    """Loads the model again and computes the logits of rows, [positions, vocabulary] of each in float32, with which a
    second reader of a format is compared."""


def make_merged_model(job: ExportJob, scratch: Path, score: Score) -> MergedModel:
    """Merge into all base weights that `export.merge_base` names, and keep the result closest to the trained model.

    At most one model is in memory at a time.

    Raises:
        DamagedFileError: a merged module computes other values than base + adapter, or the tokenizer changed.
    """
    trained = _measure_trained_model(job, score)
    results = {base: _run_trial(job, trained, base, scratch / f"merged-{base}") for base in job.merge_bases}
    selected = min(results, key=lambda base: (results[base][0].kl, base))
    for base in results:
        if base != selected:
            shutil.rmtree(scratch / f"merged-{base}")
    directory = scratch / job.layout.merged_model.name
    (scratch / f"merged-{selected}").rename(directory)
    trial, result = results[selected]
    weights: dict[str, float] = {}  # if an adapter is named twice, its weights are added
    for part in job.recipe("dequantized").adapters:
        key = digests.hash_tree(part.adapter, sorted(p.name for p in part.adapter.iterdir() if p.is_file()))
        weights[key] = weights.get(key, 0.0) + part.weight
    export = job.settings.export
    merge = MergeReport(
        adapters=weights, modules=export.modules, changed=result.changed, streamed=result.is_streamed,
        trials=tuple(trial for trial, _ in results.values()), method=export.merge_method,
        density=None if export.merge_method == "linear" else export.density,
        retention=retention.measure_retention(job, directory) if export.additional_adapters else (),
    )  # fmt: skip
    model, tokenizer = reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    runtime, verifier = TorchRuntime(model, tokenizer), trained.verifier
    probes = conversion.collect_probes(runtime, tokenizer, verifier.inputs.end_ids)
    artifact = verifier.verify(runtime, ExportedFormat("hf", job.settings.export.dtype, directory), probes=probes)
    del model, runtime
    oom.release_memory()
    return MergedModel(verifier, artifact, trial, merge, partial(_reload_logits, job, directory))


def _reload_logits(job: ExportJob, directory: Path, rows: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    model, _ = reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    logits = scoring.collect_logits(model, rows)
    del model
    oom.release_memory()
    return logits


@dataclass(frozen=True)
class _TrainedModelReference:
    """Outputs of base + adapter, which stay in memory after the model itself was released."""

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
    logits = reference_logits(model, inputs, progress)
    # This comes last because it converts the model to float32, which shows errors that bfloat16 would hide.
    recording = layers.record_activations(reference.compute_in_float32(model), inputs.rows)
    trained = _TrainedModelReference(ExportVerifier(job, tokenizer, inputs, outputs, score), logits, recording)
    del model
    oom.release_memory()
    return trained


def _run_trial(
    job: ExportJob, trained: _TrainedModelReference, merge_base: MergeBase, directory: Path
) -> tuple[MergeTrial, MergeResult]:
    """Merge into one set of base weights, load the result from disk, and measure it."""
    directory.mkdir()
    merged = merger.merge_model(job.recipe(merge_base), directory, job.progress)
    analysis = job.layout.train / "analysis.json"
    card = model_card.render_for_model(
        job.base, job.settings.train, job.trained, job.settings.export.model_copy(update={"merge_base": merge_base}),
        AdapterAnalysis.load(analysis) if analysis.exists() else None,
    )  # fmt: skip
    verifier = trained.verifier
    complete_directory(directory, verifier.tokenizer, verifier.inputs.end_ids, card)
    recording = trained.recording if merge_base == "dequantized" else _record_unquantized(job, verifier)
    model, tokenizer = reopen_model(directory, job.dtype, job.device, job.base.remote_code)
    row = token_files.open_split(job.layout.data, "test")[0]
    context = Conversation.from_json(row["conversation"]).context
    if tokenization.encode_prompt(verifier.tokenizer, context) != tokenization.encode_prompt(tokenizer, context):
        raise DamagedFileError(
            "export: the exported tokenizer encodes a test row differently from the base's tokenizer; report this as a "
            "bug, with the name of the base"
        )
    trial = measure_merge(merge_base, model, job.dtype, trained.logits, recording, verifier.inputs)
    del model
    oom.release_memory()
    return trial, merged


def _record_unquantized(job: ExportJob, verifier: ExportVerifier) -> ActivationRecording:
    """Record base + adapter on the unquantized base; a merge into the original weights must reproduce these outputs."""
    model = reference.load_adapted_model(job.recipe("original"), "original")
    recording = layers.record_activations(reference.compute_in_float32(model), verifier.inputs.rows)
    del model
    oom.release_memory()
    return recording


# Measuring a merged model.


def reference_logits(model: Model, inputs: ProbeInputs, progress: Progress) -> list[Logits]:
    """Compute the trained model's (base + adapter) logits of each row at its positions."""
    total, logits = len(inputs.rows), []
    for row, (ids, positions) in enumerate(zip(inputs.rows, inputs.positions, strict=True)):
        progress("logits", row, total)
        logits.append(logits_at(model, ids, positions))
    progress("logits", total, total)
    return logits


def measure_merge(
    merge_base: Literal["dequantized", "original"],
    merged: Model,
    dtype: torch.dtype,
    trained: Sequence[Logits],
    recording: ActivationRecording,
    inputs: ProbeInputs,
) -> MergeTrial:
    """Measure a merged model that was loaded from disk.

    Args:
        merge_base: the base weights that the updates were added to.
        merged: the plain model.
        dtype: type of the model's stored weights.
        trained: logits of the trained model from `reference_logits`, which do not depend on the merge base.
        recording: recording of `reference.load_adapted_model(recipe, merge_base)`.
        inputs: rows and positions.

    Raises:
        DamagedFileError: a module of the merged model deviates, or its vocabulary differs.
    """
    check = check_merge(recording, merged, dtype)
    max_difference, sum_difference, elements, agreements, tokens, kl = 0.0, 0.0, 0, 0, 0, 0.0
    for ids, positions, targets, expected in zip(
        inputs.rows, inputs.positions, inputs.targets, trained, strict=True
    ):  # fmt: skip
        logits = logits_at(merged, ids, positions)
        if logits.shape != expected.shape:
            raise DamagedFileError(
                f"the merged model has {logits.shape[-1]} logits; expected {expected.shape[-1]} as in the trained model"
            )
        differences = np.abs(logits.astype(np.float64) - expected)
        max_difference = max(max_difference, float(differences.max()))
        sum_difference += float(differences.sum())
        elements += differences.size
        distance = measure_distance([log_softmax(expected)], [log_softmax(logits)], [targets])
        agreements += round(distance.greedy_agreement * distance.positions)
        kl += distance.kl * distance.positions
        tokens += distance.positions
    logit_parity = MergeParity(
        rows=len(inputs.rows),
        tokens=tokens,
        max_logit_difference=max_difference,
        mean_logit_difference=sum_difference / elements,
        greedy_agreement=agreements / tokens,
    )
    return MergeTrial(merge_base=merge_base, parity=logit_parity, kl=kl / tokens, check=check)


# The directory of a merged model.


def complete_directory(directory: Path, tokenizer: Any, end_ids: Sequence[int], card: str) -> None:
    """Add tokenizer, card and final configs to merged weights, so that transformers and servers can load the model.

    Loading needs neither peft nor bitsandbytes nor Ratchet.

    Args:
        directory: contains weights, config.json and perhaps generation_config.json; both configs are rewritten.
        tokenizer: the tokenizer used in training; its chat template and added tokens are written.
        end_ids: ids of tokens that end an answer; they become the model's eos_token_id, so that all runtimes use them.
        card: text of the model card.
    """
    config = json.loads((directory / "config.json").read_bytes())
    config = {key: value for key, value in config.items() if key not in _PATH_KEYS} | {"use_cache": True}
    config.pop("quantization_config", None)
    _write_json(directory / "config.json", config)
    generation = directory / "generation_config.json"
    if generation.exists():
        end = end_ids[0] if len(end_ids) == 1 else list(end_ids)
        _write_json(generation, json.loads(generation.read_bytes()) | {"eos_token_id": end})
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(str(directory))
    files.write_atomic(directory / MODEL_CARD, card)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON in transformers' layout, so that diffs against other configs stay readable."""
    files.write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def reopen_model(
    directory: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False
) -> tuple[Model, Any]:
    """Load model and tokenizer from disk as a user would; `remote_code` allows code in the directory to run."""
    model = loading.load_plain(directory, dtype, device, remote_code)
    return model, base_model.load_tokenizer(directory, remote_code=remote_code)
