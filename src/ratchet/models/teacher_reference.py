"""Which teacher a training has: where it lies, and its identity, by content. Imports no torch: verbs ask it too."""

from functools import lru_cache
from pathlib import Path

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DataError
from ratchet.models import base_model
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import AGAIN, CARD, DistillationCard

KEY = "train.distill.teacher"

Stamp = tuple[str, int, int, int]
"""Name, bytes, time of the last change (ns) and inode of a file."""


def teacher_directory(layout: ProjectLayout, train: Train) -> Path:
    """Directory of the teacher that is named.

    Raises:
        BaseModelError: there is none.
    """
    named = str(train.distill.teacher)
    path = (layout.root / Path(named).expanduser()).resolve()
    if not path.is_dir():
        raise BaseModelError(
            f"{KEY}: {named}: no such directory ({path}); name one with a model in Hugging Face format"
        )
    return path


def digest_files(path: Path) -> dict[str, str]:
    """SHA-256 of every file that makes up the teacher: weights, configuration, tokenizer.

    Raises:
        BaseModelError: config, weights or tokenizer are missing.
    """
    stats = [(name, (path / name).stat()) for name in base_model.list_model_files(path)]
    stamps = tuple((name, one.st_size, one.st_mtime_ns, one.st_ino) for name, one in stats)
    return dict(_digest_unchanged_files(path, stamps))


@lru_cache(maxsize=4)
def _digest_unchanged_files(path: Path, stamps: tuple[Stamp, ...]) -> tuple[tuple[str, str], ...]:
    """Read once by a process, as long as the files look the same: a sweep asks for every trial."""
    return tuple((name, digests.hash_file(path / name)) for name, *_ in stamps)


def require_files(path: Path, expected: dict[str, str]) -> None:
    """Compare the bytes at hand with those that a run was started with.

    Raises:
        BaseModelError: a file differs, is gone, or is new.
    """
    found = digest_files(path)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            state = "missing" if name not in found else "new" if name not in expected else "changed"
            raise BaseModelError(
                f"{KEY}: {path / name}: {state} since this run was started, so it would go on with another teacher; "
                "bring the file back, or start again: another teacher is another run"
            )


def resolve_teacher(train: Train, layout: ProjectLayout, data_digest: str) -> tuple[Train, str | None]:
    """The settings as a run's spec holds them, and the digest of what decides about the teacher's part in it: of what
    it has said, or, if it is asked during training, of its files. None without a teacher.

    Where the teacher lies does not change what is learned, so the spec has the beginning of its digest instead.

    Args:
        train: section train.
        layout: of the project.
        data_digest: of the prepared data.

    Raises:
        DataError: a teacher is named that is asked before training, and was not, or about other rows, or otherwise
            than params.yaml says now.
        BaseModelError: one that is asked during training is not there, or no model.
    """
    settings = train.distill
    if settings.teacher is None:
        return train.model_copy(update={"distill": type(settings)()}), None
    if settings.stays:
        teaching = teacher = digests.hash_files(digest_files(teacher_directory(layout, train)))
    else:
        card = _read_matching_teaching(train, layout.distill, data_digest)
        teaching, teacher = card.digest, card.teacher_digest
    distill = settings.model_copy(update={"teacher": teacher[: digests.SHORT]})
    return train.model_copy(update={"distill": distill}), teaching


def _read_matching_teaching(train: Train, directory: Path, data_digest: str) -> DistillationCard:
    """Of what the teacher has said, if it is what the settings ask for."""
    settings = train.distill
    if not (directory / CARD).is_file():
        raise DataError(f"{KEY}: {settings.teacher}, but it was not asked yet ({directory}): {AGAIN}")
    card = DistillationCard.load(directory / CARD)
    if card.data_digest != data_digest:
        raise DataError(f"{directory}: the teacher was asked about other data than is prepared now; {AGAIN}")
    wanted = {name: getattr(settings, name) for name in ("teacher", "quantization", "temperature", "top_k")}
    for name, value in wanted.items():
        if (found := getattr(card, name)) != value:
            raise DataError(f"{directory}: made with {name} {found}, train.distill.{name} is {value} now; {AGAIN}")
    return card
