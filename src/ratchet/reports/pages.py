"""Renders pages from the Jinja templates of this package: one file each, which loads nothing.

Text is escaped. Characters that are invisible or change the reading direction are shown as \\uXXXX, integers get
thousands separators, and None becomes a dash. A page with charts contains Plotly's library once, compressed, and
templates/charts.js starts it.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ratchet.config.units import format_bytes, format_count
from ratchet.storage import digests
from ratchet.storage.html import NONE, escape_invisible, format_percentage
from ratchet.storage.records.evaluation import MetricValue

if TYPE_CHECKING:  # Jinja takes 0.1 s to import, and a supervisor renders no page before the end of a run
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
MINUS = "\u2212"
SHAPES = {
    "pass": ("M0-7a7 7 0 1 1-.01 0z", "M-3.4.2-1 2.7 3.6-2.4"),
    "fail": ("M-6.4-6.4h12.8v12.8h-12.8z", "M-3-3 3 3M3-3-3 3"),
    "undecided": ("M0-8 8 0 0 8-8 0z", "M-3.4 0h6.8"),
    "invalid": ("M0-8 8 6.4h-16z", "M0-3.6V1.6M0 3.8v.4"),
}
"""Outline and inner symbol of each outcome."""
OUTCOME_WORDS = {"pass": "holds", "fail": "fails", "undecided": "undecided", "invalid": "invalid"}
"""Word for each outcome."""
FILES_SHOWN = 40
"""Maximum number of files that a list names."""


def render(template: str, *, title: str, scripts: Sequence[str] = (), **context: Any) -> str:
    """Return a page.

    Args:
        template: name of the template, without its ending.
        title: title of the page.
        scripts: names of the scripts in the folder of templates, besides that of charts.
        context: values for the template.
    """
    return _environment().get_template(f"{template}.html.j2").render(title=title, scripts=scripts, **context)


def macros() -> Any:
    """Return the macros of templates/macros.html.j2 as functions, for parts of a page that Python composes."""
    return _environment().get_template("macros.html.j2").module


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_format_value,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "anchor": lambda title: title.lower().replace(" ", "-"), "bytes": format_bytes, "count": format_count,
        "json": _embed_json, "metric": format_metric, "p_value": format_p_value, "percent": format_width,
        "share": format_percentage, "significant": format_significant, "words": lambda name: name.replace("_", " "),
    }  # fmt: skip
    environment.globals |= {
        "style": _read_scripts(("style.css",), False)[0], "shapes": SHAPES, "words_of": OUTCOME_WORDS,
        "read_scripts": _read_scripts, "allow_scripts": _allow_scripts, "packed_plotly": _packed_plotly,
        "files_shown": FILES_SHOWN, "short": digests.SHORT, "mark_differences": mark_differences,
    }  # fmt: skip
    return environment


def _format_value(value: object) -> object:
    if isinstance(value, str):
        return value if isinstance(value, Markup) else escape_invisible(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return NONE if value is None else value


@cache
def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _read_scripts(names: Sequence[str], drawn: bool) -> list[Markup]:
    return [Markup(_read(name)) for name in (*names, *(("charts.js",) if drawn else ()))]  # noqa: S704


def _allow_scripts(texts: Iterable[str], drawn: bool) -> Markup:
    """Return the sources of a content security policy that allows these scripts, and Plotly if the page has charts."""
    hashes = [hashlib.sha256(text.encode()).digest() for text in texts] + ([_plotly()[1]] if drawn else [])
    return Markup(" ".join(f"'sha256-{base64.b64encode(value).decode()}'" for value in hashes))  # noqa: S704


@cache
def _plotly() -> tuple[str, bytes]:
    """Return Plotly's library, compressed as Base64, and its SHA-256. This takes 0.3 s once in a process."""
    import gzip

    from plotly.offline import get_plotlyjs

    library = get_plotlyjs().encode()
    return base64.b64encode(gzip.compress(library, mtime=0)).decode(), hashlib.sha256(library).digest()


def _packed_plotly() -> Markup:
    return Markup(_plotly()[0])  # noqa: S704


