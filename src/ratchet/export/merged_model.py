"""The merged model: made in every way that is to be tried, reopened, verified by module, and the closest one kept."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedError
from ratchet.export import huggingface, smoke_prompts
from ratchet.export.conversion import Exam, Form
from ratchet.export.inputs import Job
from ratchet.export.merge import streaming
from ratchet.export.merge.recipe import MergeBase
from ratchet.export.verification import layers, parity, reference
from ratchet.export.verification import merge_trial as trials
from ratchet.export.verification import probe_inputs as materials
from ratchet.export.verification.layers import Recording
from ratchet.export.verification.merge_trial import Logits
from ratchet.export.verification.parity import Score, TorchModel
from ratchet.models import model_card, oom, scoring
from ratchet.models.runtimes import tokenizer_probes
from ratchet.storage import digests
from ratchet.storage.records.export import Artifact, Merge, MergeTrial
from ratchet.storage.records.training import Analysis


@dataclass(frozen=True)
class Merged:
    """The merged model on disk, and what was found."""

    exam: Exam
    """What the other forms are asked, too."""
    artifact: Artifact
    taken: MergeTrial
    merge: Merge
    logits: "Recalled"


@dataclass(frozen=True)
class Recalled:
    """The merged model, loaded again when a second reader of a form wants to be compared with it."""

    job: Job
    directory: Path

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[positions, vocabulary] of each row, in float32."""
        model, _ = huggingface.reopen(self.directory, self.job.dtype, self.job.device, self.job.base.remote_code)
        found = scoring.logits_of(model, rows)
        del model
        oom.release()
        return found


def make(job: Job, scratch: Path, score: Score) -> Merged:
    """Merge in every way that the settings ask for, and keep the one that is closest to the model that was trained.

    Never more than one model is in memory.

    Raises:
        DamagedError: a merged module does not compute what base + adapter does, or the tokenizer changed on its way.
    """
    trained = _of_trained(job, score)
    found = {way: _trial(job, trained, way, scratch / f"merged-{way}") for way in job.ways}
    way = min(found, key=lambda way: (found[way].trial.kl, way))
    for other in found:
        if other != way:
            shutil.rmtree(scratch / f"merged-{other}")
    directory = scratch / job.layout.merged_model.name
    (scratch / f"merged-{way}").rename(directory)
    merge = Merge(
        adapters=_adapters(job), modules=job.settings.export.modules, changed=found[way].changed,
        streamed=found[way].streamed, trials=tuple(one.trial for one in found.values()),
    )  # fmt: skip
    artifact = _examine(job, trained, directory)
    return Merged(trained.exam, artifact, found[way].trial, merge, Recalled(job, directory))


@dataclass(frozen=True)
class _Trained:
    """The model that was trained, as far as it is needed once it is no longer in memory."""

    exam: Exam
    logits: list[Logits]
    recording: Recording


def _of_trained(job: Job, score: Score) -> _Trained:
    """Ask base + adapter everything that the forms will be asked."""
    tokenizer, test = job.tokenizer(), token_files.read(job.layout.data, "test")
    model = reference.combined(job.recipe("dequantized"), "dequantized")
    ends = scoring.end_tokens(model.get_base_model(), tokenizer, job.card.end_of_turn)
    material = materials.material(test, tokenizer, job.settings, ends)

    def progress(what: str, done: int, total: int) -> None:
        job.progress(f"base + adapter: {what}", done, total)

    asked = parity.reference_of(TorchModel(model, tokenizer), material, progress)
    logits = trials.logits_of(model, material, progress)
    # Last: it switches the model to float32, in which a fault shows that bfloat16 would hide.
    recording = layers.record(reference.in_float32(model), material.rows)
    found = _Trained(Exam(job, tokenizer, material, asked, score), logits, recording)
    del model
    oom.release()
    return found


@dataclass(frozen=True)
class _Tried:
    trial: MergeTrial
    changed: int
    streamed: bool


def _trial(job: Job, trained: _Trained, way: MergeBase, directory: Path) -> _Tried:
    """Merge into one base, reopen what was written, and measure."""
    directory.mkdir()
    done = streaming.merge(job.recipe(way), directory, job.progress)
    analysis = job.layout.train / "analysis.json"
    card = model_card.of_model(
        job.base, job.settings.train, job.trained, job.settings.export.model_copy(update={"merge_base": way}),
        Analysis.load(analysis) if analysis.exists() else None,  # a run of an earlier version has none
    )  # fmt: skip
    exam = trained.exam
    huggingface.finish(directory, exam.tokenizer, exam.material.ends, card)
    recording = trained.recording if way == "dequantized" else _recording(job, exam)
    model, tokenizer = huggingface.reopen(directory, job.dtype, job.device, job.base.remote_code)
    _check_tokenizer(job, exam, tokenizer)
    found = trials.trial(way, model, job.dtype, trained.logits, recording, exam.material)
    del model
    oom.release()
    return _Tried(found, done.changed, done.streamed)


def _recording(job: Job, exam: Exam) -> Recording:
    """Of base + adapter where the base is not quantised: what a merge into it must compute."""
    model = reference.combined(job.recipe("original"), "original")
    found = layers.record(reference.in_float32(model), exam.material.rows)
    del model
    oom.release()
    return found


def _check_tokenizer(job: Job, exam: Exam, tokenizer: object) -> None:
    """A test row must be asked as in training."""
    row = token_files.read(job.layout.data, "test")[0]
    question = Conversation.from_json(row["conversation"]).question
    if chat_template.prompt_ids(exam.tokenizer, question) != chat_template.prompt_ids(tokenizer, question):
        raise DamagedError("the exported tokenizer encodes a test row differently from the base's")


def _examine(job: Job, trained: _Trained, directory: Path) -> Artifact:
    model, tokenizer = huggingface.reopen(directory, job.dtype, job.device, job.base.remote_code)
    runtime, exam = TorchModel(model, tokenizer), trained.exam
    asked = smoke_prompts.ask(runtime, tokenizer, tokenizer_probes.PROBES, exam.material.ends)
    found = exam.examine(runtime, Form("hf", job.settings.export.dtype, directory), probes=asked)
    del model, runtime
    oom.release()
    return found


def _adapters(job: Job) -> dict[str, float]:
    """Weights by digest; an adapter that is named twice counts twice."""
    found: dict[str, float] = {}
    for part in job.recipe("dequantized").parts:
        names = sorted(p.name for p in part.adapter.iterdir() if p.is_file())
        key = digests.of_tree(part.adapter, names)
        found[key] = found.get(key, 0.0) + part.weight
    return found
