"""What a teacher has said about the training rows, as files: shards of safetensors, sealed and read memory-mapped.

A shard holds some rows of the training split, in order: `tokens` int32 [positions, k], `log_probabilities` float16
[positions, k + 1] (the last: of all other tokens together), `offsets` int64 [rows + 1] (where each row's positions
begin in the shard) and `sums` float64 [2] (the given answers' negative log-likelihood, and the probability left out).
Positions are those that are learned from. Which rows a shard has depends on the rows alone.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratchet.config.train import Distill
from ratchet.data.batches import Rows
from ratchet.errors import DamagedError, DataError
from ratchet.models.distillation_loss import Lesson
from ratchet.models.loss import Sequences
from ratchet.storage import digests, files
from ratchet.storage.records.distillation import CARD, Teaching

KIND = "distill"
SHARD_POSITIONS = 2**16
"""Of one shard: what a kill can cost; 12.7 MB for 32 tokens."""
MOST_SHARDS = 256
"""Files that training has open; beyond that shards are larger."""


@dataclass(frozen=True)
class Plan:
    """How large the whole will be, and which rows belong to which shard."""

    rows: int
    positions: int
    borders: tuple[int, ...]
    """First row of each shard, and the number of rows."""

    @classmethod
    def of(cls, rows: Rows) -> "Plan":
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


class Lessons:
    """What the teacher has said, for batches of training rows."""

    def __init__(self, directory: Path, rows: Rows, settings: Distill, teaching: str) -> None:
        """Open it; nothing is read but headers.

        Args:
            directory: sealed by `ratchet distill`.
            rows: the training split.
            settings: how much it counts.
            teaching: digest of the shards, as the run's spec has it.

        Raises:
            DamagedError: a file is not as it was sealed.
            DataError: it is of other rows, or not what the run began with.
        """
        files.verify(directory, KIND)
        card = Teaching.load(directory / CARD)
        plan = Plan.of(rows)
        if card.digest != teaching or (card.rows, card.positions) != (plan.rows, plan.positions):
            raise DataError(f"{directory}: changed since the run was started; run `ratchet distill`, and repeat")
        self.settings = settings
        self._before: list[int] = rows.trained_before.tolist()
        self._first = list(plan.borders[:-1])
        self._shards = [_mapped(directory / name) for name, _ in plan.shards]

    def of(self, sequences: Sequence[Sequence[int]], batch: Sequences) -> Lesson:
        """At all learned positions of these sequences of rows, one after the other; `batch`: of the same."""
        device = batch.labels.device
        tokens, values = zip(*(self._row(row) for sequence in sequences for row in sequence), strict=True)
        return Lesson(
            torch.cat(tokens).to(device, torch.int64), torch.cat(values).to(device, torch.float32),
            self.settings.weight, self.settings.temperature, self.settings.direction,
        )  # fmt: skip

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        number = bisect_right(self._first, row) - 1
        begun = self._before[self._first[number]]
        span = slice(self._before[row] - begun, self._before[row + 1] - begun)
        tokens, values = self._shards[number]
        return tokens[span], values[span]


def _mapped(path: Path) -> tuple[Tensor, Tensor]:
    """Tensors whose pages are read when they are looked at (safetensors maps a file on a CPU)."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as found:
            return found.get_tensor("tokens"), found.get_tensor("log_probabilities")
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path}: unreadable ({error}); run `ratchet distill` again") from None


def sums_of(path: Path) -> Tensor:
    """What is known of a shard beside its contents: float64 [2]."""
    with safe_open(str(path), framework="pt", device="cpu") as found:
        sums: Tensor = found.get_tensor("sums")
    return sums


def content_digest(entries: dict[str, files.Entry]) -> str:
    """Of the shards, by their manifest entries."""
    return digests.of_files({name: sha for name, (sha, _) in entries.items()})
