"""Curves of trainings, one above the other: drawn by step as they are, and as data for reports/curves.js.

Colours are those of Okabe and Ito (Color Universal Design, 2008); each side has a pattern of dashes of its own, too.
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
COLOURS, DASHES = 7, 4
"""Of lines, in reports/curves.css; each is used again once all are taken."""
NUMBERS = 10
"""Rows of the table behind a picture."""
ROOM, FAR, BEYOND = 1.0, 0.25, 6
"""How far a frame goes beyond the means where single steps do, and from where on those beyond it are told, in spans of
the means; how many are told."""
SIGNS = {
    "resumed": "\u21bb", "died": "\u2715", "stopped": "\u25a0", "skipped": "\u2298", "rolled back": "\u21b6",
    "spike": "\u25b2", "repeated": "2", "shrunk": "\u25bd", "grown": "\u25b3", "alert": "!",
}  # fmt: skip
"""What happened to a training, on the axis of steps."""
SIGNS_SHOWN = 60
"""Of one training in a picture."""
SIGN_WIDTH, HIGHEST_SIGN = 13, 3
"""Signs nearer to each other than this stand above each other, so many at most above the lowest."""


@dataclass(frozen=True)
class CurveKind:
    """What a picture shows."""

    name: str
    title: str
    note: str
    validated: bool
    """At validations; else at every step."""
    of: Callable[[Mapping[str, Any]], Any]
    """The values from those of a line."""
    band: bool = True
    smooth: bool = True


def _speed(values: Mapping[str, Any]) -> Any:
    return values["input_tokens"] / values["step_s"].clip(1e-9)


KINDS = (
    CurveKind("loss", "Training loss", "nats per answer token", False, lambda values: values["loss"]),
    CurveKind(
        "validation", "Validation loss", "nats per answer token", True, lambda values: values["loss"], smooth=False
    ),
    CurveKind("gradient", "Gradient norm", "before clipping", False, lambda values: values["grad_norm"]),
    CurveKind("rate", "Learning rate", "", False, lambda values: values["learning_rate"], band=False, smooth=False),
    CurveKind("speed", "Speed", "input tokens in a second of a step", False, _speed, band=False),
)


@dataclass(frozen=True)
class CurveSeries:
    """One curve in one picture."""

    side: int
    width: int
    """Steps that a point stands for."""
    step: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    members: Sequence["CurveSeries"] = ()
    """Of a group: each training by itself."""


@dataclass(frozen=True)
class CurvePlot:
    """All curves of one kind, and the frame that they are drawn in."""

    kind: CurveKind
    curves: Sequence[CurveSeries]
    low: float
    high: float
    beyond: Sequence[tuple[CurveSeries, float, float]]
    """Curve, step and value of what lies outside of the frame, the farthest first."""


def side_classes(number: int) -> str:
    """Classes of a side: its colour and its dashes."""
    return f"c{number % COLOURS} d{number % DASHES}"


def render_swatch(number: int) -> Html:
    """A short line as the side has it."""
    line = tag("line", x1="0", x2="26", y1="5", y2="5", class_=f"curve {side_classes(number)}")
    return tag("svg", line, width="26", height="10", viewBox="0 0 26 10", aria_hidden="true", class_="swatch")


def build_plots(sides: Sequence[ComparisonSide]) -> list[CurvePlot]:
    """The pictures that there is something for."""
    found = []
    for kind in KINDS:
        curves = [_build_series(number, side, kind) for number, side in enumerate(sides)]
        there = [one for one in curves if one.step]
        if there:
            found.append(_build_plot(kind, there))
    return found


def _build_series(number: int, side: ComparisonSide, kind: CurveKind) -> CurveSeries:
    line: HistoryCurve = side.validations if kind.validated else side.steps
    if not len(line):
        return CurveSeries(number, 1, (), (), (), ())
    mean = kind.of(line.mean).tolist()
    if not kind.band or (line.width == 1 and not side.is_group):
        return CurveSeries(number, line.width, line.step.tolist(), mean, (), ())
    members = (
        [_series_from_curve(number, one, kind) for one in side.members] if side.is_group and not kind.validated else []
    )
    return replace(_series_from_curve(number, line, kind), members=members)


def _series_from_curve(number: int, line: HistoryCurve, kind: CurveKind) -> CurveSeries:
    low, high = kind.of(line.low).tolist(), kind.of(line.high).tolist()
    return CurveSeries(number, line.width, line.step.tolist(), kind.of(line.mean).tolist(), low, high)


def _build_plot(kind: CurveKind, curves: Sequence[CurveSeries]) -> CurvePlot:
    means = [value for one in curves for value in one.mean if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    outer = [value for one in curves for value in (*one.low, *one.high) if math.isfinite(value)]
    low, high = max(min([low, *outer]), low - ROOM * span), min(max([high, *outer]), high + ROOM * span)
    beyond = [
        (one, step, value)
        for curve in curves
        for one in curve.members or [curve]
        for values in (one.low, one.high)
        for step, value in zip(one.step, values, strict=False)
        if not low - FAR * span <= value <= high + FAR * span and math.isfinite(value)
    ]
    beyond.sort(key=lambda found: -max(low - found[2], found[2] - high))
    # Of seeds that have the same to tell of the same steps, one does.
    beyond = list({(one.side, step): (one, step, value) for one, step, value in reversed(beyond)}.values())[::-1]
    room = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
    low = 0.0 if low >= 0 and low < 0.25 * high else low - room
    return CurvePlot(kind, curves, low, high + room, beyond[:BEYOND])


def render_figure(picture: CurvePlot, sides: Sequence[ComparisonSide]) -> Html:
    """A picture with its caption and its numbers."""
    kind = picture.kind
    names = [sides[one.side].name for one in picture.curves]
    said = f"{kind.title} by optimizer step of {', '.join(names)}; the table below has numbers."
    caption = tag("figcaption", kind.title, tag("span", f" {kind.note}"))
    parts = [
        caption,
        tag("div", _render_svg(picture, sides, said), class_="plot", data_chart=kind.name),
        _render_readout(),
    ]
    if picture.beyond:
        told = "; ".join(
            f"{sides[one.side].name}: {format_significant(value)} {_format_step_range(one, step)}"
            for one, step, value in picture.beyond
        )
        parts.append(explanation(f"Beyond the frame: {told}."))
    return tag("figure", *parts, _render_numbers(picture, sides), class_="curves")


def _format_step_range(one: CurveSeries, last: float) -> str:
    """Where a point lies, which is known by its last step."""
    first = last // one.width * one.width
    return f"at step {last:,.0f}" if first == last else f"in steps {max(1.0, first):,.0f} to {last:,.0f}"


def _render_readout() -> Html:
    return tag("p", class_="readout quiet", role="status", hidden="")


def _render_numbers(picture: CurvePlot, sides: Sequence[ComparisonSide]) -> Html:
    first = min(one.step[0] for one in picture.curves)
    last = max(one.step[-1] for one in picture.curves)
    asked = sorted({round(first + (last - first) * place / NUMBERS) for place in range(NUMBERS + 1)})
    rows = [(f"{step:,}", *(_value_at_step(one, step) for one in picture.curves)) for step in asked]
    heads = ("step", *(sides[one.side].name for one in picture.curves))
    numbers = table(f"{picture.kind.title} in numbers", "t" + "n" * len(picture.curves), heads, rows)
    return tag("details", tag("summary", "Numbers"), numbers)


def _value_at_step(curve: CurveSeries, step: float) -> str:
    """The value of the bucket that a step is in."""
    place = bisect_left(curve.step, step)
    if place == len(curve.step) or step < curve.step[0]:
        return NONE
    return format_significant(curve.mean[place])


def _render_svg(picture: CurvePlot, sides: Sequence[ComparisonSide], said: str) -> Html:
    last = max(one.step[-1] for one in picture.curves) or 1.0
    low, high = picture.low, picture.high

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
    for one in picture.curves:
        if one.low:
            parts.append(tag("polygon", points=_polygon_points(one, x, y), class_=f"band c{one.side % COLOURS}"))
    for one in picture.curves:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(one.step, one.mean, strict=True) if math.isfinite(b))
        parts.append(tag("polyline", points=points, class_=f"curve {side_classes(one.side)}"))
        if picture.kind.validated and len(one.step) <= SIGNS_SHOWN:
            parts += [
                tag("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r="3", class_=f"dot c{one.side % COLOURS}")
                for a, b in zip(one.step, one.mean, strict=True)
            ]
    parts += _render_event_marks(picture, sides, x)
    return tag("svg", *parts, viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=said)


def _render_event_marks(
    picture: CurvePlot, sides: Sequence[ComparisonSide], x: Callable[[float], float]
) -> Iterator[Html]:
    """What happened, on the axis; above each other where they would hide each other: a death and what follows it."""
    places: list[float] = []
    for one in picture.curves:
        for mark in event_marks(sides[one.side]):
            place = x(mark[0])
            level = min(HIGHEST_SIGN, sum(abs(place - other) < SIGN_WIDTH for other in places))
            places.append(place)
            yield tag(
                "text",
                tag("title", f"{sides[one.side].name}: {mark[3]}"),
                mark[4],
                x=f"{place:.1f}",
                y=f"{HIGH - BOTTOM - 3 - SIGN_WIDTH * level}",
                text_anchor="middle",
                class_=f"mark c{one.side % COLOURS}",
            )


def _polygon_points(one: CurveSeries, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    there = list(zip(one.step, one.low, one.high, strict=True))
    along = [f"{x(a):.1f},{y(high):.1f}" for a, _, high in there if math.isfinite(high)]
    back = [f"{x(a):.1f},{y(low):.1f}" for a, low, _ in reversed(there) if math.isfinite(low)]
    return " ".join((*along, *back))


def event_marks(side: ComparisonSide) -> list[tuple[float, float, float, str, str]]:
    """What happened to a side: step, tokens, seconds, words and sign of each."""
    found = []
    for account in side.accounts:
        for mark in account.course.marks:
            if mark.kind in SIGNS:
                tokens, seconds = (_axis_position(side.steps, axis, mark.step) for axis in ("tokens", "seconds"))
                words = f"step {mark.step:,}: {mark.kind}, {mark.text}"
                found.append((float(mark.step), tokens, seconds, words, SIGNS[mark.kind]))
    return found[:SIGNS_SHOWN]


def _axis_position(line: HistoryCurve, axis: str, step: float) -> float:
    if not len(line):
        return 0.0
    place = min(bisect_left(line.step.tolist(), step), len(line) - 1)
    return float(getattr(line, axis)[place])


# Curves of trainings as reports/curves.js draws them, and what it lets a reader choose; legend and explanation.


def render_script_data(found: Sequence[CurvePlot], sides: Sequence[ComparisonSide]) -> Html:
    """What the script draws from; nothing in it can end the element."""
    document = {
        "sides": [
            {
                "name": side.name,
                "x": _curve_axes(side.steps),
                "vx": _curve_axes(side.validations),
                "marks": [list(one) for one in event_marks(side)],
            }
            for side in sides
        ],
        "charts": {
            one.kind.name: {
                "title": one.kind.title,
                "on": "vx" if one.kind.validated else "x",
                "smooth": one.kind.smooth,
                "low": one.low,
                "high": one.high,
                "series": [
                    {
                        "side": curve.side,
                        "y": _round_values(curve.mean),
                        "low": _round_values(curve.low),
                        "high": _round_values(curve.high),
                    }
                    for curve in one.curves
                ],
            }
            for one in found
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
    """What the script lets a reader choose."""
    axes = [
        tag("option", text, value=value)
        for value, text in (("step", "optimizer steps"), ("tokens", "answer tokens"), ("seconds", "time in training"))
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
        parts.append(tag("div", *buttons, class_="kinds", role="group", aria_label="Curves that are shown"))
    return tag("div", *parts, class_="controls", hidden="")


def render_legend(sides: Sequence[ComparisonSide]) -> Html:
    """Which line is whose."""
    return tag(
        "p",
        *(tag("span", render_swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides)),
        class_="key legend",
    )


def describe_legend(sides: Sequence[ComparisonSide]) -> str:
    """What stands for what in the pictures, in words."""
    width = max((side.steps.width for side in sides), default=1)
    parts = []
    if width > 1:
        parts.append(
            f"A point stands for up to {width:,} steps: the line is their mean, the band their least and greatest, so "
            "that no spike is lost."
        )
    if any(side.is_group for side in sides):
        parts.append(
            "Of trainings with several seeds: their mean, and one standard deviation on either side; single steps that "
            "lie beyond the frame are named below it."
        )
    kinds = {mark.kind for side in sides for one in side.accounts for mark in one.course.marks}
    if signs := [f"{sign} {kind}" for kind, sign in SIGNS.items() if kind in kinds]:
        parts.append(f"Signs on the axis: {', '.join(signs)}.")
    parts.append("Steps that were done again after a crash are shown once; time is that of steps and validations.")
    return " ".join(parts)
