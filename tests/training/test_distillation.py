"""Tests of learning from a teacher's probabilities: loss and gradient, sealed targets, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

import tiny_project
from distillation_cases import (
    nothing,
    other_tokenizer,
    padded,
    prepared,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    short_context,
    with_teacher,
)
from ratchet.cli.distill import format_distillation
from ratchet.config import units
from ratchet.config.settings import Settings
from ratchet.config.train import DistillSettings, Train
from ratchet.data import token_files
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DamagedFileError, DataError, InputError, InterruptedRunError
from ratchet.models import adapters, chunked_loss, model_spec
from ratchet.models.loss import SequenceBatch, StoredTeacherTargets, compute_loss_and_gradient
from ratchet.models.memory.trace import AllocationTrace, BatchShape
from ratchet.models.teacher import TeacherCandidate, TeacherModel
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec
from ratchet.stages.distill import distill
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DISTILLATION_CARD, DistillationCard
from ratchet.training import distillation
from ratchet.training.distillation import KIND, TeacherShardPlan, TeacherShardReader, TeacherShardWriter
from ratchet.training.run_spec import build_run_spec
from small_loop import ROWS, SHAPE, SMALL, after_steps, loop_of, losses, random_rows, trained_by

POSITIONS, VOCABULARY = 5, 23
DIRECTIONS = ["forward", "reverse"]


def teacher_targets_of(logits: Tensor, k: int, **settings: object) -> StoredTeacherTargets:
    """Return the targets of a teacher with these logits."""
    chosen = {"weight": 0.3, "temperature": 2.0, "direction": "forward"} | settings
    soft = functional.log_softmax(logits / chosen["temperature"], dim=1)
    best = soft.topk(k, dim=1)
    rest = soft.scatter(1, best.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    return StoredTeacherTargets(best.indices, torch.cat([best.values, rest], dim=1), **chosen)  # type: ignore[arg-type]


def drawn(seed: int, scale: float = 2.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(POSITIONS, VOCABULARY, generator=draw, dtype=torch.float64)


def targets_of() -> Tensor:
    return torch.randint(0, VOCABULARY, (POSITIONS,), generator=torch.Generator().manual_seed(9))


def by_autograd(logits: Tensor, targets: Tensor, teacher_targets: StoredTeacherTargets) -> Tensor:
    """Compute the loss as the module's docstring defines it, by autograd and without saving memory."""
    student = functional.softmax(logits / teacher_targets.temperature, dim=1)
    kept = student.gather(1, teacher_targets.tokens)
    outside = torch.ones_like(student).scatter(1, teacher_targets.tokens, 0.0)
    q = torch.cat([kept, (student * outside).sum(dim=1, keepdim=True)], dim=1)
    p = teacher_targets.log_probabilities.exp()
    a, b = (p, q) if teacher_targets.direction == "forward" else (q, p)
    distance = (a * (a.log() - b.log())).sum()
    nll = functional.cross_entropy(logits, targets, reduction="sum")
    return (1 - teacher_targets.weight) * nll + teacher_targets.weight * teacher_targets.temperature**2 * distance


