"""The picture of all knobs of each trial as a line: parallel coordinates (Inselberg, 1985)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import COLOURS, INK, PAPER, QUIET, SMALL, TOP, USUAL, Form, Target
from ratchet.pages.sweep_scale import Scale, frame, knob_scales, round_ticks, searched
from ratchet.pages.sweep_trials import (
    broken,
    chosen,
    complete,
    counted,
    measure_name,
    ranked,
    short_names,
    unit,
    value,
)
from ratchet.records_sweep import SweepReport, Trial, TrialState

HIGHLIGHTED, IN_SO_MANY = 5, 10
"""Best trials that stand out, at most; and of how many trials one does."""

AXES = 12
"""Knobs, at most: the most important ones."""

LINES = 200
"""Of one state, at most: more make one grey area, and a file of twice the size."""

TICKS, AXIS_INCHES, HIGH_INCHES = 7, 1.25, 4.4

DASHES: Mapping[TrialState, str] = {"pruned": "-", "complete": "-", "infeasible": "--", "failed": ":"}
"""Of the states that are drawn, the lowest first."""

Point = tuple[float, float]
Places = Sequence[float | None]
"""Where a line meets each axis; None where it does not."""


@dataclass(frozen=True)
class Sheet:
    """The axes side by side: knobs, then objectives."""

    report: SweepReport
    knobs: Mapping[str, Scale]
    ends: Sequence[Scale]

    @classmethod
    def of(cls, report: SweepReport) -> "Sheet":
        """The axes of a sweep; an objective's leaves out what lies far from the rest."""
        ends = []
        for which in range(len(report.objectives)):
            found = [one for _, one in complete(report, which)]
            ends.append(Scale.around(frame(found) if found else ()))
        # What is searched only sometimes stands first: a gap there parts no line from its objective.
        sometimes = {axis.knob for axis in report.axes if axis.conditional}
        every = knob_scales(report)
        weighty = sorted(every, key=lambda knob: -report.importances.get(knob, 0.0))[:AXES]
        scales = {
            knob: every[knob] for knob in sorted(every, key=lambda knob: knob not in sometimes) if knob in weighty
        }
        return cls(report, scales, ends)

    @property
    def count(self) -> int:
        """Of axes."""
        return len(self.knobs) + len(self.ends)

    def places(self, trial: Trial) -> Places:
        """The line of a trial; what was not searched for it is a gap, and so is an objective that it did not reach."""
        values = trial.values
        found = [scale.place(values[knob]) if knob in values else None for knob, scale in self.knobs.items()]
        for which, scale in enumerate(self.ends):
            reached = value(trial, self.report.objectives, which) if trial.state == "complete" else None
            place = None if reached is None else scale.place(reached)
            found.append(None if place is None else min(1.0, max(0.0, place)))
        return found

    def axes(self) -> Iterator[tuple[str, list[tuple[float, str]]]]:
        """Title, and places and texts beside each axis."""
        names = short_names(self.knobs)
        for knob, scale in self.knobs.items():
            yield names[knob], scale.ticks(TICKS)
        for measure, scale in zip(self.report.objectives, self.ends, strict=True):
            better = "lower" if measure.direction == "minimize" else "higher"
            size, name = unit(measure.metric, scale.high)
            found = round_ticks(scale.low, scale.high, TICKS, size) if scale.low < scale.high else []
            title = measure_name(measure, scale.high)
            title = title if name and size > 1 else title.partition(" (")[0]
            yield f"{title}\n({better} is better)", [(scale.place(at) or 0.0, text) for at, text in found]