def _embed_json(value: object) -> Markup:
    """Return JSON that cannot end the element in which it stands, with seven digits of each number.

    Numbers that are not finite become null.
    """
    text = json.dumps(_round_numbers(value), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704


def _round_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round_numbers(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def format_width(share: float) -> str:
    """Format a share as a width or position in CSS and SVG. Shares outside of 0 to 1 are clipped."""
    return f"{100 * min(max(share, 0.0), 1.0):.3f}%"


def format_significant(amount: float) -> str:
    """Format with four significant digits, or all digits before the decimal point: `0.01234`, `12.35`, `12,346`."""
    if not math.isfinite(amount):
        return NONE if math.isnan(amount) else f"{MINUS if amount < 0 else ''}\u221e"
    return f"{amount:,.0f}" if abs(amount) >= 1000 else f"{amount:.4g}"


def format_metric(metric: MetricValue, value: float) -> str:
    """Format a value of a metric."""
    return f"{value:.1%}".replace("%", "\u00a0%") if metric.unit == "proportion" else format_significant(value)


def format_p_value(p: float | None) -> str:
    """Format a p-value."""
    return NONE if p is None or math.isnan(p) else "<\u00a00.001" if p < 0.001 else f"{p:.3f}"


def truncate_middle(text: str, most: int) -> str:
    """Cut the middle of a long text. The end is kept, because it often contains the question."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def mark_differences(text: str, other: str) -> tuple[Markup, Markup]:
    """Return both texts as HTML, in which the words that differ are marked."""
    words, other_words = (re.findall(r"\w+|\s+|[^\w\s]", content) for content in (text, other))
    # Spaces match everywhere; aligning each of them would take quadratic time.
    operations = SequenceMatcher(str.isspace, words, other_words, autojunk=False).get_opcodes()
    text_parts = ((kind, "".join(words[start:end])) for kind, start, end, _, _ in operations)
    other_parts = ((kind, "".join(other_words[start:end])) for kind, _, _, start, end in operations)
    return _mark_words(text_parts), _mark_words(other_parts)


def _mark_words(parts: Iterable[tuple[str, str]]) -> Markup:
    texts = ((kind == "equal" or not part.strip(), escape_invisible(part)) for kind, part in parts)
    return Markup("<bdi>{}</bdi>").format(
        Markup().join(text if is_equal else Markup("<mark>{}</mark>").format(text) for is_equal, text in texts)
    )


def describe_confusion(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    """Return the values of macro `confusion`.

    Args:
        labels: labels in the order of rows and columns.
        matrix: matrix[i][j] counts rows of true label i that were answered with label j. Columns beyond the labels
            count answers that are not labels; these columns are named `other`.
    """
    columns = len(matrix[0]) if matrix else 0
    known = sorted((count for counts in matrix for count in counts if count), reverse=True)
    least = known[PAIRS_DRAWN] + 1 if len(known) > PAIRS_DRAWN else 1
    names = [*labels, *["other"] * (columns - len(labels))]

    def cells(row: int, counts: Sequence[int]) -> list[tuple[int, str, int, str]]:
        total = sum(counts) or 1
        return [
            (count if count >= least else 0, "right" if row == column else "wrong", round(100 * count / total),
             f"{labels[row]}: {count:,} of {total:,} answered {names[column]}")
            for column, count in enumerate(counts)
        ]  # fmt: skip

    is_shown = 0 < columns <= LABELS_DRAWN
    return {
        "labels": labels, "names": names, "columns": columns, "shown": is_shown, "least": least,
        "named": columns <= LABELS_NAMED, "counted": columns <= LABELS_COUNTED,
        "rows": [(labels[row], cells(row, counts)) for row, counts in enumerate(matrix)] if is_shown else [],
    }  # fmt: skip


LABELS_COUNTED, LABELS_NAMED, LABELS_DRAWN, PAIRS_DRAWN = 20, 40, 150, 3000
"""Maximum numbers of labels of a confusion matrix with counts, with names, and drawn at all; and of pairs in it."""
CURVES = 6
"""Maximum number of precision-recall curves. Labels with the lowest average precision are shown."""


def describe_precision_recall(curves: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the values of macro `precision_recall`.

    Args:
        curves: `precision`, `recall` (both from the lowest threshold on) and `average_precision` of each label. Labels
            without points (scores that are not numbers) are omitted.
    """
    known = {label: curve for label, curve in curves.items() if curve["precision"]}
    worst = sorted(known, key=lambda label: (known[label]["average_precision"], label))[:CURVES]

    def points(curve: Mapping[str, Any]) -> str:
        pairs = zip(curve["recall"], curve["precision"], strict=True)
        return " ".join(f"{1000 * recall:.1f},{1000 * precision:.1f}" for recall, precision in pairs)

    lines = [(label, points(known[label]), known[label]["average_precision"]) for label in worst]
    return {"lines": lines, "labels": worst, "omitted": len(known) - len(worst)}
