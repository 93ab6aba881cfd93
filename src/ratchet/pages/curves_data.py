"""Curves of trainings as services/curves.js draws them, and what it lets a reader choose; legend and explanation."""

import json
import math
from collections.abc import Sequence

from ratchet.history.comparison import Side
from ratchet.history.series import Line
from ratchet.markup import Html, tag
from ratchet.pages.curves import SIGNS, Picture, marks, swatch


def data(found: Sequence[Picture], sides: Sequence[Side]) -> Html:
    """What the script draws from; nothing in it can end the element."""
    document = {
        "sides": [
            {
                "name": side.name,
                "x": _axes(side.steps),
                "vx": _axes(side.validations),
                "marks": [list(one) for one in marks(side)],
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
                    {"side": curve.side, "y": _short(curve.mean), "low": _short(curve.low), "high": _short(curve.high)}
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


def _axes(line: Line) -> dict[str, list[float | None]]:
    return {axis: _short(getattr(line, axis).tolist()) for axis in ("step", "tokens", "seconds")}


def _short(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def controls(sides: Sequence[Side]) -> Html:
    """What the script lets a reader choose."""
    axes = [
        tag("option", text, value=value)
        for value, text in (("step", "optimizer steps"), ("tokens", "answer tokens"), ("seconds", "time in training"))
    ]
    along = tag("label", tag("span", "along"), tag("select", *axes, data_by="axis"))
    slider = Html('<input type="range" min="0" max="95" step="5" value="0" data-by="smooth" />')
    smooth = tag("label", tag("span", "smoothing"), slider)
    buttons = [
        tag("button", swatch(number), tag("bdi", side.name), type="button", data_side=str(number), aria_pressed="true")
        for number, side in enumerate(sides)
    ]
    parts = [tag("div", along, smooth, class_="selects")]
    if len(sides) > 1:
        parts.append(tag("div", *buttons, class_="kinds", role="group", aria_label="Curves that are shown"))
    return tag("div", *parts, class_="controls", hidden="")


def legend(sides: Sequence[Side]) -> Html:
    """Which line is whose."""
    return tag(
        "p",
        *(tag("span", swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides)),
        class_="key legend",
    )


def summarised(sides: Sequence[Side]) -> str:
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
