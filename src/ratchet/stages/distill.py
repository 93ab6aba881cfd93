"""Stage distill: compute a teacher's probabilities for the training rows and seal them for stage train.

If the teacher runs during training (train.distill.mode: online), this stage only checks the teacher, and with
--forecast reports the memory that the teacher needs.
"""

from collections.abc import Callable
from dataclasses import replace

from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes, format_count
from ratchet.data import token_files
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.models import base_model, loading, model_spec, teacher_reference, vocabulary
from ratchet.models.memory import capacity
from ratchet.models.memory import forecast as memory_forecast
from ratchet.models.model_spec import ModelSpec
from ratchet.models.teacher import TeacherCandidate, TeacherModel, inspect_teacher
from ratchet.models.teacher_reference import KEY
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, Record
from ratchet.storage.records.data import DISTILLATION_CARD, DatasetCard, DistillationCard
from ratchet.training import microbatch_budget
from ratchet.training.distillation import (
    KIND,
    TeacherShardPlan,
    TeacherShardWriter,
    compute_content_digest,
    read_shard_sums,
)

RESULT_FIELDS = ("digest", "teacher_loss", "left_out")
"""Fields of a card that are known only after the computation."""


class DistillResult(Record):
    """Result of the stage."""

    card: DistillationCard | None
    """Card of the sealed teacher outputs; None if nothing was computed."""
    was_computed_before: bool = False
    text: tuple[str, ...] = ()
    """If nothing was computed: lines about the disk space and memory that the teacher needs."""


def distill(
    project: Project, *, forecast: bool = False, on_progress: Callable[[str], None] = ignore_progress
) -> DistillResult:
    """Run the stage: compute the teacher's probabilities for all training rows that lack them, and seal them.

    Args:
        project: section train.distill of its settings names the teacher.
        forecast: only report the disk space and memory that the teacher needs.
        on_progress: receives lines about the size.

    Raises:
        SettingsError: no teacher is named, its tokenizer differs, or its weights do not fit into memory.
        BaseModelError: the teacher's directory is missing or damaged.
        DataError: rows are too long for the teacher, or it returns NaN.
        LockHeldError: another process runs this stage.
        OSError: the disk is full.
    """
    layout, settings = project.layout, project.settings
    with project.lock("distill"):
        if settings.train.distill.teacher is None:
            raise SettingsError(f"{KEY}: found null; expected the directory of a model with the same tokenizer")
        base, data = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
        files.verify_sealed(layout.data, "data")
        path = teacher_reference.teacher_directory(layout, settings.train)
        tokenizer = base_model.open_tokenizer(base_model.locate(layout, base), base.remote_code)
        vocabulary.add_tokens(tokenizer, base.added_tokens)
        teacher = inspect_teacher(path, settings.train.distill.teacher, tokenizer, settings.train.distill)
        rows = token_files.load_rows(layout.data, "train")
        teacher.require_length(rows)
        plan = TeacherShardPlan.from_rows(rows)
        loading.use_threads(settings.machine.threads)
        if settings.train.distill.is_online:
            text = _describe_online_teacher(layout, settings, teacher, base, forecast)
            return DistillResult(card=None, text=tuple(text.split("\n")))
        on_progress(_describe_size(layout, settings, teacher, plan))
        if forecast:
            return DistillResult(card=None, text=("nothing was computed (--forecast)",))
        card = _build_card(layout, settings, teacher, base, data, plan)
        identity = digests.hash_json(card.model_dump(mode="json", exclude={"teacher"}))
        shards = TeacherShardWriter(layout.distillation_shards / identity[: digests.SHORT], plan)
        if (before := _load_sealed(layout)) is not None:
            finished = card.model_copy(update={name: getattr(before, name) for name in RESULT_FIELDS})
            if before == finished:
                return DistillResult(card=before, was_computed_before=True)
            if before.model_copy(update={"teacher": card.teacher}) == finished:  # only the teacher's name has changed
                shards.reuse(layout.distill)
        if missing := shards.list_missing():
            files.require_space(layout.experiments, plan.size_bytes(_kept_top_k(settings)))
            if computed := len(plan.boundaries) - 1 - len(missing):
                on_progress(f"{format_count(computed, 'shard')} {'is' if computed == 1 else 'are'} computed already")
            device = loading.pick_device(settings.machine.device)
            teacher.require_memory(settings.train, device)
            model = TeacherModel(teacher, settings.train, device)
            shards.write(model, rows, settings.machine.micro_batch_size)
        return DistillResult(card=_seal_shards(layout, card, shards))


