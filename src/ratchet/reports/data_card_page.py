"""Writes the dataset card as one self-contained HTML page without scripts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.prepare import DROP_REASONS
from ratchet.config.units import format_count
from ratchet.reports import pages
from ratchet.storage import digests, files
from ratchet.storage.html import NONE, format_percentage
from ratchet.storage.records.data import (
    DatasetCard,
    LengthDistribution,
    NearDuplicateCluster,
    NearDuplicateReport,
    SplitStratum,
)

OTHER_DROP_MEANINGS = {
    "sampled_out": "Omitted by a weight below 1 in prepare.sources.",
    "balanced_out": "Their category has more training rows than prepare.balance allows.",
    "teacher_held_out": (
        "A teacher's answers to validation or test prompts, which are neither ground truth nor training data."
    ),
}
"""Explanations of drop reasons that have no limit."""
CATEGORIES_SHOWN = 40
"""Maximum number of categories in the table, largest first."""
LABELS_SHOWN = 20
"""Number of the largest labels, and of the smallest labels, that are shown if there are more than twice as many."""
TEXT_SHOWN = 1000
"""Maximum number of characters shown of a near-duplicate."""
BARS_PX, MIN_BAR_PX, TICKS = 76, 2, 5
"""Maximum and minimum height of a bar of a histogram in pixels, and approximate number of ticks."""
SPLITS = ("train", "validation", "test")
NO_LENGTHS = LengthDistribution(least=0, median=0, p95=0, greatest=0, total=0, trained=0)
DROP_MEANINGS = {reason: rule.meaning for reason, rule in DROP_REASONS.items()} | OTHER_DROP_MEANINGS
SECTIONS = (
    "Sources", "Row flow", "Text quality", "Lengths", "Splits", "Class balance", "Near-duplicates", "Leaks",
    "Truncation", "Packing", "Tokens per epoch", "Template", "Notes",
)  # fmt: skip


def write_dataset_page(card: DatasetCard, target: Path) -> None:
    """Write the card as one self-contained HTML page. All lists are sorted, so that equal cards give equal bytes."""
    train = card.lengths.get("train", NO_LENGTHS)
    page = pages.render(
        "data_card",
        title=f"Dataset card {card.digest[: digests.SHORT]}",
        sections=SECTIONS,
        card=card,
        train=train,
        figures=list(_key_figures(card, train)),
        drops=_list_drops(card),
        flaws=[
            (check, DROP_MEANINGS.get(check, ""), rows)
            for check, rows in sorted(card.flaws.items(), key=lambda item: (-item[1].count, item[0]))
        ],
        dropped=sum(drop.count for drop in card.dropped.values()),
        histograms=_draw_histograms(card),
        splits=card.splits,
        split_rows=_compare_splits(card),
        source_splits=_source_splits(card),
        balance=_describe_balance(card),
        strata=_describe_strata(card),
        near_clusters=_describe_clusters(card.near_duplicates),
        semantic_clusters=_describe_clusters(card.semantic_duplicates),
        leaked=sorted(card.leaks.items(), key=lambda item: (-item[1].rows, item[0])),
        truncated=_describe_truncation(card),
        packed=sorted((int(capacity), rate) for capacity, rate in card.packing.items()),
        repeats=_explain_repeats(card),
    )
    files.write_atomic(target, page)


def _explain_repeats(card: DatasetCard) -> str:
    """Return the reason for repeated training rows, as part of a sentence."""
    return "for balance" if card.balanced else "by weight"


def _order_splits(splits: Iterable[str]) -> list[str]:
    """Sort splits in the usual order; other names follow."""
    return sorted(splits, key=lambda name: (SPLITS.index(name) if name in SPLITS else len(SPLITS), name))


def _key_figures(card: DatasetCard, train: LengthDistribution) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each key figure."""
    yield "Rows kept", format_percentage(card.rows_out, card.rows_in), f"{card.rows_in - card.rows_out:,} dropped"
    others = ", ".join(f"{card.splits[name]:,} {name}" for name in _order_splits(card.splits) if name != "train")
    repeated = f"and {card.repeated:,} repeated {_explain_repeats(card)}; " if card.repeated else ""
    yield "Training rows", f"{card.splits.get('train', 0):,}", repeated + others
    yield "Training tokens", f"{train.total:,}", "chat template included"
    yield "Trained tokens", format_percentage(train.trained, train.total), f"{train.trained:,} tokens: the answers"
    yield "Training row", f"{train.median:,}", f"tokens (median); maximum {train.greatest:,}"
    if near := card.near_duplicates:
        yield "Near-duplicates", f"{near.clusters:,}", "clusters; one row of each is kept"
    else:
        yield "Near-duplicates", NONE, "not searched"
    if card.leaks:
        sets = format_count(len(card.leaks), "evaluation set")
        yield "Leaks", f"{sum(leak.rows for leak in card.leaks.values()):,}", f"overlaps with {sets}"
    else:
        yield "Leaks", NONE, "no evaluation set was checked"
    if card.task == "labels":
        least, most = min(card.labels.values(), default=0), max(card.labels.values(), default=0)
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        yield "Labels", f"{len(card.labels):,}", f"of {span} training rows"
    elif pairs := card.pairs:
        lengths = f"of the pairs: {pairs.chosen_tokens:,.1f} tokens in the mean, rejected {pairs.rejected_tokens:,.1f}"
        yield "Chosen is longer", f"{pairs.longer_chosen:.0%}", lengths
    elif card.desirable_rows is not None:
        yield "Desirable", f"{card.desirable_rows:,}", f"of {card.splits['train'] + card.repeated:,} training answers"
    else:
        yield "Cut", f"{sum(cut.rows for cut in card.truncated.values()):,}", "rows truncated to the maximum length"


