"""HTML whose text is always escaped, and the figures of a report in it: tables, bars, histograms.

Pictures are HTML bars and SVG in percentages of their width, so that they take the reader's colours, light or dark, and
fit a phone. The classes are those of reports/page.css.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape

from ratchet.storage import digests

FILES_SHOWN, FILES_OPEN = 40, 3
"""Files of a list that are named, and that are seen before it is opened."""

NONE = "\u2013"
"""In a cell that has nothing to say."""

PICTURE_PX = 130
"""Height of a histogram: two lines of marks, the bars, the axis."""

BARS_TOP_PX, BARS_BOTTOM_PX = 34, 110

LEAST_PX = 2
"""Height of the lowest bar: a single row is seen."""

MARKS_PX = (12, 27)
"""Where the names of the marks stand: two lines, so that they never meet."""

TICKS = 5
"""Numbers on an axis, about: that many fit on a phone."""

# No character, or one that changes the order in which the rest of the page is read.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


class Html(str):
    """Text that is HTML already. All other text is escaped where it goes into a tag."""

    __slots__ = ()


def escape_invisible(text: str) -> str:
    """Text with the characters that no page can show, or that would disturb it, written as \\uXXXX."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def tag(name: str, *content: str, **attributes: str) -> Html:
    """An element. `class_` is class, `aria_label` is aria-label; what is not Html is escaped."""
    inner = "".join(part if isinstance(part, Html) else escape(escape_invisible(part)) for part in content)
    return Html(f"<{name}{_format_attributes(attributes)}>{inner}</{name}>")


def void_tag(name: str, **attributes: str) -> Html:
    """An element that has no content and no end, such as an input."""
    return Html(f"<{name}{_format_attributes(attributes)} />")


def _format_attributes(attributes: Mapping[str, str]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(escape_invisible(value))}"' for key, value in attributes.items()
    )


