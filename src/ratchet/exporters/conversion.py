"""Converts the merged model to other formats, and verifies each format in the runtime that uses it.

Writers and runtimes of formats are imported when a format is written, because they need the extra `export`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ratchet.config.export import BuiltInGgufType, GgufType
from ratchet.data import tokenization
from ratchet.data.conversation import Conversation
from ratchet.exporters.gguf import llama_cpp_tools
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.verification import parity, probe_inputs
from ratchet.exporters.verification.parity import ModelRuntime, ReferenceOutputs, Score
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.models import oom
from ratchet.models.base_model import DATE_FUNCTION, TEMPLATE_DATE
from ratchet.models.runtimes import llama_server
from ratchet.registry import model_store
from ratchet.storage import digests
from ratchet.storage.records.export import ExportArtifact, ExportProbe, FormatKind

if TYPE_CHECKING:
    from ratchet.exporters.gguf.reader import Logits

PROBE_TOKENS = 16
"""Maximum number of tokens in the answer to a probe. This many tokens are enough to distinguish two models."""
READER_ROWS = 4
"""Number of rows on which the logits of transformers' GGUF loader are compared with those of the merged model."""


@dataclass(frozen=True)
class ExportVerifier:
    """Verifies exported formats against base + adapter's outputs for the probe inputs."""

    job: ExportJob
    tokenizer: Any
    inputs: ProbeInputs
    reference: ReferenceOutputs
    score: Score
    """Scores answers as the evaluation does."""

    def verify(self, runtime: ModelRuntime, exported: "ExportedFormat", **fields: Any) -> ExportArtifact:
        """Run all probe inputs in a format's runtime, and compare the outputs with the reference.

        Args:
            runtime: the format, opened in its runtime.
            exported: the format on disk.
            fields: further fields of the record, such as probes and notes.
        """
        result = parity.compare_format(
            runtime, self.reference, self.inputs, self.decode, self.score,
            lambda activity, done, total: self.job.progress(f"{exported.name}: {activity}", done, total),
        )  # fmt: skip
        return ExportArtifact(
            name=exported.name, kind=exported.kind, type=exported.type, digest=format_fingerprint(exported.path),
            size_bytes=format_size_bytes(exported.path), runtime=runtime.name, threads=self.threads, **vars(result),
            **fields,
        )  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        """Decode an answer as the evaluation does."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def threads(self) -> int:
        """CPU threads of every runtime."""
        return self.job.settings.machine.threads or torch.get_num_threads()

    @property
    def context_tokens(self) -> int:
        """Context size in tokens that the longest row or prompt and its answer need."""
        rows = [*self.inputs.rows, *self.inputs.prompts]
        return max(map(len, rows)) + self.inputs.max_new_tokens + PROBE_TOKENS


@dataclass(frozen=True)
class ExportedFormat:
    """One exported format on disk."""

    kind: FormatKind
    type: str
    path: Path
    """File or directory inside the export."""

    @property
    def name(self) -> str:
        """Name of the format in the bundle, such as `gguf/q8_0`."""
        return "hf" if self.kind == "hf" else f"{self.kind}/{self.type}"


def format_fingerprint(path: Path) -> str:
    """Return the digest of a format's files and their relative names. A single file is hashed with its own name."""
    if path.is_file():
        return digests.hash_tree(path.parent, [path.name])
    return digests.hash_tree(path, sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()))


