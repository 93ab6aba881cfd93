"""Distillation targets: the teacher's outputs for the training rows, from files or from a teacher in memory.

With `train.distill.mode: offline`, `ratchet distill` computes the outputs once and writes them as sealed shards of
safetensors, which training maps into memory. With `online`, a worker loads the teacher and runs it on every
micro-batch.

A shard contains consecutive rows of the training split: `tokens` int32 [positions, k], `log_probabilities` float16
[positions, k + 1] (the last value is that of all other tokens together), `offsets` int64 [rows + 1] (index of each
row's first position in the shard) and `sums` float64 [2] (sums over all positions: negative log-likelihood of the
references, and probability outside of the k tokens). Only trained positions are stored. The division into shards
depends on the rows alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratchet.config.train import DistillSettings, Train
from ratchet.data.batches import BatchPlan, TokenRows, split_micro_batches
from ratchet.errors import BaseModelError, DamagedFileError, DataError, MemoryExhaustedError, SettingsError
from ratchet.models import base_model, oom, teacher_reference, vocabulary
from ratchet.models.loss import SequenceBatch, StoredTeacherTargets, require_packing_isolation
from ratchet.models.teacher import (
    OnlineTeacher,
    OnlineTeacherTargets,
    TeacherCandidate,
    TeacherModel,
    TeacherPredictions,
    inspect_teacher,
)
from ratchet.models.teacher_reference import KEY
from ratchet.runs.directory import RunSpec, TrainingLaunchSpec
from ratchet.storage import digests, files
from ratchet.storage.progress import report_progress
from ratchet.storage.records.data import DISTILLATION_CARD, DistillationCard
from ratchet.training import checkpoint

KIND = "distill"
SHARD = "distill-shard"
SHARD_POSITIONS = 2**16
"""Number of positions per shard. A killed process loses at most the work of one shard. With 32 tokens per position, a
shard has 12.7 MB."""
MAX_SHARDS = 256
"""Maximum number of shards, because training keeps all of them open. If there are more positions than MAX_SHARDS times
SHARD_POSITIONS, shards are larger."""


@dataclass(frozen=True)
class TeacherShardPlan:
    """Division of the training rows into shards."""

    rows: int
    positions: int
    boundaries: tuple[int, ...]
    """First row of each shard, then the number of rows."""

    @classmethod
    def from_rows(cls, rows: TokenRows) -> "TeacherShardPlan":
        """Fill each shard with consecutive rows up to SHARD_POSITIONS."""
        offsets = rows.cumulative_trained_tokens.tolist()
        target = max(SHARD_POSITIONS, -(-offsets[-1] // MAX_SHARDS))
        boundaries = [0]
        for row in range(1, len(rows)):
            if offsets[row] - offsets[boundaries[-1]] >= target:
                boundaries.append(row)
        return cls(len(rows), offsets[-1], (*boundaries, len(rows)))

    @property
    def shards(self) -> Iterator[tuple[str, range]]:
        """File name and rows of each shard."""
        for number, (first, last) in enumerate(pairwise(self.boundaries)):
            yield f"shard-{number:05d}.safetensors", range(first, last)

    def size_bytes(self, top_k: int) -> int:
        """Return the size on disk for `top_k` tokens per position."""
        return self.positions * (4 * top_k + 2 * (top_k + 1)) + 8 * (self.rows + 1)


class TeacherShardReader:
    """Reads the distillation targets of batches of training rows from shards."""

    def __init__(self, directory: Path, rows: TokenRows, settings: DistillSettings, distillation_digest: str) -> None:
        """Open the shards in the output of `ratchet distill`, with the digest in the run's spec; only headers are read.

        Raises:
            DamagedFileError: a file has changed since it was sealed.
            DataError: the shards belong to other rows, or have changed since the run was started.
        """
        files.verify_sealed(directory, KIND)
        card = DistillationCard.load(directory / DISTILLATION_CARD)
        plan = TeacherShardPlan.from_rows(rows)
        if card.digest != distillation_digest or (card.rows, card.positions) != (plan.rows, plan.positions):
            raise DataError(
                f"{directory}: changed since the run was started; run `ratchet distill`, then this command again"
            )
        self.settings = settings
        self._offsets: list[int] = rows.cumulative_trained_tokens.tolist()
        self._first_rows = list(plan.boundaries[:-1])
        self._shards = [_map_shard(directory / name) for name, _ in plan.shards]

    def get_targets(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> StoredTeacherTargets:
        """Return the targets of all trained positions of sequences of rows, which `batch` has as tensors."""
        device = batch.labels.device
        rows = [self._read_row(row) for sequence in sequences for row in sequence]
        tokens, values = zip(*rows, strict=True)
        return StoredTeacherTargets(
            torch.cat(tokens).to(device, torch.int64), torch.cat(values).to(device, torch.float32),
            self.settings.weight, self.settings.temperature, self.settings.direction,
        )  # fmt: skip

    def _read_row(self, row: int) -> tuple[Tensor, Tensor]:
        number = bisect_right(self._first_rows, row) - 1
        start = self._offsets[self._first_rows[number]]
        span = slice(self._offsets[row] - start, self._offsets[row + 1] - start)
        tokens, values = self._shards[number]
        return tokens[span], values[span]


def _map_shard(path: Path) -> tuple[Tensor, Tensor]:
    """Map the tensors of a shard into memory: safetensors reads pages of a file on access."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as shard:
            return shard.get_tensor("tokens"), shard.get_tensor("log_probabilities")
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); run `ratchet distill` again") from None


