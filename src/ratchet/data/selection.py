"""Selects the rows to write: removes duplicates and leaks, and applies weights and balancing.

The result does not depend on the order of files and lines. One of several duplicates is kept, by these criteria in
order: test before validation before training, so that no evaluation row is removed in favour of a training row; rows
that no teacher wrote before teacher answers; the smallest id; the smallest hash of the fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.config.prepare import Prepare
from ratchet.data import deduplication
from ratchet.data.ingest import BALANCED_OUT, EXAMPLES, HELD_OUT, SAMPLED_OUT, RowIngestion
from ratchet.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from ratchet.storage.records.data import BalanceReport, LeakageReport, NearDuplicateCluster, NearDuplicateReport

CLUSTERS_SHOWN = 12
"""Number of near-duplicate clusters on the dataset card."""
TEXT_SHOWN = 400
"""Length limit, in characters, of a text on the dataset card."""

_PREFERENCE = {TEST: 0, VALIDATION: 1, TRAIN: 2}
"""Splits in order of preference: of duplicates in several splits, the one with the smallest number is kept."""
_BY_PREFERENCE = {preference: split for split, preference in _PREFERENCE.items()}


@dataclass(frozen=True)
class RowSelection:
    """The result of the selection; arrays are by row index."""

    split: NDArray[np.int8]
    """Index into SPLITS, also for dropped rows."""
    copies: NDArray[np.int32]
    """Number of times that a row is written; 0 if the row is dropped."""
    near_duplicates: NearDuplicateReport | None
    leaks: dict[str, LeakageReport]
    balanced: BalanceReport | None = None

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Mask of the rows that are written at least once."""
        return self.copies > 0


def select_rows(ingestion: RowIngestion, settings: Prepare, progress: Callable[[int], None]) -> RowSelection:
    """Select from all accepted rows, and record dropped rows in the ingestion's ledger.

    Args:
        ingestion: the ingested rows.
        settings: section `prepare`.
        progress: called regularly with the number of rows that were searched for near-duplicates.
    """
    accepted = ingestion.accepted
    split = ingestion.split_assigner.assign()[np.array(accepted.split_indices, dtype=np.int64)]
    ids, from_teacher = np.array(accepted.ids, dtype=np.uint64), np.array(accepted.from_teacher, dtype=np.bool_)
    preference = np.array([_PREFERENCE[code] for code in range(len(_PREFERENCE))])[split]
    order = np.lexsort((np.array(accepted.field_hashes, dtype=np.uint64), ids, from_teacher, preference))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    kept = np.ones(len(accepted), dtype=np.bool_)
    _drop_held_out_prompts(ingestion, kept, split, from_teacher)
    _drop_exact_duplicates(ingestion, kept, rank)
    _drop_shared_prompts(ingestion, settings, kept, preference)
    _drop_leaked(ingestion, kept, split)
    near_duplicates = (
        _drop_near_duplicates(ingestion, settings, kept, split, rank, progress) if ingestion.signatures else None
    )
    copies = _apply_weights(ingestion, settings, kept, split, ids)
    repetitions, balanced = ingestion.balancer.count_copies((copies > 0) & (split == TRAIN), ids)
    for row in np.flatnonzero((copies > 0) & (repetitions == 0)):
        ingestion.ledger.drop(BALANCED_OUT, ingestion.accepted.where[row])
    return RowSelection(split, copies * repetitions, near_duplicates, _report_leaks(ingestion), balanced)


def _drop_held_out_prompts(
    ingestion: RowIngestion, kept: NDArray[np.bool_], split: NDArray[np.int8], from_teacher: NDArray[np.bool_]
) -> None:
    """Drop teacher answers to held-out prompts: such answers are not ground truth, and training on them leaks."""
    for row in np.flatnonzero(from_teacher & (split != TRAIN)):
        kept[row] = False
        ingestion.ledger.drop(HELD_OUT, ingestion.accepted.where[row], f"its prompt is in {SPLITS[split[row]]}")


def _drop_exact_duplicates(ingestion: RowIngestion, kept: NDArray[np.bool_], rank: NDArray[np.int64]) -> None:
    rows = np.flatnonzero(kept)
    keys = np.frombuffer(b"".join(ingestion.accepted.exact_keys), dtype=[("high", ">u8"), ("low", ">u8")])[rows]
    order = np.lexsort((rank[rows], keys["low"], keys["high"]))
    is_same = keys[order][1:] == keys[order][:-1]
    for position in np.flatnonzero(is_same):
        row, previous = rows[order[position + 1]], rows[order[position]]
        kept[row] = False
        ingestion.ledger.drop(
            "duplicate", ingestion.accepted.where[row], f"same as {ingestion.accepted.where[previous]}"
        )


