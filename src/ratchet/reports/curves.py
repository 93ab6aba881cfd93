"""Builds the plots of training curves of one or several runs, with their tables and controls.

templates/charts.js draws the plots by optimizer steps, answer tokens or time.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.reports.comparison import ComparisonSide
from ratchet.reports.pages import format_significant
from ratchet.reports.plots import COLOURS, DASHES, Figure, build_figure, plain, translucent
from ratchet.reports.run_history import HistoryCurve
from ratchet.storage.html import NONE

HIGH_PX = 320
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
SIGN_WIDTH, SIGN_HEIGHT, HIGHEST_SIGN = 0.014, 0.06, 3
"""Distance below which symbols are stacked, and height of a level, as shares of the axes; and maximum number of levels
above the lowest level."""
UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Shortest time of an axis in this unit, seconds of the unit, and its name."""


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


LOSSES = (
    CurveKind("loss", "Training loss", "", False, lambda values: values["loss"]),
    CurveKind("validation", "Validation loss", "", True, lambda values: values["loss"], smooth=False),
)
"""Plots whose note is the unit of the loss, which depends on the objective of the runs."""
KINDS = (
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


def build_plots(sides: Sequence[ComparisonSide]) -> list[CurvePlot]:
    """Return the plots that have data."""
    units = dict.fromkeys(
        run.spec.train.loss_description for side in sides for run in side.runs if run.spec is not None
    )
    plots = []
    for kind in (*(replace(kind, note="; ".join(units)) for kind in LOSSES), *KINDS):
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


def summarize_curves(sides: Sequence[ComparisonSide]) -> dict[str, Any] | None:
    """Return the values of macro `curves`; None if no run has done a step."""
    plots = build_plots(sides)
    if not plots:
        return None
    last = max(float(side.steps.seconds[-1]) for side in sides if len(side.steps))
    unit_s, unit = next((unit_s, unit) for least, unit_s, unit in UNITS if last >= least)
    return {
        "plots": [_summarize_plot(plot, sides) for plot in plots],
        "axes": [_side_axes(side, unit_s) for side in sides],
        "unit": unit,
        "names": [side.name for side in sides],
        "about": describe_legend(sides),
    }


def _summarize_plot(plot: CurvePlot, sides: Sequence[ComparisonSide]) -> dict[str, Any]:
    """Return a plot with its description, its outliers, and its table of values."""
    first = min(curve.step[0] for curve in plot.curves)
    last = max(curve.step[-1] for curve in plot.curves)
    steps = sorted({round(first + (last - first) * place / TABLE_ROWS) for place in range(TABLE_ROWS + 1)})
    names = [sides[curve.side].name for curve in plot.curves]
    return {
        "name": plot.kind.name,
        "title": plot.kind.title,
        "note": plot.kind.note,
        "figure": _build_curve_figure(plot, sides),
        "description": f"{plot.kind.title} of {', '.join(names)}. Arrow keys read values; the table below has numbers.",
        "outliers": [
            f"{sides[curve.side].name}: {format_significant(value)} {_format_step_range(curve, step)}"
            for curve, step, value in plot.outliers
        ],
        "heads": ["step", *names],
        "rows": [(f"{step:,}", *(_value_at_step(curve, step) for curve in plot.curves)) for step in steps],
    }


def _build_curve_figure(plot: CurvePlot, sides: Sequence[ComparisonSide]) -> Figure:
    """Return the figure. Its traces have no x values: the page has them once for all plots (`_side_axes`)."""
    bands: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    height = plot.high - plot.low
    last = max(curve.step[-1] for curve in plot.curves) or 1.0
    places: list[float] = []
    for curve in plot.curves:
        side, name, colour = sides[curve.side], plain(sides[curve.side].name), COLOURS[curve.side % len(COLOURS)]
        meta = {"side": curve.side, "on": "vx" if plot.kind.validated else "x", "smooth": plot.kind.smooth}
        for number, values in enumerate((curve.low, curve.high) if curve.low else ()):
            fill = {"fill": "tonexty", "fillcolor": translucent(colour)} if number else {}
            bands.append({
                "y": _round_values(values), "mode": "lines", "line": {"width": 0, "color": colour},
                "hoverinfo": "skip", "meta": meta, **fill,
            })  # fmt: skip
        has_dots = plot.kind.validated and len(curve.step) <= SIGNS_SHOWN
        lines.append({
            "y": _round_values(curve.mean), "name": name, "mode": "lines+markers" if has_dots else "lines",
            "line": {"color": colour, "width": 1.8, "dash": DASHES[curve.side % len(DASHES)]},
            "meta": {**meta, "named": True},
        })  # fmt: skip
        marks = event_marks(side)
        levels = []
        for step, *_ in marks:
            levels.append(min(HIGHEST_SIGN, sum(abs(step - earlier) < SIGN_WIDTH * last for earlier in places)))
            places.append(step)
        if marks:
            lines.append({
                "y": [plot.low + (0.5 + level) * SIGN_HEIGHT * height for level in levels], "mode": "text",
                "text": [sign for *_, sign in marks], "hovertext": [plain(f"{side.name}: {m[3]}") for m in marks],
                "hoverinfo": "text", "textfont": {"color": colour, "size": 13}, "cliponaxis": False,
                "meta": {"side": curve.side, "on": "marks"},
            })  # fmt: skip
    return build_figure([*bands, *lines], HIGH_PX, showlegend=False, hovermode="x",
                        xaxis={"rangemode": "tozero"}, yaxis={"range": [plot.low, plot.high]})  # fmt: skip


def _side_axes(side: ComparisonSide, unit_s: float) -> dict[str, dict[str, list[float | None]]]:
    """Return the positions of steps, validations and events of a side on each x-axis."""

    def axes(line: HistoryCurve) -> dict[str, list[float | None]]:
        return {
            "step": _round_values(line.step.tolist()),
            "tokens": _round_values(line.tokens.tolist()),
            "seconds": _round_values((line.seconds / unit_s).tolist()),
        }

    steps, tokens, seconds = ([float(mark[place]) for mark in event_marks(side)] for place in range(3))
    marks = {"step": steps, "tokens": tokens, "seconds": [value / unit_s for value in seconds]}
    return {
        "x": axes(side.steps), "vx": axes(side.validations), "marks": {k: _round_values(v) for k, v in marks.items()},
    }  # fmt: skip


def _round_values(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _format_step_range(curve: CurveSeries, last: float) -> str:
    """Describe the steps that a point summarizes, given the last of these steps."""
    first = last // curve.width * curve.width
    return f"at step {last:,.0f}" if first == last else f"in steps {max(1.0, first):,.0f} to {last:,.0f}"


def _value_at_step(curve: CurveSeries, step: float) -> str:
    """Format the value of the point that contains a step."""
    place = bisect_left(curve.step, step)
    if place == len(curve.step) or step < curve.step[0]:
        return NONE
    return format_significant(curve.mean[place])


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
