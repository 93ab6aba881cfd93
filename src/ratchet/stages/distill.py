"""Ask a larger model about the training rows: what it says is sealed, and read while a smaller one is trained.

Where it is asked during training, there is nothing to seal: it is looked at, and what it will take is said.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ratchet.config.schema import Settings
from ratchet.config.units import format_bytes
from ratchet.data import token_files
from ratchet.data.batches import TokenRows
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.models import base_model, loading, model_spec, teacher_reference, vocabulary
from ratchet.models.memory import capacity
from ratchet.models.memory import forecast as simulation
from ratchet.models.model_spec import ModelSpec
from ratchet.models.teacher import TeacherCandidate, TeacherModel, describe_embedding_padding, inspect_teacher
from ratchet.models.teacher_reference import KEY
from ratchet.storage import digests, disk, files
from ratchet.storage.html import format_count
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import CARD, DatasetCard, DistillationCard
from ratchet.training import microbatch_budget
from ratchet.training.distillation import (
    KIND,
    TeacherShardPlan,
    TeacherShardWriter,
    compute_content_digest,
    read_shard_sums,
)

Progress = Callable[[str], None]


def distill(layout: ProjectLayout, settings: Settings, forecast: bool, progress: Progress) -> str:
    """Run the stage: say how large it will be, ask about what is not sealed yet, seal the whole.

    Args:
        forecast: only say how large it will be.
        progress: told a line now and then.

    Raises:
        SettingsError: no teacher is named, its tokenizer is another, or its weights need more memory than there is.
        BaseModelError: there is no such model, or it is damaged.
        DataError: rows are too long for it, or it answers with NaN.
        OSError: the disk has no room for it.
    """
    if settings.train.distill.teacher is None:
        raise SettingsError(
            f"{KEY}: null: there is nobody to ask; name the directory of a model with the same tokenizer"
        )
    base, data = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    files.verify_sealed(layout.data, "data")
    path = teacher_reference.teacher_directory(layout, settings.train)
    found = inspect_teacher(path, settings.train.distill.teacher, _load_tokenizer(layout, base), settings.train.distill)
    rows = token_files.load_rows(layout.data, "train")
    found.require_length(rows)
    plan = TeacherShardPlan.of(rows)
    loading.use_threads(settings.machine.threads)
    if settings.train.distill.stays:
        return _describe_online_teacher(layout, settings, found, base, forecast)
    progress(_describe_size(layout, settings, found, plan))
    if forecast:
        return "nothing was computed (--forecast)"
    card = _build_card(layout, settings, found, base, data, plan)
    if (before := _load_sealed(layout)) == card.model_copy(update=_result_fields(before)):
        return f"{_describe(before)}\n  made before, taken as it is"
    shards = _open_shards(layout, card, before, plan)
    if shards.missing():
        disk.require_space(layout.experiments, plan.bytes_of(_kept_top_k(settings)))
        _query_teacher(settings, found, rows, shards, progress)
    return _describe(_seal_shards(layout, card, shards))


def _load_tokenizer(layout: ProjectLayout, base: BaseCard) -> Any:
    """Of the base, with its added tokens."""
    tokenizer = base_model.open_tokenizer(base_model.locate(layout, base), base.remote_code)
    vocabulary.add_tokens(tokenizer, base.added_tokens)
    return tokenizer


def _describe_online_teacher(
    layout: ProjectLayout, settings: Settings, found: TeacherCandidate, base: BaseCard, forecast: bool
) -> str:
    """What there is to be said of a teacher that training itself will ask; with `forecast` what memory it takes."""
    text = (
        f"teacher {settings.train.distill.teacher}: {found.blueprint.parameters:,} parameters, asked during training "
        "(train.distill.asked: during)\n  nothing is to be done before: `ratchet train` loads it beside the student"
    )
    if layout.distill.exists():
        text += f"\n  {layout.distill} is of a teacher that was asked before training: it is not read"
    if said := found.padding(_load_base_spec(layout, base)):
        text += f"\n  {said}"
    return f"{text}\n  {_describe_memory(layout, settings, found, base)}" if forecast else text


def _describe_memory(layout: ProjectLayout, settings: Settings, found: TeacherCandidate, base: BaseCard) -> str:
    """What a training needs with the teacher in memory, and without."""
    device, train = loading.pick_device(settings.machine.device), settings.train
    plan = _load_base_spec(layout, base)
    work = microbatch_budget.make_work_estimator(layout.data, device, found.blueprint)(settings)
    peaks = []
    for one in (work, replace(work, teacher=None)):
        peaks.append(simulation.forecast(plan, train, settings.machine, one).needed_bytes(work.sharing))
    weights = found.weight_bytes(train.distill, loading.pick_dtype(train.compute_dtype, device))
    at_hand = capacity.measure_device(device).available_bytes // work.sharing
    return (
        f"memory for {work.rows} rows of {work.row_tokens:,} tokens at a time, by the forecast: "
        f"{format_bytes(peaks[0])} on {device.type}, "
        f"{format_bytes(peaks[1])} without the teacher (its weights: about {format_bytes(weights)}); "
        f"{format_bytes(at_hand)} at hand\n  nothing was computed (--forecast)"
    )


def _load_base_spec(layout: ProjectLayout, base: BaseCard) -> ModelSpec:
    return model_spec.load(base_model.locate(layout, base), base.remote_code)


def _describe_size(layout: ProjectLayout, settings: Settings, found: TeacherCandidate, plan: TeacherShardPlan) -> str:
    """The forecast, in words."""
    top_k = _kept_top_k(settings)
    device = loading.pick_device(settings.machine.device)
    weights = found.weight_bytes(settings.train.distill, loading.pick_dtype(settings.train.compute_dtype, device))
    free = capacity.disk_free_bytes(layout.experiments)
    return (
        f"teacher {settings.train.distill.teacher}: {found.blueprint.parameters:,} parameters, weights about "
        f"{format_bytes(weights)} on {device.type} "
        f"({format_bytes(capacity.measure_device(device).available_bytes)} at hand)\n"
        f"  {plan.rows:,} rows, {plan.positions:,} answer tokens x {top_k} tokens: "
        f"{format_bytes(plan.bytes_of(top_k))} on disk ({format_bytes(free)} free), "
        f"in {format_count(len(plan.borders) - 1, 'shard')}"
    )


def _build_card(
    layout: ProjectLayout,
    settings: Settings,
    found: TeacherCandidate,
    base: BaseCard,
    data: DatasetCard,
    plan: TeacherShardPlan,
) -> DistillationCard:
    """What will be sealed, without what is only known then."""
    wanted = settings.train.distill
    device = loading.pick_device(settings.machine.device)
    return DistillationCard(
        digest="",
        teacher=str(wanted.teacher),
        teacher_digest=digests.hash_files(teacher_reference.digest_files(found.path)),
        data_digest=data.digest,
        quantization=wanted.quantization,
        compute_dtype=str(loading.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        temperature=wanted.temperature,
        top_k=_kept_top_k(settings),
        rows=plan.rows,
        positions=plan.positions,
        tokens=found.tokens,
        teacher_rows=found.rows,
        base_rows=found.base_rows(_load_base_spec(layout, base)),
        teacher_parameters=found.blueprint.parameters,
        base_parameters=base.parameters,
        teacher_loss=0.0,
        left_out=0.0,
    )


def _kept_top_k(settings: Settings) -> int:
    """How many tokens are kept: on disk there is always a number (config_train.Distill)."""
    return settings.train.distill.top_k or 0


def _result_fields(made: DistillationCard | None) -> dict[str, Any]:
    """What is only known at the end."""
    return {name: getattr(made, name) for name in ("digest", "teacher_loss", "left_out")} if made else {}


def _load_sealed(layout: ProjectLayout) -> DistillationCard | None:
    """What is sealed; None when there is nothing, or nothing whole."""
    try:
        files.verify_sealed(layout.distill, KIND)
        return DistillationCard.load(layout.distill / CARD)
    except DamagedFileError:
        return None


def _open_shards(
    layout: ProjectLayout, card: DistillationCard, before: DistillationCard | None, plan: TeacherShardPlan
) -> TeacherShardWriter:
    """Those of this very teaching; where the teacher has only another name now, those that are sealed."""
    identity = card.model_dump(mode="json", exclude={"teacher"})
    shards = TeacherShardWriter(layout.teachings / digests.hash_json(identity)[: digests.SHORT], plan)
    if before is not None and before.model_copy(update={"teacher": card.teacher}) == card.model_copy(
        update=_result_fields(before)
    ):
        shards.take_over(layout.distill)
    return shards


def _query_teacher(
    settings: Settings, found: TeacherCandidate, rows: TokenRows, shards: TeacherShardWriter, progress: Progress
) -> None:
    there = len(shards.plan.borders) - 1 - len(shards.missing())
    if there:
        progress(f"{format_count(there, 'shard')} {'is' if there == 1 else 'are'} there already")
    device = loading.pick_device(settings.machine.device)
    found.require_room(settings.train, device)
    teacher = TeacherModel(found, settings.train, device)
    shards.write(teacher, rows, settings.machine.micro_batch_rows, progress)


def _seal_shards(layout: ProjectLayout, card: DistillationCard, shards: TeacherShardWriter) -> DistillationCard:
    """Put the shards together under a card; the folder that they were made in is gone then."""
    known: dict[str, files.Entry] = {}
    with files.sealed_directory(layout.distill, KIND, known) as scratch:
        known |= shards.gather(scratch)
        loss, left_out = (sum(read_shard_sums(scratch / name) for name in known) / max(1, card.positions)).tolist()
        results = {
            "digest": compute_content_digest(known),
            "teacher_loss": round(loss, 6),
            "left_out": round(left_out, 9),
        }
        card = card.model_copy(update=results)
        card.save(scratch / CARD)
    files.remove_sealed(shards.folder)
    return card


def _describe(card: DistillationCard) -> str:
    text = (
        f"teaching {card.digest[: digests.SHORT]}: {card.rows:,} rows, {card.positions:,} answer tokens, the "
        f"{card.top_k} most probable tokens of each at temperature {card.temperature:g}\n"
        f"  the teacher's own loss on the answers: {card.teacher_loss:.4f} nats a token; it has "
        f"{card.teacher_parameters:,} parameters, the base {card.base_parameters:,} "
        f"({card.base_parameters / card.teacher_parameters:.1%})\n"
        f"  beyond the {card.top_k} lie {card.left_out:.2%} of the probability, taught as one sum"
    )
    if said := describe_embedding_padding(card.teacher_rows, card.base_rows, card.tokens):
        text += f"\n  {said}"
    return text