def _drop_shared_prompts(
    ingestion: RowIngestion, settings: Prepare, kept: NDArray[np.bool_], preference: NDArray[np.int64]
) -> None:
    """Keep a prompt (or group) in its most preferred split only.

    The same prompt can be in two splits only if a source has a split of its own.
    """
    if not any(source.split for source in settings.sources):
        return
    accepted = ingestion.accepted
    positions = ingestion.split_assigner.positions()[np.array(accepted.split_indices, dtype=np.int64)]
    _, prompt = np.unique(positions, return_inverse=True)
    best = np.full(len(accepted), len(_PREFERENCE))
    np.minimum.at(best, prompt[kept], preference[kept])
    unit = "group" if settings.split.group else "prompt"
    for row in np.flatnonzero(kept & (preference > best[prompt])):
        kept[row] = False
        other_split = SPLITS[_BY_PREFERENCE[best[prompt[row]]]]
        ingestion.ledger.drop("leaked", accepted.where[row], f"its {unit} is in the {other_split} rows too")


def _drop_leaked(ingestion: RowIngestion, kept: NDArray[np.bool_], split: NDArray[np.int8]) -> None:
    for row, matches in ingestion.accepted.leaks.items():
        if kept[row] and split[row] != TEST:  # nothing is trained on a test row
            kept[row] = False
            match = matches[0]
            ingestion.ledger.drop("leaked", ingestion.accepted.where[row], f"{match.benchmark}: {match.words}")


def _drop_near_duplicates(
    ingestion: RowIngestion, settings: Prepare, kept: NDArray[np.bool_], split: NDArray[np.int8],
    rank: NDArray[np.int64], progress: Callable[[int], None],
) -> NearDuplicateReport:  # fmt: skip
    accepted, rows = ingestion.accepted, np.flatnonzero(kept)
    bands = np.concatenate(accepted.band_keys)[rows] if accepted.band_keys else np.empty((0, 0), dtype=np.uint64)
    accepted.band_keys.clear()
    clusters = [
        (int(rows[cluster.kept]), [int(rows[i]) for i in cluster.dropped])
        for cluster in deduplication.cluster_duplicates(
            bands, rank[rows], lambda i: ingestion.text_spool[int(rows[i])], settings.deduplication, progress
        )
    ]
    across_splits = contradicting = 0
    for leader, others in clusters:
        for row in others:
            kept[row] = False
            across_splits += int(split[row] != split[leader])
            contradicting += int(accepted.label_codes[row] != accepted.label_codes[leader])
            ingestion.ledger.drop("near_duplicate", accepted.where[row], f"similar to {accepted.where[leader]}")
    clusters.sort(key=lambda cluster: (-len(cluster[1]), rank[cluster[0]]))
    return NearDuplicateReport(
        threshold=settings.deduplication.jaccard_threshold or 0.0,
        shingle_words=settings.deduplication.shingle_words,
        clusters=len(clusters),
        across_splits=across_splits,
        contradicting=contradicting,
        largest=tuple(_describe_cluster(ingestion, leader, others) for leader, others in clusters[:CLUSTERS_SHOWN]),
    )


def _describe_cluster(ingestion: RowIngestion, leader: int, others: Sequence[int]) -> NearDuplicateCluster:
    where = ingestion.accepted.where
    return NearDuplicateCluster(
        kept=where[leader],
        dropped=tuple(where[row] for row in others[:EXAMPLES]),
        size=1 + len(others),
        texts=tuple(ingestion.text_spool[row][:TEXT_SHOWN] for row in (leader, others[0])),
    )


def _apply_weights(
    ingestion: RowIngestion,
    settings: Prepare,
    kept: NDArray[np.bool_],
    split: NDArray[np.int8],
    ids: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """Return how often each row is used: training rows by the weight of their source, other rows once.

    A row is used once more than the integer part of the weight if its id, divided by 2^64, is below the fractional
    part.
    """
    weights = np.array([source.weight for source in settings.sources])[
        np.array(ingestion.accepted.source_indices, dtype=np.int64)
    ]
    integer_part = np.floor(weights)
    repetitions = integer_part + (ids.astype(np.float64) / 2.0**64 < weights - integer_part)
    copies = np.where(kept, np.where(split == TRAIN, repetitions, 1), 0).astype(np.int32)
    for row in np.flatnonzero(kept & (copies == 0)):
        ingestion.ledger.drop(SAMPLED_OUT, ingestion.accepted.where[row])
    return copies


def _report_leaks(ingestion: RowIngestion) -> dict[str, LeakageReport]:
    if ingestion.benchmarks is None:
        return {}
    accepted = ingestion.accepted
    examples: dict[str, list[str]] = {name: [] for name in ingestion.benchmarks.documents}
    for row, matches in accepted.leaks.items():
        for match in matches:
            examples[match.benchmark].append(f"{accepted.where[row]}: {match.words}")
    return {
        name: LeakageReport(
            documents=ingestion.benchmarks.documents[name],
            unchecked=ingestion.benchmarks.unchecked[name],
            rows=len(leaked),
            examples=tuple(leaked[:EXAMPLES]),
        )
        for name, leaked in examples.items()
    }
