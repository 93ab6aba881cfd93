"""Builds the RunSpec and the launch file of a training from settings, data and base. Imports no torch."""

from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.models import base_model, start_adapter, teacher_reference
from ratchet.runs.directory import RunSpec, TrainingLaunchSpec
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