def _list_drops(card: DatasetCard) -> list[dict[str, Any]]:
    """Return the dropped rows by reason, most frequent first, each with the number of rows before it."""
    drops: list[dict[str, Any]] = []
    for reason, drop in sorted(card.dropped.items(), key=lambda item: (-item[1].count, item[0])):
        before = drops[-1]["before"] + drops[-1]["count"] if drops else 0
        meaning = DROP_MEANINGS.get(reason, "")
        drops.append(
            {"reason": reason, "count": drop.count, "before": before, "meaning": meaning, "examples": drop.examples}
        )
    return drops


def _draw_histograms(card: DatasetCard) -> list[dict[str, Any]]:
    """Return one length histogram per split, on the same axes. Positions and widths are shares of the axis."""
    splits = _order_splits(card.lengths)
    histograms = [card.lengths[name].histogram for name in splits]
    right = max((max(found.greatest + 1, *found.histogram, 1) for found in card.lengths.values()), default=1)
    # Empty bins may be missing, so the width is the greatest common divisor of the edges.
    width = math.gcd(*(edge for histogram in histograms for edge in histogram)) or right
    top = max((max(h.values()) / sum(h.values()) for h in histograms if any(h.values())), default=1.0)
    minimum = right / TICKS
    power = int(10 ** (len(str(math.ceil(minimum))) - 1))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= minimum)

    def text(position: int, label: str) -> tuple[float, str, str]:
        share = position / right
        return share, "start" if share < 0.1 else "end" if share > 0.9 else "middle", label

    drawn = []
    for name in splits:
        found = card.lengths[name]
        total = sum(found.histogram.values()) or 1
        drawn.append({
            "split": name,
            "rows": card.splits.get(name, 0),
            "description": (
                f"Lengths of {name} rows: {found.least:,} to {found.greatest:,} tokens, median {found.median:,}, 95th "
                f"percentile {found.p95:,}"
            ),
            "bars": [
                (edge / right, min(width, right - edge) / right, max(BARS_PX * count / total / top, MIN_BAR_PX))
                for edge, count in sorted(found.histogram.items())
            ],
            "ticks": [text(tick, f"{tick:,}") for tick in range(0, right + 1, step)],
            "marks": [
                text(found.median, f"median {found.median:,}"), text(found.p95, f"95\u00a0% \u2264 {found.p95:,}"),
            ],
        })  # fmt: skip
    return drawn


def _source_splits(card: DatasetCard) -> set[str]:
    """Return the splits to which sources are assigned. The size of these splits does not depend on split fractions."""
    return {source.split for source in card.source_cards.values() if source.split}


def _compare_splits(card: DatasetCard) -> list[tuple[object, ...]]:
    """Return a row for each split: its bar, rows, share and wanted share."""
    assigned = _source_splits(card) - {"train"}
    random_total = sum(rows for name, rows in card.splits.items() if name not in assigned)
    bar = pages.macros().bar
    rows: list[tuple[object, ...]] = []
    for name in _order_splits(card.splits):
        count, fraction = card.splits[name], card.wanted.get(name)
        if name in assigned:
            rows.append((name, bar([]), count, NONE, "own source"))
            continue
        shares = bar([(name if name in SPLITS else "train", count / max(1, random_total))], fraction)
        wanted = NONE if fraction is None else format_percentage(fraction, 1)
        rows.append((name, shares, count, format_percentage(count, random_total), wanted))
    return rows


def _describe_balance(card: DatasetCard) -> dict[str, Any] | None:
    """Return the effect of prepare.balance; None if it is not set."""
    if (balance := card.balanced) is None:
        return None
    most = max(1, *balance.before.values(), *balance.after.values())
    names = sorted(balance.before, key=lambda name: (-balance.before[name], name))
    bdi, bar = pages.macros().bdi, pages.macros().bar
    rows = [
        (bdi(name), bar([("lost", balance.before[name] / most)]), balance.before[name],
         bar([("train", balance.after[name] / most)]), balance.after[name])
        for name in names[:CATEGORIES_SHOWN]
    ]  # fmt: skip
    shortage = ""
    if fewer := sum(count < balance.rows for count in balance.before.values()):
        effect = {"take": "are unchanged", "repeat": "are repeated"}.get(balance.on_shortage, balance.on_shortage)
        shortage = f"; {fewer:,} of {len(names):,} categories have fewer, which {effect}"
    omitted = len(names) - CATEGORIES_SHOWN
    return {"by": balance.by, "rows": balance.rows, "shortage": shortage, "table": rows, "omitted": omitted}