@pytest.mark.parametrize("temperature", [1.0, 2.5], ids=["T1", "T2.5"])
@pytest.mark.parametrize("weight", [0.3, 1.0], ids=["mixed", "teacher-alone"])
@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1], ids=["k1", "k4", "all-but-one"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_loss_and_gradient_are_those_of_autograd(direction: str, k: int, weight: float, temperature: float) -> None:
    teacher_targets = teacher_targets_of(drawn(1), k, weight=weight, temperature=temperature, direction=direction)
    logits, targets = drawn(2).requires_grad_(), targets_of()
    expected = by_autograd(logits, targets, teacher_targets)
    expected.backward()
    loss, gradient = compute_loss_and_gradient(logits.detach(), targets, teacher_targets)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert logits.grad is not None
    assert float((gradient - logits.grad).abs().max()) < 1e-13


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_distance_is_zero_for_the_teacher_itself_and_grows_with_the_tokens_told_apart(direction: str) -> None:
    def distance(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
        teacher_targets = teacher_targets_of(teacher, k, weight=1.0, direction=direction)
        return compute_loss_and_gradient(student, targets_of(), teacher_targets)

    loss, gradient = distance(drawn(3), drawn(3), 4)
    assert abs(float(loss)) < 1e-12
    assert float(gradient.abs().max()) < 1e-12
    # With all tokens but one, the rest is a single token, so no information is lost.
    found = [float(distance(drawn(5), drawn(4), k)[0]) for k in (1, 4, 12, VOCABULARY - 1)]
    assert found == sorted(found)
    assert found[0] > 0


def test_nothing_is_nan_where_one_token_has_everything() -> None:
    teacher, student = drawn(6, scale=1000.0).float(), drawn(7, scale=1000.0).float()
    for direction in DIRECTIONS:
        stored = teacher_targets_of(teacher, 4, direction=direction)
        kept = stored.log_probabilities.clamp(min=-1e4).half().float()
        teacher_targets = StoredTeacherTargets(stored.tokens, kept, stored.weight, stored.temperature, stored.direction)
        loss, gradient = compute_loss_and_gradient(student, targets_of(), teacher_targets)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


TEACHER = SHAPE | {"hidden_size": 48, "num_hidden_layers": 3}
DISTILLED = SMALL.model_copy(update={"distill": DistillSettings(teacher="t", weight=0.6, temperature=2.0, top_k=6)})
DISTILLATION_DIGEST = "of the shards"


def teacher_of(folder: Path, settings: Train = DISTILLED, rows: int = 64) -> TeacherModel:
    """Create a random teacher that is larger than the student."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**TEACHER | {"vocab_size": rows}, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return TeacherModel(TeacherCandidate(folder, model_spec.load(folder), 64, rows), settings, torch.device("cpu"))


def sealed(folder: Path, rows: TokenRows, settings: Train = DISTILLED) -> Path:
    """Write the targets of that teacher for these rows as `ratchet distill` does; return the directory."""
    plan, out = TeacherShardPlan.from_rows(rows), folder / "distill"
    shards = TeacherShardWriter(folder / "shards", plan)
    shards.write(teacher_of(folder / "teacher", settings), rows, 4)
    with files.sealed_directory(out, KIND) as scratch:
        shards.gather(scratch)
        DistillationCard(
            digest=DISTILLATION_DIGEST, teacher="t", teacher_digest="d" * 64, data_digest="d" * 64, quantization="none",
            compute_dtype="float32", temperature=settings.distill.temperature, top_k=settings.distill.top_k,
            rows=plan.rows, positions=plan.positions, tokens=64, teacher_rows=64, base_rows=64, teacher_parameters=2,
            base_parameters=1, teacher_loss=1.0, left_out=0.1,
        ).save(scratch / DISTILLATION_CARD)  # fmt: skip
    return out


def teacher_reader_of(folder: Path, rows: TokenRows, settings: Train = DISTILLED) -> TeacherShardReader:
    return TeacherShardReader(sealed(folder, rows, settings), rows, settings.distill, DISTILLATION_DIGEST)


@pytest.mark.parametrize("shard", [2**16, 40], ids=["one-shard", "many"])
def test_what_is_read_is_what_the_teacher_says(tmp_path: Path, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "SHARD_POSITIONS", shard)
    rows = random_rows(ROWS, seed=1)
    teacher = teacher_reader_of(tmp_path, rows)
    sequences = [[7, 3], [40], [0, 47, 12]]
    teacher_targets = teacher.get_targets(sequences, SequenceBatch.from_sequences(rows, sequences, torch.device("cpu")))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    expected = []
    for row in (row for sequence in sequences for row in sequence):
        batch = SequenceBatch.from_sequences(rows, [[row]], torch.device("cpu"))
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids).logits[0, :-1]
        expected.append(logits[batch.labels[0, 1:] != IGNORE_INDEX] / DISTILLED.distill.temperature)
    known = functional.log_softmax(torch.cat(expected), dim=1)
    assert len(teacher_targets.tokens) == len(known) == rows.count_trained([7, 3, 40, 0, 47, 12])
    assert torch.equal(teacher_targets.tokens, known.topk(6, dim=1).indices)
    assert torch.allclose(teacher_targets.log_probabilities[:, :-1], known.gather(1, teacher_targets.tokens), atol=4e-3)
    rest = 1 - teacher_targets.log_probabilities[:, :-1].exp().sum(dim=1)
    assert torch.allclose(teacher_targets.log_probabilities[:, -1].exp(), rest, atol=4e-3)


@pytest.mark.parametrize("width", [7, 10_000], ids=["pieces", "at-once"])
@pytest.mark.parametrize("apart", [True, False], ids=["head-apart", "in-one"])
def test_pieces_of_the_head_give_the_gradient_of_the_whole(
    tmp_path: Path, width: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 2 * width * SHAPE["vocab_size"])
    rows = random_rows(ROWS, seed=1)
    batch = SequenceBatch.from_sequences(rows, [[1], [2], [30]], torch.device("cpu"))
    teacher_targets = teacher_reader_of(tmp_path, rows).get_targets([[1], [2], [30]], batch)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model = adapters.attach(plain, DISTILLED.model_copy(update={"dropout": 0.0}), "base", (), 4)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1].double()
    learned = batch.labels[:, 1:] != IGNORE_INDEX
    expected = by_autograd(logits[learned], batch.labels[:, 1:][learned], normalized_targets(teacher_targets))
    (expected * 0.01).backward()
    wanted = [parameter.grad for _, parameter in adapters.trainable_parameters(model)]
    model.zero_grad()
    if not apart:
        monkeypatch.setattr(model.get_base_model(), "get_decoder", model.get_base_model)
    found = chunked_loss.forward_backward(model, batch, 0.01, teacher_targets=teacher_targets)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    largest = max(float(one.abs().max()) for one in wanted)
    for (_, parameter), theirs in zip(adapters.trainable_parameters(model), wanted, strict=True):
        assert float((parameter.grad - theirs).abs().max()) <= 1e-5 * largest


def normalized_targets(teacher_targets: StoredTeacherTargets) -> StoredTeacherTargets:
    """Return the targets in float64, with probabilities that sum to 1."""
    values = teacher_targets.log_probabilities.double()
    return replace(teacher_targets, log_probabilities=values - values.logsumexp(dim=1, keepdim=True))


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_a_distilled_training_goes_on_exactly_and_micro_batches_change_nothing(tmp_path: Path, batching: str) -> None:
    train = DISTILLED.model_copy(update={"batching": batching, "dropout": 0.0})
    teacher = teacher_reader_of(tmp_path, random_rows(ROWS, seed=1), train)
    once = loop_of(tmp_path / "once", train, teacher=teacher)
    once.run()
    again = tmp_path / "again"
    loop_of(again, train, after_steps(RunPaths(again), 5), teacher=teacher)
    with pytest.raises(InterruptedRunError):
        loop_of(again, train, after_steps(RunPaths(again), 5), teacher=teacher).run()
    resumed = loop_of(again, train, teacher=teacher)
    resumed.run()
    assert losses(RunPaths(again)) == losses(once.context.paths)
    for name, value in trained_by(once).items():
        assert torch.equal(value, trained_by(resumed)[name])
    alone = loop_of(tmp_path / "alone", train)
    alone.run()
    assert losses(alone.context.paths)[0] != losses(once.context.paths)[0]
    small = loop_of(tmp_path / "small", train, micro=1, teacher=teacher)
    small.run()
    assert losses(small.context.paths) == pytest.approx(losses(once.context.paths), rel=1e-4)


def test_damaged_shard_and_another_teaching_are_refused(tmp_path: Path) -> None:
    rows = random_rows(ROWS, seed=1)
    out = sealed(tmp_path, rows)
    for other, distillation_digest in ((rows, "another"), (random_rows(ROWS + 1, seed=1), DISTILLATION_DIGEST)):
        with pytest.raises(DataError, match="changed since the run was started"):
            TeacherShardReader(out, other, DISTILLED.distill, distillation_digest)
    shard = out / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    with pytest.raises(DamagedFileError, match="shard-00000"):
        TeacherShardReader(out, rows, DISTILLED.distill, DISTILLATION_DIGEST)


def test_a_teacher_that_answers_nan_is_named_with_the_row(tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path / "teacher")
    with torch.no_grad():
        teacher.model.lm_head.weight[5] = torch.nan
    with pytest.raises(DataError, match=r"output for training row 3 is not finite"):
        teacher.predict(random_rows(ROWS, seed=1), [3])


def test_padding_rows_of_the_embedding_are_ignored(tmp_path: Path) -> None:
    teacher, padded = teacher_of(tmp_path / "a"), teacher_of(tmp_path / "b", rows=80)

    def wide(value: Tensor) -> Tensor:
        is_embedding = len(value) == 64 and value.ndim == 2
        return torch.cat([value, value.new_ones(16, value.shape[1])]) if is_embedding else value

    with torch.no_grad():
        padded.model.load_state_dict({name: wide(value) for name, value in teacher.model.state_dict().items()})
        padded.model.lm_head.weight[64:] *= 50  # by far the most probable, if padding rows were tokens
    rows = random_rows(ROWS, seed=1)
    one, two = teacher.predict(rows, [3, 4]), padded.predict(rows, [3, 4])
    assert torch.equal(one.tokens, two.tokens)
    assert torch.allclose(one.log_probabilities.float(), two.log_probabilities.float(), atol=2e-3)


def test_a_lesson_needs_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak memory of a micro-batch with several chunks of logits is at most 2 % higher with a teacher than
    without."""
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 8 * 20_000)
    rows = random_rows(ROWS, seed=1)
    batch = SequenceBatch.from_sequences(rows, [[1], [2], [30]], torch.device("cpu"))
    teacher_targets = teacher_reader_of(tmp_path, rows).get_targets([[1], [2], [30]], batch)

    def most(teacher_targets: StoredTeacherTargets | None) -> int:
        torch.manual_seed(0)
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | {"vocab_size": 20_000}))
        model = adapters.attach(plain, DISTILLED.model_copy(update={"target_modules": ("q_proj",)}), "base", (), 4)
        ledger = AllocationTrace(model, BatchShape(3, 24, 72, False, "cpu"), records_graph=True)
        with ledger:
            chunked_loss.forward_backward(model, batch, 0.01, teacher_targets=teacher_targets)
        return max(peak.total_bytes for peak in ledger.peaks.values())

    assert most(teacher_targets) <= 1.02 * most(None)