def format_size_bytes(path: Path) -> int:
    """Return the total size of a format's files."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def convert_formats(
    verifier: ExportVerifier, merged: Path, scratch: Path, logits: "Logits"
) -> Iterator[ExportArtifact]:
    """Write and verify every requested format, one after the other, so that only one format at a time is in memory.

    Args:
        verifier: verifies each format.
        merged: Hugging Face directory of the merged model.
        scratch: directory of the complete export, which contains a path for each format.
        logits: computes the merged model's logits, with which the logits of transformers' GGUF loader are compared.

    Raises:
        BaseModelError, SettingsError: a format does not support the model, or its runtime cannot open the result.
    """
    export = verifier.job.settings.export
    for gguf_type in export.gguf.types:
        path = scratch / model_store.format_path("gguf", gguf_type)
        path.parent.mkdir(exist_ok=True)
        notes = _write_gguf(verifier, merged, path, gguf_type)
        yield _verify_gguf(verifier, ExportedFormat("gguf", gguf_type, path), merged, notes, logits)
    for int8_type in export.bitsandbytes.types:
        from ratchet.exporters import int8

        job = verifier.job
        path = scratch / model_store.format_path("bitsandbytes", int8_type)
        path.mkdir(parents=True)
        int8.write_int8(merged, path, job.dtype, job.device, export.max_shard_size)
        with int8.open_runtime(path, job.device, job.base.remote_code) as quantized:
            probes = collect_probes(quantized, verifier.tokenizer, verifier.inputs.end_ids)
            artifact = verifier.verify(quantized, ExportedFormat("bitsandbytes", int8_type, path), probes=probes)
        oom.release_memory()
        yield artifact
    for onnx_type in export.onnx.types:
        from ratchet.exporters import onnx
        from ratchet.models.runtimes import onnx as onnx_runtime

        path = scratch / model_store.format_path("onnx", onnx_type)
        path.mkdir(parents=True)
        onnx.write_onnx(merged, path, onnx_type, verifier.job.progress)
        with onnx_runtime.open_runtime(path, verifier.threads) as runtime:
            probes = collect_probes(runtime, verifier.tokenizer, verifier.inputs.end_ids)
            artifact = verifier.verify(runtime, ExportedFormat("onnx", onnx_type, path), probes=probes)
        yield artifact


def _write_gguf(verifier: ExportVerifier, merged: Path, path: Path, gguf_type: GgufType) -> tuple[str, ...]:
    """Write a GGUF file with our writer, or else with llama.cpp's tools. Returns notes for users of the file."""
    from ratchet.exporters.gguf import architectures, writer

    job = verifier.job
    is_supported = architectures.is_supported(merged)
    if is_supported and gguf_type not in llama_cpp_tools.TYPES:
        return writer.write_gguf(merged, path, cast(BuiltInGgufType, gguf_type), job.progress)
    if not is_supported and gguf_type in llama_cpp_tools.CONVERTED:
        llama_cpp_tools.convert_to_gguf(job.tools, merged, path, gguf_type)
        return ("written by llama.cpp's converter",)
    unquantized = path.with_name("unquantized.gguf")
    notes: tuple[str, ...] = ()
    if is_supported:
        notes = writer.write_gguf(merged, unquantized, "f32", job.progress)
    else:
        llama_cpp_tools.convert_to_gguf(job.tools, merged, unquantized, "f32")
    llama_cpp_tools.quantize_gguf(job.tools, unquantized, path, gguf_type, verifier.threads)
    unquantized.unlink()
    return (*notes, "quantized by llama.cpp's llama-quantize")


def _verify_gguf(
    verifier: ExportVerifier, exported: ExportedFormat, merged: Path, notes: tuple[str, ...], logits: "Logits"
) -> ExportArtifact:  # fmt: skip
    """Collect the probes with an f16 cache, as in servers; verify with an f32 cache, which adds no rounding."""
    from ratchet.exporters.gguf import reader

    difference, note = reader.compare_logits(exported.path, merged, verifier.inputs.rows[:READER_ROWS], logits)
    with llama_server.open_runtime(exported.path, verifier.threads, verifier.context_tokens, "f16") as runtime:
        probes = runtime.probes(probe_inputs.PROBES, PROBE_TOKENS)
    with llama_server.open_runtime(exported.path, verifier.threads, verifier.context_tokens, "f32") as runtime:
        artifact = verifier.verify(
            runtime, exported, probes=probes, second_reader=None if difference is None else reader.NAME,
            second_reader_difference=difference, notes=notes if note is None else (*notes, note),
        )  # fmt: skip
    if DATE_FUNCTION in str(verifier.tokenizer.chat_template):
        text = (
            "prompts of the chat template were not compared: it writes today's date in llama.cpp, and "
            f"{TEMPLATE_DATE:%d %b %Y} in training"
        )
        return artifact.model_copy(update={"notes": (*artifact.notes, text)})
    prompts = [tuple(prompt_ids(verifier.tokenizer, question)) for question in probe_inputs.PROBES]
    same_prompts = sum(probe.prompt_ids == prompt for probe, prompt in zip(probes, prompts, strict=True))
    return artifact.model_copy(
        update={
            "texts": artifact.texts + len(prompts),
            "texts_tokenised": artifact.texts_tokenised + same_prompts,
        }
    )


# Probes: short fixed prompts with their greedy answers. Deployment repeats them before a server may use the model.


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Encode a question as a conversation that ends where the assistant's answer begins."""
    return tokenization.encode_prompt(tokenizer, Conversation([{"role": "user", "content": question}]))


def collect_probes(runtime: ModelRuntime, tokenizer: Any, end_ids: Sequence[int]) -> tuple[ExportProbe, ...]:
    """Answer each of PROBES greedily.

    Each probe records for every answer token how far its log-probability is above the second highest, in nats.
    """
    probes = []
    for question in probe_inputs.PROBES:
        prompt = prompt_ids(tokenizer, question)
        answer = runtime.generate(prompt, PROBE_TOKENS, end_ids)
        positions = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        log_probabilities = (
            runtime.log_probabilities([*prompt, *answer], positions) if answer else np.empty((0, 2), np.float32)
        )
        top_two = np.sort(log_probabilities, axis=1)[:, -2:]
        probes.append(
            ExportProbe(
                question=question,
                prompt_ids=tuple(prompt),
                answer_ids=tuple(answer),
                answer=tokenizer.decode(
                    [token for token in answer if token not in end_ids], skip_special_tokens=True
                ).strip(),
                margins=tuple(float(best - second) for second, best in top_two),
            )
        )
    return tuple(probes)