def parallel(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw a line for each trial across all knobs and objectives; the best stand out.

    An axis is logarithmic where the knob was searched so. Trials that still train, and those that another one went
    on with, are left out.
    """
    sheet = Sheet.of(report)
    trials = [trial for trial in counted(report) if trial.state != "running"]
    if not sheet.knobs or not trials:
        said = "No trial has ended." if sheet.knobs else "No knob was searched."
        canvas.nothing(said, target, "parallel", form)
        return
    made = canvas.figure(HIGH_INCHES, max(canvas.WIDE, AXIS_INCHES * sheet.count))
    axes = made.add_subplot()
    best, said = _best(report, trials)
    crowd = max(0.15, min(0.6, 20 / len(trials)))
    for state in DASHES:
        members = [one for one in trials if one.state == state and one not in best]
        lines = [sheet.places(one) for one in canvas.thinned(members, LINES)]
        faint = crowd if state in ("pruned", "complete") else max(0.25, crowd)
        of_all = f", {len(lines)} of {len(members):,}" if len(lines) < len(members) else ""
        _draw(axes, lines, colors=COLOURS[state], linewidths=1.0, alpha=faint, linestyles=DASHES[state], zorder=2,
              label=f"{state}{of_all}")  # fmt: skip
    _draw(axes, [sheet.places(one) for one in best], colors=TOP, linewidths=1.6, zorder=4, label=said)
    if (star := chosen(report)) is not None and report.winner is not None:
        _draw(axes, [sheet.places(star)], colors=INK, linewidths=1.6, linestyles="--", zorder=5,
              label=canvas.star_title(report, star))  # fmt: skip
    _upright(axes, sheet)
    if len(sheet.knobs) < (every := len(searched(report))):
        axes.set_title(f"the {len(sheet.knobs)} most important of {every} knobs", fontsize=SMALL, color=QUIET)
    canvas.legend(made, axes, columns=7)
    canvas.save(made, target, "parallel", form)


def _best(report: SweepReport, trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Trials that stand out, and what they are: of several objectives those of the front."""
    if len(report.objectives) > 1:
        return [one for one in trials if one.number in report.best], "front"
    found = ranked(report)[: min(HIGHLIGHTED, math.ceil(len(trials) / IN_SO_MANY))]
    return found, f"the best {len(found)}" if len(found) > 1 else "the best"


def _draw(axes: Any, lines: Sequence[Places], **look: Any) -> None:
    """Lines with their gaps; what stands alone between two gaps is a dot."""
    pieces = [piece for line in lines for piece in unbroken(line)]
    canvas.strokes(axes, [piece for piece in pieces if len(piece) > 1], **look)
    if lonely := [piece[0] for piece in pieces if len(piece) == 1]:
        axes.plot(*zip(*lonely, strict=True), linestyle="", marker=".", markersize=5, color=look["colors"],
                  alpha=look.get("alpha"), zorder=look["zorder"], rasterized=len(lonely) > canvas.MANY)  # fmt: skip


def unbroken(line: Places) -> list[list[Point]]:
    """The pieces of a line between its gaps."""
    known = groupby(enumerate(line), key=lambda one: one[1] is not None)
    return [[(float(at), one) for at, one in piece if one is not None] for there, piece in known if there]


def _upright(axes: Any, sheet: Sheet) -> None:
    """The axes themselves, over the lines: their texts stand on paper."""
    axes.set_axis_off()
    axes.set_xlim(-0.45, sheet.count - 0.7)
    axes.set_ylim(-0.05, 1.17)
    axes.vlines(range(sheet.count), 0, 1, color=QUIET, linewidth=0.9, zorder=6)
    paper = {"facecolor": PAPER, "alpha": 0.75, "edgecolor": "none", "pad": 0.6}
    for at, (title, ticks) in enumerate(sheet.axes()):
        axes.hlines([place for place, _ in ticks], at - 0.02, at, color=QUIET, linewidth=0.8, zorder=6)
        for place, text in ticks:
            axes.text(at - 0.035, place, canvas.plain(broken(text, 14)), ha="right", va="center", fontsize=SMALL,
                      color=INK, zorder=7, linespacing=0.95, bbox=paper)  # fmt: skip
        axes.text(at, 1.055, canvas.plain(broken(title, 13)), ha="center", va="bottom", fontsize=USUAL, color=INK)
