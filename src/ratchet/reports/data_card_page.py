"""Renders the dataset card as one self-contained HTML page without scripts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ratchet.config.prepare import DropLimitSettings
from ratchet.storage import digests, files, html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, mark_differences, tag
from ratchet.storage.records.data import DatasetCard, LengthDistribution, NearDuplicateCluster, SplitStratum

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
SPLITS = ("train", "validation", "test")
NO_LENGTHS = LengthDistribution(least=0, median=0, p95=0, greatest=0, total=0, trained=0)
DROP_MEANINGS = DropLimitSettings.descriptions() | OTHER_DROP_MEANINGS
Body = Sequence[Html] | str
"""Content of a section. Text explains why a section is empty."""

STYLE = Path(__file__).with_name("page.css")


def explain_repeats(card: DatasetCard) -> str:
    """Return the reason for repeated training rows, as part of a sentence."""
    return "for balance" if card.balanced else "by weight"


def render_teacher_sources(card: DatasetCard) -> list[Html]:
    """Render the sources that a teacher answered, and the rows omitted from them."""
    sources = {
        name: source.teacher_provenance
        for name, source in sorted(card.source_cards.items())
        if source.teacher_provenance
    }
    if not sources:
        return []
    rows = [
        (
            tag("bdi", name),
            html.place_list(source.teachers),
            f"{source.answers:,}",
            html.place_list([f"{filter_.replace('_', ' ')}: {count:,}" for filter_, count in source.filters]),
            f"{source.rows:,}",
            f"{source.training_rows:,}",
        )
        for name, source in sources.items()
    ]
    heads = ("source", "teacher", "answers", "omitted by", "chosen", "training rows kept")
    share = format_percentage(card.teacher_rows, card.splits.get("train", 0))
    summary = (
        f"{format_count(card.teacher_rows, 'training row')} ({share}) are answers of a teacher; "
        "they are never used for evaluation."
    )
    return [tag("p", summary), html.table("Teacher answers", "twnwnn", heads, rows)]


def render_balance(card: DatasetCard, labels: Sequence[Html] | str) -> Sequence[Html] | str:
    """Render the effect of prepare.balance, followed by the resulting balance of labels or strata."""
    if (balance := card.balanced) is None:
        return labels
    most = max(1, *balance.before.values(), *balance.after.values())
    names = sorted(balance.before, key=lambda name: (-balance.before[name], name))
    rows = [
        (
            tag("bdi", name),
            bar(("lost", balance.before[name] / most)),
            f"{balance.before[name]:,}",
            bar(("train", balance.after[name] / most)),
            f"{balance.after[name]:,}",
        )
        for name in names[:CATEGORIES_SHOWN]
    ]
    fewer = sum(count < balance.rows for count in balance.before.values())
    summary = f"Balanced by {balance.by}: {format_count(balance.rows, 'training row')} of each category per epoch"
    if fewer:
        shortage = {"take": "are unchanged", "repeat": "are repeated"}.get(balance.on_shortage, balance.on_shortage)
        summary += f"; {fewer:,} of {len(names):,} categories have fewer, which {shortage}"
    heads = ("category", "", "training rows before", "", "per epoch now")
    content = [tag("p", f"{summary}."), html.table("Training rows by category", "tbnbn", heads, rows)]
    if len(names) > CATEGORIES_SHOWN:
        content.append(
            explanation(
                f"{len(names) - CATEGORIES_SHOWN:,} smaller categories are omitted; the JSON card has all of them."
            )
        )
    return [*content, *([explanation(labels)] if isinstance(labels, str) else labels)]


# The page: one HTML file without external resources. All lists are sorted, so that equal cards give equal bytes for
# any order of their keys.


def write_dataset_page(card: DatasetCard, target: Path) -> None:
    """Write the card as one self-contained HTML page. Equal cards give equal bytes."""
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in SECTIONS]
    main = tag("main", *(html.section(title, body(card)) for title, body in SECTIONS.items()))
    contents = tag("nav", *links, aria_label="Sections")
    title = f"Dataset card {card.digest[: digests.SHORT]}"
    page = html.document(title, STYLE.read_text(encoding="utf-8"), _render_header(card), contents, main)
    files.write_atomic(target, page)


def _order_splits(splits: Iterable[str]) -> list[str]:
    """Sort splits in the usual order; other names follow."""
    return sorted(splits, key=lambda name: (SPLITS.index(name) if name in SPLITS else len(SPLITS), name))


def _render_header(card: DatasetCard) -> Html:
    train = card.lengths.get("train", NO_LENGTHS)
    tokens = f"{format_count(train.total, 'token')} per epoch"
    figures = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in _key_figures(card, train)
    ]
    return tag(
        "header",
        tag("p", "Dataset card ", tag("code", card.digest[: digests.SHORT]), class_="quiet"),
        tag("h1", f"{format_count(card.rows_in, 'row')} in, {card.rows_out:,} out", tag("span", tokens)),
        tag("dl", *figures),
    )


def _key_figures(card: DatasetCard, train: LengthDistribution) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each key figure."""
    yield "Rows kept", format_percentage(card.rows_out, card.rows_in), f"{card.rows_in - card.rows_out:,} dropped"
    others = ", ".join(f"{card.splits[name]:,} {name}" for name in _order_splits(card.splits) if name != "train")
    repeated = f"and {card.repeated:,} repeated {explain_repeats(card)}; " if card.repeated else ""
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
    else:
        yield "Cut", f"{sum(cut.rows for cut in card.truncated.values()):,}", "rows truncated to the maximum length"


