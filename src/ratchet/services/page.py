"""The dataset card as a page: one HTML file that needs no network, no script and no other file.

Pictures are HTML bars and SVG written by hand, so that they take the reader's colours, light or dark, and fit a phone.
Everything is put in an order of its own, so that equal cards give equal bytes however their keys are ordered.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

from ratchet import digest, files
from ratchet.card import Cluster, DatasetCard, Lengths, Stratum
from ratchet.config_data import Limits

SHOWN_ENDS = 20
"""Labels that are shown from each end, where there are more than twice as many."""

FILES_SHOWN = 40
"""Files of a source that are listed; the JSON card has all."""

TEXT_SHOWN = 1000
"""Characters of a text."""

PICTURE_PX = 128
"""Height of a histogram: two lines of marks, the bars, the axis."""

BARS_TOP_PX, BARS_BOTTOM_PX = 30, 108

SPLITS = ("train", "validation", "test")

MEANING = {name: str(field.description) for name, field in Limits.model_fields.items()} | {
    "sampled_out": "Left out by a weight below 1, as prepare.sources asks.",
}

# Would end the text, be no character, or change the order in which the rest of the page is read.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


class Html(str):
    """Text that is HTML already. All other text is escaped where it goes into a tag."""

    __slots__ = ()


def dataset_page(card: DatasetCard, target: Path) -> None:
    """Write the card as one self-contained HTML page; equal cards give equal bytes."""
    sections = [(title, write(card)) for title, write in _SECTIONS]
    links = [_tag("a", title, href=f"#{_anchor(title)}") for title, _ in sections]
    head = _tag(
        "head",
        Html('<meta charset="utf-8" /><meta name="viewport" content="width=device-width, initial-scale=1" />'),
        # Nothing of the data could run even if it were not escaped.
        Html('<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'" />'),
        Html('<meta name="color-scheme" content="light dark" />'),
        _tag("title", f"Dataset card {_short(card.digest)}"),
        _tag("style", Html(_STYLE)),
    )
    body = _tag("body", _header(card), _tag("nav", *links, aria_label="Sections"), *_main(sections))
    page = _tag("html", head, body, lang="en-GB")
    files.write_atomic(target, f"<!DOCTYPE html>\n{page}\n")


def visible(text: str) -> str:
    """Text with the characters that no page can show, or that would disturb it, written as \\uXXXX."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def _tag(name: str, *content: str, **attributes: str) -> Html:
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    written = "".join(f' {names[key]}="{escape(visible(value))}"' for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Html) else escape(visible(part)) for part in content)
    return Html(f"<{name}{written}>{inner}</{name}>")


