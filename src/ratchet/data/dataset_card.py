"""Builds the dataset card of the prepared rows."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ratchet.config.extensions import describe_extension
from ratchet.config.prepare import Prepare
from ratchet.data import batches, ingest
from ratchet.data.ingest import RowIngestion
from ratchet.data.selection import RowSelection
from ratchet.data.sources import SourceReader, describe_teacher_data
from ratchet.data.splits import SMALLEST_STRATUM, SPLITS, TRAIN, SplitName, split_fractions
from ratchet.storage import digests
from ratchet.storage.records.data import (
    DatasetCard,
    FlawedRows,
    LengthDistribution,
    PairReport,
    SourceCard,
    SplitStratum,
    TruncationReport,
)

BINS = 24
"""Approximate number of bins of a length histogram."""
PACK_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Pack capacities, in tokens, for which the card reports the fill rate."""
MAX_NAMES_SHOWN = 5
"""Number of strata or labels that a note names."""
MAX_LENGTH_BIAS = 0.15
"""Difference of the share of longer chosen answers from a half, above which the card has a note."""
MAX_LABEL_CHARACTERS = 60
"""Length limit of a label in a note, in characters, because a teacher's answer may be a long text."""


def build_card(
    ingestion: RowIngestion, selection: RowSelection, settings: Prepare, reader: SourceReader
) -> DatasetCard:
    """Build the card. The stage adds the digests of data, base model and template."""
    accepted = ingestion.accepted
    lengths, trained = np.array(accepted.lengths), np.array(accepted.trained_tokens)
    members = {name: np.flatnonzero(selection.kept & (selection.split == code)) for code, name in enumerate(SPLITS)}
    sources = _source_cards(ingestion, settings, reader, members["train"])
    width = _bin_width(int(lengths.max(initial=1)))
    repetitions = selection.copies[members["train"]]
    written = {**members, "train": np.repeat(members["train"], repetitions)}  # the rows of one epoch
    by_label = strata = {}
    if settings.task == "labels":
        codes = np.array(accepted.label_codes, dtype=np.int64)
        by_label = strata = _count_by_split(list(ingestion.label_names), codes, members)
    if settings.split.stratify:
        codes = ingestion.split_assigner.stratum_codes()[np.array(accepted.split_indices, dtype=np.int64)]
        strata = _count_by_split(ingestion.split_assigner.strata, codes, members)
    cut = np.array(accepted.truncated_tokens)
    teachers = [card.teacher_provenance for card in sources.values() if card.teacher_provenance is not None]
    return DatasetCard(
        digest="",
        sources={name: content for card in sources.values() for name, content in card.files.items()},
        base_digest="",
        task=settings.task,
        rows_in=ingestion.ledger.rows_in,
        rows_out=ingestion.ledger.rows_out,
        dropped=ingestion.ledger.dropped,
        flaws={
            check: FlawedRows(count=rows.count, is_dropped=check in settings.quality.drop, examples=rows.examples)
            for check, rows in ingestion.flaws.dropped.items()
        },
        splits={name: len(rows) for name, rows in members.items()},
        lengths={name: _summarize_lengths(lengths[rows], trained[rows], width) for name, rows in written.items()},
        labels={name: count for name, stratum in by_label.items() if (count := stratum.splits["train"])},
        source_cards=sources,
        repeated=int((repetitions - 1).sum()),
        balanced=selection.balanced,
        teacher_rows=sum(teacher.training_rows for teacher in teachers),
        end_of_turn=ingestion.encoder.end_of_turn,
        wanted={**split_fractions(settings)},
        strata=strata,
        near_duplicates=selection.near_duplicates,
        semantic_duplicates=selection.semantic_duplicates,
        pairs=_compare_lengths(ingestion, members["train"]) if ingestion.has_pairs else None,
        desirable_rows=int(np.array(accepted.is_desirable)[written["train"]].sum())
        if ingestion.preference == "label"
        else None,
        leaks=selection.leaks,
        truncated={
            name: TruncationReport(rows=int(np.count_nonzero(cut[rows])), tokens=int(cut[rows].sum()))
            for name, rows in members.items()
            if cut[rows].any()
        },
        packing=_compute_fill_rates(lengths[written["train"]]),
        missing_fields=ingestion.passthrough.missing,
        notes=(*_notes(ingestion, settings, strata, selection), *_describe_held_out_pairs(reader)),
    )


