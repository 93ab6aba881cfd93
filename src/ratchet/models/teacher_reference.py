"""Locates the teacher of a distillation and identifies it by its content. This module does not import torch."""

from pathlib import Path

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DataError
from ratchet.models import base_model
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DISTILLATION_CARD, RERUN_HINT, DistillationCard

KEY = "train.distill.teacher"
"""Key path of the setting, for messages."""


def teacher_directory(layout: ProjectLayout, train: Train) -> Path:
    """Return the directory of the configured teacher. Raises BaseModelError if the directory does not exist."""
    setting = str(train.distill.teacher)
    path = (layout.root / Path(setting).expanduser()).resolve()
    if not path.is_dir():
        raise BaseModelError(
            f"{KEY}: {setting}: no such directory ({path}); set a directory with a model in Hugging Face format"
        )
    return path


def digest_files(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of the teacher: weights, configuration, tokenizer.

    Raises BaseModelError if config, weights or tokenizer are missing.
    """
    return digests.hash_unchanged_files(path, base_model.list_model_files(path))


def require_files(path: Path, expected: dict[str, str]) -> None:
    """Compare the teacher's files with the digests recorded at the start of the run.

    Raises BaseModelError if a file differs, is missing, or is new.
    """
    actual = digest_files(path)
    if difference := digests.find_first_difference(expected, actual):
        name, state = difference
        raise BaseModelError(
            f"{KEY}: {path / name}: {state} since the start of this run, which cannot resume with another teacher; "
            "restore the file, or start a new run"
        )


def resolve_teacher(train: Train, layout: ProjectLayout, data_digest: str) -> tuple[Train, str | None]:
    """Return section train as a run's spec contains it, and a digest that identifies the teacher's outputs.

    The second value is the digest of the teacher's files if the teacher is evaluated during training, otherwise that of
    the stored outputs; without a teacher, it is None. The teacher's path does not affect training, so the spec contains
    the first digits of the teacher's digest instead of the path.

    Raises:
        DataError: the stored outputs are missing, or belong to other data or settings.
        BaseModelError: a teacher that is evaluated during training is missing, or is not a model.
    """
    settings = train.distill
    if settings.teacher is None:
        return train.model_copy(update={"distill": type(settings)()}), None
    if settings.is_online:
        distillation_digest = teacher_digest = digests.hash_files(digest_files(teacher_directory(layout, train)))
    else:
        card = _load_matching_card(train, layout.distill, data_digest)
        distillation_digest, teacher_digest = card.digest, card.teacher_digest
    distill = settings.model_copy(update={"teacher": teacher_digest[: digests.SHORT]})
    return train.model_copy(update={"distill": distill}), distillation_digest


def _load_matching_card(train: Train, directory: Path, data_digest: str) -> DistillationCard:
    """Load the card of the stored teacher outputs. Raises DataError if they do not match data and settings."""
    settings = train.distill
    if not (directory / DISTILLATION_CARD).is_file():
        raise DataError(f"{KEY}: {settings.teacher}: found no teacher outputs in {directory}; {RERUN_HINT}")
    card = DistillationCard.load(directory / DISTILLATION_CARD)
    if card.data_digest != data_digest:
        raise DataError(f"{directory}: the teacher outputs belong to other data than the prepared data; {RERUN_HINT}")
    expected = {name: getattr(settings, name) for name in ("teacher", "quantization", "temperature", "top_k")}
    for name, value in expected.items():
        if (actual := getattr(card, name)) != value:
            raise DataError(
                f"{directory}: made with {name} {actual}, but train.distill.{name} is {value}; {RERUN_HINT}"
            )
    return card
