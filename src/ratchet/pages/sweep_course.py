"""Pictures of the course of a sweep: what each trial came to, and how validation loss went in each."""

from collections.abc import Sequence
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import COLOURS, INK, TOP, Form, Target
from ratchet.pages.sweep_scale import frame
from ratchet.pages.sweep_trials import (
    LOSS,
    best_so_far,
    chosen,
    counted,
    curve,
    measure_name,
    number,
    ranked,
    superseded,
    value,
)
from ratchet.records_sweep import SweepReport, Trial, TrialState

PANEL_INCHES, ROW_INCHES = 2.7, 0.2
"""Height of an objective's panel, and of a row for trials without a value."""

BEST, FEW = 3, 25
"""Curves that are shown in a colour of their own; signs on curves that may be large."""

Point = tuple[float, float]


def history(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw each trial's objective by its number, and the best until then as a line.

    A pruned trial stands at its last validation loss, where that is the objective. States without a value have a row
    each below; a trial that another one goes on with is left to that one. An objective far from the others stands at
    the edge, as a small triangle.
    """
    if not report.trials:
        canvas.nothing("No trial has begun.", target, "history", form)
        return
    old = superseded(report)
    trials = [trial for trial in report.trials if trial.number not in old]
    absent = [one for one in trials if value(one, report.objectives) is None]
    rows = list(canvas.by_state(absent))
    count = len(report.objectives)
    below = ROW_INCHES * len(rows) + 0.1 if rows else 0.0
    made = canvas.figure(count * PANEL_INCHES + below + 0.9)
    heights = [PANEL_INCHES] * count + ([below] if rows else [])
    panels = made.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).flatten().tolist()
    for which in range(count):
        _objective(panels[which], report, trials, which)
    if rows:
        _absent(panels[-1], absent, rows)
    canvas.dress(panels[-1], "trial", panels[-1].get_ylabel(), grid="" if rows else "both")
    # Without values the panel above has only text: the numbers of the trials still fix where things stand.
    panels[-1].set_xlim(-0.6 - 0.01 * len(report.trials), report.trials[-1].number + 0.6 + 0.01 * len(report.trials))
    canvas.wholes(panels[-1].xaxis)
    canvas.legend(made, *panels, columns=7)
    canvas.save(made, target, "history", form)


def _objective(axes: Any, report: SweepReport, trials: Sequence[Trial], which: int) -> None:
    measure = report.objectives[which]
    known = {trial.number: found for trial in trials if (found := value(trial, report.objectives, which)) is not None}
    canvas.dress(axes, "", measure_name(measure, max(known.values(), default=0.0)))
    if not known:
        canvas.say(axes, "no trial has come to a value")
        axes.set_yticks([])
        return
    final = [known[trial.number] for trial in trials if trial.state == "complete" and trial.number in known]
    low, high = frame(final, [known[one.number] for one in trials if one.state != "complete" and one.number in known])
    axes.set_ylim(low, high)
    canvas.amounts(axes.yaxis, measure, (low, high))
    beyond = []
    for state, members in canvas.by_state(trials).items():
        places = [(one.number, known[one.number]) for one in members if one.number in known]
        beyond += [(at, min(high, max(low, found)), state) for at, found in places if not low <= found <= high]
        canvas.dots(axes, [place for place in places if low <= place[1] <= high], state)
    _edges(axes, beyond, high)
    if steps := best_so_far(report, which):
        line = [*steps, (report.trials[-1].number + 0.5, steps[-1][1])]
        axes.step(*zip(*line, strict=True), where="post", color=INK, linewidth=1.3, label="best so far", zorder=2)
    best = chosen(report)
    if best is not None and best.number in known:
        canvas.star(axes, (best.number, min(high, max(low, known[best.number]))), canvas.star_title(report, best))


def _edges(axes: Any, beyond: Sequence[tuple[float, float, TrialState]], high: float) -> None:
    """Small triangles for what lies outside of the frame; they point there."""
    for state in dict.fromkeys(one for _, _, one in beyond):
        for top in (True, False):
            places = [(at, edge) for at, edge, one in beyond if one == state and (edge == high) == top]
            # Half of a sign lies outside, and is cut off by nothing.
            canvas.dots(axes, places, state, marker=10 if top else 11, markersize=4.5, label=None, clip_on=False,
                        markeredgewidth=0, markerfacecolor=COLOURS[state])  # fmt: skip


def _absent(axes: Any, trials: Sequence[Trial], rows: Sequence[TrialState]) -> None:
    """A row for each state of trials that came to no value."""
    for row, state in enumerate(rows):
        canvas.dots(axes, [(one.number, row) for one in trials if one.state == state], state)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def curves(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the validation loss of each trial by rows learned from: the best in colours of their own, pruned in grey.

    A trial that goes on with a pruned one is drawn from its beginning, with a diamond where it went on.
    """
    by_number = {trial.number: trial for trial in report.trials}
    found = {trial.number: line for trial in counted(report) if (line := list(curve(trial, by_number).items()))}
    if not found:
        canvas.nothing("No trial has been validated yet.", target, "curves", form)
        return
    made = canvas.figure(4.2)
    axes = made.add_subplot()
    canvas.dress(axes, "rows learned from", "validation loss (nats per token)")
    canvas.figures(axes.xaxis, number)
    canvas.figures(axes.yaxis, number)
    loss = next((which for which, one in enumerate(report.objectives) if one.metric == LOSS), 0)
    best = [trial.number for trial in ranked(report, loss) if trial.number in found][:BEST]
    crowd = max(0.12, min(0.7, 25 / len(found)))
    for state, members in canvas.by_state(by_number[one] for one in found if one not in best).items():
        lines: list[Sequence[Point]] = [found[one.number] for one in members]
        style = "--" if state in ("running", "failed") else "-"
        canvas.strokes(axes, lines, colors=COLOURS[state], linewidths=1.0, linestyles=style,
                       alpha=crowd if state in ("complete", "pruned") else 0.9, label=state, zorder=2)  # fmt: skip
        if state != "complete":
            canvas.dots(axes, [line[-1] for line in lines], state, markersize=3.5, label=None)
    for place, one in enumerate(best):
        axes.plot(*zip(*found[one], strict=True), color=TOP if not place else INK, zorder=4 + BEST - place,
                  linestyle=("-", "--", ":")[place], linewidth=2.0 if not place else 1.2,
                  label=f"{('best', 'second', 'third')[place]}: trial {one}")  # fmt: skip
    _continued(axes, report, by_number, found)
    axes.set_ylim(*frame([loss for line in found.values() for _, loss in line]))
    axes.set_xlim(left=0)
    canvas.legend(made, axes, columns=4)
    canvas.save(made, target, "curves", form)


def _continued(axes: Any, report: SweepReport, by_number: dict[int, Trial], found: dict[int, list[Any]]) -> None:
    places = []
    for trial in report.trials:
        earlier = None if trial.continues is None else by_number.get(trial.continues)
        if trial.number in found and earlier is not None and (line := list(curve(earlier, by_number).items())):
            places.append(line[-1])
    if places:
        size, width = (4.5, 0.9) if len(places) <= FEW else (2.5, 0.5)
        axes.plot(*zip(*places, strict=True), linestyle="", marker="D", markersize=size, color="none", zorder=8,
                  markeredgecolor=INK, markeredgewidth=width, label="went on from here")  # fmt: skip