def _source_cards(
    ingestion: RowIngestion, settings: Prepare, reader: SourceReader, training: NDArray[np.int64]
) -> dict[str, SourceCard]:
    cards = {}
    training_rows = np.bincount(
        np.array(ingestion.accepted.source_indices, dtype=np.int64)[training], minlength=len(settings.sources)
    )
    for index, source in enumerate(settings.sources):
        contents = {name: digests.hash_file(path) for name, path in reader.files[index].items()}
        teacher = reader.teacher_cards[index]
        cards[source.label] = SourceCard(
            files=contents or {source.label: source.revision or ""},
            record_schema=reader.schema_descriptions[index],
            weight=source.weight,
            split=source.split,
            rows=ingestion.rows_by_source[index],
            teacher_provenance=None if teacher is None else describe_teacher_data(teacher, int(training_rows[index])),
        )
    return cards


def _compare_lengths(ingestion: RowIngestion, rows: NDArray[np.int64]) -> PairReport:
    accepted = ingestion.accepted
    chosen, rejected = np.array(accepted.trained_tokens)[rows], np.array(accepted.rejected_tokens)[rows]
    return PairReport(
        chosen_tokens=round(float(chosen.mean()), 2),
        rejected_tokens=round(float(rejected.mean()), 2),
        longer_chosen=round(float(((chosen > rejected) + 0.5 * (chosen == rejected)).mean()), 4),
    )


def _describe_length_bias(ingestion: RowIngestion, selection: RowSelection) -> Iterator[str]:
    """Yield a note if most chosen answers are longer, or most are shorter, than the rejected ones."""
    rows = np.flatnonzero(selection.kept & (selection.split == TRAIN))
    report = _compare_lengths(ingestion, rows) if ingestion.has_pairs and len(rows) else None
    if report is not None and abs(report.longer_chosen - 0.5) > MAX_LENGTH_BIAS:
        yield (
            f"the chosen answer is the longer one in {report.longer_chosen:.0%} of the training pairs (chosen "
            f"{report.chosen_tokens:,.0f}, rejected {report.rejected_tokens:,.0f} tokens in the mean), so a model may "
            "learn to prefer length"
        )


def _bin_width(longest: int) -> int:
    """Return a round bin width: 1, 2 or 5 times a power of ten."""
    smallest = max(1, longest / BINS)
    power = 10 ** math.floor(math.log10(smallest))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest))


