"""The merged model in other formats: written, opened in the runtime that each is for, and examined there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ratchet.config.export import GgufType, OnnxType, PlainType
from ratchet.export import smoke_prompts
from ratchet.export.gguf import llama_cpp_tools, reader, writer
from ratchet.export.inputs import ExportJob
from ratchet.export.onnx import exporter
from ratchet.export.verification import parity
from ratchet.export.verification.parity import ReferenceOutputs, Score
from ratchet.export.verification.probe_inputs import ProbeInputs
from ratchet.models.runtimes import llama, tokenizer_probes
from ratchet.models.runtimes import onnx as onnx_runtime
from ratchet.models.runtimes.runtime import ModelRuntime
from ratchet.registry import bundle_files
from ratchet.storage import digests
from ratchet.storage.records.export import ExportArtifact, FormatKind

WITNESSED_ROWS = 4
"""Rows on which a second reader of a GGUF file is asked."""


@dataclass(frozen=True)
class ExportVerifier:
    """What every form is asked, and how base + adapter answered."""

    job: ExportJob
    tokenizer: Any
    material: ProbeInputs
    reference: ReferenceOutputs
    score: Score
    """Answers, as the evaluation scores them."""

    def examine(self, runtime: ModelRuntime, form: "ExportedFormat", **known: Any) -> ExportArtifact:
        """Ask a form everything."""
        found = parity.examine_format(
            runtime, self.reference, self.material, self.decode, self.score,
            lambda what, done, total: self.job.progress(f"{form.name}: {what}", done, total),
        )  # fmt: skip
        return ExportArtifact(
            name=form.name, kind=form.kind, type=form.type, digest=format_fingerprint(form.path),
            size_bytes=format_size_bytes(form.path),
            runtime=runtime.name, closeness=found.closeness, task=found.task, texts_tokenised=found.texts_tokenised,
            texts=found.texts, tokens_per_second=found.tokens_per_second, threads=self.threads, **known,
        )  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        """An answer as text, as the evaluation reads it."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def threads(self) -> int:
        """CPU threads of every runtime."""
        return self.job.settings.machine.threads or torch.get_num_threads()

    @property
    def context_tokens(self) -> int:
        """That the longest row and its answer need."""
        asked = [*self.material.rows, *self.material.prompts]
        return max(map(len, asked)) + self.material.max_new_tokens + smoke_prompts.NEW_TOKENS


@dataclass(frozen=True)
class ExportedFormat:
    """One form on the disk."""

    kind: FormatKind
    type: str
    path: Path
    """File or directory, below the export."""

    @property
    def name(self) -> str:
        """As the bundle calls it."""
        return "hf" if self.kind == "hf" else f"{self.kind}/{self.type}"


def format_fingerprint(path: Path) -> str:
    """Of a form's files, by their names in it; of a single file, by its own."""
    if path.is_file():
        return digests.hash_tree(path.parent, [path.name])
    return digests.hash_tree(path, sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()))


def format_size_bytes(path: Path) -> int:
    """Bytes of a form."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def convert_formats(
    exam: ExportVerifier, merged: Path, scratch: Path, logits: reader.Logits
) -> Iterator[ExportArtifact]:
    """Every format that is asked for, one after the other; nothing else of them is in memory meanwhile.

    Args:
        merged: Hugging Face directory.
        scratch: of the whole export; forms get folders in it.
        logits: of the merged model, for second readers.

    Raises:
        BaseModelError, SettingsError: a format cannot carry the model, or a runtime does not open what was written.
    """
    wanted = exam.job.settings.export
    for kind in wanted.gguf.types:
        path = scratch / bundle_files.format_path("gguf", kind)
        path.parent.mkdir(exist_ok=True)
        notes = _write_gguf(exam.job, merged, path, kind)
        yield _examine_gguf(exam, ExportedFormat("gguf", kind, path), merged, notes, logits)
    for precision in wanted.onnx.types:
        path = scratch / bundle_files.format_path("onnx", precision)
        path.mkdir(parents=True)
        yield _examine_onnx(exam, merged, ExportedFormat("onnx", precision, path), precision)


def _write_gguf(job: ExportJob, merged: Path, path: Path, kind: GgufType) -> tuple[str, ...]:
    """By our own writer, or by llama.cpp's tools where only they can; what somebody who uses the file should know."""
    own = writer.is_supported(merged)
    if own and kind not in llama_cpp_tools.TYPES:
        return writer.write_gguf(merged, path, cast(PlainType, kind), job.progress)
    if not own and kind in llama_cpp_tools.CONVERTED:
        llama_cpp_tools.convert_to_gguf(job.tools, merged, path, kind)
        return ("written by llama.cpp's converter",)
    whole = path.with_name("whole.gguf")
    notes: tuple[str, ...] = ()
    if own:
        notes = writer.write_gguf(merged, whole, "f32", job.progress)
    else:
        llama_cpp_tools.convert_to_gguf(job.tools, merged, whole, "f32")
    llama_cpp_tools.quantize_gguf(job.tools, whole, path, kind, job.settings.machine.threads or torch.get_num_threads())
    whole.unlink()
    return (*notes, "quantised by llama.cpp's llama-quantize")


def _examine_gguf(
    exam: ExportVerifier, form: ExportedFormat, merged: Path, notes: tuple[str, ...], logits: reader.Logits
) -> ExportArtifact:  # fmt: skip
    """With float32 caches, which show what the file is; then, as it is served, the probes."""
    difference, note = reader.compare_logits(form.path, merged, exam.material.rows[:WITNESSED_ROWS], logits)
    with llama.open_runtime(form.path, exam.threads, exam.context_tokens, "f16") as runtime:
        asked = runtime.probes(tokenizer_probes.PROBES, smoke_prompts.NEW_TOKENS)
    with llama.open_runtime(form.path, exam.threads, exam.context_tokens, "f32") as runtime:
        found = exam.examine(
            runtime, form, probes=asked, witness=None if difference is None else reader.NAME,
            witness_difference=difference, notes=notes if note is None else (*notes, note),
        )  # fmt: skip
    ours = [tuple(smoke_prompts.prompt_ids(exam.tokenizer, question)) for question in tokenizer_probes.PROBES]
    alike = sum(probe.prompt_ids == prompt for probe, prompt in zip(asked, ours, strict=True))
    texts, same = found.texts + len(ours), found.texts_tokenised + alike
    return found.model_copy(update={"texts": texts, "texts_tokenised": same})


def _examine_onnx(exam: ExportVerifier, merged: Path, form: ExportedFormat, precision: OnnxType) -> ExportArtifact:
    exporter.write_onnx(merged, form.path, precision, exam.job.progress)
    with onnx_runtime.open_runtime(form.path, exam.threads) as runtime:
        asked = smoke_prompts.ask_probes(runtime, exam.tokenizer, tokenizer_probes.PROBES, exam.material.ends)
        return exam.examine(runtime, form, probes=asked)
