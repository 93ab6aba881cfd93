"""Computes packs and batches: which rows each optimizer step trains on, and the arrays of a batch.

Packing is best-fit decreasing over the whole split, repeated for every epoch. Rows are placed from the longest to the
shortest, each into the pack with the least free space that is sufficient; if no pack has sufficient space, a new pack
begins. Rows of equal length are interchangeable. So the number of packs and the fill of each pack depend only on the
lengths, and a random draw per epoch decides which of the rows of equal length goes into which pack.

D. S. Johnson, Fast algorithms for bin packing, Journal of Computer and System Sciences 8 (1974), 272-314.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratchet.config.train import Train
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DataError, SettingsError

WINDOW_BATCHES = 64
"""Number of batches whose rows are drawn together and sorted by length (`train.batching: by_length`). A larger number
means less padding, but more similar epochs."""


class PackingPlan:
    """Assignment of rows, given by their numbers of tokens, to packs of a capacity in tokens, different in each epoch.

    Raises SettingsError if a row is longer than a pack, and DataError if a row has no tokens.
    """

    offsets: NDArray[np.int64]
    """Pack k contains `epoch(...)[offsets[k] : offsets[k + 1]]`."""

    def __init__(self, lengths: ArrayLike, capacity_tokens: int, rows_per_example: int = 1) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        unit = "row" if rows_per_example == 1 else "the pair of answers"
        if len(self._lengths) and (longest := int(self._lengths.max())) > capacity_tokens:
            limit = capacity_tokens // rows_per_example
            raise SettingsError(
                f"train.pack_tokens: found {capacity_tokens}, but {unit} {self._lengths.argmax()} has {longest} "
                f"tokens; set it to at least {longest}, or lower prepare.max_tokens to {limit} and prepare again"
            )
        if len(self._lengths) and self._lengths.min() < 1:
            raise DataError(
                f"row {self._lengths.argmin()} has no tokens and cannot be packed; run `ratchet prepare` again"
            )
        packs = _best_fit_decreasing(self._lengths, capacity_tokens)
        self._positions = np.argsort(packs, kind="stable")  # in the list of rows by decreasing length, ordered by pack
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(packs))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows of all packs of one epoch; a pure function of the lengths, the seed and the epoch."""
        # The third number separates this random stream from that of the epoch's order.
        shuffled = np.random.default_rng([seed, epoch, 1]).permutation(len(self._lengths))
        by_length = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        return by_length[self._positions]


def count_packs(counts: NDArray[np.int64], capacity_tokens: int) -> int:
    """Return the number of packs of a `PackingPlan`, from the number of rows of each length (index: tokens)."""
    lengths = np.flatnonzero(counts)
    return sum(one.packs for one in _place_rows(lengths, counts[lengths], capacity_tokens) if one.is_new)


class _Placement(NamedTuple):
    """Rows of one length that are placed together, as many into each pack as fit; the last pack may take fewer."""

    length: int
    rows: int
    packs: int
    space: int
    """Free tokens of each of these packs before."""
    is_new: bool