def _render_sources(card: DatasetCard) -> Body:
    if not card.source_cards:
        return [html.digest_list(card.sources)] if card.sources else "No source is listed."
    rows = [
        (
            tag("bdi", name),
            c.record_schema,
            f"{c.rows:,}",
            f"{c.weight:g}",
            c.split or "drawn",
            html.digest_list(c.files),
        )
        for name, c in sorted(card.source_cards.items())
    ]
    heads = ("source", "read as", "rows", "weight", "split", "files, SHA-256")
    return [html.table("Sources", "ttnntw", heads, rows), *render_teacher_sources(card)]


def _render_rows(card: DatasetCard) -> Body:
    """Render all rows as one bar, and the dropped rows enlarged below it, one segment per reason."""
    drops = sorted(card.dropped.items(), key=lambda item: (-item[1].count, item[0]))
    dropped, total = sum(drop.count for _, drop in drops), max(1, card.rows_in)
    sign = "=" if card.rows_in == card.rows_out + dropped else "≠"
    kept_text = f"kept {format_percentage(card.rows_out, card.rows_in)}"
    lost = f"dropped {format_percentage(dropped, card.rows_in)}"
    parts = [("train", card.rows_out / total), *(("lost", drop.count / total) for _, drop in drops)]
    content = [
        tag("p", f"{card.rows_in:,} in {sign} {card.rows_out:,} out + {dropped:,} dropped", class_="ledger"),
        tag("div", bar(*parts), class_="whole", role="img", aria_label=f"All rows: {kept_text}, {lost}"),
        html.legend(("train", kept_text), ("lost", lost)),
    ]
    if not drops:
        return [*content, explanation("No row was dropped.")]
    rows, before = [], 0
    for reason, drop in drops:
        segment = bar(("gap", before / max(1, dropped)), ("lost", drop.count / max(1, dropped)))
        name = tag("span", reason.replace("_", " "), tag("small", DROP_MEANINGS.get(reason, "")))
        share = format_percentage(drop.count, card.rows_in)
        rows.append((name, segment, f"{drop.count:,}", share, html.place_list(drop.examples)))
        before += drop.count
    heads = ("reason", "share of dropped rows", "rows", "share of all rows", "first examples")
    return [*content, html.table("Dropped rows by reason", "tsnnw", heads, rows)]


def _render_lengths(card: DatasetCard) -> Body:
    """Render one length histogram per split, on the same axes."""
    splits = _order_splits(card.lengths)
    if not splits:
        return "No lengths were measured."
    histograms = [card.lengths[name].histogram for name in splits]
    right = max(max(lengths.greatest + 1, *lengths.histogram, 1) for lengths in card.lengths.values())
    width = html.compute_bin_width(histograms) or right
    top = max((max(h.values()) / sum(h.values()) for h in histograms if any(h.values())), default=1.0)
    content = [explanation("Tokens per row, as share of the split's rows, on one scale.")]
    for name in splits:
        lengths = card.lengths[name]
        description = (
            f"Lengths of {name} rows: {lengths.least:,} to {lengths.greatest:,} tokens, "
            f"median {lengths.median:,}, 95th percentile {lengths.p95:,}"
        )
        marks = {"median": lengths.median, "95\u00a0% ≤": lengths.p95}
        plot = html.histogram(lengths.histogram, width, (right, top), marks, description)
        caption = tag("figcaption", name, tag("span", f" · {format_count(card.splits.get(name, 0), 'row')}"))
        content.append(tag("figure", caption, plot))
    rows = [
        (name, f"{lengths.least:,}", f"{lengths.median:,}", f"{lengths.p95:,}", f"{lengths.greatest:,}")
        for name, lengths in ((name, card.lengths[name]) for name in splits)
    ]
    heads = ("split", "shortest", "median", "95th percentile", "longest")
    return [*content, html.table("Lengths in tokens by split", "tnnnn", heads, rows)]


