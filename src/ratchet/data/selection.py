"""Which of the rows taken in are kept, in which split and how often: duplicates, leaks and weights.

Nothing here depends on the order of files and lines. Of rows that are the same, one in the test split is kept before
one in validation, and that before one in training, so that what is measured is never taken out for what is learned;
within a split one that no teacher wrote is kept, of these the smallest id; of rows that say the very same, the one
whose fields hash lowest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.config.data import Prepare
from ratchet.data import deduplication
from ratchet.data.ingest import IngestedRows, RowIngestion
from ratchet.data.row_ledger import BALANCED_OUT, EXAMPLES, HELD_OUT, SAMPLED_OUT
from ratchet.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from ratchet.storage.records.data import BalanceReport, LeakageReport, NearDuplicateCluster, NearDuplicateReport

CLUSTERS_SHOWN = 12
TEXT_SHOWN = 400
"""Characters of a text on the card."""

_PREFERENCE = {TEST: 0, VALIDATION: 1, TRAIN: 2}
_BY_PREFERENCE = {preference: split for split, preference in _PREFERENCE.items()}


@dataclass(frozen=True)
class RowSelection:
    """The choice, by row index."""

    split: NDArray[np.int8]
    """Index into SPLITS, of dropped rows too."""
    copies: NDArray[np.int32]
    """How often a row is written; 0: dropped."""
    near_duplicates: NearDuplicateReport | None
    leaks: dict[str, LeakageReport]
    balanced: BalanceReport | None = None

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.copies > 0


def select_rows(intake: RowIngestion, settings: Prepare, progress: Callable[[int], None]) -> RowSelection:
    """Choose among all rows; what is dropped is booked in the intake's ledger.

    Args:
        progress: told now and then how many rows were searched for near-duplicates.
    """
    taken = intake.taken
    split = intake.divider.assign()[np.array(taken.divided, dtype=np.int64)]
    ids, taught = np.array(taken.ids, dtype=np.uint64), np.array(taken.taught, dtype=np.bool_)
    preference = np.array([_PREFERENCE[code] for code in range(len(_PREFERENCE))])[split]
    order = np.lexsort((np.array(taken.fields, dtype=np.uint64), ids, taught, preference))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    kept = np.ones(len(taken), dtype=np.bool_)
    _drop_held_out(intake, kept, split, taught)
    _drop_exact(intake, kept, rank)
    _drop_divided(intake, settings, kept, preference)
    _drop_leaked(intake, kept, split)
    near = _drop_near(intake, settings, kept, split, rank, progress) if intake.signatures else None
    copies = _copies(intake, settings, kept, split, ids)
    times, balanced = intake.categories.copies((copies > 0) & (split == TRAIN), ids)
    for row in np.flatnonzero((copies > 0) & (times == 0)):
        intake.ledger.drop(BALANCED_OUT, intake.taken.where[row])
    return RowSelection(split, copies * times, near, _leaks(intake, settings), balanced)


def _drop_held_out(
    intake: RowIngestion, kept: NDArray[np.bool_], split: NDArray[np.int8], taught: NDArray[np.bool_]
) -> None:
    """What a teacher says is no truth to judge by; and to a validation or test prompt, nothing to learn from."""
    for row in np.flatnonzero(taught & (split != TRAIN)):
        kept[row] = False
        intake.ledger.drop(HELD_OUT, intake.taken.where[row], f"its prompt is of {SPLITS[split[row]]}")


def _drop_exact(intake: RowIngestion, kept: NDArray[np.bool_], rank: NDArray[np.int64]) -> None:
    rows = np.flatnonzero(kept)
    keys = np.frombuffer(b"".join(intake.taken.keys), dtype=[("high", ">u8"), ("low", ">u8")])[rows]
    order = np.lexsort((rank[rows], keys["low"], keys["high"]))
    same = keys[order][1:] == keys[order][:-1]
    for place in np.flatnonzero(same):
        row, before = rows[order[place + 1]], rows[order[place]]
        kept[row] = False
        intake.ledger.drop("duplicate", intake.taken.where[row], f"as {intake.taken.where[before]}")


def _drop_divided(
    intake: RowIngestion, settings: Prepare, kept: NDArray[np.bool_], preference: NDArray[np.int64]
) -> None:
    """A source with its own split may have prompts (or groups) that others have too: they stay in the better split."""
    if not any(source.split for source in settings.sources):
        return  # drawn splits keep them together
    taken = intake.taken
    positions = intake.divider.positions()[np.array(taken.divided, dtype=np.int64)]
    _, together = np.unique(positions, return_inverse=True)
    best = np.full(len(taken), len(_PREFERENCE))
    np.minimum.at(best, together[kept], preference[kept])
    what = "group" if settings.split.group else "prompt"
    for row in np.flatnonzero(kept & (preference > best[together])):
        kept[row] = False
        where = SPLITS[_BY_PREFERENCE[best[together[row]]]]
        intake.ledger.drop("leaked", taken.where[row], f"its {what} is in the {where} rows too")


def _drop_leaked(intake: RowIngestion, kept: NDArray[np.bool_], split: NDArray[np.int8]) -> None:
    for row, matches in intake.taken.leaks.items():
        if kept[row] and split[row] != TEST:  # a test row teaches nothing
            kept[row] = False
            found = matches[0]
            intake.ledger.drop("leaked", intake.taken.where[row], f"{found.benchmark}: {found.words}")


def _drop_near(
    intake: RowIngestion, settings: Prepare, kept: NDArray[np.bool_], split: NDArray[np.int8], rank: NDArray[np.int64],
    progress: Callable[[int], None],
) -> NearDuplicateReport:  # fmt: skip
    taken, rows = intake.taken, np.flatnonzero(kept)
    bands = np.concatenate(taken.bands)[rows] if taken.bands else np.empty((0, 0), dtype=np.uint64)
    taken.bands.clear()
    found = [
        (int(rows[cluster.kept]), [int(rows[i]) for i in cluster.dropped])
        for cluster in deduplication.cluster_duplicates(
            bands, rank[rows], lambda i: intake.texts[int(rows[i])], settings.duplicates, progress
        )
    ]
    across = contradicting = 0
    for leader, others in found:
        for row in others:
            kept[row] = False
            across += int(split[row] != split[leader])
            contradicting += int(taken.labels[row] != taken.labels[leader])
            intake.ledger.drop("near_duplicate", taken.where[row], f"like {taken.where[leader]}")
    found.sort(key=lambda cluster: (-len(cluster[1]), rank[cluster[0]]))
    return NearDuplicateReport(
        threshold=settings.duplicates.near or 0.0,
        shingle_words=settings.duplicates.shingle_words,
        clusters=len(found),
        across_splits=across,
        contradicting=contradicting,
        largest=tuple(_cluster(intake, leader, others) for leader, others in found[:CLUSTERS_SHOWN]),
    )


def _cluster(intake: RowIngestion, leader: int, others: Sequence[int]) -> NearDuplicateCluster:
    where = intake.taken.where
    return NearDuplicateCluster(
        kept=where[leader],
        dropped=tuple(where[row] for row in others[:EXAMPLES]),
        size=1 + len(others),
        texts=tuple(intake.texts[row][:TEXT_SHOWN] for row in (leader, others[0])),
    )


def _copies(
    intake: RowIngestion, settings: Prepare, kept: NDArray[np.bool_], split: NDArray[np.int8], ids: NDArray[np.uint64]
) -> NDArray[np.int32]:
    """Training rows as often as their source's weight says; the part behind the point is drawn by the row's id."""
    weights = np.array([source.weight for source in settings.sources])[np.array(intake.taken.sources, dtype=np.int64)]
    whole = np.floor(weights)
    drawn = whole + (ids.astype(np.float64) / 2.0**64 < weights - whole)
    copies = np.where(kept, np.where(split == TRAIN, drawn, 1), 0).astype(np.int32)
    for row in np.flatnonzero(kept & (copies == 0)):
        intake.ledger.drop(SAMPLED_OUT, intake.taken.where[row])
    return copies


def _leaks(intake: RowIngestion, settings: Prepare) -> dict[str, LeakageReport]:
    if intake.benchmarks is None:
        return {}
    rows: dict[str, list[str]] = {name: [] for name in intake.benchmarks.documents}
    for where, benchmark, words in _matches(intake.taken):
        rows[benchmark].append(f"{where}: {words}")
    return {
        name: LeakageReport(
            documents=intake.benchmarks.documents[name],
            unchecked=intake.benchmarks.unchecked[name],
            rows=len(found),
            examples=tuple(found[:EXAMPLES]),
        )
        for name, found in rows.items()
    }


def _matches(taken: IngestedRows) -> Iterator[tuple[str, str, str]]:
    for row, matches in taken.leaks.items():
        for match in matches:
            yield taken.where[row], match.benchmark, match.words
