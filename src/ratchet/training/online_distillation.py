"""The teacher in the memory of a worker, which asks it at every micro-batch (train.distill.asked: during)."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import base_model, teacher_reference, vocabulary
from ratchet.models.loss import SequenceBatch, require_packing_isolation
from ratchet.models.teacher import OnlineTeacher, OnlineTeacherTargets, TeacherCandidate, TeacherModel, inspect_teacher
from ratchet.models.teacher_reference import KEY
from ratchet.runs.directory import RunSpec, TrainingLaunchSpec
from ratchet.storage import digests


def find_teacher(spec: RunSpec, launch: TrainingLaunchSpec, rows: TokenRows) -> TeacherCandidate | None:
    """The teacher that the run was started with, looked at before anything is loaded; None where none is to stay.

    Args:
        spec: of the run.
        launch: where base and teacher lie.
        rows: the training split.

    Raises:
        BaseModelError: it is not there, damaged, or has changed since the run was started.
        SettingsError: its tokenizer is another, or it has fewer tokens than train.distill.top_k.
        DataError: rows are too long for it.
    """
    if launch.teacher_path is None or launch.teacher_files is None:
        return None
    path, base = Path(launch.teacher_path), launch.base
    if not path.is_dir():
        raise BaseModelError(f"{KEY}: {path}: no such directory; bring it back: it is asked at every step")
    teacher_reference.require_files(path, launch.teacher_files)
    if digests.hash_files(launch.teacher_files) != spec.teaching:
        raise BaseModelError(f"{KEY}: {path} is not the teacher of run {spec.run_id}; repeat `ratchet train`")
    tokenizer = base_model.open_tokenizer(Path(launch.base_path), base.remote_code)
    vocabulary.add_tokens(tokenizer, base.added_tokens)
    teacher = inspect_teacher(path, str(path), tokenizer, spec.train.distill)
    teacher.require_length(rows)
    return teacher


class OnlineTeacherReader:
    """A teacher that is there, for batches of training rows."""

    def __init__(self, teacher: TeacherCandidate, settings: Train, rows: TokenRows, device: torch.device) -> None:
        """Load it.

        Args:
            teacher: to be loaded.
            settings: section train.
            rows: the training split.
            device: where student and teacher compute.

        Raises:
            SettingsError: it cannot be held as train.distill says, or would mix the rows of a pack.
            BaseModelError: its files are damaged.
        """
        self.model = TeacherModel(teacher, settings, device).model
        self._teacher = OnlineTeacher(self.model, teacher.tokens, settings.distill, teacher.path)
        self._rows = rows
        pack = BatchPlan(rows.lengths, settings).shared_sequence()
        if pack:
            try:
                require_packing_isolation(self.model, rows, pack, device)
            except SettingsError as error:
                raise SettingsError(f"{KEY}: {teacher.path}: {error}") from None

    def of(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> OnlineTeacherTargets:
        """Let it read a micro-batch.

        Args:
            sequences: the rows of each sequence.
            batch: the same as tensors.
        """
        rows = [row for sequence in sequences for row in sequence]
        ends = list(accumulate(self._rows.trained([row]) for row in rows))
        return self._teacher.lesson(batch, lambda position: rows[bisect_right(ends, position)])