def _source_splits(card: DatasetCard) -> set[str]:
    """Return the splits to which sources are assigned. The size of these splits does not depend on split fractions."""
    return {source.split for source in card.source_cards.values() if source.split}


def _render_splits(card: DatasetCard) -> Body:
    if not card.splits:
        return "There are no splits."
    assigned = _source_splits(card) - {"train"}
    random_total = sum(rows for name, rows in card.splits.items() if name not in assigned)
    rows = []
    for name in _order_splits(card.splits):
        count, fraction = card.splits[name], card.wanted.get(name)
        line = bar((name if name in SPLITS else "train", count / max(1, random_total)), mark=fraction)
        target = "own source" if name in assigned else NONE if fraction is None else format_percentage(fraction, 1)
        of_drawn = NONE if name in assigned else format_percentage(count, random_total)
        rows.append((name, bar() if name in assigned else line, f"{count:,}", of_drawn, target))
    heads = ("split", "actual share, and a line at the target", "rows", "found", "wanted")
    content = [html.table("Splits", "tbnnn", heads, rows)]
    if "train" in _source_splits(card):
        content.append(explanation("All rows of a source are assigned to train, so train exceeds its fraction."))
    return content


def _render_balance_section(card: DatasetCard) -> Body:
    strata = card.strata
    if not strata and card.labels:
        strata = {name: SplitStratum(rows=rows, splits={"train": rows}) for name, rows in card.labels.items()}
    if not strata:
        return "The data has no labels, and the splits are not stratified."
    grouping = "label" if card.labels.keys() <= strata.keys() and card.labels else "stratum"
    names = sorted(strata, key=lambda name: (-strata[name].rows, name))
    splits = _order_splits({split for stratum in strata.values() for split in stratum.splits})
    most = max(1, strata[names[0]].rows)
    content = [tag("p", sentence) for sentence in _describe_imbalance(card, strata, names, grouping)]
    content.append(html.legend(*((split if split in SPLITS else "lost", split) for split in splits)))
    omitted = len(names) - 2 * LABELS_SHOWN
    groups = [names] if omitted <= 0 else [names[:LABELS_SHOWN], names[-LABELS_SHOWN:]]
    for group, end in zip(groups, ("largest", "smallest"), strict=False):
        if omitted > 0:
            content.append(tag("h3", f"The {LABELS_SHOWN} {end} of {len(names):,}"))
        rows = [
            (
                tag("bdi", name),
                bar(*((s if s in SPLITS else "lost", strata[name].splits.get(s, 0) / most) for s in splits)),
                f"{strata[name].rows:,}",
                *(f"{strata[name].splits.get(split, 0):,}" for split in splits),
            )
            for name in group
        ]
        table = html.table(
            f"Rows by {grouping} and split", "tbn" + "n" * len(splits), (grouping, "", "rows", *splits), rows
        )
        content.append(tag("div", table, class_="dense"))
    if omitted > 0:
        content.append(explanation(f"{omitted:,} between them are omitted; the JSON card has all of them."))
    return content


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


def _render_near_duplicates(card: DatasetCard) -> Body:
    near = card.near_duplicates
    if near is None:
        return "Near-duplicates were not searched (prepare.deduplication.jaccard_threshold is not set)."
    criterion = f"Jaccard ≥ {near.threshold:g}, shingles of {format_count(near.shingle_words, 'word')}"
    if not near.clusters:
        return f"No near-duplicates were found at {criterion}."
    summary = f"{format_count(near.clusters, 'cluster')} of rows at {criterion}; one row of each is kept. "
    leaked = f"{format_count(near.across_splits, 'dropped row')} would have leaked: the kept row is in another split."
    across = leaked if near.across_splits else "No cluster spans several splits."
    clusters = sorted(near.largest, key=lambda cluster: (-cluster.size, cluster.kept))
    listing = (
        f"The {len(clusters)} largest are listed" if len(clusters) < near.clusters else "All are listed, largest first"
    )
    return [
        tag("p", summary, across),
        explanation(f"{listing}; differing words are marked."),
        *map(_render_cluster, clusters),
    ]


