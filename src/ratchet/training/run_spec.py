"""What settings, data and base mean as a run, and where its worker finds them. Imports no torch: verbs ask it too."""

from ratchet.config.schema import Settings
from ratchet.models import base_model, teacher_reference
from ratchet.runs.directory import RunSpec, TrainingLaunchSpec
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard


def build_run_spec(layout: ProjectLayout, settings: Settings) -> RunSpec:
    """Which run these settings, this data and this base mean. Raises DataError where a stage before it has not run, or
    the teacher was not asked what the settings say; BaseModelError where one that is to stay is gone."""
    data, base = DatasetCard.load(layout.dataset_card), BaseCard.load(layout.base_card)
    train, teaching = teacher_reference.resolve_teacher(settings.train, layout, data.digest)
    return RunSpec(train=train, data_digest=data.digest, base_digest=base.digest, teaching=teaching)


def build_launch(layout: ProjectLayout, settings: Settings) -> TrainingLaunchSpec:
    """How and where a worker of it runs, now.

    Raises like `build_run_spec`, and BaseModelError where the base is gone.
    """
    base, distill = BaseCard.load(layout.base_card), settings.train.distill
    teacher = teacher_reference.teacher_directory(layout, settings.train) if distill.stays else None
    return TrainingLaunchSpec(
        machine=settings.machine,
        base_path=str(base_model.locate(layout, base)),
        data_path=str(layout.data),
        teaching_path=str(layout.distill) if distill.teacher is not None and teacher is None else None,
        teacher_path=None if teacher is None else str(teacher),
        teacher_files=None if teacher is None else teacher_reference.digest_files(teacher),
        base=base,
    )
