"""Selects the rows to write: removes duplicates and leaks, and applies weights and balancing.

The result does not depend on the order of files and lines. One of several duplicates is kept, by these criteria in
order: test before validation before training, so that no evaluation row is removed in favour of a training row; rows
that no teacher wrote before teacher answers; the smallest id; the smallest hash of the fields.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.config.prepare import DropReason, Prepare
from ratchet.data import deduplication, semantic_duplicates
from ratchet.data.deduplication import RowCluster
from ratchet.data.ingest import BALANCED_OUT, EXAMPLES, HELD_OUT, SAMPLED_OUT, RowIngestion
from ratchet.data.row_table import find_shared, find_sorted, sort_unique
from ratchet.data.semantic_duplicates import Embedder
from ratchet.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from ratchet.storage import digests
from ratchet.storage.progress import report_progress
from ratchet.storage.records.data import BalanceReport, LeakageReport, NearDuplicateCluster, NearDuplicateReport

CLUSTERS_SHOWN = 12
"""Number of near-duplicate clusters on the dataset card."""
TEXT_SHOWN = 400
"""Length limit, in characters, of a text on the dataset card."""


@dataclass(frozen=True)
class RowSelection:
    """The result of the selection; arrays are by row index."""

    split: NDArray[np.int8]
    """Index into SPLITS, also for dropped rows."""
    copies: NDArray[np.int32]
    """Number of times that a row is written; 0 if the row is dropped."""
    near_duplicates: NearDuplicateReport | None
    semantic_duplicates: NearDuplicateReport | None
    leaks: dict[str, LeakageReport]
    balanced: BalanceReport | None = None

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Mask of the rows that are written at least once."""
        return self.copies > 0


def select_rows(ingestion: RowIngestion, settings: Prepare, embedder: Embedder | None = None) -> RowSelection:
    """Select from all accepted rows, and record dropped rows in the ingestion's ledger.

    With an embedder, semantic duplicates are dropped too.
    """
    selector = _RowSelector(ingestion, settings)
    split, accepted = selector.split, ingestion.accepted
    held_out = np.flatnonzero(accepted.values.column("from_teacher") & (split != TRAIN))
    selector.drop(held_out, HELD_OUT, lambda k: f"its prompt is in {SPLITS[split[held_out[k]]]}")
    selector.drop_exact_duplicates()
    if any(source.split for source in settings.sources):  # otherwise no prompt is in two splits
        selector.drop_shared_prompts()
    leaked = np.array(accepted.leaked_rows, dtype=np.int64)
    numbers = np.flatnonzero(selector.kept[leaked] & (split[leaked] != TEST))  # nothing is trained on a test row
    selector.drop(leaked[numbers], "leaked", lambda k: accepted.first_leaks[int(numbers[k])])
    near_duplicates = selector.drop_near_duplicates() if ingestion.signatures else None
    semantic_duplicates = selector.drop_semantic_duplicates(embedder) if embedder else None
    copies = selector.apply_weights()
    repetitions, balanced = ingestion.balancer.count_copies((copies > 0) & (split == TRAIN), accepted.values)
    selector.drop(np.flatnonzero((copies > 0) & (repetitions == 0)), BALANCED_OUT)
    leaks = _report_leaks(ingestion)
    return RowSelection(split, copies * repetitions, near_duplicates, semantic_duplicates, leaks, balanced)


