"""Saves figures as SVG files with colours for light pages and, by a media query, for dark pages."""

import io
from pathlib import Path

from matplotlib.figure import Figure

DARK = {
    "#ffffff": "#14171a", "#000000": "#e3e6e9", "#cccccc": "#3a4047", "#dddddd": "#4a525b", "#0072b2": "#3f94d1",
    "#d55e00": "#e8702a",
}  # fmt: skip
"""Colours of figures on light pages, in lower case, with those that replace them on dark pages."""
STYLE = "*{stroke-linejoin: round; stroke-linecap: butt}"
"""Style sheet that Matplotlib writes."""


def save(figure: Figure, target: Path) -> None:
    """Write the file. Raises ValueError if Matplotlib's style sheet is not as expected."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    target.write_text(with_dark_colours(written.getvalue()), encoding="utf-8")


def with_dark_colours(text: str) -> str:
    """Return the text of an SVG file of Matplotlib with colours for dark pages."""
    if text.count(STYLE) != 1:
        raise ValueError("Matplotlib's style sheet is not as expected")
    rules = [
        f'[style*="{part}: {light}"]{{{part}: {dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    media = "\n".join(("@media (prefers-color-scheme: dark) {", f"text{{fill: {DARK['#000000']}}}", *rules, "}"))
    return text.replace(STYLE, f"{STYLE}\n{media}")
