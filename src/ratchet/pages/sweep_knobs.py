"""Pictures of each knob for itself: how much it explains, and what its values came to."""

import math
from collections.abc import Mapping
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import COLOURS, INK, QUIET, SMALL, USUAL, Form, Target
from ratchet.pages.sweep_scale import Scale, frame, knob_scales, round_ticks
from ratchet.pages.sweep_trials import broken, chosen, counted, measure_name, short_names, shown, unit, value
from ratchet.records_sweep import SweepReport, Trial

COLUMNS, PANEL_INCHES, TICKS = 4, 2.4, 5
"""Panels side by side; height of one; texts below one, at most."""

LETTERS, UPRIGHT, SLANTING = 120, 9, 16
"""Below all panels of a row; of a text that stands upright (in two lines, if need be), and of one that slants."""

STRIP = 0.07
"""Of the panel's height, for trials without a value; they stand above all others."""

GOLDEN = 0.6180339887
"""Its multiples, without their whole parts, are spread evenly: where the points of one choice stand side by side."""


def importances(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the share of the first objective's variance that each knob explains, the largest first."""
    if not report.importances:
        canvas.nothing("Too few trials to say which knob matters.", target, "importances", form)
        return
    ordered = sorted(report.importances.items(), key=lambda one: (-one[1], one[0]))
    names = short_names(report.importances)
    made = canvas.figure(0.7 + 0.3 * len(ordered))
    axes = made.add_subplot()
    canvas.dress(axes, "share of the variance of the objective that the knob explains", grid="x")
    axes.barh(range(len(ordered)), [share for _, share in ordered], height=0.62, color=COLOURS["complete"])
    for row, (_, share) in enumerate(ordered):
        axes.annotate(f"{share:.0%}", (share, row), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=SMALL, color=INK)  # fmt: skip
    axes.set_yticks(range(len(ordered)), [canvas.plain(shown(names[knob])) for knob, _ in ordered])
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_xlim(0, min(1.08, 1.15 * max(0.05, *(share for _, share in ordered))))
    canvas.figures(axes.xaxis, lambda at: f"{at:.0%}")
    canvas.save(made, target, "importances", form)


def slices(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective over each knob: a panel a knob, a mark a trial.

    Trials without a value (infeasible, failed) stand in a strip above all others, so that it is seen which values
    cannot be trained. Of a choice, marks are spread so that they do not hide each other.
    """
    scales = knob_scales(report)
    trials = [trial for trial in counted(report) if trial.state != "running"]
    if not scales or not trials:
        canvas.nothing("No trial has ended." if scales else "No knob was searched.", target, "slices", form)
        return
    columns = min(COLUMNS, len(scales))
    rows = math.ceil(len(scales) / columns)
    made = canvas.figure(PANEL_INCHES * rows + 0.6)
    panels = made.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    known = {one.number: found for one in trials if (found := value(one, report.objectives)) is not None}
    final = [known[one.number] for one in trials if one.state == "complete" and one.number in known]
    low, high = frame(final, [known[one.number] for one in trials if one.state == "pruned" and one.number in known])
    strip = high + STRIP * (high - low)
    heights = {one.number: min(high, max(low, known[one.number])) if one.number in known else strip for one in trials}
    names = short_names(scales)
    for axes, (knob, scale) in zip(panels, scales.items(), strict=False):
        _slice(axes, (report, trials), (knob, scale), heights)
        canvas.dress(axes, shown(names[knob]))
        _ticks(axes, scale, LETTERS // columns)
        axes.set_xlim(-0.12, 1.12)
        axes.axhline(high, color=QUIET, linewidth=0.5, linestyle=":")
    for axes in panels[len(scales) :]:
        axes.remove()
    panels[0].set_ylim(low, strip + STRIP * (high - low))
    _heights(panels[0], report, known, (low, high, strip))
    made.supylabel(canvas.plain(measure_name(report.objectives[0], high)), fontsize=USUAL, color=INK)
    canvas.legend(made, *panels[: len(scales)])
    canvas.save(made, target, "slices", form)


def _ticks(axes: Any, scale: Scale, letters: int) -> None:
    """Texts below a panel; slanting where many long ones would not stand side by side."""
    ticks = scale.ticks(TICKS)
    texts = [broken(text, UPRIGHT) for _, text in ticks]
    look: dict[str, Any] = {}
    if len(texts) * max(len(line) for text in texts for line in text.split("\n")) > letters:
        texts = [text if len(text) <= SLANTING else f"{text[: SLANTING - 1]}…" for _, text in ticks]
        look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks([place for place, _ in ticks], [canvas.plain(text) for text in texts], **look)


def _heights(axes: Any, report: SweepReport, known: Mapping[int, float], limits: tuple[float, float, float]) -> None:
    low, high, strip = limits
    size, _ = unit(report.objectives[0].metric, high)
    ticks = round_ticks(low, high, TICKS + 1, size) if known else []
    axes.set_yticks([place for place, _ in ticks] + [strip], [text for _, text in ticks] + ["no value"])


def _slice(
    axes: Any, tried: tuple[SweepReport, list[Trial]], on: tuple[str, Scale], heights: Mapping[int, float]
) -> None:
    (report, trials), (knob, scale) = tried, on
    spread = 0.0 if scale.choices is None else min(0.2, 0.5 / max(1, len(scale.choices)))
    star = chosen(report)
    for state, members in canvas.by_state(trials).items():
        places = []
        for trial in members:
            place = scale.place(trial.values[knob]) if knob in trial.values else None
            if place is not None:
                aside = spread * ((trial.number * GOLDEN) % 1 - 0.5)
                places.append((place + aside, heights[trial.number]))
                if star is not None and trial.number == star.number:
                    canvas.star(axes, places[-1], canvas.star_title(report, star))
        size = 4.2 if len(members) <= canvas.MANY else 3
        canvas.dots(axes, places, state, markersize=size, alpha=max(0.35, min(1.0, 60 / len(members))))