class _RowSelector:
    """State of a selection; arrays are by row index."""

    def __init__(self, ingestion: RowIngestion, settings: Prepare) -> None:
        self.ingestion, self.settings = ingestion, settings
        self.values = ingestion.accepted.values
        assigned = ingestion.split_assigner.assign()
        self.split = np.empty(len(self.values), dtype=np.int8)
        for rows, (indices,) in self.values.blocks("split_index"):
            self.split[rows] = assigned[indices]
        self.kept = np.ones(len(self.values), dtype=np.bool_)

    def sort_by_preference(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort ascending row indices: of duplicates, the first one is kept."""
        columns = [self.values.column(name)[rows] for name in ("field_hash", "id", "from_teacher")]
        return rows[np.lexsort((*columns, TEST - self.split[rows]))]

    def drop(self, rows: NDArray[np.int64], reason: str, explain: Callable[[int], str] = lambda _: "") -> None:
        """Drop rows; `explain` returns the explanation of the k-th of them."""
        self.kept[rows] = False
        where = self.ingestion.accepted.where
        places = ((where[row], explain(k)) for k, row in enumerate(rows.tolist()))
        self.ingestion.ledger.drop_rows(reason, len(rows), places)

    def drop_exact_duplicates(self) -> None:
        where = self.ingestion.accepted.where
        candidates, _ = find_shared(self.values.column("exact_high"), self.kept)
        rows = self.sort_by_preference(candidates)
        high, low = (self.values.column(name)[rows] for name in ("exact_high", "exact_low"))
        order = np.lexsort((low, high))  # stable: equal rows stay in the order of preference
        rows, high, low = rows[order], high[order], low[order]
        equal = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
        self.drop(rows[equal + 1], "duplicate", lambda k: f"same as {where[int(rows[equal[k]])]}")

    def drop_shared_prompts(self) -> None:
        """Keep a prompt (or group) in its most preferred split only."""
        positions = self.ingestion.split_assigner.positions()
        held_out = {}
        for code in (VALIDATION, TEST):
            found = [np.empty(0)]
            for rows, (indices,) in self.values.blocks("split_index"):
                found.append(positions[indices[self.kept[rows] & (self.split[rows] == code)]])
            held_out[code] = sort_unique(np.concatenate(found))
        best = np.full(len(self.values), TRAIN, dtype=np.int8)
        for rows, (indices,) in self.values.blocks("split_index"):
            for code, prompts in held_out.items():
                best[rows][find_sorted(prompts, positions[indices])[1]] = code
        unit = "group" if self.settings.split.group else "prompt"
        shared = np.flatnonzero(self.kept & (self.split < best))
        self.drop(shared, "leaked", lambda k: f"its {unit} is in the {SPLITS[best[shared[k]]]} rows too")

    def drop_near_duplicates(self) -> NearDuplicateReport:
        texts, settings = self.ingestion.text_spool, self.settings.deduplication
        band_keys, count = self.ingestion.band_keys, int(np.count_nonzero(self.kept))
        found = deduplication.cluster_duplicates(
            (band_keys.column(name) for name in band_keys.names), self.kept, self.sort_by_preference,
            texts.__getitem__, settings, lambda done: report_progress("rows compared", done, count),
        )  # fmt: skip
        return self._drop_clusters(
            found, "near_duplicate",
            NearDuplicateReport(
                threshold=settings.jaccard_threshold or 0.0, shingle_words=settings.shingle_words, clusters=0,
                across_splits=0, largest=(),
            ),
        )  # fmt: skip

    def drop_semantic_duplicates(self, embedder: Embedder) -> NearDuplicateReport:
        settings = self.settings.semantic_duplicates
        found = semantic_duplicates.cluster_semantic_duplicates(
            np.flatnonzero(self.kept), self.sort_by_preference, self.ingestion.text_spool.__getitem__, embedder,
            settings, self.ingestion.folder,
        )  # fmt: skip
        model = f"{settings.model} ({embedder.digest[: digests.SHORT]})"
        return self._drop_clusters(
            found,
            "semantic_duplicate",
            NearDuplicateReport(
                threshold=settings.threshold, shingle_words=0, clusters=0, across_splits=0, largest=(), model=model
            ),
        )

    def _drop_clusters(
        self, clusters: list[RowCluster], reason: DropReason, report: NearDuplicateReport
    ) -> NearDuplicateReport:
        """Drop all rows of each cluster but the first; return the report with their numbers."""
        accepted, texts = self.ingestion.accepted, self.ingestion.text_spool
        rows = np.array([row for cluster in clusters for row in cluster.dropped], dtype=np.int64)
        leaders = np.array([cluster.kept for cluster in clusters for _ in cluster.dropped], dtype=np.int64)
        self.drop(rows, reason, lambda k: f"similar to {accepted.where[int(leaders[k])]}")
        labels = self.values.column("label")
        clusters.sort(key=lambda cluster: -len(cluster.dropped))  # equal sizes stay in the order of preference
        largest = [
            NearDuplicateCluster(
                kept=accepted.where[cluster.kept],
                dropped=tuple(accepted.where[row] for row in cluster.dropped[:EXAMPLES]),
                size=1 + len(cluster.dropped),
                texts=tuple(texts[row][:TEXT_SHOWN] for row in (cluster.kept, cluster.dropped[0])),
            )
            for cluster in clusters[:CLUSTERS_SHOWN]
        ]
        return report.model_copy(
            update={
                "clusters": len(clusters),
                "across_splits": int(np.count_nonzero(self.split[rows] != self.split[leaders])),
                "contradicting": int(np.count_nonzero(labels[rows] != labels[leaders])),
                "largest": tuple(largest),
            }
        )  # fmt: skip

    def apply_weights(self) -> NDArray[np.int32]:
        """Return how often each row is used: training rows by the weight of their source, other rows once.

        A row is used once more than the integer part of the weight if its id, divided by 2^64, is below the fractional
        part.
        """
        weights = np.array([source.weight for source in self.settings.sources])
        copies = np.empty(len(self.values), dtype=np.int32)
        for rows, (ids, sources) in self.values.blocks("id", "source"):
            integer_part = np.floor(weights[sources])
            repetitions = integer_part + (ids.astype(np.float64) / 2.0**64 < weights[sources] - integer_part)
            copies[rows] = np.where(self.kept[rows], np.where(self.split[rows] == TRAIN, repetitions, 1), 0)
        self.drop(np.flatnonzero(self.kept & (copies == 0)), SAMPLED_OUT)
        return copies


def _report_leaks(ingestion: RowIngestion) -> dict[str, LeakageReport]:
    if ingestion.benchmarks is None:
        return {}
    accepted = ingestion.accepted
    return {
        name: LeakageReport(
            documents=documents,
            unchecked=ingestion.benchmarks.unchecked[name],
            rows=accepted.leak_counts[name],
            examples=tuple(accepted.leaks[name]),
        )
        for name, documents in ingestion.benchmarks.documents.items()
    }