def read_shard_sums(path: Path) -> Tensor:
    """Read the sums of a shard, float64 [2]."""
    with safe_open(str(path), framework="pt", device="cpu") as shard:
        sums: Tensor = shard.get_tensor("sums")
    return sums


def compute_content_digest(entries: dict[str, files.Entry]) -> str:
    """Return the digest of all shards, from their manifest entries."""
    return digests.hash_files({name: sha for name, (sha, _) in entries.items()})


# Computing the teacher's outputs, shard by shard. A sealed shard is not computed again.


@dataclass
class TeacherShardWriter:
    """Writes the missing shards of one distillation into a folder of their own."""

    folder: Path
    plan: TeacherShardPlan

    def list_missing(self) -> list[tuple[str, range]]:
        """Return the shards that are missing or damaged."""
        return [(name, rows) for name, rows in self.plan.shards if self._find_entry(name) is None]

    def write(self, teacher: TeacherModel, rows: TokenRows, micro_batch_size: int) -> None:
        """Compute all missing shards, and seal each when it is complete.

        Raises:
            DataError: the teacher returns NaN.
            MemoryExhaustedError: a single row does not fit into memory.
        """
        missing = self.list_missing()
        total, completed = sum(len(span) for _, span in missing), 0

        def report(count: int) -> None:
            nonlocal completed
            completed += count
            report_progress("rows scored by the teacher", completed, total)

        for name, span in missing:
            tensors = _compute_shard(teacher, rows, span, micro_batch_size, report)
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                checkpoint.write_safetensors(scratch / name, tensors)

    def gather(self, directory: Path) -> dict[str, files.Entry]:
        """Link all shards into a directory; return their manifest entries."""
        entries = {}
        for name, _ in self.plan.shards:
            entry = self._find_entry(name)
            if entry is None:
                raise DamagedFileError(
                    f"{self.folder / name}: damaged after it was sealed; run `ratchet distill` again"
                )
            files.link_or_copy(self.folder / name / name, directory / name)
            entries[name] = entry
        return entries

    def reuse(self, directory: Path) -> None:
        """Link the missing shards from a sealed distillation that differs from this one only in its card."""
        files.verify_sealed(directory, KIND)
        for name, _ in self.list_missing():
            with files.sealed_directory(self.folder / name, SHARD) as scratch:
                files.link_or_copy(directory / name, scratch / name)

    def _find_entry(self, name: str) -> files.Entry | None:
        """Return the manifest entry of a shard; None if it is missing or damaged."""
        try:
            return files.verify_sealed(self.folder / name, SHARD).files[name]
        except (DamagedFileError, KeyError):
            return None


def _compute_shard(
    teacher: TeacherModel, rows: TokenRows, span: range, micro_batch_size: int, report: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return the tensors of a shard. Rows of similar length are computed together, the longest first."""
    lengths = [rows.count_tokens([row]) for row in span]
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    sums = torch.zeros(2, dtype=torch.float64)
    for piece in split_micro_batches(list(span), lengths, micro_batch_size):
        for part, predictions in _compute_predictions(teacher, rows, piece):
            sums += torch.tensor([predictions.loss, predictions.left_out], dtype=torch.float64)
            counts = [rows.count_trained([row]) for row in part]
            tensors = zip(predictions.tokens.split(counts), predictions.log_probabilities.split(counts), strict=True)
            outputs |= dict(zip(part, tensors, strict=True))
        report(len(piece))
    offsets = torch.tensor([0, *(len(outputs[row][0]) for row in span)])
    return {
        "tokens": torch.cat([outputs[row][0] for row in span]),
        "log_probabilities": torch.cat([outputs[row][1] for row in span]),
        "offsets": offsets.cumsum(0),
        "sums": sums,
    }


def _compute_predictions(
    teacher: TeacherModel, rows: TokenRows, piece: list[int]
) -> list[tuple[list[int], TeacherPredictions]]:
    """Compute the rows of a piece at once, or in halves if they do not fit into memory.

    Return the rows and the outputs of each part that was computed at once.
    """
    try:
        return [(piece, teacher.predict(rows, piece))]
    except Exception as error:
        if not oom.is_out_of_memory(error):
            raise
    oom.release_memory()
    if len(piece) == 1:
        raise MemoryExhaustedError(
            f"train.distill.teacher: not enough memory for training row {piece[0]} of {rows.count_tokens(piece)} "
            "tokens; set train.distill.quantization: nf4, a smaller prepare.max_tokens or a smaller teacher"
        )
    half = len(piece) // 2
    return [
        *_compute_predictions(teacher, rows, piece[:half]),
        *_compute_predictions(teacher, rows, piece[half:]),
    ]


# The teacher in the memory of a worker.


def find_teacher(spec: RunSpec, launch: TrainingLaunchSpec, rows: TokenRows) -> TeacherCandidate | None:
    """Check the teacher of an online distillation before any model is loaded; return None without online distillation.

    Raises:
        BaseModelError: the teacher is missing, damaged, or has changed since the run was started.
        SettingsError: the teacher has another tokenizer, or fewer tokens than train.distill.top_k.
        DataError: rows are too long for the teacher.
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
        """Load the teacher for the training rows.

        Raises:
            SettingsError: the teacher cannot be loaded as train.distill requires, or would mix the rows of a pack.
            BaseModelError: the teacher's files are damaged.
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
        """Run the teacher on a micro-batch of sequences of rows, which `batch` has as tensors."""
        rows = [row for sequence in sequences for row in sequence]
        ends = list(accumulate(self._rows.count_trained([row]) for row in rows))
        return self._teacher.compute_targets(batch, lambda position: rows[bisect_right(ends, position)])