def _main(sections: Iterable[tuple[str, Sequence[Html] | str]]) -> Html:
    """Sections in order; one that is a text has nothing to show, and says so."""
    written = []
    for title, found in sections:
        parts = [_tag("p", found, class_="quiet")] if isinstance(found, str) else found
        written.append(_tag("section", _tag("h2", title), *parts, id=_anchor(title)))
    return _tag("main", *written)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _table(what: str, kinds: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table that scrolls by itself where the screen is narrow.

    Args:
        what: it shows, for those who hear it.
        kinds: a letter a column: `t` text, `n` numbers, `b` bars, `w` text that needs width.
        heads: the columns' names.
        rows: cells; the first of each names its row.
    """
    head = _tag("tr", *(_tag("th", text, scope="col", class_=kind) for kind, text in zip(kinds, heads, strict=True)))
    body = [
        _tag("tr", _tag("th", row[0], scope="row"), *(_tag("td", c, class_=k) for k, c in zip(kinds[1:], row[1:], strict=True)))
        for row in rows
    ]
    table = _tag("table", _tag("thead", head), _tag("tbody", *body))
    return _tag("div", table, class_="scroll", role="region", aria_label=what, tabindex="0")


def _bar(*parts: tuple[str, float], mark: float | None = None) -> Html:
    """Parts of a whole of 1 side by side, and a mark; the numbers stand beside it, so it is silent."""
    drawn = [_tag("i", class_=kind, style=f"width:{_percent(share)}") for kind, share in parts if share > 0]
    if mark is not None:
        drawn.append(_tag("b", style=f"left:{_percent(mark)}"))
    return _tag("span", *drawn, class_="bar", aria_hidden="true")


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.3f}%"


def _share(part: float, whole: float) -> str:
    """A percentage that says 0 or 100 only where it is meant."""
    if not whole:
        return "–"
    share = part / whole
    if 0 < share < 0.0005:
        return "< 0.1\u00a0%"
    if 0.9995 <= share < 1:
        return "> 99.9\u00a0%"
    return f"{share:.1%}".replace("%", "\u00a0%")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _short(full: str) -> str:
    return full[: digest.SHORT] or "none"


def _splits(named: Iterable[str]) -> list[str]:
    """Names in the usual order, others behind."""
    return sorted(named, key=lambda name: (SPLITS.index(name) if name in SPLITS else len(SPLITS), name))


def _places(places: Sequence[str]) -> Html:
    return _tag("ul", *(_tag("li", _tag("bdi", place)) for place in places), class_="places") if places else Html("–")


def _header(card: DatasetCard) -> Html:
    train = card.lengths.get("train")
    title = f"{card.rows_in:,} rows in, {card.rows_out:,} out"
    tokens = _count(train.total, "token") if train else "no token"
    again = " in training rows, each taken once" if card.repeated else " per epoch"
    figures = [
        _tag("div", _tag("dt", name), _tag("dd", _tag("strong", value), _tag("small", note)))
        for name, value, note in _figures(card)
    ]
    return _tag(
        "header",
        _tag("p", "Dataset card · ", _tag("code", _short(card.digest)), class_="quiet"),
        _tag("h1", title, _tag("span", f", {tokens}{again}")),
        _tag("dl", *figures),
    )


def _figures(card: DatasetCard) -> list[tuple[str, str, str]]:
    """Name, value and a word of explanation of each key figure."""
    train = card.lengths.get("train", Lengths(least=0, median=0, p95=0, greatest=0, total=0, trained=0))
    others = ", ".join(f"{card.splits[name]:,} {name}" for name in _splits(card.splits) if name != "train")
    again = f"and {card.repeated:,} again by weight; " if card.repeated else ""
    near, cut = card.near_duplicates, sum(one.rows for one in card.truncated.values())
    alike = near.clusters if near else 0
    figures = [
        ("Rows kept", _share(card.rows_out, card.rows_in), f"{card.rows_in - card.rows_out:,} dropped"),
        ("Training rows", f"{card.splits.get('train', 0):,}", again + others),
        ("Training tokens", f"{train.total:,}", "chat template included"),
        ("Learned from", _share(train.trained, train.total), f"{train.trained:,} tokens: the answers"),
        ("Row length", f"{train.median:,}", f"tokens in the median, {train.greatest:,} at most"),
        ("Near-duplicates", f"{alike:,}" if near else "–", "clusters, one row kept of each" if near else "not searched"),
        ("Leaks", f"{sum(one.rows for one in card.leaks.values()):,}", f"rows in {_count(len(card.leaks), 'evaluation set')}"),
    ]
    if card.task == "labels":
        least, most = min(card.labels.values(), default=0), max(card.labels.values(), default=0)
        return [*figures, ("Labels", f"{len(card.labels):,}", f"of {least:,} to {most:,} training rows")]
    return [*figures, ("Cut", f"{cut:,}", "rows, to the longest length")]


def _sources(card: DatasetCard) -> Sequence[Html] | str:
    if not card.source_cards:
        return [_files(card.sources)] if card.sources else "No source is named."
    rows = [
        (_tag("bdi", name), one.shape, f"{one.rows:,}", f"{one.weight:g}", one.split or "by fractions", _files(one.files))
        for name, one in sorted(card.source_cards.items())
    ]
    return [_table("Sources", "ttnntw", ("source", "read as", "rows", "weight", "split", "files and SHA-256"), rows)]


def _files(found: Mapping[str, str]) -> Html:
    items = [
        _tag("li", _tag("bdi", name), " ", _tag("code", _short(content), title=content))
        for name, content in sorted(found.items())[:FILES_SHOWN]
    ]
    if len(found) > FILES_SHOWN:
        items.append(_tag("li", f"and {len(found) - FILES_SHOWN:,} more"))
    listed = _tag("ul", *items, class_="places")
    return listed if len(found) <= 3 else _tag("details", _tag("summary", f"{len(found):,} files"), listed)


def _rows(card: DatasetCard) -> Sequence[Html]:
    """The whole as one bar, and below it what was dropped, enlarged: each reason starts where the one before ends."""
    drops = sorted(card.dropped.items(), key=lambda item: (-item[1].count, item[0]))
    dropped = sum(drop.count for _, drop in drops)
    sign = "=" if card.rows_in == card.rows_out + dropped else "≠"
    ledger = _tag("p", f"{card.rows_in:,} in {sign} {card.rows_out:,} out + {dropped:,} dropped", class_="ledger")
    parts = [("train", card.rows_out / max(1, card.rows_in)), *(("lost", d.count / max(1, card.rows_in)) for _, d in drops)]
    said = f"{_share(card.rows_out, card.rows_in)} of the rows were kept, {_share(dropped, card.rows_in)} dropped."
    whole = _tag("div", _bar(*parts), class_="whole", role="img", aria_label=said)
    key = _key(("train", f"kept {_share(card.rows_out, card.rows_in)}"), ("lost", f"dropped {_share(dropped, card.rows_in)}"))
    if not drops:
        return [ledger, whole, key, _tag("p", "No row was dropped.", class_="quiet")]
    rows, before = [], 0
    for reason, drop in drops:
        bar = _bar(("gap", before / max(1, dropped)), ("lost", drop.count / max(1, dropped)))
        name = _tag("span", _plain(reason), _tag("small", MEANING.get(reason, "")))
        rows.append((name, bar, f"{drop.count:,}", _share(drop.count, card.rows_in), _places(drop.examples)))
        before += drop.count
    heads = ("reason", "part of what was dropped", "rows", "of all rows", "first examples")
    return [ledger, whole, key, _table("Dropped rows by reason", "tbnnw", heads, rows)]


def _plain(reason: str) -> str:
    return reason.replace("_", " ")


def _key(*entries: tuple[str, str]) -> Html:
    return _tag("p", *(_tag("span", _tag("i", class_=kind), text) for kind, text in entries), class_="key")
