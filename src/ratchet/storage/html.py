"""HTML pages: elements with escaped text, tables, bars, histograms; and the files of pages.

Figures are HTML bars and SVG with widths in percent, so they follow the reader's light or dark colours and fit on a
phone. CSS classes are those of reports/page.css. An existing file is overwritten only if it is a page of Ratchet.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.storage import digests, files

FILES_SHOWN, FILES_OPEN = 40, 3
"""Maximum number of files that a list names, and maximum number of files in a list that is not collapsed."""

NONE = "\u2013"
"""Text of an empty cell."""

FIGURE_PX = 130
"""Height of a histogram in pixels, for two lines of labels, the bars and the axis."""

BARS_TOP_PX, BARS_BOTTOM_PX = 34, 110

MIN_BAR_PX = 2
"""Minimum height of a bar in pixels, so that a single row is visible."""

LABELS_PX = (12, 27)
"""Vertical positions in pixels of the two lines of mark labels. Each mark has its own line, so labels never overlap."""

TICKS = 5
"""Approximate number of ticks on an axis; this many fit on a phone."""

ENDING = ".html"

# Characters that are invisible, or change the reading direction of the rest of the page.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


class Html(str):
    """Text that is already HTML. Other text is escaped when it is put into a tag."""

    __slots__ = ()


def escape_invisible(text: str) -> str:
    """Replace characters that are invisible or change the reading direction by \\uXXXX."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\r\n", "\n"))


def tag(name: str, *content: str, **attributes: str) -> Html:
    """Build an element. `class_` becomes class, `aria_label` aria-label; text that is not Html is escaped."""
    inner = "".join(part if isinstance(part, Html) else escape(escape_invisible(part)) for part in content)
    return Html(f"<{name}{_format_attributes(attributes)}>{inner}</{name}>")


def void_tag(name: str, **attributes: str) -> Html:
    """Build an element without content or end tag, such as an input."""
    return Html(f"<{name}{_format_attributes(attributes)} />")


def _format_attributes(attributes: Mapping[str, str]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(escape_invisible(value))}"' for key, value in attributes.items()
    )


