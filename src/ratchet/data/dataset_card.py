"""What is known of prepared rows, as the dataset card."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ratchet.config.data import Prepare
from ratchet.data import balance, batches
from ratchet.data.ingest import RowIngestion
from ratchet.data.selection import RowSelection
from ratchet.data.sources import SourceReader, describe_teacher_data
from ratchet.data.splits import SMALLEST_STRATUM, SPLITS, TRAIN, SplitName, split_fractions
from ratchet.storage import digests
from ratchet.storage.records.data import DatasetCard, LengthDistribution, SourceCard, SplitStratum, TruncationReport

BINS = 24
"""Of the histograms of lengths, about."""

PACK_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Capacities for which the card says how full packs would be."""

NAMED = 5
"""Strata or labels named in a note."""
LABEL_SHOWN = 60
"""Characters of a label in a note: a teacher's may be an essay."""


def build_card(intake: RowIngestion, chosen: RowSelection, settings: Prepare, found: SourceReader) -> DatasetCard:
    """The card, but for what only the stage knows: the digests of data, base model and template."""
    taken = intake.taken
    lengths, trained = np.array(taken.lengths), np.array(taken.trained)
    members = {name: np.flatnonzero(chosen.kept & (chosen.split == code)) for code, name in enumerate(SPLITS)}
    sources = _sources(intake, settings, found, members["train"])
    width = _bin_width(int(lengths.max(initial=1)))
    times = chosen.copies[members["train"]]
    written = {**members, "train": np.repeat(members["train"], times)}  # lengths are those of an epoch
    strata = _strata(intake, settings, members)
    taught = np.array(taken.taught, dtype=np.bool_)[members["train"]]
    return DatasetCard(
        digest="",
        sources={name: content for one in sources.values() for name, content in one.files.items()},
        base_digest="",
        task=settings.task,
        rows_in=intake.ledger.rows_in,
        rows_out=intake.ledger.rows_out,
        dropped=intake.ledger.dropped,
        splits={name: len(rows) for name, rows in members.items()},
        lengths={name: _summarize_lengths(lengths[rows], trained[rows], width) for name, rows in written.items()},
        labels=_labels(intake, members["train"]) if settings.task == "labels" else {},
        source_cards=sources,
        repeated=int((times - 1).sum()),
        balanced=chosen.balanced,
        taught_rows=int(np.count_nonzero(taught)),
        end_of_turn=intake.encoder.end_of_turn,
        wanted={**split_fractions(settings)},
        strata=strata,
        near_duplicates=chosen.near_duplicates,
        leaks=chosen.leaks,
        truncated=_count_truncated(intake, members),
        packing=_packing(lengths[written["train"]]),
        missing_fields=intake.fields.missing,
        notes=tuple(_notes(intake, settings, strata, chosen)),
    )


def _sources(
    intake: RowIngestion, settings: Prepare, found: SourceReader, training: NDArray[np.int64]
) -> dict[str, SourceCard]:
    cards = {}
    rows = np.bincount(np.array(intake.taken.sources, dtype=np.int64)[training], minlength=len(settings.sources))
    for index, source in enumerate(settings.sources):
        contents = {name: digests.hash_file(path) for name, path in found.files[index].items()}
        cards[source.label] = SourceCard(
            files=contents or {source.label: source.revision or ""},
            shape=found.shapes[index],
            weight=source.weight,
            split=source.split,
            rows=intake.rows_by_source[index],
            taught=None if (one := found.taught[index]) is None else describe_teacher_data(one, int(rows[index])),
        )
    return cards


def _bin_width(greatest: int) -> int:
    """A round width, so that edges read well: 1, 2 or 5 times a power of ten."""
    least = max(1, greatest / BINS)
    ten = 10 ** math.floor(math.log10(least))
    return int(next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= least))


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


def _labels(intake: RowIngestion, rows: NDArray[np.int64]) -> dict[str, int]:
    names = list(intake.label_names)
    codes, counts = np.unique(np.array(intake.taken.labels)[rows], return_counts=True)
    return dict(sorted((names[code], int(count)) for code, count in zip(codes, counts, strict=True)))