def _place_rows(lengths: NDArray[np.int64], counts: NDArray[np.int64], capacity_tokens: int) -> Iterator[_Placement]:
    """Yield how best fit decreasing places rows, from the distinct lengths, ascending, and the number of rows of each.

    Rows of equal length are placed together: the fullest packs with space for at least one of these rows take as many
    of them as fit, one pack after another. The result is the same as that of best fit row by row. Each iteration places
    at least one row and changes only packs that take rows. A bit field with one bit per token of capacity makes the
    search fast.
    """
    packs: dict[int, int] = defaultdict(int)  # number of open packs by free space, in tokens
    space_bits = 0  # bit s is set if packs[s] is not 0
    for length, count in zip(reversed(lengths.tolist()), reversed(counts.tolist()), strict=True):
        remaining = count
        while remaining:
            fitting = space_bits >> length
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity_tokens
            rows_per_pack = space // length
            filled = -(-remaining // rows_per_pack)
            if fitting:
                filled = min(filled, packs[space])
                packs[space] -= filled
            rows = min(remaining, rows_per_pack * filled)
            remaining -= rows
            rows_in_last = rows - rows_per_pack * (filled - 1)
            packs[space - rows_per_pack * length] += filled - 1
            packs[space - rows_in_last * length] += 1
            for free in (space, space - rows_per_pack * length, space - rows_in_last * length):
                space_bits = space_bits | 1 << free if packs[free] else space_bits & ~(1 << free)
            yield _Placement(length, rows, filled, space, is_new=not fitting)


def _best_fit_decreasing(lengths: NDArray[np.int64], capacity_tokens: int) -> NDArray[np.int64]:
    """Return the pack of each position; positions are the rows in order of decreasing length."""
    pack_of = np.empty(len(lengths), dtype=np.int64)
    placed = pack_count = 0
    packs: dict[int, list[int]] = defaultdict(list)  # open packs by free space, in tokens
    lengths_and_counts = np.unique(lengths, return_counts=True)
    for length, rows, filled, space, is_new in _place_rows(*lengths_and_counts, capacity_tokens):
        if is_new:
            filled_packs = list(range(pack_count, pack_count + filled))
            pack_count += filled
        else:
            filled_packs = packs[space][-filled:]
            del packs[space][-filled:]
        rows_per_pack = space // length
        pack_of[placed : placed + rows] = np.repeat(filled_packs, rows_per_pack)[:rows]
        placed += rows
        packs[space - rows_per_pack * length] += filled_packs[:-1]
        packs[space - (rows - rows_per_pack * (filled - 1)) * length].append(filled_packs[-1])
    return pack_of


# ----- Batches
#
# The rows of optimizer step i are a pure function of (row lengths, settings, i). Sequences (rows or packs of rows) form
# one endless stream of epochs, and each step takes the next `train.batch_size` sequences. Every sequence occurs exactly
# once per epoch, and a batch may span two epochs. So a checkpoint does not store the order, and a restart does not
# replay it.


def count_validation_interval(settings: Train, sequences: int) -> int:
    """Return the number of optimizer steps between two validations, if an epoch has this number of sequences."""
    if settings.validate_every_epochs is None:
        return settings.validate_every_steps
    return max(1, round(settings.validate_every_epochs * sequences / settings.batch_size))


class BatchPlan:
    """The batches of a training run, from the number of tokens of each row and the section `train` of the settings.

    If the objective compares two answers, an example is a pair of rows: row 2i with the chosen answer, and row 2i + 1
    with the rejected one. A pair is never divided: it is a sequence, or a part of a pack.

    A fraction of an epoch takes that fraction of the sequences, and the last batch may be smaller. Raises SettingsError
    if an example is longer than `train.pack_tokens`, and DataError if the split has no rows or a row to pack has no
    tokens.
    """

    def __init__(self, lengths: ArrayLike, settings: Train) -> None:
        self.rows_per_example = settings.rows_per_example
        self.lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, self.rows_per_example).sum(axis=1)
        """Number of tokens of each example."""
        if not len(self.lengths):
            raise DataError(
                "the training split has no rows to learn; run `ratchet prepare` again, or, if all answers are labelled "
                "false, add some that are labelled true"
            )
        self.seed, self.batch_size, self.batching = settings.seed, settings.batch_size, settings.batching
        self._packing: PackingPlan | None = None
        if settings.batching == "packed":
            self._packing = PackingPlan(self.lengths, settings.pack_tokens, self.rows_per_example)
        self.sequences = len(self.lengths) if self._packing is None else len(self._packing)
        self.total_sequences = max(1, round(self.sequences * settings.epochs))
        self.steps = math.ceil(self.total_sequences / self.batch_size)
        self.validation_interval = count_validation_interval(settings, self.sequences)
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int) -> list[list[int]]:
        """Return the sequences of step `step` (from 0) in stream order, each as a list of row indices."""
        start = step * self.batch_size
        stop = min(start + self.batch_size, self.total_sequences)
        places = (divmod(position, self.sequences) for position in range(start, stop))
        return [self._pack(epoch, int(self._epoch(epoch)[0][place])) for epoch, place in places]

    def find_multi_row_sequence(self) -> list[int] | None:
        """Return the rows of a sequence with several rows; None if no epoch has such a sequence."""
        if self._packing is None:
            return None
        packs = np.flatnonzero(np.diff(self._packing.offsets) > 1)
        return self._pack(0, int(packs[0])) if len(packs) else None

    def _pack(self, epoch: int, number: int) -> list[int]:
        """Return the rows of a pack; without packing, those of one example."""
        examples = [number]
        if self._packing is not None:
            examples = self._epoch(epoch)[1][slice(*self._packing.offsets[number : number + 2])].tolist()
        return list_rows(examples, self.rows_per_example)

    def _draw(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the order of all sequences in one epoch, and the rows of all packs if there are packs."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.sequences)
        if self.batching == "by_length":
            order = self._sort_windows(order, epoch, rng)
        return order, order if self._packing is None else self._packing.epoch(self.seed, epoch)

    def _sort_windows(self, order: NDArray[np.int64], epoch: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Sort each window of a permutation by length, then shuffle its batches.

        Batches are aligned with steps, so the rows of a step have similar lengths. The only exception is the step that
        spans two epochs, whose rows stay random.
        """
        size = self.batch_size
        head = min(-epoch * self.sequences % size, self.sequences)  # rows that complete the previous epoch's last batch
        tail = head + (self.sequences - head) // size * size
        middle = order[head:tail].copy()
        for start in range(0, len(middle), WINDOW_BATCHES * size):
            window = middle[start : start + WINDOW_BATCHES * size]
            window[:] = window[np.argsort(self.lengths[window], kind="stable")]
        batches = rng.permutation(middle.reshape(-1, size), axis=0)
        return np.concatenate([order[:head], batches.ravel(), order[tail:]])


def list_rows(examples: Iterable[int], rows_per_example: int) -> list[int]:
    """Return the rows of examples."""
    return [example * rows_per_example + k for example in examples for k in range(rows_per_example)]


def divide_sequences(sequences: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return each row of some sequences as a sequence of its own."""
    return [[row] for sequence in sequences for row in sequence]


def split_micro_batches(
    indices: list[int], lengths: Sequence[int], micro_batch_size: int, max_tokens: int | None = None
) -> list[list[int]]:
    """Split sequences, given by index and number of tokens, into micro-batches of similar lengths for little padding.

    A micro-batch has at most `micro_batch_size` sequences and, unless it is a single sequence, at most `max_tokens`
    padded tokens (sequences x longest).
    """
    order = sorted(range(len(indices)), key=lambda k: (-lengths[k], k))
    micro_batches, start = [], 0
    while start < len(order):
        longest = max(1, lengths[order[start]])
        rows = micro_batch_size if max_tokens is None else max(1, min(micro_batch_size, max_tokens // longest))
        micro_batches.append([indices[k] for k in order[start : start + rows]])
        start += rows
    return micro_batches


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences padded on the right: int64 arrays of [sequences, longest]."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    """Positions from 0 in each row. Every padding token has position 0, so it counts as a row of one token and attends
    only to itself."""


@dataclass(frozen=True)
class TokenRows:
    """A split in memory: concatenated ids and labels of all rows, 8 bytes per token; row i begins at offsets[i]."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    is_desirable: NDArray[np.bool_] | None = None
    """Whether the answer of each row is desirable; None for rows without this label."""

    @classmethod
    def from_lists(cls, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> "TokenRows":
        """Create rows from lists. Raises DataError if a row's ids and labels differ in number."""
        import pyarrow as pa

        columns = {"input_ids": input_ids, "labels": labels}
        return cls.from_arrow(pa.table({name: pa.array(rows, pa.list_(pa.int32())) for name, rows in columns.items()}))

    @classmethod
    def from_arrow(cls, table: Any) -> "TokenRows":
        """Create rows from the columns `input_ids` and `labels` of an Arrow table, without a copy of single chunks.

        Raises DataError if a row's ids and labels differ in number.
        """
        flat, lengths = [], []
        for name in ("input_ids", "labels"):
            # Arrow's own `to_numpy` and `flatten` import pandas and pyarrow.compute: 0.2 s of every start of a worker.
            chunks = table.column(name).chunks
            offsets = [np.from_dlpack(chunk.offsets) for chunk in chunks]
            values = [np.from_dlpack(chunk.values)[o[0] : o[-1]] for chunk, o in zip(chunks, offsets, strict=True)]
            flat.append(_concatenate(values, np.int32))
            lengths.append(_concatenate([np.diff(o) for o in offsets], np.int64))
        if not np.array_equal(lengths[0], lengths[1]):
            raise DataError(
                "the split has rows with different numbers of token ids and labels; run `ratchet prepare` again"
            )
        return cls(flat[0], flat[1], np.concatenate([[0], np.cumsum(lengths[0])]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def interleave(self, other: "TokenRows") -> "TokenRows":
        """Return these rows and those of another split of the same size in turns: 2i is row i of this one."""
        offsets = np.zeros(2 * len(self) + 1, np.int64)
        offsets[1:] = np.cumsum(np.stack([self.lengths, other.lengths], axis=1).ravel())
        input_ids, labels = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.int32)
        for first, rows in enumerate((self, other)):
            for row, start in enumerate(offsets[first:-1:2]):
                span = slice(rows.offsets[row], rows.offsets[row + 1])
                stop = start + span.stop - span.start
                input_ids[start:stop], labels[start:stop] = rows.input_ids[span], rows.labels[span]
        return TokenRows(input_ids, labels, offsets)

    def select(self, rows: Iterable[int]) -> "TokenRows":
        """Return some of the rows, without labels of their answers."""
        return self._join([[slice(int(self.offsets[row]), int(self.offsets[row + 1]))] for row in rows])

    def mismatch(self, rows: Sequence[int]) -> "TokenRows":
        """Return the prompt of each of these rows with the answer of the row before it; the first gets the last one's.

        A result is cut to the longest row of this split, which leaves at least one token of the answer.
        """
        longest, prompts, answers = int(self.lengths.max()), [], []
        for row in rows:
            start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
            first = start + int(np.argmax(self.labels[start:stop] != IGNORE_INDEX))
            prompts.append(slice(start, first))
            answers.append(slice(first, stop))
        spans = []
        for prompt, answer in zip(prompts, answers[-1:] + answers[:-1], strict=True):
            space = longest - (prompt.stop - prompt.start)
            spans.append([prompt, slice(answer.start, min(answer.stop, answer.start + space))])
        return self._join(spans)

    def _join(self, rows: Sequence[Sequence[slice]]) -> "TokenRows":
        """Return rows that consist of spans of these rows."""
        spans = [span for row in rows for span in row]
        lengths = [sum(span.stop - span.start for span in row) for row in rows]
        return TokenRows(
            _concatenate([self.input_ids[span] for span in spans], np.int32),
            _concatenate([self.labels[span] for span in spans], np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each row."""
        return np.diff(self.offsets)

    def list_ids(self, row: int) -> list[int]:
        """Return the token ids of a row."""
        ids: list[int] = self.input_ids[self.offsets[row] : self.offsets[row + 1]].tolist()
        return ids

    def count_tokens(self, rows: Sequence[int]) -> int:
        """Return the total number of tokens of rows."""
        return sum(int(self.offsets[row + 1] - self.offsets[row]) for row in rows)

    def count_trained(self, rows: Sequence[int]) -> int:
        """Return the number of trained tokens of rows, without each row's first token, which has no context."""
        spans = ((self.offsets[row] + 1, self.offsets[row + 1]) for row in rows)
        return sum(int(np.count_nonzero(self.labels[start:stop] != IGNORE_INDEX)) for start, stop in spans)

    @property
    def cumulative_trained_tokens(self) -> NDArray[np.int64]:
        """Number of trained tokens in all rows before each row; the last entry is the total; [rows + 1]."""
        is_trained = self.labels != IGNORE_INDEX
        is_trained[self.offsets[:-1][self.lengths > 0]] = False
        return np.concatenate([[0], np.cumsum(is_trained)])[self.offsets].astype(np.int64)

    def pad(self, sequences: Sequence[Sequence[int]]) -> PaddedBatch:
        """Build padded arrays. A row's first label is masked, because the token before it belongs to another row."""
        shape = len(sequences), max(map(self.count_tokens, sequences))
        batch = PaddedBatch(
            np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64), np.zeros(shape, np.int64)
        )
        for k, rows in enumerate(sequences):
            begin = 0
            for row in rows:
                start, stop = self.offsets[row], self.offsets[row + 1]
                end = begin + int(stop - start)
                batch.input_ids[k, begin:end] = self.input_ids[start:stop]
                batch.labels[k, begin + 1 : end] = self.labels[start + 1 : stop]
                batch.position_ids[k, begin:end] = np.arange(end - begin)
                begin = end
        return batch


def _concatenate(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate arrays; a single array is not copied."""
    joined = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
    return joined.astype(dtype, copy=False)