def _describe_strata(card: DatasetCard) -> dict[str, Any] | None:
    """Return the rows of labels or strata by split; None if there are none."""
    strata = card.strata
    if not strata and card.labels:
        strata = {name: SplitStratum(rows=rows, splits={"train": rows}) for name, rows in card.labels.items()}
    if not strata:
        return None
    grouping = "label" if card.labels.keys() <= strata.keys() and card.labels else "stratum"
    names = sorted(strata, key=lambda name: (-strata[name].rows, name))
    splits = _order_splits({split for stratum in strata.values() for split in stratum.splits})
    kinds = [split if split in SPLITS else "lost" for split in splits]
    most = max(1, strata[names[0]].rows)
    bdi, bar = pages.macros().bdi, pages.macros().bar

    def row(name: str) -> tuple[object, ...]:
        counts = [strata[name].splits.get(split, 0) for split in splits]
        shares = [(kind, count / most) for kind, count in zip(kinds, counts, strict=True)]
        return bdi(name), bar(shares), strata[name].rows, *counts

    omitted = len(names) - 2 * LABELS_SHOWN
    groups = [("", names)]
    if omitted > 0:
        title = f"The {LABELS_SHOWN} {{}} of {len(names):,}"
        groups = [(title.format("largest"), names[:LABELS_SHOWN]), (title.format("smallest"), names[-LABELS_SHOWN:])]
    return {
        "sentences": list(_describe_imbalance(card, strata, names, grouping)),
        "legend": list(zip(kinds, splits, strict=True)),
        "grouping": grouping,
        "splits": splits,
        "groups": [(title, [row(name) for name in group]) for title, group in groups],
        "omitted": omitted,
    }


def _describe_imbalance(
    card: DatasetCard, strata: Mapping[str, SplitStratum], names: Sequence[str], grouping: str
) -> Iterator[str]:
    """Describe the imbalance, labels missing in a split, and the largest deviation from the split fractions."""
    most, least = strata[names[0]].rows, strata[names[-1]].rows
    ratio = f", {most / least:,.1f} to 1" if least else ""
    yield (
        f"The largest {grouping} has {format_count(most, 'row')} ({names[0]}), the smallest {least:,} "
        f"({names[-1]}){ratio}."
    )
    for split in _order_splits(card.splits):
        if card.strata and (missing := [name for name in names if not strata[name].splits.get(split)]):
            yield f"{len(missing):,} of {len(names):,} have no {split} row, for example {missing[0]}."
    deviations = [
        (abs(strata[name].splits.get(split, 0) - fraction * strata[name].rows), name, split, fraction)
        for name in names
        for split, fraction in sorted(card.wanted.items())
    ]
    if card.strata and deviations and not _source_splits(card):
        _, name, split, fraction = max(deviations)
        yield (
            f"Largest deviation from the target, in rows: {name} has {strata[name].splits.get(split, 0):,} in {split}; "
            f"the target of {format_percentage(fraction, 1)} is {fraction * strata[name].rows:,.1f}."
        )


def _describe_clusters(report: NearDuplicateReport | None) -> list[dict[str, Any]]:
    """Return the clusters of a report, largest first."""
    found = sorted(report.largest, key=lambda cluster: (-cluster.size, cluster.kept)) if report else []
    return [_describe_cluster(cluster) for cluster in found]


def _describe_cluster(cluster: NearDuplicateCluster) -> dict[str, Any]:
    """Return a kept row next to one of its dropped near-duplicates."""
    kept, dropped = (text[:TEXT_SHOWN] for text in (*cluster.texts, "", "")[:2])
    also = cluster.dropped[1:]
    return {
        "size": cluster.size, "kept": cluster.kept, "dropped": next(iter(cluster.dropped), ""),
        "marked": pages.mark_differences(kept, dropped), "is_equal": kept == dropped,
        "also": also, "more": cluster.size - 2 - len(also),
    }  # fmt: skip


def _describe_truncation(card: DatasetCard) -> list[tuple[object, ...]]:
    if not any(cut.rows for cut in card.truncated.values()):
        return []
    rows: list[tuple[object, ...]] = []
    for name in _order_splits(card.truncated):
        cut, remaining = card.truncated[name], card.lengths.get(name, NO_LENGTHS).total
        share = format_percentage(cut.rows, card.splits.get(name, 0))
        rows.append((name, cut.rows, share, cut.tokens, format_percentage(cut.tokens, cut.tokens + remaining)))
    return rows