def _summarize_lengths(lengths: NDArray[np.int32], trained: NDArray[np.int32], width: int) -> LengthDistribution:
    bins, counts = np.unique(lengths // width, return_counts=True)
    return LengthDistribution(
        least=int(lengths.min()),
        median=round(float(np.median(lengths))),
        p95=int(np.percentile(lengths, 95, method="lower")),
        greatest=int(lengths.max()),
        total=int(lengths.sum()),
        trained=int(trained.sum()),
        histogram={int(b) * width: int(n) for b, n in zip(bins, counts, strict=True)},
    )


def _count_by_split(
    names: list[str], codes: NDArray[np.int64], members: dict[SplitName, NDArray[np.int64]]
) -> dict[str, SplitStratum]:
    """Count kept rows by name and split; `codes` has for each row the index of its name."""
    counts = {split: np.bincount(codes[rows], minlength=len(names)) for split, rows in members.items()}
    strata = {}
    for name, code in sorted((name, code) for code, name in enumerate(names)):
        splits = {split: int(count[code]) for split, count in counts.items()}
        if any(splits.values()):
            strata[name] = SplitStratum(rows=sum(splits.values()), splits={**splits})
    return strata


def _compute_fill_rates(lengths: NDArray[np.int32]) -> dict[str, float]:
    """Return the fill rate of packs for the two smallest capacities that fit the longest row."""
    capacities = [capacity for capacity in PACK_TOKENS if capacity >= lengths.max(initial=0)][:2]
    packs = {capacity: len(batches.PackingPlan(lengths, capacity)) for capacity in capacities}
    return {str(c): round(int(lengths.sum()) / (count * c), 4) if count else 0.0 for c, count in packs.items()}


def _notes(
    ingestion: RowIngestion, settings: Prepare, strata: dict[str, SplitStratum], selection: RowSelection
) -> Iterator[str]:
    for kind, is_omitted in sorted(ingestion.encoder.omitted.items()):
        if is_omitted:
            advice = "set prepare.system: merge" if kind == "system messages" else "use another template, or drop them"
            yield f"the chat template omits {kind}, so the model does not see them; {advice}"
    yield from _describe_length_bias(ingestion, selection)
    if selection.near_duplicates and (count := selection.near_duplicates.contradicting):
        yield f"{count:,} dropped near-duplicates have another label than the row that was kept instead"
    if ingestion.unanswered_messages:
        yield f"{ingestion.unanswered_messages:,} messages after the last answer of their conversation were removed"
    if settings.split.stratify:
        small = [name for name, stratum in strata.items() if stratum.rows < SMALLEST_STRATUM]
        if small:
            yield (
                f"{len(small)} strata have fewer than {SMALLEST_STRATUM} rows, too few for every split, and are in one "
                f"split only: {_join_names(small)}"
            )
    yield from _describe_teacher_labels(ingestion, settings, selection)
    if selection.balanced:
        yield from ingest.describe_balance(selection.balanced)
    missing = [name for name, stratum in strata.items() if not stratum.splits[SPLITS[TRAIN]]]
    if missing:
        yield f"{len(missing)} labels or strata have no training row: {_join_names(missing)}"
    yield from ingestion.passthrough.notes()
    if settings.filters:
        yield "filters: " + ", ".join(describe_extension("ratchet.filters", name) for name in settings.filters)
    for name, leak in selection.leaks.items():
        if leak.unchecked:
            yield (
                f"{name}: {leak.unchecked} of {leak.documents} documents are too short for n-grams; "
                "they were compared as a whole"
            )


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (" ..." if len(names) > MAX_NAMES_SHOWN else "")


def _describe_held_out_pairs(reader: SourceReader) -> Iterator[str]:
    """Yield a note if validation and test rows are pairs of generated answers."""
    deciders = sorted({card.pairs.by for card in reader.teacher_cards if card is not None and card.pairs is not None})
    if deciders and not any(reader.teacher_sources):
        yield (
            "validation and test rows are pairs of generated answers too, because no source has other pairs; which "
            f"answer is better was decided by the {' or the '.join(deciders)}"
        )


def _describe_teacher_labels(ingestion: RowIngestion, settings: Prepare, selection: RowSelection) -> Iterator[str]:
    """Yield a note if some labels occur only in teacher answers.

    Teacher answers are never held out, so no held-out row has these labels.
    """
    accepted = ingestion.accepted
    from_teacher = np.array(accepted.from_teacher, dtype=np.bool_)
    if settings.task != "labels" or not from_teacher.any():
        return
    names, labels = list(ingestion.label_names), np.array(accepted.label_codes, dtype=np.int64)
    own_counts = np.bincount(labels[~from_teacher], minlength=len(names))
    counts = np.bincount(labels[from_teacher & selection.kept], minlength=len(names))
    new = [(name, int(counts[code])) for code, name in enumerate(names) if counts[code] and not own_counts[code]]
    if new:
        shown = _join_names([f"{name[:MAX_LABEL_CHARACTERS]!r} ({count:,} rows)" for name, count in sorted(new)])
        yield (
            f"{len(new):,} of {len(np.flatnonzero(own_counts + counts)):,} labels occur only in teacher answers, not "
            f"in your own rows: {shown}; if they are not labels, remove such answers with select.answer_format"
        )
