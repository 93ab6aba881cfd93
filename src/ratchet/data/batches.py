"""Several rows to a sequence: best-fit decreasing over the whole split (Johnson 1974), anew in every epoch.

Rows are taken from the longest to the shortest, and each goes into the pack whose free room is least of all that still
hold it; where there is none, a new pack begins. Rows of one length are as good as one another, so how many packs there
are and how full each is depends on the lengths alone, and which row of a length goes where on a draw an epoch.

D. S. Johnson, Fast algorithms for bin packing, Journal of Computer and System Sciences 8 (1974), 272-314.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratchet.config.train import Train
from ratchet.data.conversation import MASKED
from ratchet.errors import DataError, SettingsError


@dataclass(frozen=True)
class PackedRows:
    """Packs as flat arrays: pack k holds `rows[offsets[k] : offsets[k + 1]]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> list[int]:
        found: list[int] = self.rows[self.offsets[pack] : self.offsets[pack + 1]].tolist()
        return found


class PackingPlan:
    """How the rows of a split share packs.

    Args:
        lengths: tokens of each row.
        capacity_tokens: tokens that a pack holds.

    Raises:
        SettingsError: a row is longer than a pack.
        DataError: a row has no tokens.
    """

    def __init__(self, lengths: ArrayLike, capacity_tokens: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        _check_lengths(self.lengths, capacity_tokens)
        packs = _best_fit_decreasing(self.lengths, capacity_tokens)
        self._places = np.argsort(packs, kind="stable")
        """Places in the order of falling length, a pack's places side by side."""
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(packs))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def epoch(self, seed: int, epoch: int) -> PackedRows:
        """The packs of one epoch: a function of the lengths, the seed and the epoch."""
        # The third number sets this stream apart from the one that the order of an epoch is drawn from.
        drawn = np.random.default_rng([seed, epoch, 1]).permutation(len(self.lengths))
        falling = drawn[np.argsort(-self.lengths[drawn], kind="stable")]
        return PackedRows(falling[self._places], self._offsets)

    @property
    def shared(self) -> int | None:
        """A pack that holds more than one row, the same in every epoch; None when each row has its own."""
        found = np.flatnonzero(np.diff(self._offsets) > 1)
        return int(found[0]) if len(found) else None


def pack_rows(lengths: ArrayLike, capacity_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Row indices of each pack of an epoch; their number depends on lengths and capacity only. Raises like Packing."""
    packs = PackingPlan(lengths, capacity_tokens).epoch(seed, epoch)
    return [packs[k] for k in range(len(packs))]


def fill_rate(lengths: ArrayLike, packs: Sequence[Sequence[int]], capacity_tokens: int) -> float:
    """Share of the packs' room that rows take, from 0 to 1; 0 without packs."""
    tokens = int(np.asarray(lengths, dtype=np.int64).sum())
    return tokens / (len(packs) * capacity_tokens) if packs else 0.0


def _check_lengths(lengths: NDArray[np.int64], capacity_tokens: int) -> None:
    if not len(lengths):
        return
    longest, shortest = int(lengths.argmax()), int(lengths.argmin())
    if lengths[longest] > capacity_tokens:
        raise SettingsError(
            f"train.pack_tokens: {capacity_tokens}, but row {longest} has {lengths[longest]} tokens; set pack_tokens "
            f"to at least {lengths[longest]}, or lower prepare.max_tokens to {capacity_tokens} and prepare again"
        )
    if lengths[shortest] < 1:
        raise DataError(f"row {shortest} has no tokens and cannot be packed; run `ratchet prepare` again")


def _best_fit_decreasing(lengths: NDArray[np.int64], capacity_tokens: int) -> NDArray[np.int64]:
    """Pack of each place, places being the rows in the order of falling length.

    Rows of one length are placed together: the fullest packs that hold one more take as many as they can, one pack
    after the other, which is what best fit does row by row. A turn of the loop places one row at least, and touches
    no pack that takes none; the capacity costs only the search in a bit field of that many bits.
    """
    places = np.empty(len(lengths), dtype=np.int64)
    placed = opened = 0
    packs: dict[int, list[int]] = defaultdict(list)  # open packs by free room, in tokens
    rooms = 0  # bit r is set where packs[r] is not empty
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(reversed(values.tolist()), reversed(counts.tolist()), strict=True):
        end = placed + count
        while placed < end:
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity_tokens
            each = room // length
            wanted = -(-(end - placed) // each)
            if fitting:
                taken = packs[room][-wanted:]
                del packs[room][-wanted:]
            else:
                taken = list(range(opened, opened + wanted))
                opened += wanted
            rows = min(end - placed, each * len(taken))
            places[placed : placed + rows] = np.repeat(taken, each)[:rows]
            placed += rows
            of_last = rows - each * (len(taken) - 1)
            packs[room - each * length] += taken[:-1]
            packs[room - of_last * length].append(taken[-1])
            for touched in (room, room - each * length, room - of_last * length):
                rooms = rooms | 1 << touched if packs[touched] else rooms & ~(1 << touched)
    return places


# Which rows the i-th optimizer step learns from: a pure function of (lengths of the rows, settings, i).
#
# Sequences (rows, or packs of rows) come as one endless stream of epochs; step i takes the next `train.batch_rows` of
# it.
# Every sequence comes exactly once an epoch, a batch may reach over the end of an epoch, and nothing about the order
# has
# to be saved in a checkpoint or replayed after a restart.

WINDOW_BATCHES = 64
"""Batches that are drawn together and then sorted by length: many, and little is padded; all, and epochs are alike."""


class BatchPlan:
    """The order of rows for a whole training.

    Args:
        lengths: tokens of each training row.
        settings: seed, epochs, batch_rows, batching and pack_tokens are read. A fraction of an epoch takes that share
            of the sequences; the last batch is smaller when it does not come out even.

    Raises:
        SettingsError: a row is longer than `train.pack_tokens`.
        DataError: there is no row, or one without tokens to pack.
    """

    def __init__(self, lengths: ArrayLike, settings: Train) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self.lengths):
            raise DataError("the training split has no rows; run `ratchet prepare` again")
        self.seed, self.batch_rows, self.batching = settings.seed, settings.batch_rows, settings.batching
        self._packing = PackingPlan(self.lengths, settings.pack_tokens) if settings.batching == "packed" else None
        self.sequences = len(self.lengths) if self._packing is None else len(self._packing)
        self.total_sequences = max(1, round(self.sequences * settings.epochs))
        self.steps = math.ceil(self.total_sequences / self.batch_rows)
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int) -> list[list[int]]:
        """Sequences of step `step` (from 0) in stream order, each the indices of its rows: one, unless packed."""
        start = step * self.batch_rows
        stop = min(start + self.batch_rows, self.total_sequences)
        return [self._sequence(*divmod(position, self.sequences)) for position in range(start, stop)]

    def shared_sequence(self) -> list[int] | None:
        """Rows of a sequence that holds several; None when there is none, in any epoch."""
        if self._packing is None or self._packing.shared is None:
            return None
        return self._packing.epoch(self.seed, 0)[self._packing.shared]

    def _sequence(self, epoch: int, place: int) -> list[int]:
        order, packs = self._epoch(epoch)
        number = int(order[place])
        return [number] if packs is None else packs[number]

    def _draw(self, epoch: int) -> tuple[NDArray[np.int64], PackedRows | None]:
        """Numbers of all sequences in the order of one epoch, and the packs that they number."""
        draw = np.random.default_rng([self.seed, epoch])
        order = draw.permutation(self.sequences)
        if self.batching == "by_length":
            order = self._by_length(order, epoch, draw)
        return order, None if self._packing is None else self._packing.epoch(self.seed, epoch)

    def _by_length(self, order: NDArray[np.int64], epoch: int, draw: np.random.Generator) -> NDArray[np.int64]:
        """Sort each window of a permutation by length, and shuffle the batches that it is then cut into.

        Batches are cut where the steps are. So the rows of a step are of like length, but for one step an epoch: that
        which ends one epoch and begins the next, whose rows stay drawn at random.
        """
        size = self.batch_rows
        head = min(-epoch * self.sequences % size, self.sequences)  # rows that fill up the last epoch's last batch
        tail = head + (self.sequences - head) // size * size
        middle = order[head:tail].copy()
        for start in range(0, len(middle), WINDOW_BATCHES * size):
            window = middle[start : start + WINDOW_BATCHES * size]
            window[:] = window[np.argsort(self.lengths[window], kind="stable")]
        batches = draw.permutation(middle.reshape(-1, size), axis=0)
        return np.concatenate([order[:head], batches.ravel(), order[tail:]])


def split_micro_batches(
    indices: list[int], lengths: Sequence[int], micro_batch_rows: int, max_tokens: int | None = None
) -> list[list[int]]:
    """A batch in pieces that are computed one at a time, sequences of like length together so that little is padded.

    Which rows a *step* learns from does not depend on this.

    Args:
        indices: the sequences.
        lengths: of each of them, in tokens.
        micro_batch_rows: most sequences of a piece.
        max_tokens: most padded tokens of a piece, sequences x longest; one that alone is longer is a piece of its own.
    """
    order = sorted(range(len(indices)), key=lambda k: (-lengths[k], k))
    pieces, start = [], 0
    while start < len(order):
        longest = max(1, lengths[order[start]])
        rows = micro_batch_rows if max_tokens is None else max(1, min(micro_batch_rows, max_tokens // longest))
        pieces.append([indices[k] for k in order[start : start + rows]])
        start += rows
    return pieces


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences side by side, filled on the right: int64 arrays of [sequences, longest]."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    """Count from 0 in each row. 0 where filled: a row of one token, which sees itself and is seen by nobody."""


@dataclass(frozen=True)
class TokenRows:
    """A split in memory: token ids and labels of all rows end to end, 8 bytes a token; row i begins at offsets[i]."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def from_lists(cls, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> "TokenRows":
        """Rows from lists of numbers. Raises DataError when a row's ids and labels are not as many."""
        flat = [np.fromiter((x for row in column for x in row), np.int32) for column in (input_ids, labels)]
        return cls._checked(flat[0], flat[1], [np.array([len(row) for row in c]) for c in (input_ids, labels)])

    @classmethod
    def from_arrow(cls, table: Any) -> "TokenRows":
        """Rows from the list columns `input_ids` and `labels` of an Arrow table, without a copy if it is in one piece.

        Raises:
            DataError: a row's ids and labels are not as many.
        """
        flat, lengths = [], []
        for name in ("input_ids", "labels"):
            # Arrow's own `to_numpy` and `flatten` import pandas and pyarrow.compute: .2 s of every start of a worker.
            chunks = table.column(name).chunks
            offsets = [np.from_dlpack(chunk.offsets) for chunk in chunks]
            values = [np.from_dlpack(chunk.values)[at[0] : at[-1]] for chunk, at in zip(chunks, offsets, strict=True)]
            flat.append(_concatenate(values, np.int32))
            lengths.append(_concatenate([np.diff(at) for at in offsets], np.int64))
        return cls._checked(flat[0], flat[1], lengths)

    @classmethod
    def _checked(cls, input_ids: NDArray[Any], labels: NDArray[Any], lengths: list[NDArray[Any]]) -> "TokenRows":
        if not np.array_equal(lengths[0], lengths[1]):
            raise DataError("the split has rows with more token ids than labels, or fewer; run `ratchet prepare` again")
        return cls(input_ids, labels, np.concatenate([[0], np.cumsum(lengths[0])]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of these rows together."""
        return sum(int(self.offsets[row + 1] - self.offsets[row]) for row in rows)

    def trained(self, rows: Sequence[int]) -> int:
        """Tokens of these rows that are learned from; a row's first is not, for nothing comes before it."""
        spans = ((self.offsets[row] + 1, self.offsets[row + 1]) for row in rows)
        return sum(int(np.count_nonzero(self.labels[start:stop] != MASKED)) for start, stop in spans)

    @property
    def trained_before(self) -> NDArray[np.int64]:
        """Tokens that are learned from in the rows before each row, and in all of them; [rows + 1]."""
        learned = self.labels != MASKED
        learned[self.offsets[:-1][self.lengths > 0]] = False
        return np.concatenate([[0], np.cumsum(learned)])[self.offsets].astype(np.int64)

    def padded(self, sequences: Sequence[Sequence[int]]) -> PaddedBatch:
        """Sequences of rows as arrays. A row's first label is masked: its prediction would be the row before's."""
        shape = len(sequences), max(map(self.tokens, sequences))
        batch = PaddedBatch(np.zeros(shape, np.int64), np.full(shape, MASKED, np.int64), np.zeros(shape, np.int64))
        for k, rows in enumerate(sequences):
            place = 0
            for row in rows:
                start, stop = self.offsets[row], self.offsets[row + 1]
                end = place + int(stop - start)
                batch.input_ids[k, place:end] = self.input_ids[start:stop]
                batch.labels[k, place + 1 : end] = self.labels[start + 1 : stop]
                batch.position_ids[k, place:end] = np.arange(end - place)
                place = end
        return batch


def _concatenate(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Arrays end to end; one alone is not copied."""
    joined = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
    return joined.astype(dtype, copy=False)
