"""Renders training curves of one or several runs as SVG, and as data for the interactive plots of curves.js.

Colours are those of Okabe and Ito (Color Universal Design, 2008). Each side also has its own dash pattern.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.reports.comparison import ComparisonSide
from ratchet.reports.forest_plot import format_significant
from ratchet.reports.run_history import HistoryCurve
from ratchet.reports.sweep_canvas import round_ticks
from ratchet.storage.html import NONE, Html, explanation, table, tag

WIDE, HIGH = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 34
"""Size and margins of a plot, in its own pixels."""
COLOURS, DASHES = 7, 4
"""Numbers of line colours and dash patterns in curves.css. Further lines reuse them."""
TABLE_ROWS = 10
"""Number of rows in the table below a plot."""
MAX_EXTENSION, OUTLIER_DISTANCE, MAX_OUTLIERS = 1.0, 0.25, 6
"""Maximum extension of the frame beyond the means, which shows single steps; distance from the frame beyond which a
value is listed as an outlier (both in multiples of the range of the means); and maximum number of listed outliers.
"""
SIGNS = {
    "resumed": "\u21bb", "died": "\u2715", "stopped": "\u25a0", "skipped": "\u2298", "rolled back": "\u21b6",
    "spike": "\u25b2", "repeated": "2", "shrunk": "\u25bd", "grown": "\u25b3", "alert": "!",
}  # fmt: skip
"""Symbol of each kind of event on the step axis."""
SIGNS_SHOWN = 60
"""Maximum number of symbols per run in a plot."""
SIGN_WIDTH, HIGHEST_SIGN = 13, 3
"""Distance in pixels below which symbols are stacked, and maximum number of levels above the lowest level."""


@dataclass(frozen=True)
class CurveKind:
    """A kind of plot: its title, unit and data."""

    name: str
    title: str
    note: str
    validated: bool
    """Whether the values belong to validations, not to steps."""
    select: Callable[[Mapping[str, Any]], Any]
    """Function that returns the plotted values, given the values of a curve by name."""
    band: bool = True
    """Whether minimum and maximum are drawn."""
    smooth: bool = True
    """Whether the page offers smoothing."""


def _speed(values: Mapping[str, Any]) -> Any:
    return values["input_tokens"] / values["step_s"].clip(1e-9)


KINDS = (
    CurveKind("loss", "Training loss", "nats per answer token", False, lambda values: values["loss"]),
    CurveKind(
        "validation", "Validation loss", "nats per answer token", True, lambda values: values["loss"], smooth=False
    ),
    CurveKind("gradient", "Gradient norm", "before clipping", False, lambda values: values["grad_norm"]),
    CurveKind("rate", "Learning rate", "", False, lambda values: values["learning_rate"], band=False, smooth=False),
    CurveKind("speed", "Speed", "input tokens per second of a step", False, _speed, band=False),
)


@dataclass(frozen=True)
class CurveSeries:
    """One curve in one plot."""

    side: int
    width: int
    """Number of steps that a point summarizes."""
    step: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    members: Sequence["CurveSeries"] = ()
    """Curves of the single runs of a group."""


@dataclass(frozen=True)
class CurvePlot:
    """All curves of one kind and the frame of the plot."""

    kind: CurveKind
    curves: Sequence[CurveSeries]
    low: float
    high: float
    outliers: Sequence[tuple[CurveSeries, float, float]]
    """Curve, step and value of points outside the frame, farthest first."""


def side_classes(number: int) -> str:
    """Return the CSS classes of a side: colour and dashes."""
    return f"c{number % COLOURS} d{number % DASHES}"


def render_swatch(number: int) -> Html:
    """Render a short line in the style of the side."""
    line = tag("line", x1="0", x2="26", y1="5", y2="5", class_=f"curve {side_classes(number)}")
    return tag("svg", line, width="26", height="10", viewBox="0 0 26 10", aria_hidden="true", class_="swatch")


def build_plots(sides: Sequence[ComparisonSide]) -> list[CurvePlot]:
    """Return the plots that have data."""
    plots = []
    for kind in KINDS:
        curves = [_build_series(number, side, kind) for number, side in enumerate(sides)]
        nonempty = [curve for curve in curves if curve.step]
        if nonempty:
            plots.append(_build_plot(kind, nonempty))
    return plots


def _build_series(number: int, side: ComparisonSide, kind: CurveKind) -> CurveSeries:
    line: HistoryCurve = side.validations if kind.validated else side.steps
    if not len(line):
        return CurveSeries(number, 1, (), (), (), ())
    mean = kind.select(line.mean).tolist()
    if not kind.band or (line.width == 1 and not side.is_group):
        return CurveSeries(number, line.width, line.step.tolist(), mean, (), ())
    members = (
        [_series_from_curve(number, member, kind) for member in side.members]
        if side.is_group and not kind.validated
        else []
    )
    return replace(_series_from_curve(number, line, kind), members=members)


def _series_from_curve(number: int, line: HistoryCurve, kind: CurveKind) -> CurveSeries:
    low, high = kind.select(line.low).tolist(), kind.select(line.high).tolist()
    return CurveSeries(number, line.width, line.step.tolist(), kind.select(line.mean).tolist(), low, high)


def _build_plot(kind: CurveKind, curves: Sequence[CurveSeries]) -> CurvePlot:
    means = [value for curve in curves for value in curve.mean if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    outer = [value for curve in curves for value in (*curve.low, *curve.high) if math.isfinite(value)]
    low, high = (
        max(min([low, *outer]), low - MAX_EXTENSION * span),
        min(max([high, *outer]), high + MAX_EXTENSION * span),
    )
    outliers = [
        (series, step, value)
        for curve in curves
        for series in curve.members or [curve]
        for values in (series.low, series.high)
        for step, value in zip(series.step, values, strict=False)
        if not low - OUTLIER_DISTANCE * span <= value <= high + OUTLIER_DISTANCE * span and math.isfinite(value)
    ]
    outliers.sort(key=lambda outlier: -max(low - outlier[2], outlier[2] - high))
    # Keep only the farthest outlier of each side at each step, the farthest of all first.
    farthest: dict[tuple[int, float], tuple[CurveSeries, float, float]] = {}
    for series, step, value in outliers:
        farthest.setdefault((series.side, step), (series, step, value))
    outliers = list(farthest.values())
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
    low = 0.0 if low >= 0 and low < 0.25 * high else low - margin
    return CurvePlot(kind, curves, low, high + margin, outliers[:MAX_OUTLIERS])


def render_figure(plot: CurvePlot, sides: Sequence[ComparisonSide]) -> Html:
    """Render a plot with its caption and its table of values."""
    kind = plot.kind
    names = [sides[curve.side].name for curve in plot.curves]
    description = f"{kind.title} by optimizer step of {', '.join(names)}; the table below has numbers."
    caption = tag("figcaption", kind.title, tag("span", f" {kind.note}"))
    parts = [
        caption,
        tag("div", _render_svg(plot, sides, description), class_="plot", data_chart=kind.name),
        _render_readout(),
    ]
    if plot.outliers:
        outliers = "; ".join(
            f"{sides[curve.side].name}: {format_significant(value)} {_format_step_range(curve, step)}"
            for curve, step, value in plot.outliers
        )
        parts.append(explanation(f"Outside the frame: {outliers}."))
    return tag("figure", *parts, _render_numbers(plot, sides), class_="curves")


def _format_step_range(curve: CurveSeries, last: float) -> str:
    """Describe the steps that a point summarizes, given the last of these steps."""
    first = last // curve.width * curve.width
    return f"at step {last:,.0f}" if first == last else f"in steps {max(1.0, first):,.0f} to {last:,.0f}"


def _render_readout() -> Html:
    return tag("p", class_="readout quiet", role="status", hidden="")


def _render_numbers(plot: CurvePlot, sides: Sequence[ComparisonSide]) -> Html:
    first = min(curve.step[0] for curve in plot.curves)
    last = max(curve.step[-1] for curve in plot.curves)
    steps = sorted({round(first + (last - first) * place / TABLE_ROWS) for place in range(TABLE_ROWS + 1)})
    rows = [(f"{step:,}", *(_value_at_step(curve, step) for curve in plot.curves)) for step in steps]
    heads = ("step", *(sides[curve.side].name for curve in plot.curves))
    numbers = table(f"{plot.kind.title}: values", "t" + "n" * len(plot.curves), heads, rows)
    return tag("details", tag("summary", "Numbers"), numbers)


def _value_at_step(curve: CurveSeries, step: float) -> str:
    """Format the value of the point that contains a step."""
    place = bisect_left(curve.step, step)
    if place == len(curve.step) or step < curve.step[0]:
        return NONE
    return format_significant(curve.mean[place])


def _render_svg(plot: CurvePlot, sides: Sequence[ComparisonSide], description: str) -> Html:
    last = max(curve.step[-1] for curve in plot.curves) or 1.0
    low, high = plot.low, plot.high

    def x(value: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * value / last

    def y(value: float) -> float:
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * share

    parts = []
    for place, text in round_ticks(low, high, 6):
        parts.append(
            tag("line", x1=f"{LEFT}", x2=f"{WIDE - RIGHT}", y1=f"{y(place):.1f}", y2=f"{y(place):.1f}", class_="grid")
        )
        parts.append(tag("text", text, x=f"{LEFT - 8}", y=f"{y(place) + 4:.1f}", text_anchor="end"))
    for place, text in round_ticks(0.0, last, 8):
        parts.append(tag("text", text, x=f"{x(place):.1f}", y=f"{HIGH - BOTTOM + 24}", text_anchor="middle"))
    for curve in plot.curves:
        if curve.low:
            parts.append(tag("polygon", points=_polygon_points(curve, x, y), class_=f"band c{curve.side % COLOURS}"))
    for curve in plot.curves:
        points = " ".join(
            f"{x(a):.1f},{y(b):.1f}" for a, b in zip(curve.step, curve.mean, strict=True) if math.isfinite(b)
        )
        parts.append(tag("polyline", points=points, class_=f"curve {side_classes(curve.side)}"))
        if plot.kind.validated and len(curve.step) <= SIGNS_SHOWN:
            parts += [
                tag("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r="3", class_=f"dot c{curve.side % COLOURS}")
                for a, b in zip(curve.step, curve.mean, strict=True)
            ]
    parts += _render_event_marks(plot, sides, x)
    return tag("svg", *parts, viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=description)


def _render_event_marks(
    plot: CurvePlot, sides: Sequence[ComparisonSide], x: Callable[[float], float]
) -> Iterator[Html]:
    """Draw the symbols of events on the step axis. Overlapping symbols are stacked."""
    places: list[float] = []
    for curve in plot.curves:
        for mark in event_marks(sides[curve.side]):
            place = x(mark[0])
            level = min(HIGHEST_SIGN, sum(abs(place - earlier) < SIGN_WIDTH for earlier in places))
            places.append(place)
            yield tag(
                "text",
                tag("title", f"{sides[curve.side].name}: {mark[3]}"),
                mark[4],
                x=f"{place:.1f}",
                y=f"{HIGH - BOTTOM - 3 - SIGN_WIDTH * level}",
                text_anchor="middle",
                class_=f"mark c{curve.side % COLOURS}",
            )


def _polygon_points(curve: CurveSeries, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = list(zip(curve.step, curve.low, curve.high, strict=True))
    along = [f"{x(a):.1f},{y(high):.1f}" for a, _, high in points if math.isfinite(high)]
    back = [f"{x(a):.1f},{y(low):.1f}" for a, low, _ in reversed(points) if math.isfinite(low)]
    return " ".join((*along, *back))


def event_marks(side: ComparisonSide) -> list[tuple[float, float, float, str, str]]:
    """Return step, tokens, seconds, text and symbol of each event of a side."""
    events = []
    for run in side.runs:
        for mark in run.history.marks:
            if mark.kind in SIGNS:
                tokens, seconds = (_axis_position(side.steps, axis, mark.step) for axis in ("tokens", "seconds"))
                text = f"step {mark.step:,}: {mark.kind}, {mark.text}"
                events.append((float(mark.step), tokens, seconds, text, SIGNS[mark.kind]))
    return events[:SIGNS_SHOWN]


def _axis_position(line: HistoryCurve, axis: str, step: float) -> float:
    if not len(line):
        return 0.0
    place = min(bisect_left(line.step.tolist(), step), len(line) - 1)
    return float(getattr(line, axis)[place])


# Data for curves.js, controls, legend and explanation.


def render_script_data(plots: Sequence[CurvePlot], sides: Sequence[ComparisonSide]) -> Html:
    """Render the data for curves.js as JSON, escaped so that it cannot end the script element."""
    document = {
        "sides": [
            {
                "name": side.name,
                "x": _curve_axes(side.steps),
                "vx": _curve_axes(side.validations),
                "marks": [list(mark) for mark in event_marks(side)],
            }
            for side in sides
        ],
        "charts": {
            plot.kind.name: {
                "title": plot.kind.title,
                "on": "vx" if plot.kind.validated else "x",
                "smooth": plot.kind.smooth,
                "low": plot.low,
                "high": plot.high,
                "series": [
                    {
                        "side": curve.side,
                        "y": _round_values(curve.mean),
                        "low": _round_values(curve.low),
                        "high": _round_values(curve.high),
                    }
                    for curve in plot.curves
                ],
            }
            for plot in plots
        },
    }
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return tag("script", Html(text), type="application/json", id="curves-data")


def _curve_axes(line: HistoryCurve) -> dict[str, list[float | None]]:
    return {axis: _round_values(getattr(line, axis).tolist()) for axis in ("step", "tokens", "seconds")}


def _round_values(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def render_controls(sides: Sequence[ComparisonSide]) -> Html:
    """Render the controls of the plots."""
    axes = [
        tag("option", text, value=value)
        for value, text in (("step", "optimizer steps"), ("tokens", "answer tokens"), ("seconds", "training time"))
    ]
    along = tag("label", tag("span", "along"), tag("select", *axes, data_by="axis"))
    slider = Html('<input type="range" min="0" max="95" step="5" value="0" data-by="smooth" />')
    smooth = tag("label", tag("span", "smoothing"), slider)
    buttons = [
        tag(
            "button",
            render_swatch(number),
            tag("bdi", side.name),
            type="button",
            data_side=str(number),
            aria_pressed="true",
        )
        for number, side in enumerate(sides)
    ]
    parts = [tag("div", along, smooth, class_="selects")]
    if len(sides) > 1:
        parts.append(tag("div", *buttons, class_="kinds", role="group", aria_label="Visible curves"))
    return tag("div", *parts, class_="controls", hidden="")


def render_legend(sides: Sequence[ComparisonSide]) -> Html:
    """Render the legend."""
    return tag(
        "p",
        *(tag("span", render_swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides)),
        class_="key legend",
    )


def describe_legend(sides: Sequence[ComparisonSide]) -> str:
    """Return the explanation of lines, bands and symbols."""
    width = max((side.steps.width for side in sides), default=1)
    parts = []
    if width > 1:
        parts.append(
            f"A point summarizes up to {width:,} steps: the line is their mean, the band their minimum and "
            "maximum, so that every spike is visible."
        )
    if any(side.is_group for side in sides):
        parts.append(
            "For several seeds: the mean plus and minus one standard deviation. Single steps outside the frame are "
            "listed below it."
        )
    kinds = {mark.kind for side in sides for run in side.runs for mark in run.history.marks}
    if signs := [f"{sign} {kind}" for kind, sign in SIGNS.items() if kind in kinds]:
        parts.append(f"Symbols on the axis: {', '.join(signs)}.")
    parts.append("Steps repeated after a crash are shown once. Time counts steps and validations.")
    return " ".join(parts)
