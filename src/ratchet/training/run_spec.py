"""Builds the RunSpec and the launch file of a training from settings, data and base. Imports no torch."""

from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.models import base_model, start_adapter, teacher_reference
from ratchet.models.start_adapter import PinnedStartAdapters, StartChampion
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.log import print_message
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard


def build_run_spec(layout: ProjectLayout, settings: Settings) -> RunSpec:
    """Return the spec of the run that settings, prepared data and base define.

    Raises:
        DataError: an earlier stage has not run, or the teacher's outputs do not match the settings.
        BaseModelError: the teacher of an online distillation is missing.
        SettingsError: the weights of train.init_adapter do not fit the settings or the base.
    """
    data, base = DatasetCard.load(layout.dataset_card), BaseCard.load(layout.base_card)
    train, distillation_digest = resolve_train(layout, settings.train, data.digest, base.digest)
    return RunSpec(
        train=train, data_digest=data.digest, base_digest=base.digest, distillation_digest=distillation_digest
    )


def resolve_train(layout: ProjectLayout, train: Train, data_digest: str, base_digest: str) -> tuple[Train, str | None]:
    """Return section train with digests instead of paths, as a run's spec contains it, and the distillation digest.

    Raises: see `teacher_reference.resolve_teacher` and `start_adapter.resolve`.
    """
    train, distillation_digest = teacher_reference.resolve_teacher(train, layout, data_digest)
    return start_adapter.resolve(layout, train, base_digest), distillation_digest


def pin_champion(layout: ProjectLayout, settings: Settings, records: bool = True) -> Settings:
    """Return the settings of stage train with the directory of an adapter for `train.init_adapter: champion`.

    It is the adapter of the current champion. But a run that began with an earlier champion and is unfinished keeps
    that one. With `records`, the champion is recorded for the run, and reported.

    Raises:
        DataError: there is no champion on this machine, or an earlier stage has not run.
        SettingsError: its adapter does not fit the settings or the base.
    """
    if settings.train.init_adapter != start_adapter.CHAMPION:
        return settings
    plain = build_run_spec(layout, _start_from(settings, None))

    def compute_run_id(champion: StartChampion) -> str:
        train = plain.train.model_copy(update={"init_adapter": champion.digest})
        return plain.model_copy(update={"train": train}).run_id

    pinned = PinnedStartAdapters.load_if_present(layout)
    unfinished = (
        champion
        for run_id, champion in pinned.champions.items()
        if (run := RunPaths(layout.runs / run_id)).root.is_dir()
        and not run.is_finished()
        and compute_run_id(champion) == run_id
    )
    if (champion := next(unfinished, None)) is not None:
        text = "resumes from the champion that it began with, version {}; `ratchet reset {}` starts it again"
    else:
        champion, text = start_adapter.read_champion_start(layout), "starts from the champion, version {}"
    run_id = compute_run_id(champion)
    settings = _start_from(settings, str(start_adapter.locate_champion(layout, champion).path))
    start_adapter.resolve(layout, settings.train, plain.base_digest)  # refuses weights that do not fit
    if records:
        changes = {"champions": pinned.champions | {run_id: champion}, "latest_run": run_id}
        pinned.model_copy(update=changes).save(layout.start_adapters)
        print_message(f"run {run_id} {text.format(champion.version, run_id)}")
    return settings


def _start_from(settings: Settings, init_adapter: str | None) -> Settings:
    return settings.model_copy(update={"train": settings.train.model_copy(update={"init_adapter": init_adapter})})


def build_launch(layout: ProjectLayout, settings: Settings) -> TrainingLaunchSpec:
    """Return the launch file of the run, which defines how and where a worker runs it on this machine.

    Raises:
        DataError: an earlier stage has not run.
        BaseModelError: the base, or the teacher of an online distillation, is missing.
    """
    base, distill = BaseCard.load(layout.base_card), settings.train.distill
    teacher = teacher_reference.teacher_directory(layout, settings.train) if distill.is_online else None
    start = None if settings.train.init_adapter is None else start_adapter.locate(layout, settings.train)
    return TrainingLaunchSpec(
        machine=settings.machine,
        base_path=str(base_model.locate(layout, base)),
        data_path=str(layout.data),
        distillation_path=str(layout.distill) if distill.teacher is not None and teacher is None else None,
        teacher_path=None if teacher is None else str(teacher),
        teacher_files=None if teacher is None else teacher_reference.digest_files(teacher),
        start_path=None if start is None else str(start.path),
        base=base,
    )