def document(title: str, style: str, *body: Html, images: bool = False, script: str = "") -> str:
    """Build a self-contained page.

    Args:
        title: title of the page.
        style: CSS.
        body: content of the page.
        images: whether to allow images that are embedded as data URLs.
        script: JavaScript; the content security policy allows only this script, by its SHA-256.
    """
    allowed = "img-src data:; " if images else ""
    if script:
        fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += f"script-src 'sha256-{fingerprint}'; "
        body = (*body, tag("script", Html(script)))
    head = (
        Html('<meta charset="utf-8" /><meta name="viewport" content="width=device-width, initial-scale=1" />'),
        # With this policy, even unescaped data could not run as a script or access the network.
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
    """Return the id of the section with this title."""
    return title.lower().replace(" ", "-")


def section(title: str, body: Sequence[Html] | str) -> Html:
    """Build a section. If the body is text, it becomes a paragraph that explains why there is no content."""
    parts = [explanation(body)] if isinstance(body, str) else body
    return tag("section", tag("h2", title), *parts, id=anchor(title))


def explanation(text: str) -> Html:
    """Build an explanatory paragraph."""
    return tag("p", text, class_="quiet")


def table(label: str, kinds: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Build a table that scrolls on narrow screens.

    Args:
        label: description for screen readers.
        kinds: one letter per column: `t` text, `n` numbers, `b` bars, `s` bars next to long text, `w` long text.
        titles: column titles.
        rows: cells of each row; the first cell is the header of the row.
    """
    head = tag("tr", *(tag("th", text, scope="col", class_=kind) for kind, text in zip(kinds, titles, strict=True)))
    body = []
    for row_header, *row in rows:
        cells = (tag("td", cell, class_=kind) for kind, cell in zip(kinds[1:], row, strict=True))
        body.append(tag("tr", tag("th", row_header, scope="row"), *cells))
    element = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", element, class_="scroll", role="region", aria_label=label, tabindex="0")


def bar(*parts: tuple[str, float], mark: float | None = None) -> Html:
    """Build a stacked bar of (class, share) parts, with an optional mark. The shares sum to at most 1.

    The bar is hidden from screen readers, because the numbers are next to it.
    """
    elements = [tag("i", class_=kind, style=f"width:{_percent(share)}") for kind, share in parts if share > 0]
    if mark is not None:
        elements.append(tag("b", style=f"left:{_percent(mark)}"))
    return tag("span", *elements, class_="bar", aria_hidden="true")


def legend(*entries: tuple[str, str]) -> Html:
    """Build a legend from (class, name) pairs."""
    return tag("p", *(tag("span", tag("i", class_=kind), name) for kind, name in entries), class_="key")


def place_list(places: Sequence[str]) -> Html:
    """Build a list of locations or texts in the data, each with its own reading direction."""
    return tag("ul", *(tag("li", tag("bdi", place)) for place in places), class_="places") if places else Html(NONE)


def digest_list(file_digests: Mapping[str, str]) -> Html:
    """Build a list of files with the first digits of their SHA-256. A long list is collapsed."""
    items = [
        tag("li", tag("bdi", name), " ", tag("code", digest[: digests.SHORT], title=digest))
        for name, digest in sorted(file_digests.items())[:FILES_SHOWN]
    ]
    count = len(file_digests)
    if count > FILES_SHOWN:
        items.append(tag("li", f"and {count - FILES_SHOWN:,} more"))
    names = tag("ul", *items, class_="places")
    return names if count <= FILES_OPEN else tag("details", tag("summary", f"{count:,} files"), names)


def mark_differences(text: str, other: str) -> Html:
    """Mark the words of `text` that differ from `other`."""
    return mark_both_differences(text, other)[0]


def mark_both_differences(text: str, other: str) -> tuple[Html, Html]:
    """Mark the words of both texts in which they differ."""
    words, other_words = (re.findall(r"\w+|\s+|[^\w\s]", content) for content in (text, other))
    # Spaces match everywhere; aligning each of them would take quadratic time.
    operations = SequenceMatcher(str.isspace, words, other_words, autojunk=False).get_opcodes()
    text_parts = [(kind, "".join(words[start:end])) for kind, start, end, _, _ in operations]
    other_parts = [(kind, "".join(other_words[start:end])) for kind, _, _, start, end in operations]
    return _mark_words(text_parts), _mark_words(other_parts)


def _mark_words(parts: Iterable[tuple[str, str]]) -> Html:
    return tag("bdi", *(part if kind == "equal" or not part.strip() else tag("mark", part) for kind, part in parts))


def format_percentage(part: float, whole: float) -> str:
    """Format a share as a percentage. Only exact values are shown as 0 % and 100 %, others as < 0.1 % and > 99.9 %."""
    if not whole:
        return NONE
    share = part / whole
    if 0 < share < 0.0005:
        return "<\u00a00.1\u00a0%"
    if 0.9995 <= share < 1:
        return ">\u00a099.9\u00a0%"
    return f"{share:.1%}".replace("%", "\u00a0%")


def format_count(number: int, noun: str) -> str:
    """Format a number with a noun: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compute_bin_width(histograms: Iterable[Mapping[int, int]]) -> int:
    """Return the common bin width of histograms, in which empty bins may be missing; 0 if all counts are in bin 0."""
    return math.gcd(*(edge for histogram in histograms for edge in histogram))


def histogram(
    counts: Mapping[int, int], width: int, limits: tuple[int, float], marks: Mapping[str, int], label: str
) -> Html:
    """Draw a histogram.

    Args:
        counts: count of each bin, by its lower edge.
        width: width of a bin.
        limits: end of the axis, and the share of the total that is drawn at full height.
        marks: position of up to two vertical lines, by name; the first is solid, the second dashed.
        label: description for screen readers.
    """
    right, top = limits
    total, full_px = sum(counts.values()) or 1, BARS_BOTTOM_PX - BARS_TOP_PX
    parts = [tag("title", label)]
    for edge, count in sorted(counts.items()):
        height_px = max(full_px * count / total / top, MIN_BAR_PX)
        extent = {"x": _percent(edge / right), "width": _percent(min(width, right - edge) / right)}
        parts.append(tag("rect", y=f"{BARS_BOTTOM_PX - height_px:.2f}", height=f"{height_px:.2f}", **extent))
    bottom = str(BARS_BOTTOM_PX)
    parts.append(tag("line", x1="0", x2="100%", y1=bottom, y2=bottom, class_="axis"))
    step = _round_step(right / TICKS)
    parts += [_svg_text(tick, right, BARS_BOTTOM_PX + 16, f"{tick:,}") for tick in range(0, right + 1, step)]
    for (name, value), y, kind in zip(marks.items(), LABELS_PX, ("solid", "dashed"), strict=False):
        x = _percent(value / right)
        parts.append(tag("line", x1=x, x2=x, y1=str(y + 3), y2=bottom, class_=kind))
        parts.append(_svg_text(value, right, y, f"{name} {value:,}"))
    return tag("svg", *parts, width="100%", height=str(FIGURE_PX), role="img", aria_label=label)


def _svg_text(position: int, right: int, y: int, text: str) -> Html:
    """Build SVG text at a position on the axis. Near the ends of the axis, the text is aligned inwards."""
    share = position / right
    anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
    return tag("text", text, x=_percent(share), y=str(y), text_anchor=anchor)


def _round_step(minimum: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 ... that is at least `minimum`."""
    power = int(10 ** (len(str(math.ceil(minimum))) - 1))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= minimum)


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.3f}%"


OPENING = document("", "").partition("style-src")[0].encode()
"""First bytes of every page, independent of its kind and version."""


def require_writable_target(target: Path) -> None:
    """Check that a page can be written to this path, before expensive work starts.

    Raises:
        SettingsError: the path is a folder or a file that is not a page, its name does not end in .html, or its folder
            cannot be created.
    """
    message = f"--output {target}: cannot be written"
    if target.suffix.lower() != ENDING:
        raise SettingsError(f"{message} (the name of a page must end in {ENDING}); choose such a name")
    files.require_writable(target, "--output")
    if target.is_file() and not _is_page(target):
        raise SettingsError(
            f"{message} (the existing file is not a page of `ratchet`); choose another name, or remove the file"
        )


def write(target: Path, text: str) -> None:
    """Write a page atomically, and create its folder if it is missing.

    Raises:
        SettingsError: the path is not writable; see `require_writable_target`.
    """
    require_writable_target(target)
    try:
        files.make_directory(target.parent)
        files.write_atomic(target, text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingsError(
            f"--output {target}: cannot be written ({error.filename or target}: {error.strerror}); choose a file in a "
            "folder that exists or can be created"
        ) from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(OPENING)) == OPENING