def _strata(
    intake: RowIngestion, settings: Prepare, members: dict[SplitName, NDArray[np.int64]]
) -> dict[str, SplitStratum]:
    """Kept rows by stratum and split; without strata, by label; else nothing."""
    if settings.split.stratify:
        names = intake.divider.strata
        codes = intake.divider.stratum_codes()[np.array(intake.taken.divided, dtype=np.int64)]
    elif settings.task == "labels":
        names, codes = list(intake.label_names), np.array(intake.taken.labels, dtype=np.int64)
    else:
        return {}
    counts = {split: np.bincount(codes[rows], minlength=len(names)) for split, rows in members.items()}
    found = {
        name: SplitStratum(
            rows=sum(int(count[code]) for count in counts.values()),
            splits={split: int(count[code]) for split, count in counts.items()},
        )
        for code, name in enumerate(names)
    }
    return {name: stratum for name, stratum in sorted(found.items()) if stratum.rows}


def _count_truncated(intake: RowIngestion, members: dict[SplitName, NDArray[np.int64]]) -> dict[str, TruncationReport]:
    cut = np.array(intake.taken.cut)
    return {
        name: TruncationReport(rows=int(np.count_nonzero(cut[rows])), tokens=int(cut[rows].sum()))
        for name, rows in members.items()
        if cut[rows].any()
    }


def _packing(lengths: NDArray[np.int32]) -> dict[str, float]:
    fitting = [capacity for capacity in PACK_TOKENS if capacity >= lengths.max(initial=0)]
    listed = lengths.tolist()
    return {
        str(capacity): round(batches.fill_rate(listed, batches.pack_rows(listed, capacity, 0, 0), capacity), 4)
        for capacity in fitting[:2]
    }


def _notes(
    intake: RowIngestion, settings: Prepare, strata: dict[str, SplitStratum], chosen: RowSelection
) -> Iterator[str]:
    for kind, left_out in sorted(intake.left_out.items()):
        if left_out:
            way_out = "set prepare.system: merge" if kind == "system messages" else "use another one, or drop them"
            yield f"the chat template leaves {kind} out: the model will not see them; {way_out}"
    if chosen.near_duplicates and (count := chosen.near_duplicates.contradicting):
        yield f"{count:,} near-duplicates were dropped whose label is another than that of the row kept for them"
    if intake.unanswered:
        yield f"{intake.unanswered:,} messages that come after the last answer of their conversation were left out"
    if settings.split.stratify:
        small = [name for name, stratum in strata.items() if stratum.rows < SMALLEST_STRATUM]
        if small:
            shown = ", ".join(small[:NAMED]) + (" ..." if len(small) > NAMED else "")
            yield (
                f"{len(small)} strata of fewer than {SMALLEST_STRATUM} rows cannot be in every split "
                f"and are in one: {shown}"
            )
    yield from _describe_teacher_labels(intake, settings, chosen)
    if chosen.balanced:
        yield from balance.describe_balance(chosen.balanced)
    missing = [name for name, stratum in strata.items() if not stratum.splits[SPLITS[TRAIN]]]
    if missing:
        shown = ", ".join(missing[:NAMED]) + (" ..." if len(missing) > NAMED else "")
        yield f"{len(missing)} labels or strata have no training row: {shown}"
    yield from intake.fields.notes()
    for name, leak in chosen.leaks.items():
        if leak.unchecked:
            yield (
                f"{name}: {leak.unchecked} of {leak.documents} documents are too short for n-grams; "
                "they were compared as a whole"
            )


def _describe_teacher_labels(intake: RowIngestion, settings: Prepare, chosen: RowSelection) -> Iterator[str]:
    """Labels that only a teacher gives: whatever words it found become a class, and no held-out row is of it."""
    taken = intake.taken
    taught = np.array(taken.taught, dtype=np.bool_)
    if settings.task != "labels" or not taught.any():
        return
    names, labels = list(intake.label_names), np.array(taken.labels, dtype=np.int64)
    known = np.bincount(labels[~taught], minlength=len(names))
    counts = np.bincount(labels[taught & chosen.kept], minlength=len(names))
    alone = sorted((name, int(counts[code])) for code, name in enumerate(names) if counts[code] and not known[code])
    if alone:
        shown = ", ".join(f"{name[:LABEL_SHOWN]!r} ({count:,} rows)" for name, count in alone[:NAMED])
        yield (
            f"{len(alone):,} of {len(np.flatnonzero(known + counts)):,} labels are a teacher's alone, no row of yours "
            f"has them: {shown}{' ...' if len(alone) > NAMED else ''}; if they are none, leave such answers out with "
            "select.format"
        )
