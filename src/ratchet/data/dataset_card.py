"""Builds the dataset card of the prepared rows."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ratchet.config.extensions import describe_extension
from ratchet.config.prepare import Prepare
from ratchet.data import batches, ingest
from ratchet.data.ingest import RowIngestion
from ratchet.data.row_table import BLOCK_ROWS
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
MAX_LONG_SHARE = 0.05
"""Share of rows that are dropped as too long above which the card has a note."""
MAX_LENGTH_BIAS = 0.15
"""Difference of the share of longer chosen answers from a half, above which the card has a note."""
MAX_LABEL_CHARACTERS = 60
"""Length limit of a label in a note, in characters, because a teacher's answer may be a long text."""


def build_card(
    ingestion: RowIngestion, selection: RowSelection, settings: Prepare, reader: SourceReader
) -> DatasetCard:
    """Build the card. The stage adds the digests of data, base model and template."""
    values = ingestion.accepted.values
    masks = {name: selection.kept & (selection.split == code) for code, name in enumerate(SPLITS)}
    lengths = values.column("length")
    width = _bin_width(int(lengths.max(initial=1)))
    length_counts = {name: _count_values(lengths, mask, selection.copies) for name, mask in masks.items()}
    del lengths
    trained_tokens = values.column("trained_tokens")
    trained = {name: int((trained_tokens * selection.copies)[mask].sum()) for name, mask in masks.items()}
    del trained_tokens
    sources = _source_cards(ingestion, settings, reader, masks["train"])
    by_label = strata = {}
    if settings.task == "labels":
        by_label = strata = _count_by_split(list(ingestion.label_names), values.column("label"), masks)
    if settings.split.stratify:
        codes = np.empty(len(values), dtype=np.int32)
        codes_of_all = ingestion.split_assigner.stratum_codes()
        for rows, (indices,) in values.blocks("split_index"):
            codes[rows] = codes_of_all[indices]
        strata = _count_by_split(ingestion.split_assigner.strata, codes, masks)
    cut = {name: values.column("truncated_tokens", mask) for name, mask in masks.items()}
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
        splits={name: int(np.count_nonzero(mask)) for name, mask in masks.items()},
        lengths={name: _summarize_lengths(counts, trained[name], width) for name, counts in length_counts.items()},
        labels={name: count for name, stratum in by_label.items() if (count := stratum.splits["train"])},
        source_cards=sources,
        repeated=int((selection.copies[masks["train"]] - 1).sum()),
        balanced=selection.balanced,
        teacher_rows=sum(teacher.training_rows for teacher in teachers),
        end_of_turn=ingestion.encoder.end_of_turn,
        wanted={**split_fractions(settings)},
        strata=strata,
        near_duplicates=selection.near_duplicates,
        semantic_duplicates=selection.semantic_duplicates,
        pairs=_compare_lengths(ingestion, masks["train"]) if ingestion.has_pairs else None,
        desirable_rows=int((values.column("is_desirable") * selection.copies)[masks["train"]].sum())
        if ingestion.preference == "label"
        else None,
        leaks=selection.leaks,
        truncated={
            name: TruncationReport(rows=int(np.count_nonzero(tokens)), tokens=int(tokens.sum()))
            for name, tokens in cut.items()
            if tokens.any()
        },
        packing=_compute_fill_rates(length_counts["train"]),
        missing_fields=ingestion.passthrough.missing,
        notes=(*_notes(ingestion, settings, strata, selection), *_describe_held_out_pairs(reader)),
    )


def _source_cards(
    ingestion: RowIngestion, settings: Prepare, reader: SourceReader, training: NDArray[np.bool_]
) -> dict[str, SourceCard]:
    cards = {}
    training_rows = np.bincount(ingestion.accepted.values.column("source", training), minlength=len(settings.sources))
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


def _compare_lengths(ingestion: RowIngestion, mask: NDArray[np.bool_]) -> PairReport:
    values = ingestion.accepted.values
    chosen, rejected = values.column("trained_tokens", mask), values.column("rejected_tokens", mask)
    return PairReport(
        chosen_tokens=round(float(chosen.mean()), 2),
        rejected_tokens=round(float(rejected.mean()), 2),
        longer_chosen=round(float(((chosen > rejected) + 0.5 * (chosen == rejected)).mean()), 4),
    )


def _describe_length_bias(ingestion: RowIngestion, selection: RowSelection) -> Iterator[str]:
    """Yield a note if most chosen answers are longer, or most are shorter, than the rejected ones."""
    mask = selection.kept & (selection.split == TRAIN)
    report = _compare_lengths(ingestion, mask) if ingestion.has_pairs and mask.any() else None
    if report is not None and abs(report.longer_chosen - 0.5) > MAX_LENGTH_BIAS:
        yield (
            f"the chosen answer is the longer one in {report.longer_chosen:.0%} of the training pairs (chosen "
            f"{report.chosen_tokens:,.0f}, rejected {report.rejected_tokens:,.0f} tokens in the mean), so a model may "
            f"learn to prefer {'long' if report.longer_chosen > 0.5 else 'short'} answers"
        )


