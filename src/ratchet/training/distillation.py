"""What a teacher has said about the training rows, as files: shards of safetensors, sealed and read memory-mapped.

A shard holds some rows of the training split, in order: `tokens` int32 [positions, k], `log_probabilities` float16
[positions, k + 1] (the last: of all other tokens together), `offsets` int64 [rows + 1] (where each row's positions
begin in the shard) and `sums` float64 [2] (the given answers' negative log-likelihood, and the probability left out).
Positions are those that are learned from. Which rows a shard has depends on the rows alone.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratchet.config.train import DistillSettings
from ratchet.data.batches import TokenRows, split_micro_batches
from ratchet.errors import DamagedFileError, DataError, MemoryExhaustedError
from ratchet.models import oom
from ratchet.models.loss import SequenceBatch, StoredTeacherTargets
from ratchet.models.teacher import TeacherModel, TeacherPredictions
from ratchet.storage import digests, files
from ratchet.storage.records.data import CARD, DistillationCard
from ratchet.training import checkpoint

KIND = "distill"
SHARD_POSITIONS = 2**16
"""Of one shard: what a kill can cost; 12.7 MB for 32 tokens."""
MOST_SHARDS = 256
"""Files that training has open; beyond that shards are larger."""


@dataclass(frozen=True)
class TeacherShardPlan:
    """How large the whole will be, and which rows belong to which shard."""

    rows: int
    positions: int
    borders: tuple[int, ...]
    """First row of each shard, and the number of rows."""

    @classmethod
    def of(cls, rows: TokenRows) -> "TeacherShardPlan":
        """Consecutive rows, until a shard has its positions."""
        before = rows.trained_before.tolist()
        target = max(SHARD_POSITIONS, -(-before[-1] // MOST_SHARDS))
        borders = [0]
        for row in range(1, len(rows)):
            if before[row] - before[borders[-1]] >= target:
                borders.append(row)
        return cls(len(rows), before[-1], (*borders, len(rows)))

    @property
    def shards(self) -> Iterator[tuple[str, range]]:
        """Name of each file, and its rows."""
        for number, (first, last) in enumerate(pairwise(self.borders)):
            yield f"shard-{number:05d}.safetensors", range(first, last)

    def bytes_of(self, top_k: int) -> int:
        """On disk."""
        return self.positions * (4 * top_k + 2 * (top_k + 1)) + 8 * (self.rows + 1)


class TeacherShardReader:
    """What the teacher has said, for batches of training rows."""

    def __init__(self, directory: Path, rows: TokenRows, settings: DistillSettings, teaching: str) -> None:
        """Open it; nothing is read but headers.

        Args:
            directory: sealed by `ratchet distill`.
            rows: the training split.
            settings: how much it counts.
            teaching: digest of the shards, as the run's spec has it.

        Raises:
            DamagedFileError: a file is not as it was sealed.
            DataError: it is of other rows, or not what the run began with.
        """
        files.verify_sealed(directory, KIND)
        card = DistillationCard.load(directory / CARD)
        plan = TeacherShardPlan.of(rows)
        if card.digest != teaching or (card.rows, card.positions) != (plan.rows, plan.positions):
            raise DataError(f"{directory}: changed since the run was started; run `ratchet distill`, and repeat")
        self.settings = settings
        self._before: list[int] = rows.trained_before.tolist()
        self._first = list(plan.borders[:-1])
        self._shards = [_map_shard(directory / name) for name, _ in plan.shards]

    def of(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> StoredTeacherTargets:
        """At all learned positions of these sequences of rows, one after the other; `batch`: of the same."""
        device = batch.labels.device
        tokens, values = zip(*(self._row(row) for sequence in sequences for row in sequence), strict=True)
        return StoredTeacherTargets(
            torch.cat(tokens).to(device, torch.int64), torch.cat(values).to(device, torch.float32),
            self.settings.weight, self.settings.temperature, self.settings.direction,
        )  # fmt: skip

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        number = bisect_right(self._first, row) - 1
        begun = self._before[self._first[number]]
        span = slice(self._before[row] - begun, self._before[row + 1] - begun)
        tokens, values = self._shards[number]
        return tokens[span], values[span]


def _map_shard(path: Path) -> tuple[Tensor, Tensor]:
    """Tensors whose pages are read when they are looked at (safetensors maps a file on a CPU)."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as found:
            return found.get_tensor("tokens"), found.get_tensor("log_probabilities")
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path}: unreadable ({error}); run `ratchet distill` again") from None


