"""Tests of a teacher in memory: its probabilities, their independence of the student, refusals and cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from online_distillation_cases import (
    CPU,
    TEACHER,
    attending,
    distill_settings,
    found,
)
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DataError, SettingsError
from ratchet.models import adapters, chunked_loss, model_spec, oom, recommendations
from ratchet.models.loss import SequenceBatch, StoredTeacherTargets, compute_loss_and_gradient
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.memory.parameters import list_unique_tensors
from ratchet.models.memory.trace import AllocationTrace, BatchShape
from ratchet.models.recommendations import MemoryConstraint
from ratchet.models.teacher import TeacherCandidate, TeacherModel
from ratchet.training.distillation import OnlineTeacherReader
from small_loop import ROWS, SHAPE, random_rows

DIRECTIONS = ["forward", "reverse"]


def teacher_targets_of(
    teacher: OnlineTeacherReader, rows: TokenRows, sequences: list[list[int]]
) -> StoredTeacherTargets:
    """Return the targets for all trained positions of these sequences in one piece."""
    told = teacher.get_targets(sequences, SequenceBatch.from_sequences(rows, sequences, CPU))
    return told.select(slice(0, rows.count_trained([row for sequence in sequences for row in sequence])))


def student(settings: Train, **shape: int) -> Any:
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | shape))
    return adapters.attach(plain, settings, "base", (), 4)


def by_autograd(logits: Tensor, targets: Tensor, known: Tensor, teacher_targets: StoredTeacherTargets) -> Tensor:
    """Compute the loss over every token that the teacher knows, by autograd and without saving memory."""
    student = functional.log_softmax(logits[:, : known.shape[1]] / teacher_targets.temperature, dim=1)
    a, b = (known, student) if teacher_targets.direction == "forward" else (student, known)
    distance = (a.exp() * (a - b)).sum()
    nll = functional.cross_entropy(logits, targets, reduction="sum")
    return (1 - teacher_targets.weight) * nll + teacher_targets.weight * teacher_targets.temperature**2 * distance


@pytest.mark.parametrize("padding", [0, 3], ids=["alike", "padded-student"])
@pytest.mark.parametrize("temperature", [1.0, 2.5], ids=["T1", "T2.5"])
@pytest.mark.parametrize("weight", [0.3, 1.0], ids=["mixed", "teacher-alone"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_of_all_tokens_loss_and_gradient_are_those_of_autograd(
    direction: Any, weight: float, temperature: float, padding: int
) -> None:
    draw = torch.Generator().manual_seed(1)
    logits, theirs = (2 * torch.randn(5, 20 + more, generator=draw, dtype=torch.float64) for more in (padding, 0))
    targets = torch.randint(0, 20, (5,), generator=draw)
    teacher_targets = StoredTeacherTargets(
        None, functional.log_softmax(theirs / temperature, dim=1), weight, temperature, direction
    )
    logits.requires_grad_()
    expected = by_autograd(logits, targets, teacher_targets.log_probabilities, teacher_targets)
    expected.backward()
    before = teacher_targets.log_probabilities.clone()
    loss, gradient = compute_loss_and_gradient(logits.detach(), targets, teacher_targets)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert logits.grad is not None
    assert float((gradient - logits.grad).abs().max()) < 1e-13
    assert torch.equal(teacher_targets.log_probabilities, before)


@pytest.mark.parametrize("width", [7, 10_000], ids=["pieces", "at-once"])
@pytest.mark.parametrize("apart", [True, False], ids=["head-apart", "in-one"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_whole_teacher_gives_the_gradient_of_two_whole_models(
    tmp_path: Path, width: int, apart: bool, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 4 * width * SHAPE["vocab_size"])
    settings, rows, sequences = distill_settings(None, direction=direction), random_rows(ROWS, seed=1), [[1], [2], [30]]
    teacher, batch = attending(tmp_path, settings, rows), SequenceBatch.from_sequences(rows, sequences, CPU)
    model = student(settings)
    learned = batch.labels[:, 1:] != IGNORE_INDEX
    with torch.no_grad():
        theirs = teacher.model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1][learned].double()
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1][learned].double()
    known = functional.log_softmax(theirs / 2.0, dim=1)
    expected = by_autograd(
        logits, batch.labels[:, 1:][learned], known, StoredTeacherTargets(None, known, 0.6, 2.0, direction)
    )
    (expected * 0.01).backward()
    wanted = [parameter.grad for _, parameter in adapters.trainable_parameters(model)]
    model.zero_grad()
    if not apart:
        for one in (model.get_base_model(), teacher.model):
            monkeypatch.setattr(one, "get_decoder", lambda one=one: one)
    assert float(
        chunked_loss.forward_backward(model, batch, 0.01, teacher_targets=teacher.get_targets(sequences, batch))
    ) == pytest.approx(float(expected.detach()), rel=1e-5)
    largest = max(float(one.abs().max()) for one in wanted)
    for (_, parameter), gradient in zip(adapters.trainable_parameters(model), wanted, strict=True):
        assert float((parameter.grad - gradient).abs().max()) <= 1e-5 * largest


def test_most_probable_tokens_and_what_is_learned_are_those_from_disk(tmp_path: Path) -> None:
    """The teacher in memory and the stored targets agree, apart from the rounding to 16 bits on disk."""
    rows, settings, sequences = random_rows(ROWS, seed=1), distill_settings(6), [[7], [3], [40]]
    batch, teacher = SequenceBatch.from_sequences(rows, sequences, CPU), attending(tmp_path, settings, rows)
    said = TeacherModel(found(tmp_path), settings, CPU).predict(rows, [7, 3, 40])
    teacher_targets = teacher_targets_of(teacher, rows, sequences)
    assert torch.equal(teacher_targets.tokens, said.tokens.long())
    assert torch.equal(teacher_targets.log_probabilities.to(torch.float16), said.log_probabilities)
    assert teacher_targets.log_probabilities.dtype == torch.float32
    stored = StoredTeacherTargets(said.tokens.long(), said.log_probabilities.float(), 0.6, 2.0, "forward")
    gradients, losses = [], []
    for one in (stored, teacher.get_targets(sequences, batch)):
        model = student(settings)
        losses.append(float(chunked_loss.forward_backward(model, batch, 0.01, teacher_targets=one)))
        gradients.append(torch.cat([one.grad.flatten() for _, one in adapters.trainable_parameters(model)]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert float((gradients[0] - gradients[1]).norm()) < 3e-3 * float(gradients[1].norm())


def test_what_it_says_of_a_row_depends_on_nothing_before(tmp_path: Path) -> None:
    rows = random_rows(ROWS, seed=1)
    teacher = attending(tmp_path, distill_settings(), rows)
    first = teacher_targets_of(teacher, rows, [[7], [3]])
    for row in range(20):
        teacher_targets_of(teacher, rows, [[row], [row + 5], [row + 11]])
    again = teacher_targets_of(teacher, rows, [[7], [3]])
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.log_probabilities, again.log_probabilities)


def test_a_pack_is_read_as_its_rows(tmp_path: Path) -> None:
    rows, settings = random_rows(ROWS, seed=1), distill_settings(None, temperature=1.0)
    teacher = attending(tmp_path, settings.model_copy(update={"batching": "packed"}), rows)
    packed = teacher_targets_of(teacher, rows, [[7, 3], [40]])
    alone = torch.cat([teacher_targets_of(teacher, rows, [[row]]).log_probabilities for row in (7, 3, 40)])
    assert torch.allclose(packed.log_probabilities, alone, atol=1e-4)


def test_a_teacher_that_mixes_the_rows_of_a_pack_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    rows, settings = random_rows(ROWS, seed=1), distill_settings().model_copy(update={"batching": "packed"})
    with pytest.raises(SettingsError, match=r"train\.distill\.teacher: .*batching: packed, but this model"):
        OnlineTeacherReader(TeacherCandidate(tmp_path, model_spec.load(tmp_path), 64, 64), settings, rows, CPU)


def test_padding_rows_of_its_embedding_are_ignored(tmp_path: Path) -> None:
    def loud(model: Any) -> None:
        model.lm_head.weight[64:] *= 50

    rows = random_rows(ROWS, seed=1)
    teacher_targets = teacher_targets_of(
        attending(tmp_path, distill_settings(None), rows, wide=80, spoil=loud), rows, [[3]]
    )
    assert teacher_targets.log_probabilities.shape == (rows.count_trained([3]), 64)
    assert torch.allclose(
        teacher_targets.log_probabilities.exp().sum(dim=1), torch.ones(rows.count_trained([3])), atol=1e-5
    )


@pytest.mark.parametrize("sequences", [[[0], [2]], [[2, 0]]], ids=["rows", "pack"])
@pytest.mark.parametrize("top_k", [6, None], ids=["some", "all"])
def test_a_row_that_it_answers_with_nan_is_named(tmp_path: Path, top_k: int | None, sequences: list[list[int]]) -> None:
    def deaf(model: Any) -> None:
        model.model.embed_tokens.weight[13] = torch.nan

    ids = [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14, 15]]
    rows = TokenRows.from_lists(ids, [[IGNORE_INDEX] * 2 + row[2:] for row in ids])
    teacher = attending(tmp_path, distill_settings(top_k), rows, spoil=deaf)
    with pytest.raises(DataError, match=r"output for training row 2 is not finite"):
        teacher_targets_of(teacher, rows, sequences)


@pytest.mark.parametrize("top_k", [6, None], ids=["some", "all"])
def test_beside_the_student_it_takes_the_memory_of_its_layers_only(
    tmp_path: Path, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a teacher, the chunks of logits need no more memory: the peak is at most 5 % above that without a
    teacher."""
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 8 * 20_000)
    rows, settings = (
        random_rows(ROWS, seed=1),
        distill_settings(top_k).model_copy(update={"target_modules": ("q_proj",)}),
    )
    teacher = OnlineTeacherReader(replace(found(tmp_path, wide=20_000), tokens=20_000), settings, rows, CPU)
    sequences = [[1], [2], [30]]
    batch = SequenceBatch.from_sequences(rows, sequences, CPU)

    def most(with_teacher: bool) -> int:
        model = student(settings, vocab_size=20_000)
        ledger = AllocationTrace(model, BatchShape(3, 24, 72, False, "cpu"), records_graph=True)
        ledger.exclude(teacher.model)
        with ledger:
            chunked_loss.forward_backward(
                model, batch, 0.01, teacher_targets=teacher.get_targets(sequences, batch) if with_teacher else None
            )
        return max(peak.total_bytes for peak in ledger.peaks.values())

    assert most(True) <= 1.05 * most(False)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_its_weights_are_counted_to_the_byte(tmp_path: Path, quantization: Any) -> None:
    settings = distill_settings(None, quantization=quantization)
    teacher = TeacherModel(found(tmp_path), settings, CPU)
    held = sum(-(-tensor.nbytes // 64) * 64 for tensor in list_unique_tensors(teacher.model))
    base = model_spec.from_config(transformers.LlamaConfig(**SHAPE))
    work = MemoryWorkload(2, 48, 30, packed=False, device="cpu", teacher=teacher.candidate.spec)
    parts = forecast.forecast(base, settings, Machine(), work)
    for phase in ("loaded", "adapters", "steady", "evaluation"):
        assert parts.phase_memory(phase).parts["teacher"] == held
    alone = forecast.forecast(base, settings, Machine(), replace(work, teacher=None))
    assert "teacher" not in alone.phase_memory("steady").parts
    with_it, without = (
        one.phase_memory("steady").total_bytes - one.phase_memory("steady").parts["libraries"] for one in (parts, alone)
    )  # fmt: skip
    assert with_it >= without + held


def test_layers_larger_than_the_students_are_counted(tmp_path: Path) -> None:
    """The forward pass of a wide teacher is the peak of a step of a tiny student."""
    base = model_spec.from_config(transformers.LlamaConfig(**SHAPE))
    wide = model_spec.from_config(transformers.LlamaConfig(**TEACHER | {"intermediate_size": 20_000}))
    work = MemoryWorkload(4, 48, 30, packed=False, device="cuda", teacher=wide)
    found = forecast.forecast(base, distill_settings(), Machine(), work).phase_memory("steady").parts
    assert found["activations"] >= 4 * 48 * 20_000 * 2  # at least one activation, in 16 bits


def test_what_would_need_less_is_named() -> None:
    base = model_spec.from_config(transformers.LlamaConfig(**SHAPE))
    large = model_spec.from_config(transformers.LlamaConfig(**TEACHER | {"hidden_size": 256, "num_hidden_layers": 8}))
    work = MemoryWorkload(1, 48, 30, packed=False, device="cuda", teacher=large)
    text = oom.describe_alternatives(base, distill_settings(), Machine(), work)
    assert "teacher " in text
    assert "train.distill.quantization: nf4" in text
    assert "train.distill.mode: offline" in text


def test_the_doctor_puts_it_into_4_bits_before_rows_are_cut() -> None:
    settings = Settings(train=distill_settings(), machine=Machine(micro_batch_size=1, activation_checkpointing=True))

    def needed(one: Settings) -> int:
        return 150 if one.train.distill.quantization == "none" else 50

    found = recommendations.fit_to_memory(settings, "cuda", MemoryConstraint(100, needed, 64))
    assert found.fits
    assert found.changes[-1].values == {"train.distill.quantization": "nf4"}