def _describe_online_teacher(
    layout: ProjectLayout, settings: Settings, teacher: TeacherCandidate, base: BaseCard, forecast: bool
) -> str:
    """Describe a teacher that runs during training; with `forecast`, also the memory that it needs."""
    text = (
        f"teacher {settings.train.distill.teacher}: {teacher.spec.parameters:,} parameters, runs during training "
        "(train.distill.mode: online)\n  nothing to compute now: `ratchet train` loads it together with the student"
    )
    if layout.distill.exists():
        text += f"\n  {layout.distill} is from a teacher that ran before training: it is not used"
    base_spec = _load_base_spec(layout, base)
    if padding := teacher.describe_padding(base_spec):
        text += f"\n  {padding}"
    if not forecast:
        return text
    device, train = loading.pick_device(settings.machine.device), settings.train
    work = microbatch_budget.make_work_estimator(layout.data, device, teacher.spec)(settings)
    with_teacher, without_teacher = (
        memory_forecast.forecast(base_spec, train, settings.machine, workload).needed_bytes(work.local_ranks)
        for workload in (work, replace(work, teacher=None))
    )
    weights = teacher.weight_bytes(train.distill, loading.pick_dtype(train.compute_dtype, device))
    available = capacity.measure_device(device).available_bytes // work.local_ranks
    return (
        f"{text}\n  memory for {work.rows} rows of {work.row_tokens:,} tokens at a time, by the forecast: "
        f"{format_bytes(with_teacher)} on {device.type}, {format_bytes(without_teacher)} without the teacher "
        f"(its weights: about {format_bytes(weights)}); "
        f"{format_bytes(available)} available\n  nothing was computed (--forecast)"
    )


def _load_base_spec(layout: ProjectLayout, base: BaseCard) -> ModelSpec:
    return model_spec.load(base_model.locate(layout, base), base.remote_code)


def _describe_size(layout: ProjectLayout, settings: Settings, teacher: TeacherCandidate, plan: TeacherShardPlan) -> str:
    """Describe the memory and the disk space that the teacher needs."""
    top_k = _kept_top_k(settings)
    device = loading.pick_device(settings.machine.device)
    weights = teacher.weight_bytes(settings.train.distill, loading.pick_dtype(settings.train.compute_dtype, device))
    free = capacity.disk_free_bytes(layout.experiments)
    return (
        f"teacher {settings.train.distill.teacher}: {teacher.spec.parameters:,} parameters, weights about "
        f"{format_bytes(weights)} on {device.type} "
        f"({format_bytes(capacity.measure_device(device).available_bytes)} available)\n"
        f"  {plan.rows:,} rows, {plan.positions:,} answer tokens x {top_k} tokens: "
        f"{format_bytes(plan.size_bytes(top_k))} on disk ({format_bytes(free)} free), "
        f"in {format_count(len(plan.boundaries) - 1, 'shard')}"
    )


def _build_card(
    layout: ProjectLayout,
    settings: Settings,
    teacher: TeacherCandidate,
    base: BaseCard,
    data: DatasetCard,
    plan: TeacherShardPlan,
) -> DistillationCard:
    """Build the card. The fields that are known only after the computation are empty."""
    distill = settings.train.distill
    device = loading.pick_device(settings.machine.device)
    return DistillationCard(
        digest="",
        teacher=str(distill.teacher),
        teacher_digest=digests.hash_files(teacher_reference.digest_files(teacher.path)),
        data_digest=data.digest,
        quantization=distill.quantization,
        compute_dtype=str(loading.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        temperature=distill.temperature,
        top_k=_kept_top_k(settings),
        rows=plan.rows,
        positions=plan.positions,
        tokens=teacher.tokens,
        teacher_rows=teacher.rows,
        base_rows=teacher.base_rows(_load_base_spec(layout, base)),
        teacher_parameters=teacher.spec.parameters,
        base_parameters=base.parameters,
        teacher_loss=0.0,
        left_out=0.0,
    )


def _kept_top_k(settings: Settings) -> int:
    """Return the number of tokens stored per position; 0 if train.distill.top_k is null (only in mode online)."""
    return settings.train.distill.top_k or 0


def _load_sealed(layout: ProjectLayout) -> DistillationCard | None:
    """Load the card of the sealed teacher outputs; None if the outputs do not exist or are damaged."""
    try:
        files.verify_sealed(layout.distill, KIND)
        return DistillationCard.load(layout.distill / DISTILLATION_CARD)
    except DamagedFileError:
        return None


def _seal_shards(layout: ProjectLayout, card: DistillationCard, shards: TeacherShardWriter) -> DistillationCard:
    """Gather the shards in the sealed output with their card, and remove the folder in which they were computed."""
    entries: dict[str, files.Entry] = {}
    with files.sealed_directory(layout.distill, KIND, entries) as scratch:
        entries |= shards.gather(scratch)
        loss, left_out = (sum(read_shard_sums(scratch / name) for name in entries) / max(1, card.positions)).tolist()
        results = {
            "digest": compute_content_digest(entries),
            "teacher_loss": round(loss, 6),
            "left_out": round(left_out, 9),
        }
        card = card.model_copy(update=results)
        card.save(scratch / DISTILLATION_CARD)
    files.remove_sealed(shards.folder)
    return card
