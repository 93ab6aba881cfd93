"""Parts of the dataset card's page: which rows a teacher wrote, and what balancing did."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ratchet.config.data import DropLimitSettings
from ratchet.storage import digests, files, html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, mark_differences, tag
from ratchet.storage.records.data import DatasetCard, LengthDistribution, NearDuplicateCluster, SplitStratum

ORIGIN_MEANING = {
    "sampled_out": "Left out by a weight below 1, as prepare.sources asks.",
    "balanced_out": "Their category has more training rows than prepare.balance takes.",
    "taught_held_out": "A teacher's answers to validation or test prompts: no truth to judge by, nor to learn.",
}
"""Of reasons for which a row is dropped, those without a limit."""

SHOWN = 40
"""Categories in the table: the largest."""


def explain_repeats(card: DatasetCard) -> str:
    """Why some training rows come more than once."""
    return "to balance" if card.balanced else "by weight"


def render_teacher_sources(card: DatasetCard) -> list[Html]:
    """Who wrote the rows of sources that are answers of a teacher, and what was left out of those answers."""
    found = {name: one.taught for name, one in sorted(card.source_cards.items()) if one.taught}
    if not found:
        return []
    rows = [
        (
            tag("bdi", name),
            html.place_list(one.teachers),
            f"{one.answers:,}",
            html.place_list([f"{filter_.replace('_', ' ')}: {count:,}" for filter_, count in one.filters]),
            f"{one.rows:,}",
            f"{one.training_rows:,}",
        )
        for name, one in found.items()
    ]
    heads = ("source", "teacher", "answers", "left out by", "chosen", "training rows here")
    share = format_percentage(card.taught_rows, card.splits.get("train", 0))
    said = (
        f"{format_count(card.taught_rows, 'training row')} ({share}) are answers of a teacher; "
        "nothing is judged by them."
    )
    return [tag("p", said), html.table("Answers of teachers", "twnwnn", heads, rows)]


def render_balance(card: DatasetCard, labels: Sequence[Html] | str) -> Sequence[Html] | str:
    """What prepare.balance did, and below it the balance of labels or strata as it is."""
    if (one := card.balanced) is None:
        return labels
    most = max(1, *one.before.values(), *one.after.values())
    names = sorted(one.before, key=lambda name: (-one.before[name], name))
    rows = [
        (
            tag("bdi", name),
            bar(("lost", one.before[name] / most)),
            f"{one.before[name]:,}",
            bar(("train", one.after[name] / most)),
            f"{one.after[name]:,}",
        )
        for name in names[:SHOWN]
    ]
    fewer = sum(count < one.rows for count in one.before.values())
    said = f"Balanced by {one.by}: {format_count(one.rows, 'training row')} of each category in an epoch"
    if fewer:
        how = {"take": "come as they are", "repeat": "are repeated"}.get(one.fewer, one.fewer)
        said += f"; {fewer:,} of {len(names):,} categories have fewer, which {how}"
    heads = ("category", "", "training rows before", "", "in an epoch now")
    shown = [tag("p", f"{said}."), html.table("Training rows by category", "tbnbn", heads, rows)]
    if len(names) > SHOWN:
        shown.append(explanation(f"{len(names) - SHOWN:,} smaller ones are not shown; the JSON card has all."))
    return [*shown, *([explanation(labels)] if isinstance(labels, str) else labels)]


# The dataset card as a page: one HTML file that needs no network, no script and no other file.
#
# Everything is put in an order of its own, so that equal cards give equal bytes however their keys are ordered.

STYLE = Path(__file__).with_name("page.css")

SHOWN_ENDS = 20
"""Labels that are shown from each end, where there are more than twice as many."""

TEXT_SHOWN = 1000
"""Characters of a text."""

SPLITS = ("train", "validation", "test")

NO_LENGTHS = LengthDistribution(least=0, median=0, p95=0, greatest=0, total=0, trained=0)

MEANING = DropLimitSettings.sentences() | ORIGIN_MEANING

Body = Sequence[Html] | str
"""What a section shows; a text says that there is nothing to show."""


def write_dataset_page(card: DatasetCard, target: Path) -> None:
    """Write the card as one self-contained HTML page; equal cards give equal bytes."""
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in SECTIONS]
    main = tag("main", *(html.section(title, body(card)) for title, body in SECTIONS.items()))
    contents = tag("nav", *links, aria_label="Sections")
    title = f"Dataset card {card.digest[: digests.SHORT]}"
    page = html.document(title, STYLE.read_text(encoding="utf-8"), _render_header(card), contents, main)
    files.write_atomic(target, page)


def _order_splits(splits: Iterable[str]) -> list[str]:
    """Splits in the usual order, others behind them."""
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
    """Name, value and a word of explanation of each key figure."""
    yield "Rows kept", format_percentage(card.rows_out, card.rows_in), f"{card.rows_in - card.rows_out:,} dropped"
    others = ", ".join(f"{card.splits[name]:,} {name}" for name in _order_splits(card.splits) if name != "train")
    again = f"and {card.repeated:,} again {explain_repeats(card)}; " if card.repeated else ""
    yield "Training rows", f"{card.splits.get('train', 0):,}", again + others
    yield "Training tokens", f"{train.total:,}", "chat template included"
    yield "Learned from", format_percentage(train.trained, train.total), f"{train.trained:,} tokens: the answers"
    yield "Training row", f"{train.median:,}", f"tokens in the median, {train.greatest:,} at most"
    if near := card.near_duplicates:
        yield "Near-duplicates", f"{near.clusters:,}", "clusters, one row kept of each"
    else:
        yield "Near-duplicates", NONE, "not searched for"
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
        yield "Cut", f"{sum(cut.rows for cut in card.truncated.values()):,}", "rows, to the longest length"


def _render_sources(card: DatasetCard) -> Body:
    if not card.source_cards:
        return [html.fingerprint_list(card.sources)] if card.sources else "No source is named."
    rows = [
        (tag("bdi", name), c.shape, f"{c.rows:,}", f"{c.weight:g}", c.split or "drawn", html.fingerprint_list(c.files))
        for name, c in sorted(card.source_cards.items())
    ]
    heads = ("source", "read as", "rows", "weight", "split", "files, SHA-256")
    return [html.table("Sources", "ttnntw", heads, rows), *render_teacher_sources(card)]


def _render_rows(card: DatasetCard) -> Body:
    """The whole as one bar, and below it what was dropped, enlarged: each reason starts where the one before ends."""
    drops = sorted(card.dropped.items(), key=lambda item: (-item[1].count, item[0]))
    dropped, whole = sum(drop.count for _, drop in drops), max(1, card.rows_in)
    sign = "=" if card.rows_in == card.rows_out + dropped else "≠"
    kept = f"kept {format_percentage(card.rows_out, card.rows_in)}"
    lost = f"dropped {format_percentage(dropped, card.rows_in)}"
    parts = [("train", card.rows_out / whole), *(("lost", drop.count / whole) for _, drop in drops)]
    shown = [
        tag("p", f"{card.rows_in:,} in {sign} {card.rows_out:,} out + {dropped:,} dropped", class_="ledger"),
        tag("div", bar(*parts), class_="whole", role="img", aria_label=f"Of all rows {kept}, {lost}"),
        html.legend(("train", kept), ("lost", lost)),
    ]
    if not drops:
        return [*shown, explanation("No row was dropped.")]
    rows, before = [], 0
    for reason, drop in drops:
        falls = bar(("gap", before / max(1, dropped)), ("lost", drop.count / max(1, dropped)))
        name = tag("span", reason.replace("_", " "), tag("small", MEANING.get(reason, "")))
        share = format_percentage(drop.count, card.rows_in)
        rows.append((name, falls, f"{drop.count:,}", share, html.place_list(drop.examples)))
        before += drop.count
    heads = ("reason", "part of the dropped rows", "rows", "of all rows", "first examples")
    return [*shown, html.table("Dropped rows by reason", "tsnnw", heads, rows)]


def _render_lengths(card: DatasetCard) -> Body:
    """One picture a split, on the same axes, so that shapes can be compared."""
    splits = _order_splits(card.lengths)
    if not splits:
        return "No lengths were measured."
    every = [card.lengths[name].histogram for name in splits]
    right = max(max(one.greatest + 1, *one.histogram, 1) for one in card.lengths.values())
    width = html.compute_bin_width(every) or right
    top = max((max(h.values()) / sum(h.values()) for h in every if any(h.values())), default=1.0)
    shown = [explanation("Tokens of a row, by share of the split's rows; all on one scale.")]
    for name in splits:
        one = card.lengths[name]
        said = (
            f"Lengths of {name} rows: {one.least:,} to {one.greatest:,} tokens, "
            f"median {one.median:,}, 95 % have at most {one.p95:,}"
        )
        marks = {"median": one.median, "95\u00a0% ≤": one.p95}
        drawn = html.histogram(one.histogram, width, (right, top), marks, said)
        caption = tag("figcaption", name, tag("span", f" · {format_count(card.splits.get(name, 0), 'row')}"))
        shown.append(tag("figure", caption, drawn))
    rows = [
        (name, f"{one.least:,}", f"{one.median:,}", f"{one.p95:,}", f"{one.greatest:,}")
        for name, one in ((name, card.lengths[name]) for name in splits)
    ]
    heads = ("split", "shortest", "median", "95 % at most", "longest")
    return [*shown, html.table("Lengths in tokens by split", "tnnnn", heads, rows)]


def _source_splits(card: DatasetCard) -> set[str]:
    """Splits that a source brings itself: they follow no fraction."""
    return {source.split for source in card.source_cards.values() if source.split}


def _render_splits(card: DatasetCard) -> Body:
    if not card.splits:
        return "There are no splits."
    own = _source_splits(card) - {"train"}
    drawn = sum(rows for name, rows in card.splits.items() if name not in own)
    rows = []
    for name in _order_splits(card.splits):
        found, wanted = card.splits[name], card.wanted.get(name)
        line = bar((name if name in SPLITS else "train", found / max(1, drawn)), mark=wanted)
        said = "a source of its own" if name in own else NONE if wanted is None else format_percentage(wanted, 1)
        of_drawn = NONE if name in own else format_percentage(found, drawn)
        rows.append((name, bar() if name in own else line, f"{found:,}", of_drawn, said))
    heads = ("split", "found, and a line where wanted", "rows", "found", "wanted")
    shown = [html.table("Splits", "tbnnn", heads, rows)]
    if "train" in _source_splits(card):
        shown.append(explanation("A source gives all its rows to train, so more than the fraction is found there."))
    return shown


def _render_balance_section(card: DatasetCard) -> Body:
    strata = card.strata
    if not strata and card.labels:
        strata = {name: SplitStratum(rows=rows, splits={"train": rows}) for name, rows in card.labels.items()}
    if not strata:
        return "There are no labels, and the splits are not stratified."
    what = "label" if card.labels.keys() <= strata.keys() and card.labels else "stratum"
    names = sorted(strata, key=lambda name: (-strata[name].rows, name))
    splits = _order_splits({split for one in strata.values() for split in one.splits})
    most = max(1, strata[names[0]].rows)
    shown = [tag("p", sentence) for sentence in _describe_imbalance(card, strata, names, what)]
    shown.append(html.legend(*((split if split in SPLITS else "lost", split) for split in splits)))
    left_out = len(names) - 2 * SHOWN_ENDS
    groups = [names] if left_out <= 0 else [names[:SHOWN_ENDS], names[-SHOWN_ENDS:]]
    for group, end in zip(groups, ("largest", "smallest"), strict=False):
        if left_out > 0:
            shown.append(tag("h3", f"The {SHOWN_ENDS} {end} of {len(names):,}"))
        rows = [
            (
                tag("bdi", name),
                bar(*((s if s in SPLITS else "lost", strata[name].splits.get(s, 0) / most) for s in splits)),
                f"{strata[name].rows:,}",
                *(f"{strata[name].splits.get(split, 0):,}" for split in splits),
            )
            for name in group
        ]
        made = html.table(f"Rows by {what} and split", "tbn" + "n" * len(splits), (what, "", "rows", *splits), rows)
        shown.append(tag("div", made, class_="dense"))
    if left_out > 0:
        shown.append(explanation(f"{left_out:,} between them are not shown; the JSON card has all."))
    return shown


def _describe_imbalance(
    card: DatasetCard, strata: Mapping[str, SplitStratum], names: Sequence[str], what: str
) -> Iterator[str]:
    """How even the strata are, what is missing in a split, and which is furthest from the fractions that are set."""
    most, least = strata[names[0]].rows, strata[names[-1]].rows
    ratio = f", {most / least:,.1f} to 1" if least else ""
    yield (
        f"The largest {what} has {format_count(most, 'row')} ({names[0]}), the smallest {least:,} ({names[-1]}){ratio}."
    )
    for split in _order_splits(card.splits):
        if card.strata and (missing := [name for name in names if not strata[name].splits.get(split)]):
            yield f"Without a {split} row: {len(missing):,} of {len(names):,}, {missing[0]} among them."
    off = [
        (abs(strata[name].splits.get(split, 0) - wanted * strata[name].rows), name, split, wanted)
        for name in names
        for split, wanted in sorted(card.wanted.items())
    ]
    if card.strata and off and not _source_splits(card):
        _, name, split, wanted = max(off)
        yield (
            f"Furthest from what is wanted, in rows: {name} has {strata[name].splits.get(split, 0):,} in {split}, "
            f"where {format_percentage(wanted, 1)} are {wanted * strata[name].rows:,.1f}."
        )


def _render_near_duplicates(card: DatasetCard) -> Body:
    near = card.near_duplicates
    if near is None:
        return "Near-duplicates were not searched for (prepare.duplicates.near)."
    alike = f"Jaccard ≥ {near.threshold:g}, in shingles of {format_count(near.shingle_words, 'word')}"
    if not near.clusters:
        return f"No near-duplicates were found at {alike}."
    found = f"{format_count(near.clusters, 'cluster')} of rows at {alike}; one row of each is kept. "
    leaked = f"{format_count(near.across_splits, 'dropped row')} would have leaked: the row kept is in another split."
    across = leaked if near.across_splits else "None went across splits."
    shown = sorted(near.largest, key=lambda cluster: (-cluster.size, cluster.kept))
    which = f"The {len(shown)} largest follow" if len(shown) < near.clusters else "They follow, the largest first"
    return [
        tag("p", found, across),
        explanation(f"{which}; words that differ are marked."),
        *map(_render_cluster, shown),
    ]


def _render_cluster(cluster: NearDuplicateCluster) -> Html:
    """A kept row beside one that was dropped for it."""
    kept, dropped = (text[:TEXT_SHOWN] for text in (*cluster.texts, "", "")[:2])
    boxes = (
        tag("div", tag("small", what, tag("bdi", place)), tag("p", text))
        for what, place, text in (
            ("kept: ", cluster.kept, mark_differences(kept, dropped)),
            ("dropped: ", next(iter(cluster.dropped), ""), mark_differences(dropped, kept)),
        )
    )
    parts = [tag("h3", format_count(cluster.size, "row")), tag("div", *boxes, class_="pair")]
    if kept == dropped:
        parts.append(tag("small", "They differ only behind what is shown."))
    if also := cluster.dropped[1:]:
        rest = cluster.size - 2 - len(also)
        more = f" and {rest:,} more" if rest > 0 else ""
        parts.append(tag("small", "Also dropped: ", tag("bdi", ", ".join(also)), more))
    return tag("article", *parts)


def _render_leaks(card: DatasetCard) -> Body:
    if not card.leaks:
        return "No evaluation set is named, so none was checked."
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
    said = "Rows that share an n-gram with an evaluation set. Documents too short for n-grams are compared as a whole."
    return [explanation(said), html.table("Leaks by evaluation set", "tnnnw", heads, rows)]


def _render_truncation(card: DatasetCard) -> Body:
    if not any(cut.rows for cut in card.truncated.values()):
        return "No conversation was cut."
    rows = []
    for name in _order_splits(card.truncated):
        cut, kept = card.truncated[name], card.lengths.get(name, NO_LENGTHS).total
        share = format_percentage(cut.rows, card.splits.get(name, 0))
        rows.append((name, f"{cut.rows:,}", share, f"{cut.tokens:,}", format_percentage(cut.tokens, cut.tokens + kept)))
    heads = ("split", "rows cut", "of its rows", "tokens cut off", "of its tokens")
    return [html.table("Truncation by split", "tnnnn", heads, rows)]


def _render_packing(card: DatasetCard) -> Body:
    if not card.packing:
        return "No fill rate was measured: the longest row fits in no usual pack."
    rates = sorted((int(capacity), rate) for capacity, rate in card.packing.items())
    rows = [
        (format_count(capacity, "token"), bar(("train", rate)), format_percentage(rate, 1)) for capacity, rate in rates
    ]
    said = "How full packs of whole training rows are, as stage train would pack them; the rest is padding."
    return [explanation(said), html.table("Fill rate of packs", "tbn", ("pack of", "", "filled"), rows)]


def _render_tokens(card: DatasetCard) -> Body:
    if not card.lengths:
        return "No tokens were counted."
    most = max(1, *(one.total for one in card.lengths.values()))
    rows = []
    for name in _order_splits(card.lengths):
        one = card.lengths[name]
        parts = bar(("train", one.trained / most), ("test", (one.total - one.trained) / most))
        rows.append((name, parts, f"{one.total:,}", f"{one.trained:,}", format_percentage(one.trained, one.total)))
    shown = [
        html.legend(("train", "learned from"), ("test", "read only")),
        html.table("Tokens by split", "tbnnn", ("split", "", "tokens", "learned from", "share"), rows),
    ]
    if card.repeated:
        rows_again = f"{format_count(card.repeated, 'row')} that come again {explain_repeats(card)}"
        shown.append(explanation(f"{rows_again} are in these sums."))
    return shown


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
    "Where the rows went": _render_rows,
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
