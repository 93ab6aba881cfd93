"""Selects the rows to write: removes duplicates and leaks, and applies weights and balancing.

The result does not depend on the order of files and lines. One of several duplicates is kept, by these criteria in
order: test before validation before training, so that no evaluation row is removed in favour of a training row; rows
that no teacher wrote before teacher answers; the smallest id; the smallest hash of the fields.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.config.prepare import DropReason, Prepare
from ratchet.data import deduplication, semantic_duplicates
from ratchet.data.ingest import BALANCED_OUT, EXAMPLES, HELD_OUT, SAMPLED_OUT, RowIngestion
from ratchet.data.semantic_duplicates import Embedder
from ratchet.data.splits import SPLITS, TEST, TRAIN
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
    for row in np.flatnonzero(selector.from_teacher & (split != TRAIN)).tolist():
        selector.drop(row, HELD_OUT, f"its prompt is in {SPLITS[split[row]]}")
    selector.drop_exact_duplicates()
    if any(source.split for source in settings.sources):  # otherwise no prompt is in two splits
        selector.drop_shared_prompts()
    for row, matches in accepted.leaks.items():
        if selector.kept[row] and split[row] != TEST:  # nothing is trained on a test row
            selector.drop(row, "leaked", f"{matches[0].benchmark}: {matches[0].words}")
    near_duplicates = selector.drop_near_duplicates() if ingestion.signatures else None
    semantic_duplicates = selector.drop_semantic_duplicates(embedder) if embedder else None
    copies = selector.apply_weights()
    repetitions, balanced = ingestion.balancer.count_copies((copies > 0) & (split == TRAIN), selector.ids)
    for row in np.flatnonzero((copies > 0) & (repetitions == 0)).tolist():
        ingestion.ledger.drop(BALANCED_OUT, accepted.where[row])
    leaks = _report_leaks(ingestion)
    return RowSelection(split, copies * repetitions, near_duplicates, semantic_duplicates, leaks, balanced)


class _RowSelector:
    """State of a selection; arrays are by row index."""

    def __init__(self, ingestion: RowIngestion, settings: Prepare) -> None:
        self.ingestion, self.settings, accepted = ingestion, settings, ingestion.accepted
        self.split_indices = np.array(accepted.split_indices, dtype=np.int64)
        self.split = ingestion.split_assigner.assign()[self.split_indices]
        self.ids, self.from_teacher = (
            np.array(accepted.ids, dtype=np.uint64),
            np.array(accepted.from_teacher, dtype=bool),
        )
        self.preference = TEST - self.split
        """0 for test, 1 for validation, 2 for training: of duplicates, one with the smallest number is kept."""
        field_hashes = np.array(accepted.field_hashes, dtype=np.uint64)
        order = np.lexsort((field_hashes, self.ids, self.from_teacher, self.preference))
        self.rank = np.empty(len(order), dtype=np.int64)
        self.rank[order] = np.arange(len(order))
        self.kept = np.ones(len(accepted), dtype=np.bool_)

    def drop(self, row: int, reason: str, detail: str) -> None:
        self.kept[row] = False
        self.ingestion.ledger.drop(reason, self.ingestion.accepted.where[row], detail)

    def drop_exact_duplicates(self) -> None:
        rows, where = np.flatnonzero(self.kept), self.ingestion.accepted.where
        keys = np.frombuffer(b"".join(self.ingestion.accepted.exact_keys), dtype=[("high", ">u8"), ("low", ">u8")])[
            rows
        ]
        order = np.lexsort((self.rank[rows], keys["low"], keys["high"]))
        for position in np.flatnonzero(keys[order][1:] == keys[order][:-1]):
            self.drop(rows[order[position + 1]], "duplicate", f"same as {where[rows[order[position]]]}")

    def drop_shared_prompts(self) -> None:
        """Keep a prompt (or group) in its most preferred split only."""
        positions = self.ingestion.split_assigner.positions()[self.split_indices]
        _, prompt = np.unique(positions, return_inverse=True)
        best = np.full(len(positions), len(SPLITS))
        np.minimum.at(best, prompt[self.kept], self.preference[self.kept])
        unit = "group" if self.settings.split.group else "prompt"
        for row in np.flatnonzero(self.kept & (self.preference > best[prompt])).tolist():
            self.drop(row, "leaked", f"its {unit} is in the {SPLITS[TEST - best[prompt[row]]]} rows too")

    def drop_near_duplicates(self) -> NearDuplicateReport:
        accepted, texts, settings = self.ingestion.accepted, self.ingestion.text_spool, self.settings.deduplication
        rows = np.flatnonzero(self.kept)
        bands = np.concatenate(accepted.band_keys)[rows] if accepted.band_keys else np.empty((0, 0), dtype=np.uint64)
        accepted.band_keys.clear()
        found = deduplication.cluster_duplicates(
            bands, self.rank[rows], lambda i: texts[int(rows[i])], settings,
            lambda done: report_progress("rows compared", done, len(rows)),
        )  # fmt: skip
        return self._drop_clusters(
            [(int(rows[cluster.kept]), rows[list(cluster.dropped)].tolist()) for cluster in found], "near_duplicate",
            NearDuplicateReport(
                threshold=settings.jaccard_threshold or 0.0, shingle_words=settings.shingle_words, clusters=0,
                across_splits=0, largest=(),
            ),
        )  # fmt: skip

    def drop_semantic_duplicates(self, embedder: Embedder) -> NearDuplicateReport:
        rows, texts = np.flatnonzero(self.kept), self.ingestion.text_spool
        settings = self.settings.semantic_duplicates
        found = semantic_duplicates.cluster_semantic_duplicates(
            self.rank[rows], lambda i: texts[int(rows[i])], embedder, settings, self.ingestion.folder,
            lambda done: report_progress("meanings compared", done, len(rows)),
        )  # fmt: skip
        model = f"{settings.model} ({embedder.digest[: digests.SHORT]})"
        return self._drop_clusters(
            [(int(rows[cluster.kept]), rows[list(cluster.dropped)].tolist()) for cluster in found],
            "semantic_duplicate",
            NearDuplicateReport(
                threshold=settings.threshold, shingle_words=0, clusters=0, across_splits=0, largest=(), model=model
            ),
        )

    def _drop_clusters(
        self, clusters: list[tuple[int, list[int]]], reason: DropReason, report: NearDuplicateReport
    ) -> NearDuplicateReport:
        """Drop all rows of each cluster but the first; return the report with their numbers."""
        accepted, texts = self.ingestion.accepted, self.ingestion.text_spool
        across_splits = contradicting = 0
        for leader, others in clusters:
            for row in others:
                across_splits += int(self.split[row] != self.split[leader])
                contradicting += int(accepted.label_codes[row] != accepted.label_codes[leader])
                self.drop(row, reason, f"similar to {accepted.where[leader]}")
        clusters.sort(key=lambda cluster: (-len(cluster[1]), self.rank[cluster[0]]))
        largest = [
            NearDuplicateCluster(
                kept=accepted.where[leader],
                dropped=tuple(accepted.where[row] for row in others[:EXAMPLES]),
                size=1 + len(others),
                texts=tuple(texts[row][:TEXT_SHOWN] for row in (leader, others[0])),
            )
            for leader, others in clusters[:CLUSTERS_SHOWN]
        ]
        return report.model_copy(
            update={
                "clusters": len(clusters), "across_splits": across_splits, "contradicting": contradicting,
                "largest": tuple(largest),
            }
        )  # fmt: skip

    def apply_weights(self) -> NDArray[np.int32]:
        """Return how often each row is used: training rows by the weight of their source, other rows once.

        A row is used once more than the integer part of the weight if its id, divided by 2^64, is below the fractional
        part.
        """
        source_indices = np.array(self.ingestion.accepted.source_indices, dtype=np.int64)
        weights = np.array([source.weight for source in self.settings.sources])[source_indices]
        integer_part = np.floor(weights)
        repetitions = integer_part + (self.ids.astype(np.float64) / 2.0**64 < weights - integer_part)
        copies = np.where(self.kept, np.where(self.split == TRAIN, repetitions, 1), 0).astype(np.int32)
        for row in np.flatnonzero(self.kept & (copies == 0)):
            self.ingestion.ledger.drop(SAMPLED_OUT, self.ingestion.accepted.where[row])
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
