"""Reliability diagram: how often the likeliest label is right, by how sure the model is of it.

M. H. DeGroot and S. E. Fienberg, "The Comparison and Evaluation of Forecasters", The Statistician 32, 1983.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.markup import Html, counted, table, tag

LEFT, TOP, SQUARE = 56, 10, 360
"""Of the picture, in pixels of its own."""
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Bar:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability."""
    right: float
    """Share of prompts of which the label is right."""
    least: float
    most: float
    """95 % interval of that share."""
    n: int


def diagram(bars: Sequence[Bar], error: float) -> Html:
    """The diagram with its numbers. A model that means its probabilities has all bars end on the diagonal."""
    parts = []
    for tick in TICKS:
        x, y = f"{LEFT + SQUARE * tick:.0f}", f"{TOP + SQUARE * (1 - tick):.0f}"
        parts.append(tag("line", x1=f"{LEFT}", x2=f"{LEFT + SQUARE}", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{tick:g}", x=f"{LEFT - 8}", y=y, dy="4", text_anchor="end"))
        parts.append(tag("text", f"{tick:g}", x=x, y=f"{TOP + SQUARE + 20}", text_anchor="middle"))
    parts += [part for bar in bars for part in _drawn(bar)]
    ends = {"x1": f"{LEFT}", "y1": f"{TOP + SQUARE}", "x2": f"{LEFT + SQUARE}", "y2": f"{TOP}"}
    parts.append(tag("line", **ends, class_="dashed"))
    middle = TOP + SQUARE // 2
    turned = {"transform": f"rotate(-90 14 {middle})", "x": "14", "y": f"{middle}"}
    sure, right = "probability of the likeliest label", "share that is right"
    parts.append(tag("text", sure, x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", right, text_anchor="middle", **turned))
    said = (
        f"Reliability diagram of {counted(sum(bar.n for bar in bars), 'prompt')}; expected calibration error "
        f"{error:.3f}. The table below has numbers."
    )
    size = f"0 0 {LEFT + SQUARE + 12} {TOP + SQUARE + 44}"
    drawn = tag("svg", *parts, viewBox=size, role="img", aria_label=said, class_="square")
    note = " Bars below the dashed line: surer than right; above it: righter than sure. Lines: 95 % intervals."
    caption = tag("figcaption", "Reliability.", tag("span", note))
    return tag("figure", caption, drawn, _numbers(bars))


def _drawn(bar: Bar) -> Sequence[Html]:
    place, width = LEFT + SQUARE * bar.low, SQUARE * (bar.high - bar.low)
    high, middle = SQUARE * bar.right, place + width / 2
    said = tag("title", f"{bar.low:g} to {bar.high:g}: {bar.right:.1%} of {counted(bar.n, 'prompt')} right")
    size = {"x": f"{place:.1f}", "y": f"{TOP + SQUARE - high:.1f}", "width": f"{width:.1f}", "height": f"{high:.1f}"}
    ends = {"y1": f"{TOP + SQUARE * (1 - bar.least):.1f}", "y2": f"{TOP + SQUARE * (1 - bar.most):.1f}"}
    line = tag("line", x1=f"{middle:.1f}", x2=f"{middle:.1f}", **ends)
    return [tag("rect", said, **size, fill_opacity="0.55"), line]


def _numbers(bars: Sequence[Bar]) -> Html:
    rows = [
        (
            f"{bar.low:g} to {bar.high:g}",
            f"{bar.confidence:.3f}",
            f"{bar.right:.3f}",
            f"{bar.least:.3f} to {bar.most:.3f}",
            f"{bar.n:,}",
        )
        for bar in bars
    ]
    return table(
        "Calibration in numbers", "tnnnn", ("probability", "mean of it", "right", "95 % interval", "prompts"), rows
    )
