"""The teacher in the memory of a worker, which runs it at every micro-batch (train.distill.mode: online)."""

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
    """Check the teacher of an online distillation before anything is loaded; return None without one.

    Args:
        spec: the run.
        launch: paths of base and teacher.
        rows: the training split.

    Raises:
        BaseModelError: the teacher is missing, damaged, or has changed since the run was started.
        SettingsError: it has another tokenizer, or fewer tokens than train.distill.top_k.
        DataError: rows are too long for it.
    """
    if launch.teacher_path is None or launch.teacher_files is None:
        return None
    path, base = Path(launch.teacher_path), launch.base
    if not path.is_dir():
        raise BaseModelError(f"{KEY}: {path}: no such directory; restore it: training needs it at every step")
    teacher_reference.require_files(path, launch.teacher_files)
    if digests.hash_files(launch.teacher_files) != spec.distillation_digest:
        raise BaseModelError(f"{KEY}: {path} is not the teacher of run {spec.run_id}; run `ratchet train` again")
    tokenizer = base_model.open_tokenizer(Path(launch.base_path), base.remote_code)
    vocabulary.add_tokens(tokenizer, base.added_tokens)
    teacher = inspect_teacher(path, str(path), tokenizer, spec.train.distill)
    teacher.require_length(rows)
    return teacher


class OnlineTeacherReader:
    """Computes the distillation targets of batches of training rows with a teacher in memory."""

    def __init__(self, teacher: TeacherCandidate, settings: Train, rows: TokenRows, device: torch.device) -> None:
        """Load the teacher.

        Args:
            teacher: the teacher to load.
            settings: section train.
            rows: the training split.
            device: device of student and teacher.

        Raises:
            SettingsError: it cannot be loaded as train.distill requires, or would mix the rows of a pack.
            BaseModelError: its files are damaged.
        """
        self.model = TeacherModel(teacher, settings, device).model
        self._teacher = OnlineTeacher(self.model, teacher.tokens, settings.distill, teacher.path)
        self._rows = rows
        pack = BatchPlan(rows.lengths, settings).find_multi_row_sequence()
        if pack:
            try:
                require_packing_isolation(self.model, rows, pack, device)
            except SettingsError as error:
                raise SettingsError(f"{KEY}: {teacher.path}: {error}") from None

    def get_targets(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> OnlineTeacherTargets:
        """Run the teacher on a micro-batch.

        Args:
            sequences: rows of each sequence.
            batch: the same as tensors.
        """
        rows = [row for sequence in sequences for row in sequence]
        ends = list(accumulate(self._rows.count_trained([row]) for row in rows))
        return self._teacher.compute_targets(batch, lambda position: rows[bisect_right(ends, position)])