def _render_cluster(cluster: NearDuplicateCluster) -> Html:
    """Render a kept row next to one of its dropped near-duplicates."""
    kept_text, dropped = (text[:TEXT_SHOWN] for text in (*cluster.texts, "", "")[:2])
    boxes = (
        tag("div", tag("small", title, tag("bdi", place)), tag("p", text))
        for title, place, text in (
            ("kept: ", cluster.kept, mark_differences(kept_text, dropped)),
            ("dropped: ", next(iter(cluster.dropped), ""), mark_differences(dropped, kept_text)),
        )
    )
    parts = [tag("h3", format_count(cluster.size, "row")), tag("div", *boxes, class_="pair")]
    if kept_text == dropped:
        parts.append(tag("small", "They differ only after the visible part."))
    if also := cluster.dropped[1:]:
        rest = cluster.size - 2 - len(also)
        more = f" and {rest:,} more" if rest > 0 else ""
        parts.append(tag("small", "Also dropped: ", tag("bdi", ", ".join(also)), more))
    return tag("article", *parts)


def _render_leaks(card: DatasetCard) -> Body:
    if not card.leaks:
        return "No evaluation set is configured, so none was checked."
    rows = [
        (
            tag("bdi", name),
            f"{leak.documents:,}",
            f"{leak.unchecked:,}",
            f"{leak.rows:,}",
            html.place_list(leak.examples),
        )
        for name, leak in sorted(card.leaks.items(), key=lambda item: (-item[1].rows, item[0]))
    ]
    heads = ("evaluation set", "documents", "too short for n-grams", "rows that overlap", "first examples")
    note = "Rows that share an n-gram with an evaluation set. Documents too short for n-grams are compared whole."
    return [explanation(note), html.table("Leaks by evaluation set", "tnnnw", heads, rows)]


def _render_truncation(card: DatasetCard) -> Body:
    if not any(cut.rows for cut in card.truncated.values()):
        return "No conversation was truncated."
    rows = []
    for name in _order_splits(card.truncated):
        cut, remaining = card.truncated[name], card.lengths.get(name, NO_LENGTHS).total
        share = format_percentage(cut.rows, card.splits.get(name, 0))
        rows.append(
            (name, f"{cut.rows:,}", share, f"{cut.tokens:,}", format_percentage(cut.tokens, cut.tokens + remaining))
        )
    heads = ("split", "rows truncated", "of its rows", "tokens removed", "of its tokens")
    return [html.table("Truncation by split", "tnnnn", heads, rows)]


def _render_packing(card: DatasetCard) -> Body:
    if not card.packing:
        return "The fill rate was not measured: the longest row exceeds every usual pack size."
    rates = sorted((int(capacity), rate) for capacity, rate in card.packing.items())
    rows = [
        (format_count(capacity, "token"), bar(("train", rate)), format_percentage(rate, 1)) for capacity, rate in rates
    ]
    note = "Fill rate of packs of whole training rows, as stage train packs them. The rest is padding."
    return [explanation(note), html.table("Fill rate of packs", "tbn", ("pack size", "", "filled"), rows)]


def _render_tokens(card: DatasetCard) -> Body:
    if not card.lengths:
        return "No tokens were counted."
    most = max(1, *(lengths.total for lengths in card.lengths.values()))
    rows = []
    for name in _order_splits(card.lengths):
        lengths = card.lengths[name]
        parts = bar(("train", lengths.trained / most), ("test", (lengths.total - lengths.trained) / most))
        rows.append(
            (
                name,
                parts,
                f"{lengths.total:,}",
                f"{lengths.trained:,}",
                format_percentage(lengths.trained, lengths.total),
            )
        )
    content = [
        html.legend(("train", "trained"), ("test", "context only")),
        html.table("Tokens by split", "tbnnn", ("split", "", "tokens", "trained", "share"), rows),
    ]
    if card.repeated:
        rows_again = f"{format_count(card.repeated, 'row')} repeated {explain_repeats(card)}"
        content.append(explanation(f"{rows_again} are included in these sums."))
    return content


def _render_template(card: DatasetCard) -> Body:
    facts = {
        "End of turn": card.end_of_turn,
        "Chat template, SHA-256": card.template,
        "Base model": card.base_digest,
        "Data": card.digest,
    }
    pairs = [(tag("dt", name), tag("dd", tag("code", value or "none"))) for name, value in facts.items()]
    return [tag("dl", *(part for pair in pairs for part in pair), class_="facts")]


def _render_notes(card: DatasetCard) -> Body:
    return [tag("ul", *(tag("li", tag("bdi", note)) for note in card.notes))] if card.notes else "There are no notes."


SECTIONS: dict[str, Callable[[DatasetCard], Body]] = {
    "Sources": _render_sources,
    "Row flow": _render_rows,
    "Lengths": _render_lengths,
    "Splits": _render_splits,
    "Class balance": lambda card: render_balance(card, _render_balance_section(card)),
    "Near-duplicates": _render_near_duplicates,
    "Leaks": _render_leaks,
    "Truncation": _render_truncation,
    "Packing": _render_packing,
    "Tokens per epoch": _render_tokens,
    "Template": _render_template,
    "Notes": _render_notes,
}