def asked(layout: ProjectLayout, settings: Settings, forecast: bool = False) -> tuple[str, str]:
    """Run `ratchet distill`; return its final text and its progress lines."""
    lines: list[str] = []
    result = distill(Project.from_parts(layout, settings), forecast=forecast, on_progress=lines.append)
    return format_distillation(result), "\n".join(lines)


def test_the_size_is_told_before_and_holds(project: ProjectLayout) -> None:
    settings = with_teacher(project)
    done, told = asked(project, settings, forecast=True)
    assert "nothing was computed" in done
    assert not project.distill.exists()
    done, _ = asked(project, settings)
    card = DistillationCard.load(project.distill / DISTILLATION_CARD)
    planned = TeacherShardPlan.from_rows(token_files.load_rows(project.data, "train")).size_bytes(8)
    held = sum(path.stat().st_size for path in project.distill.glob("*.safetensors"))
    assert planned <= held <= planned + 1000
    assert f"{card.positions:,} answer tokens x 8 tokens: {units.format_bytes(planned)}" in told
    assert not list(project.distillation_shards.iterdir())
    assert "computed before" in asked(project, settings)[0]
    assert tiny_project.ratchet(project, "verify", str(project.distill)).returncode == 0


def test_what_is_sealed_is_not_asked_again(project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "SHARD_POSITIONS", 100)
    settings = with_teacher(project)
    asked(project, settings)
    whole = DistillationCard.load(project.distill / DISTILLATION_CARD)
    files.remove_sealed(project.distill)

    def dies(operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "shard-00003.safetensors":
            raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(files, "before", dies)
        asked(project, settings)
    (folder,) = project.distillation_shards.iterdir()
    assert [path.name for path in sorted(folder.iterdir())] == [f"shard-{n:05d}.safetensors" for n in range(3)]
    damaged = folder / "shard-00001.safetensors" / "shard-00001.safetensors"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    inode = (folder / "shard-00000.safetensors" / "shard-00000.safetensors").stat().st_ino
    _, told = asked(project, settings)
    assert "2 shards are computed already" in told
    assert DistillationCard.load(project.distill / DISTILLATION_CARD) == whole
    assert (project.distill / "shard-00000.safetensors").stat().st_ino == inode


def test_training_requires_the_answers_that_the_settings_describe(project: ProjectLayout) -> None:
    settings = with_teacher(project)
    with pytest.raises(DataError, match="found no teacher outputs"):
        build_run_spec(project, settings)
    asked(project, settings)
    with pytest.raises(DataError, match=r"made with temperature 1\.0, but train\.distill\.temperature is 3\.0"):
        build_run_spec(project, with_teacher(project, temperature=3.0))
    before = build_run_spec(project, settings)
    inode = (project.distill / "shard-00000.safetensors").stat().st_ino
    (project.root / "teacher").rename(project.root / "elsewhere")
    moved = with_teacher(project, teacher="elsewhere")
    with pytest.raises(DataError, match=r"made with teacher teacher, but train\.distill\.teacher is elsewhere"):
        build_run_spec(project, moved)
    asked(project, moved)
    assert (project.distill / "shard-00000.safetensors").stat().st_ino == inode
    assert build_run_spec(project, moved) == before
    assert before.run_id != build_run_spec(project, tiny_project.SETTINGS).run_id
    assert build_run_spec(project, with_teacher(project, teacher="elsewhere", weight=0.7)).run_id != before.run_id


def test_a_run_that_nobody_teaches_goes_on_with_other_settings_of_teaching(tmp_path: Path) -> None:
    for settings in (DistillSettings(), DistillSettings(weight=0.7, temperature=3.0)):
        spec = RunSpec(train=Train(distill=settings), data_digest="d" * 64, base_digest="b" * 64)
        RunDirectory.open(tmp_path, spec).close()
    assert len(list(tmp_path.iterdir())) == 1


def test_padded_teacher_is_allowed_and_reported(project: ProjectLayout) -> None:
    padded(project)
    assert "512 rows (teacher)" in asked(project, with_teacher(project))[0]


def no_weights(project: ProjectLayout) -> None:
    (project.root / "teacher" / "model.safetensors").unlink()


def cut_weights(project: ProjectLayout) -> None:
    path = project.root / "teacher" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def nan_weights(project: ProjectLayout) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(project.root / "teacher")
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = torch.nan
    model.save_pretrained(project.root / "teacher")


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (nothing, {"teacher": None}, "train.distill.teacher: found null"),
        (nothing, {"teacher": "nowhere"}, "nowhere: no such directory"),
        (nothing, {"top_k": 400}, "train.distill.top_k: 400"),
        (other_tokenizer, {}, "'quite another'.*ratchet generate"),
        (no_weights, {}, "no weights"),
        (cut_weights, {}, "model.safetensors"),
        (nan_weights, {}, "is not finite"),
        (short_context, {}, "reads at most 16"),
    ],
    ids=["no-teacher", "no-directory", "top-k", "tokenizer", "no-weights", "cut-weights", "nan-weights", "context"],
)
def test_what_cannot_teach_is_refused(
    project: ProjectLayout, spoil: Any, changes: dict[str, Any], message: str
) -> None:
    spoil(project)
    with pytest.raises(InputError, match=message):
        asked(project, with_teacher(project, **changes))
    assert not project.distill.exists()
    assert not project.distillation_shards.exists()
