"""A drawing as part of a page: it takes the page's colours, light or dark, and letters, and loads nothing."""

import base64
import re

from ratchet.markup import Html, lone, tag
from ratchet.pages import sweep_canvas as canvas

PX_A_POINT, LEAST = 1.5, 0.65
"""On a wide page, where letters of all pictures have the size of the text around them; share of it on a narrow one."""

PNG = b"\x89PNG"

VARIABLES = {
    canvas.INK: "ink",
    canvas.QUIET: "quiet",
    canvas.RULE: "rule",
    canvas.PAPER: "paper",
    canvas.TOP: "top",
    **{colour: state for state, colour in canvas.COLOURS.items()},
}
"""Colours of pictures, and the CSS variables of services/sweep.css that stand for them on a page."""

_LEFT_OUT = (
    re.compile(r"<metadata>.*?</metadata>", re.S),
    # It would hold for the whole page.
    re.compile(r"<style[^>]*>.*?</style>", re.S),
)
_STYLE = re.compile(r' style="([^"]*)"')
_FAMILY = re.compile(r"font-family:[^;]*;? ?")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_GROUP = re.compile(r'<g id="[^"]*"')
_LINES = re.compile(r"\s*\n\s*")
_FRAME = re.compile(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>')
_FILL = re.compile(r' fill="([^"]*)"')
_STILL = re.compile(r' transform="rotate\(-0 [^)]*\)"')


def picture(drawing: bytes, title: str, note: str, said: str) -> Html:
    """A figure with its caption.

    Args:
        drawing: SVG as matplotlib writes it, or PNG.
        title: of the picture.
        note: how it is read.
        said: what it shows, for those who hear it.
    """
    if drawing.startswith(PNG):
        source = f"data:image/png;base64,{base64.b64encode(drawing).decode('ascii')}"
        shown = lone("img", src=source, alt=said)
    else:
        shown = _within(drawing.decode("utf-8"), said)
    caption = tag("figcaption", title, tag("span", f" {note}"))
    frame = tag("div", shown, class_="scroll", role="region", aria_label=title, tabindex="0")
    return tag("figure", caption, frame, class_="picture")


def _within(text: str, said: str) -> Html:
    """An SVG file's content as an element of a page."""
    for pattern in _LEFT_OUT:
        text = pattern.sub("", text)
    found = _FRAME.search(text)
    if found is None:
        raise ValueError("the drawing is no SVG with a view box")
    inner = text[found.end() : text.rindex("</svg>")]
    # Ids of groups come again in each picture, and nobody refers to them.
    inner = _LINES.sub(" ", _GROUP.sub("<g", inner)).replace("> <", "><")
    inner = _STILL.sub("", inner.replace("xlink:href=", "href="))
    # Of the ground of hatches; a colour that is no style gives way to the page's own for rectangles.
    inner = _STYLE.sub(_styled, _FILL.sub(r' style="fill: \1; stroke: none"', inner))
    widest = float(found[1].split()[2]) * PX_A_POINT
    size = f"min-width:{widest * LEAST:.0f}px;max-width:{widest:.0f}px"
    return tag("svg", Html(inner), viewBox=found[1], style=size, role="img", aria_label=said)


def _styled(found: re.Match[str]) -> str:
    """A style in the page's colours; letters are the page's, too."""
    style = _FAMILY.sub("", found[1])
    style = _COLOUR.sub(lambda one: f"var(--{VARIABLES[one[0]]})" if one[0] in VARIABLES else one[0], style)
    return f' style="{style}"'
