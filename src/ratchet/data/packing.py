"""Several rows to a sequence: best-fit decreasing over the whole split (Johnson 1974), anew in every epoch.

Rows are taken from the longest to the shortest, and each goes into the pack whose free room is least of all that still
hold it; where there is none, a new pack begins. Rows of one length are as good as one another, so how many packs there
are and how full each is depends on the lengths alone, and which row of a length goes where on a draw an epoch.

D. S. Johnson, Fast algorithms for bin packing, Journal of Computer and System Sciences 8 (1974), 272-314.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratchet.errors import DataError, SettingsError


@dataclass(frozen=True)
class Packs:
    """Packs as flat arrays: pack k holds `rows[offsets[k] : offsets[k + 1]]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> list[int]:
        found: list[int] = self.rows[self.offsets[pack] : self.offsets[pack + 1]].tolist()
        return found


class Packing:
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
        _check(self.lengths, capacity_tokens)
        packs = _best_fit_decreasing(self.lengths, capacity_tokens)
        self._places = np.argsort(packs, kind="stable")
        """Places in the order of falling length, a pack's places side by side."""
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(packs))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def epoch(self, seed: int, epoch: int) -> Packs:
        """The packs of one epoch: a function of the lengths, the seed and the epoch."""
        # The third number sets this stream apart from the one that the order of an epoch is drawn from.
        drawn = np.random.default_rng([seed, epoch, 1]).permutation(len(self.lengths))
        falling = drawn[np.argsort(-self.lengths[drawn], kind="stable")]
        return Packs(falling[self._places], self._offsets)

    @property
    def shared(self) -> int | None:
        """A pack that holds more than one row, the same in every epoch; None when each row has its own."""
        found = np.flatnonzero(np.diff(self._offsets) > 1)
        return int(found[0]) if len(found) else None


def pack(lengths: ArrayLike, capacity_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Row indices of each pack of an epoch; their number depends on lengths and capacity only. Raises like Packing."""
    packs = Packing(lengths, capacity_tokens).epoch(seed, epoch)
    return [packs[k] for k in range(len(packs))]


def fill_rate(lengths: ArrayLike, packs: Sequence[Sequence[int]], capacity_tokens: int) -> float:
    """Share of the packs' room that rows take, from 0 to 1; 0 without packs."""
    tokens = int(np.asarray(lengths, dtype=np.int64).sum())
    return tokens / (len(packs) * capacity_tokens) if packs else 0.0


def _check(lengths: NDArray[np.int64], capacity_tokens: int) -> None:
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