def _describe_missing_label(ingestion: RowIngestion, selection: RowSelection) -> Iterator[str]:
    """Yield a note if all training answers have the same label of preference."""
    mask = selection.kept & (selection.split == TRAIN)
    if ingestion.preference == "label" and mask.any():
        desirable = ingestion.accepted.values.column("is_desirable", mask)
        if desirable.all() or not desirable.any():
            yield (
                f"all {len(desirable):,} training answers are labelled {str(bool(desirable[0])).lower()}, so "
                "train.objective kto cannot learn from them; add answers with the other label"
            )


def _describe_long_rows(ingestion: RowIngestion, settings: Prepare) -> Iterator[str]:
    """Yield a note if many rows were dropped because they are too long."""
    if (dropped := ingestion.ledger.dropped.get("too_long")) is None:
        return
    share = dropped.count / ingestion.ledger.rows_in
    if share > MAX_LONG_SHARE:
        yield (
            f"{dropped.count:,} rows ({share:.0%}) were dropped because they have more than {settings.max_tokens:,} "
            "tokens (prepare.max_tokens); prepare.too_long says what happens to such rows"
        )


def _bin_width(longest: int) -> int:
    """Return a round bin width: 1, 2 or 5 times a power of ten."""
    smallest = max(1, longest / BINS)
    power = 10 ** math.floor(math.log10(smallest))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest))


def _count_values(values: NDArray[np.int32], mask: NDArray[np.bool_], copies: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return how often each value occurs in the rows of a mask and their copies; the index is the value."""
    counts = np.zeros(int(values.max(initial=0)) + 1, dtype=np.int64)
    for start in range(0, len(values), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        np.add.at(counts, values[rows][mask[rows]], copies[rows][mask[rows]])
    return counts


def _summarize_lengths(counts: NDArray[np.int64], trained: int, width: int) -> LengthDistribution:
    """Summarize the lengths of one or more rows, from the number of rows of each length (index: tokens)."""
    present, total = np.flatnonzero(counts), int(counts.sum())
    ends = np.cumsum(counts)
    # The lengths at these positions in the sorted rows: the two in the middle, and the lower one at 95 %.
    positions = [(total - 1) // 2, total // 2, int((total - 1) * 0.95)]
    low, high, p95 = np.searchsorted(ends, positions, side="right").tolist()
    histogram = np.bincount(present // width, weights=counts[present])
    return LengthDistribution(
        least=int(present[0]),
        median=round((low + high) / 2),
        p95=p95,
        greatest=int(present[-1]),
        total=int((present * counts[present]).sum()),
        trained=trained,
        histogram={b * width: int(n) for b, n in enumerate(histogram.tolist()) if n},
    )


def _count_by_split(
    names: list[str], codes: NDArray[np.int32], masks: dict[SplitName, NDArray[np.bool_]]
) -> dict[str, SplitStratum]:
    """Count kept rows by name and split; `codes` has for each row the index of its name."""
    counts = {split: np.bincount(codes[mask], minlength=len(names)) for split, mask in masks.items()}
    strata = {}
    for name, code in sorted((name, code) for code, name in enumerate(names)):
        splits = {split: int(count[code]) for split, count in counts.items()}
        if any(splits.values()):
            strata[name] = SplitStratum(rows=sum(splits.values()), splits={**splits})
    return strata


def _compute_fill_rates(counts: NDArray[np.int64]) -> dict[str, float]:
    """Return the fill rate of packs for the two smallest capacities that fit the longest row."""
    tokens = int((np.arange(len(counts)) * counts).sum())
    longest = int(np.flatnonzero(counts).max(initial=0))
    capacities = [capacity for capacity in PACK_TOKENS if capacity >= longest][:2]
    packs = {capacity: batches.count_packs(counts, capacity) for capacity in capacities}
    return {str(c): round(tokens / (count * c), 4) if count else 0.0 for c, count in packs.items()}


def _notes(
    ingestion: RowIngestion, settings: Prepare, strata: dict[str, SplitStratum], selection: RowSelection
) -> Iterator[str]:
    for kind, is_omitted in sorted(ingestion.encoder.omitted.items()):
        if is_omitted:
            advice = "set prepare.system: merge" if kind == "system messages" else "use another template, or drop them"
            yield f"the chat template omits {kind}, so the model does not see them; {advice}"
    yield from _describe_length_bias(ingestion, selection)
    yield from _describe_missing_label(ingestion, selection)
    yield from _describe_long_rows(ingestion, settings)
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
    values = ingestion.accepted.values
    from_teacher = values.column("from_teacher")
    if settings.task != "labels" or not from_teacher.any():
        return
    names, labels = list(ingestion.label_names), values.column("label")
    own_counts = np.bincount(labels[~from_teacher], minlength=len(names))
    counts = np.bincount(labels[from_teacher & selection.kept], minlength=len(names))
    new = [(name, int(counts[code])) for code, name in enumerate(names) if counts[code] and not own_counts[code]]
    if new:
        shown = _join_names([f"{name[:MAX_LABEL_CHARACTERS]!r} ({count:,} rows)" for name, count in sorted(new)])
        yield (
            f"{len(new):,} of {len(np.flatnonzero(own_counts + counts)):,} labels occur only in teacher answers, not "
            f"in your own rows: {shown}; if they are not labels, remove such answers with select.answer_format"
        )
