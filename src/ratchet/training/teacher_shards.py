"""Asking a teacher about all training rows, shard by shard; what is sealed is not asked again."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.data.batches import Rows, micro_batches
from ratchet.errors import DamagedError, MemoryExhaustedError
from ratchet.models import oom
from ratchet.models.teacher import Said, Teacher
from ratchet.storage import files
from ratchet.training import safetensors_writer
from ratchet.training.distillation import KIND, Plan

SHARD = "distill-shard"
TOLD_EVERY_S = 30.0

Progress = Callable[[str], None]


@dataclass
class Shards:
    """The shards of one teaching, in a folder of their own until all are there."""

    folder: Path
    plan: Plan

    def missing(self) -> list[tuple[str, range]]:
        """Those that are not there, or not whole: a damaged one is made again."""
        return [(name, rows) for name, rows in self.plan.shards if self._entry(name) is None]

    def write(self, teacher: Teacher, rows: Rows, micro_batch_rows: int, progress: Progress) -> None:
        """Ask about every row of the shards that are missing, and seal each as soon as it is complete.

        Raises:
            DataError: the teacher answers with NaN.
            MemoryExhaustedError: it cannot read even one row.
        """
        left = self.missing()
        told = _Told(progress, sum(len(span) for _, span in left))
        for name, span in left:
            tensors = self._asked(teacher, rows, span, micro_batch_rows, told)
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                safetensors_writer.write(scratch / name, tensors)

    def gather(self, directory: Path) -> dict[str, files.Entry]:
        """Give all shards a second name in a directory; returns what is known of the files."""
        found = {}
        for name, _ in self.plan.shards:
            entry = self._entry(name)
            if entry is None:
                raise DamagedError(f"{self.folder / name}: not whole any more; run `ratchet distill` again")
            files.link_or_copy(self.folder / name / name, directory / name)
            found[name] = entry
        return found

    def take_over(self, directory: Path) -> None:
        """Use the shards of a sealed teaching that is the same but for its card."""
        files.verify(directory, KIND)
        for name, _ in self.missing():
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                files.link_or_copy(directory / name, scratch / name)

    def _entry(self, name: str) -> files.Entry | None:
        try:
            return files.verify(self.folder / name, SHARD).files[name]
        except (DamagedError, KeyError):
            return None

    def _asked(
        self, teacher: Teacher, rows: Rows, span: range, micro_batch_rows: int, told: "_Told"
    ) -> dict[str, Tensor]:
        """Rows of like length together, the longest first; back in order."""
        lengths = [rows.tokens([row]) for row in span]
        said: dict[int, tuple[Tensor, Tensor]] = {}
        sums = torch.zeros(2, dtype=torch.float64)
        for piece in micro_batches(list(span), lengths, micro_batch_rows):
            for some, answer in _fitting(teacher, rows, piece):
                sums += torch.tensor([answer.loss, answer.left_out], dtype=torch.float64)
                counts = [rows.trained([row]) for row in some]
                parts = zip(answer.tokens.split(counts), answer.log_probabilities.split(counts), strict=True)
                said |= dict(zip(some, parts, strict=True))
            told.rows(len(piece))
        counts = torch.tensor([0, *(len(said[row][0]) for row in span)])
        return {
            "tokens": torch.cat([said[row][0] for row in span]),
            "log_probabilities": torch.cat([said[row][1] for row in span]),
            "offsets": counts.cumsum(0),
            "sums": sums,
        }


def _fitting(teacher: Teacher, rows: Rows, piece: list[int]) -> list[tuple[list[int], Said]]:
    """Half as many at a time where memory does not suffice."""
    try:
        return [(piece, teacher.say(rows, piece))]
    except Exception as error:
        if not oom.is_exhausted(error):
            raise
    oom.release()
    if len(piece) == 1:
        raise MemoryExhaustedError(
            f"train.distill.teacher: memory does not suffice for training row {piece[0]} of {rows.tokens(piece)} "
            "tokens; set train.distill.quantization: nf4, a smaller prepare.max_tokens, or take a smaller teacher"
        )
    half = len(piece) // 2
    return [*_fitting(teacher, rows, piece[:half]), *_fitting(teacher, rows, piece[half:])]


class _Told:
    """How far it is, now and then."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self.begun = self.last = time.monotonic()

    def rows(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        now = time.monotonic()
        if now - self.last >= TOLD_EVERY_S:
            self.last = now
            rate = self.done / (now - self.begun)
            left_s = (self.total - self.done) / rate
            self.progress(f"{self.done:,} of {self.total:,} rows, {rate:,.1f} rows/s, {left_s / 60:,.0f} min left")