def read_shard_sums(path: Path) -> Tensor:
    """What is known of a shard beside its contents: float64 [2]."""
    with safe_open(str(path), framework="pt", device="cpu") as found:
        sums: Tensor = found.get_tensor("sums")
    return sums


def compute_content_digest(entries: dict[str, files.Entry]) -> str:
    """Of the shards, by their manifest entries."""
    return digests.hash_files({name: sha for name, (sha, _) in entries.items()})


# Asking a teacher about all training rows, shard by shard; what is sealed is not asked again.

SHARD = "distill-shard"
TOLD_EVERY_S = 30.0

Progress = Callable[[str], None]


@dataclass
class TeacherShardWriter:
    """The shards of one teaching, in a folder of their own until all are there."""

    folder: Path
    plan: TeacherShardPlan

    def missing(self) -> list[tuple[str, range]]:
        """Those that are not there, or not whole: a damaged one is made again."""
        return [(name, rows) for name, rows in self.plan.shards if self._entry(name) is None]

    def write(self, teacher: TeacherModel, rows: TokenRows, micro_batch_rows: int, progress: Progress) -> None:
        """Ask about every row of the shards that are missing, and seal each as soon as it is complete.

        Raises:
            DataError: the teacher answers with NaN.
            MemoryExhaustedError: it cannot read even one row.
        """
        left = self.missing()
        told = _TeacherProgress(progress, sum(len(span) for _, span in left))
        for name, span in left:
            tensors = self._asked(teacher, rows, span, micro_batch_rows, told)
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                checkpoint.write_safetensors(scratch / name, tensors)

    def gather(self, directory: Path) -> dict[str, files.Entry]:
        """Give all shards a second name in a directory; returns what is known of the files."""
        found = {}
        for name, _ in self.plan.shards:
            entry = self._entry(name)
            if entry is None:
                raise DamagedFileError(f"{self.folder / name}: not whole any more; run `ratchet distill` again")
            files.link_or_copy(self.folder / name / name, directory / name)
            found[name] = entry
        return found

    def take_over(self, directory: Path) -> None:
        """Use the shards of a sealed teaching that is the same but for its card."""
        files.verify_sealed(directory, KIND)
        for name, _ in self.missing():
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                files.link_or_copy(directory / name, scratch / name)

    def _entry(self, name: str) -> files.Entry | None:
        try:
            return files.verify_sealed(self.folder / name, SHARD).files[name]
        except (DamagedFileError, KeyError):
            return None

    def _asked(
        self, teacher: TeacherModel, rows: TokenRows, span: range, micro_batch_rows: int, told: "_TeacherProgress"
    ) -> dict[str, Tensor]:
        """Rows of like length together, the longest first; back in order."""
        lengths = [rows.tokens([row]) for row in span]
        said: dict[int, tuple[Tensor, Tensor]] = {}
        sums = torch.zeros(2, dtype=torch.float64)
        for piece in split_micro_batches(list(span), lengths, micro_batch_rows):
            for some, answer in _query_teacher(teacher, rows, piece):
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


def _query_teacher(
    teacher: TeacherModel, rows: TokenRows, piece: list[int]
) -> list[tuple[list[int], TeacherPredictions]]:
    """Half as many at a time where memory does not suffice."""
    try:
        return [(piece, teacher.say(rows, piece))]
    except Exception as error:
        if not oom.is_out_of_memory(error):
            raise
    oom.release_memory()
    if len(piece) == 1:
        raise MemoryExhaustedError(
            f"train.distill.teacher: memory does not suffice for training row {piece[0]} of {rows.tokens(piece)} "
            "tokens; set train.distill.quantization: nf4, a smaller prepare.max_tokens, or take a smaller teacher"
        )
    half = len(piece) // 2
    return [*_query_teacher(teacher, rows, piece[:half]), *_query_teacher(teacher, rows, piece[half:])]


class _TeacherProgress:
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