def document(title: str, style: str, *body: Html, images: bool = False, script: str = "") -> str:
    """A whole page that loads nothing.

    Args:
        title: of the page.
        style: CSS.
        body: its content.
        images: pictures that stand in the page itself may be shown.
        script: JavaScript of our own, the only one that may run: it is named by its SHA-256.
    """
    allowed = "img-src data:; " if images else ""
    if script:
        fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += f"script-src 'sha256-{fingerprint}'; "
        body = (*body, tag("script", Html(script)))
    head = (
        Html('<meta charset="utf-8" /><meta name="viewport" content="width=device-width, initial-scale=1" />'),
        # Nothing of the data could run or reach a network even if it were not escaped.
        Html(
            '<meta http-equiv="Content-Security-Policy" '
            f"""content="default-src 'none'; {allowed}style-src 'unsafe-inline'" />"""
        ),
        Html('<meta name="color-scheme" content="light dark" />'),
        tag("title", title),
        tag("style", Html(style)),
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en-GB')}\n"


def anchor(title: str) -> str:
    """Where a section is found in the page."""
    return title.lower().replace(" ", "-")


def section(title: str, body: Sequence[Html] | str) -> Html:
    """A section; a body that is text says in a line that there is nothing to show."""
    parts = [explanation(body)] if isinstance(body, str) else body
    return tag("section", tag("h2", title), *parts, id=anchor(title))


def explanation(text: str) -> Html:
    """A paragraph that explains."""
    return tag("p", text, class_="quiet")


def table(what: str, kinds: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table that scrolls by itself where the screen is narrow.

    Args:
        what: it shows, for those who hear it.
        kinds: a letter a column: `t` text, `n` numbers, `b` bars, `s` bars beside much text, `w` that text.
        heads: the columns' names.
        rows: cells; the first of each names its row.
    """
    head = tag("tr", *(tag("th", text, scope="col", class_=kind) for kind, text in zip(kinds, heads, strict=True)))
    body = []
    for first, *others in rows:
        cells = (tag("td", cell, class_=kind) for kind, cell in zip(kinds[1:], others, strict=True))
        body.append(tag("tr", tag("th", first, scope="row"), *cells))
    written = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", written, class_="scroll", role="region", aria_label=what, tabindex="0")


def bar(*parts: tuple[str, float], mark: float | None = None) -> Html:
    """Parts of a whole of 1 side by side, each with its class, and a mark. Silent: the numbers stand beside it."""
    drawn = [tag("i", class_=kind, style=f"width:{_percent(share)}") for kind, share in parts if share > 0]
    if mark is not None:
        drawn.append(tag("b", style=f"left:{_percent(mark)}"))
    return tag("span", *drawn, class_="bar", aria_hidden="true")


def legend(*entries: tuple[str, str]) -> Html:
    """What the colours of a picture mean: class and name of each."""
    return tag("p", *(tag("span", tag("i", class_=kind), name) for kind, name in entries), class_="key")


def place_list(found: Sequence[str]) -> Html:
    """Places and texts of the data, each in a line and with its own reading direction."""
    return tag("ul", *(tag("li", tag("bdi", place)) for place in found), class_="places") if found else Html(NONE)


def fingerprint_list(found: Mapping[str, str]) -> Html:
    """Files with the beginning of their SHA-256; many are folded away."""
    items = [
        tag("li", tag("bdi", name), " ", tag("code", content[: digests.SHORT], title=content))
        for name, content in sorted(found.items())[:FILES_SHOWN]
    ]
    if len(found) > FILES_SHOWN:
        items.append(tag("li", f"and {len(found) - FILES_SHOWN:,} more"))
    listed = tag("ul", *items, class_="places")
    return listed if len(found) <= FILES_OPEN else tag("details", tag("summary", f"{len(found):,} files"), listed)


def mark_differences(text: str, other: str) -> Html:
    """Text with the words marked that the other has not in that place."""
    return mark_both_differences(text, other)[0]


def mark_both_differences(text: str, other: str) -> tuple[Html, Html]:
    """Both texts, each with the words marked that the other has not in that place."""
    words, others = (re.findall(r"\w+|\s+|[^\w\s]", one) for one in (text, other))
    # Blanks match everywhere: to look for the place of each would take the square of their number.
    found = SequenceMatcher(str.isspace, words, others, autojunk=False).get_opcodes()
    first = [(kind, "".join(words[start:end])) for kind, start, end, _, _ in found]
    second = [(kind, "".join(others[start:end])) for kind, _, _, start, end in found]
    return _mark_words(first), _mark_words(second)


def _mark_words(parts: Iterable[tuple[str, str]]) -> Html:
    return tag("bdi", *(part if kind == "equal" or not part.strip() else tag("mark", part) for kind, part in parts))


def format_percentage(part: float, whole: float) -> str:
    """A percentage that says 0 or 100 only where it is meant."""
    if not whole:
        return NONE
    share = part / whole
    if 0 < share < 0.0005:
        return "<\u00a00.1\u00a0%"
    if 0.9995 <= share < 1:
        return ">\u00a099.9\u00a0%"
    return f"{share:.1%}".replace("%", "\u00a0%")


def format_count(number: int, one: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"


def compute_bin_width(histograms: Iterable[Mapping[int, int]]) -> int:
    """Width of the bins of histograms that share their edges (empty bins may be missing); 0: only one bin is known."""
    return math.gcd(*(edge for histogram in histograms for edge in histogram))


def histogram(
    counts: Mapping[int, int], width: int, frame: tuple[int, float], marks: Mapping[str, int], said: str
) -> Html:
    """Draw a distribution.

    Args:
        counts: by lower edge of the bin.
        width: of a bin.
        frame: where the axis ends, and the share of the whole that the full height stands for.
        marks: name and place of up to two lines: the first is drawn solid, the second dashed.
        said: what it shows, for those who hear it.
    """
    right, top = frame
    total, room = sum(counts.values()) or 1, BARS_BOTTOM_PX - BARS_TOP_PX
    parts = [tag("title", said)]
    for edge, count in sorted(counts.items()):
        high = max(room * count / total / top, LEAST_PX)
        place = {"x": _percent(edge / right), "width": _percent(min(width, right - edge) / right)}
        parts.append(tag("rect", y=f"{BARS_BOTTOM_PX - high:.2f}", height=f"{high:.2f}", **place))
    bottom = str(BARS_BOTTOM_PX)
    parts.append(tag("line", x1="0", x2="100%", y1=bottom, y2=bottom, class_="axis"))
    step = _round_step(right / TICKS)
    parts += [_svg_text(tick, right, BARS_BOTTOM_PX + 16, f"{tick:,}") for tick in range(0, right + 1, step)]
    for (name, value), y, kind in zip(marks.items(), MARKS_PX, ("solid", "dashed"), strict=False):
        x = _percent(value / right)
        parts.append(tag("line", x1=x, x2=x, y1=str(y + 3), y2=bottom, class_=kind))
        parts.append(_svg_text(value, right, y, f"{name} {value:,}"))
    return tag("svg", *parts, width="100%", height=str(PICTURE_PX), role="img", aria_label=said)


def _svg_text(place: int, right: int, y: int, text: str) -> Html:
    """Text in a picture, turned inwards at its ends."""
    share = place / right
    anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
    return tag("text", text, x=_percent(share), y=str(y), text_anchor=anchor)


def _round_step(least: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ..."""
    ten = int(10 ** (len(str(math.ceil(least))) - 1))
    return next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= least)


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.3f}%"
