"""Pictures of the course of a sweep: what each trial came to, and how validation loss went in each."""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from ratchet.reports import sweep_canvas as canvas
from ratchet.reports.sweep_canvas import (
    COLOURS,
    INK,
    PAPER,
    QUIET,
    SMALL,
    TOP,
    USUAL,
    Form,
    ParameterScale,
    Target,
    axis_limits,
    parameter_scales,
    round_ticks,
    searched_axes,
)
from ratchet.reports.sweep_timeline import draw_savings, draw_timeline
from ratchet.storage.records.sweep import SweepReport, Trial, TrialState
from ratchet.tuning.trial_summary import (
    LOSS,
    best_values_so_far,
    break_lines,
    completed_values,
    counted_trials,
    format_knob_value,
    format_number,
    measure_label,
    objective_unit,
    rank_trials,
    recommended_trial,
    shorten_names,
    superseded_numbers,
    trial_value,
    validation_curve,
)

PANEL_INCHES, ROW_INCHES = 2.7, 0.2
"""Height of an objective's panel, and of a row for trials without a value."""

BEST, FEW = 3, 25
"""Curves that are shown in a colour of their own; signs on curves that may be large."""

Point = tuple[float, float]


def draw_history(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw each trial's objective by its number, and the best until then as a line.

    A pruned trial stands at its last validation loss, where that is the objective. States without a value have a row
    each below; a trial that another one goes on with is left to that one. An objective far from the others stands at
    the edge, as a small triangle.
    """
    if not report.trials:
        canvas.save_empty_plot("No trial has begun.", target, "history", form)
        return
    old = superseded_numbers(report)
    trials = [trial for trial in report.trials if trial.number not in old]
    absent = [one for one in trials if trial_value(one, report.objectives) is None]
    rows = list(canvas.group_by_state(absent))
    count = len(report.objectives)
    below = ROW_INCHES * len(rows) + 0.1 if rows else 0.0
    made = canvas.create_figure(count * PANEL_INCHES + below + 0.9)
    heights = [PANEL_INCHES] * count + ([below] if rows else [])
    panels = made.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).flatten().tolist()
    for which in range(count):
        _draw_objective_history(panels[which], report, trials, which)
    if rows:
        _draw_valueless_trials(panels[-1], absent, rows)
    canvas.style_axes(panels[-1], "trial", panels[-1].get_ylabel(), grid="" if rows else "both")
    # Without values the panel above has only text: the numbers of the trials still fix where things stand.
    panels[-1].set_xlim(-0.6 - 0.01 * len(report.trials), report.trials[-1].number + 0.6 + 0.01 * len(report.trials))
    canvas.set_integer_ticks(panels[-1].xaxis)
    canvas.add_legend(made, *panels, columns=7)
    canvas.save_figure(made, target, "history", form)


def _draw_objective_history(axes: Any, report: SweepReport, trials: Sequence[Trial], which: int) -> None:
    measure = report.objectives[which]
    known = {
        trial.number: found for trial in trials if (found := trial_value(trial, report.objectives, which)) is not None
    }
    canvas.style_axes(axes, "", measure_label(measure, max(known.values(), default=0.0)))
    if not known:
        canvas.write_message(axes, "no trial has come to a value")
        axes.set_yticks([])
        return
    final = [known[trial.number] for trial in trials if trial.state == "complete" and trial.number in known]
    low, high = axis_limits(
        final, [known[one.number] for one in trials if one.state != "complete" and one.number in known]
    )
    axes.set_ylim(low, high)
    canvas.set_objective_ticks(axes.yaxis, measure, (low, high))
    beyond = []
    for state, members in canvas.group_by_state(trials).items():
        places = [(one.number, known[one.number]) for one in members if one.number in known]
        beyond += [(at, min(high, max(low, found)), state) for at, found in places if not low <= found <= high]
        canvas.draw_points(axes, [place for place in places if low <= place[1] <= high], state)
    _draw_outlier_marks(axes, beyond, high)
    if steps := best_values_so_far(report, which):
        line = [*steps, (report.trials[-1].number + 0.5, steps[-1][1])]
        axes.step(*zip(*line, strict=True), where="post", color=INK, linewidth=1.3, label="best so far", zorder=2)
    best = recommended_trial(report)
    if best is not None and best.number in known:
        canvas.draw_star(axes, (best.number, min(high, max(low, known[best.number]))), canvas.star_label(report, best))


def _draw_outlier_marks(axes: Any, beyond: Sequence[tuple[float, float, TrialState]], high: float) -> None:
    """Small triangles for what lies outside of the frame; they point there."""
    for state in dict.fromkeys(one for _, _, one in beyond):
        for top in (True, False):
            places = [(at, edge) for at, edge, one in beyond if one == state and (edge == high) == top]
            # Half of a sign lies outside, and is cut off by nothing.
            canvas.draw_points(axes, places, state, marker=10 if top else 11, markersize=4.5, label=None, clip_on=False,
                        markeredgewidth=0, markerfacecolor=COLOURS[state])  # fmt: skip


def _draw_valueless_trials(axes: Any, trials: Sequence[Trial], rows: Sequence[TrialState]) -> None:
    """A row for each state of trials that came to no value."""
    for row, state in enumerate(rows):
        canvas.draw_points(axes, [(one.number, row) for one in trials if one.state == state], state)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def draw_curves(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the validation loss of each trial by rows learned from: the best in colours of their own, pruned in grey.

    A trial that goes on with a pruned one is drawn from its beginning, with a diamond where it went on.
    """
    by_number = {trial.number: trial for trial in report.trials}
    found = {
        trial.number: line
        for trial in counted_trials(report)
        if (line := list(validation_curve(trial, by_number).items()))
    }
    if not found:
        canvas.save_empty_plot("No trial has been validated yet.", target, "curves", form)
        return
    made = canvas.create_figure(4.2)
    axes = made.add_subplot()
    canvas.style_axes(axes, "rows learned from", "validation loss (nats per token)")
    canvas.set_number_ticks(axes.xaxis, format_number)
    canvas.set_number_ticks(axes.yaxis, format_number)
    loss = next((which for which, one in enumerate(report.objectives) if one.metric == LOSS), 0)
    best = [trial.number for trial in rank_trials(report, loss) if trial.number in found][:BEST]
    crowd = max(0.12, min(0.7, 25 / len(found)))
    for state, members in canvas.group_by_state(by_number[one] for one in found if one not in best).items():
        lines: list[Sequence[Point]] = [found[one.number] for one in members]
        style = "--" if state in ("running", "failed") else "-"
        canvas.draw_lines(axes, lines, colors=COLOURS[state], linewidths=1.0, linestyles=style,
                       alpha=crowd if state in ("complete", "pruned") else 0.9, label=state, zorder=2)  # fmt: skip
        if state != "complete":
            canvas.draw_points(axes, [line[-1] for line in lines], state, markersize=3.5, label=None)
    for place, one in enumerate(best):
        axes.plot(*zip(*found[one], strict=True), color=TOP if not place else INK, zorder=4 + BEST - place,
                  linestyle=("-", "--", ":")[place], linewidth=2.0 if not place else 1.2,
                  label=f"{('best', 'second', 'third')[place]}: trial {one}")  # fmt: skip
    _draw_resume_points(axes, report, by_number, found)
    axes.set_ylim(*axis_limits([loss for line in found.values() for _, loss in line]))
    axes.set_xlim(left=0)
    canvas.add_legend(made, axes, columns=4)
    canvas.save_figure(made, target, "curves", form)


def _draw_resume_points(
    axes: Any, report: SweepReport, by_number: dict[int, Trial], found: dict[int, list[Any]]
) -> None:
    places = []
    for trial in report.trials:
        earlier = None if trial.continues is None else by_number.get(trial.continues)
        if (
            trial.number in found
            and earlier is not None
            and (line := list(validation_curve(earlier, by_number).items()))
        ):
            places.append(line[-1])
    if places:
        size, width = (4.5, 0.9) if len(places) <= FEW else (2.5, 0.5)
        axes.plot(*zip(*places, strict=True), linestyle="", marker="D", markersize=size, color="none", zorder=8,
                  markeredgecolor=INK, markeredgewidth=width, label="went on from here")  # fmt: skip


# Pictures of each knob for itself: how much it explains, and what its values came to.

COLUMNS, KNOB_PANEL_INCHES, TICKS = 4, 2.4, 5
"""Panels side by side; height of one; texts below one, at most."""

LETTERS, UPRIGHT, SLANTING = 120, 9, 16
"""Below all panels of a row; of a text that stands upright (in two lines, if need be), and of one that slants."""

STRIP = 0.07
"""Of the panel's height, for trials without a value; they stand above all others."""

GOLDEN = 0.6180339887
"""Its multiples, without their whole parts, are spread evenly: where the points of one choice stand side by side."""


def draw_importances(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the share of the first objective's variance that each knob explains, the largest first."""
    if not report.importances:
        canvas.save_empty_plot("Too few trials to say which knob matters.", target, "importances", form)
        return
    ordered = sorted(report.importances.items(), key=lambda one: (-one[1], one[0]))
    names = shorten_names(report.importances)
    made = canvas.create_figure(0.7 + 0.3 * len(ordered))
    axes = made.add_subplot()
    canvas.style_axes(axes, "share of the variance of the objective that the knob explains", grid="x")
    axes.barh(range(len(ordered)), [share for _, share in ordered], height=0.62, color=COLOURS["complete"])
    for row, (_, share) in enumerate(ordered):
        axes.annotate(f"{share:.0%}", (share, row), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=SMALL, color=INK)  # fmt: skip
    axes.set_yticks(range(len(ordered)), [canvas.sanitize_label(format_knob_value(names[knob])) for knob, _ in ordered])
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_xlim(0, min(1.08, 1.15 * max(0.05, *(share for _, share in ordered))))
    canvas.set_number_ticks(axes.xaxis, lambda at: f"{at:.0%}")
    canvas.save_figure(made, target, "importances", form)


def draw_slices(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective over each knob: a panel a knob, a mark a trial.

    Trials without a value (infeasible, failed) stand in a strip above all others, so that it is seen which values
    cannot be trained. Of a choice, marks are spread so that they do not hide each other.
    """
    scales = parameter_scales(report)
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    if not scales or not trials:
        canvas.save_empty_plot("No trial has ended." if scales else "No knob was searched.", target, "slices", form)
        return
    columns = min(COLUMNS, len(scales))
    rows = math.ceil(len(scales) / columns)
    made = canvas.create_figure(KNOB_PANEL_INCHES * rows + 0.6)
    panels = made.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    known = {one.number: found for one in trials if (found := trial_value(one, report.objectives)) is not None}
    final = [known[one.number] for one in trials if one.state == "complete" and one.number in known]
    low, high = axis_limits(
        final, [known[one.number] for one in trials if one.state == "pruned" and one.number in known]
    )
    strip = high + STRIP * (high - low)
    heights = {one.number: min(high, max(low, known[one.number])) if one.number in known else strip for one in trials}
    names = shorten_names(scales)
    for axes, (knob, scale) in zip(panels, scales.items(), strict=False):
        _draw_slice(axes, (report, trials), (knob, scale), heights)
        canvas.style_axes(axes, format_knob_value(names[knob]))
        _write_ticks(axes, scale, LETTERS // columns)
        axes.set_xlim(-0.12, 1.12)
        axes.axhline(high, color=QUIET, linewidth=0.5, linestyle=":")
    for axes in panels[len(scales) :]:
        axes.remove()
    panels[0].set_ylim(low, strip + STRIP * (high - low))
    _set_objective_ticks(panels[0], report, known, (low, high, strip))
    made.supylabel(canvas.sanitize_label(measure_label(report.objectives[0], high)), fontsize=USUAL, color=INK)
    canvas.add_legend(made, *panels[: len(scales)])
    canvas.save_figure(made, target, "slices", form)


def _write_ticks(axes: Any, scale: ParameterScale, letters: int) -> None:
    """Texts below a panel; slanting where many long ones would not stand side by side."""
    ticks = scale.ticks(TICKS)
    texts = [break_lines(text, UPRIGHT) for _, text in ticks]
    look: dict[str, Any] = {}
    if len(texts) * max(len(line) for text in texts for line in text.split("\n")) > letters:
        texts = [text if len(text) <= SLANTING else f"{text[: SLANTING - 1]}…" for _, text in ticks]
        look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks([place for place, _ in ticks], [canvas.sanitize_label(text) for text in texts], **look)


def _set_objective_ticks(
    axes: Any, report: SweepReport, known: Mapping[int, float], limits: tuple[float, float, float]
) -> None:
    low, high, strip = limits
    size, _ = objective_unit(report.objectives[0].metric, high)
    ticks = round_ticks(low, high, TICKS + 1, size) if known else []
    axes.set_yticks([place for place, _ in ticks] + [strip], [text for _, text in ticks] + ["no value"])


def _draw_slice(
    axes: Any, tried: tuple[SweepReport, list[Trial]], on: tuple[str, ParameterScale], heights: Mapping[int, float]
) -> None:
    (report, trials), (knob, scale) = tried, on
    spread = 0.0 if scale.choices is None else min(0.2, 0.5 / max(1, len(scale.choices)))
    star = recommended_trial(report)
    for state, members in canvas.group_by_state(trials).items():
        places = []
        for trial in members:
            place = scale.place(trial.values[knob]) if knob in trial.values else None
            if place is not None:
                aside = spread * ((trial.number * GOLDEN) % 1 - 0.5)
                places.append((place + aside, heights[trial.number]))
                if star is not None and trial.number == star.number:
                    canvas.draw_star(axes, places[-1], canvas.star_label(report, star))
        size = 4.2 if len(members) <= canvas.MANY else 3
        canvas.draw_points(axes, places, state, markersize=size, alpha=max(0.35, min(1.0, 60 / len(members))))


# Pictures of how two things go together: two knobs and the objective, two objectives.

PREFERRED = ("train.learning_rate", "train.rank")
"""Across and up, where both were searched."""

ENOUGH = 10
"""Places with an objective, from which on the space between them is coloured."""

LEVELS = 10
COLOUR_MAP = "cividis"
"""As light for everybody (Nuñez, Anderton and Renslow, 2018)."""

DENSE, CELLS = 60, 10
"""Trials from which on those are merged that lie in one of so many cells across and up: else noise would be drawn."""

FLAT = 0.02
"""Triangles whose circles relate as this or less are left out: between points on a line nothing is known."""

INKED: Mapping[TrialState, Mapping[str, Any]] = {"pruned": {"markeredgecolor": INK}}
"""How marks look different over colours: grey could not be told from them."""

BETTER = {"minimize": "lower", "maximize": "higher"}

PAIRS, LABELLED = 6, 12
"""Of objectives, at most; members of a front that have their numbers beside them, at most."""

SurfacePoint = tuple[float, float]


def choose_contour_pair(report: SweepReport) -> tuple[str, str] | None:
    """The two numeric knobs of the contour: learning rate and rank, else the two most important ones."""
    numeric = [axis.knob for axis in searched_axes(report) if axis.kind != "choice"]
    if len(numeric) < 2:
        return None
    if all(knob in numeric for knob in PREFERRED):
        return PREFERRED
    across, up = sorted(numeric, key=lambda knob: (-report.importances.get(knob, 0.0), numeric.index(knob)))[:2]
    return across, up


def draw_contour(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective over two knobs: trials as points, the space between them where there are enough.

    The colours between points are linear over Delaunay triangles of the points, on the scales of the knobs; where
    other knobs differ, too, they show no more than what lies near. Nothing is drawn beyond the points.
    """
    knobs = choose_contour_pair(report)
    trials = (
        [] if knobs is None else [one for one in counted_trials(report) if all(knob in one.values for knob in knobs)]
    )
    if knobs is None or not trials:
        said = "A contour needs two numeric knobs." if knobs is None else "No trial has begun."
        canvas.save_empty_plot(said, target, "contour", form)
        return
    scales = {knob: scale for knob, scale in parameter_scales(report).items() if knob in knobs}
    across, up = (scales[knob] for knob in knobs)
    places = {one.number: (across.place(one.values[knobs[0]]), up.place(one.values[knobs[1]])) for one in trials}
    known = {number: (x, y) for number, (x, y) in places.items() if x is not None and y is not None}
    if not known:
        canvas.save_empty_plot("No trial has a place on both axes.", target, "contour", form)
        return
    made = canvas.create_figure(4.9, 7.6)
    axes = made.add_subplot()
    names = shorten_names(axis.knob for axis in report.axes)
    canvas.style_axes(axes, format_knob_value(names[knobs[0]]), format_knob_value(names[knobs[1]]))
    axes.set_xticks(*_scale_ticks(across))
    axes.set_yticks(*_scale_ticks(up))
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.06, 1.06)
    coloured = _draw_coloured_points(made, axes, report, known)
    for state, members in canvas.group_by_state(trials).items():
        if state != "complete" or not coloured:
            look = INKED.get(state, {}) if coloured and len(members) <= canvas.MANY else {}
            canvas.draw_points(axes, [known[one.number] for one in members if one.number in known], state, **look)
    star = recommended_trial(report)
    if star is not None and star.number in known:
        canvas.draw_star(axes, known[star.number], canvas.star_label(report, star))
    canvas.add_legend(made, axes)
    canvas.save_figure(made, target, "contour", form)


def _scale_ticks(scale: ParameterScale) -> tuple[list[float], list[str]]:
    found = scale.ticks(8)
    return [place for place, _ in found], [canvas.sanitize_label(text) for _, text in found]


def _draw_coloured_points(made: Any, axes: Any, report: SweepReport, known: Mapping[int, tuple[float, float]]) -> bool:
    """Complete trials as points whose colour is the objective, over the space between them; whether there are any."""
    from matplotlib.colors import Normalize

    found = [(known[trial.number], amount) for trial, amount in completed_values(report) if trial.number in known]
    if not found:
        return False
    low, high = axis_limits([amount for _, amount in found])
    best_low = report.objectives[0].direction == "minimize"
    scale = Normalize(low, high, clip=True)
    colours = f"{COLOUR_MAP}_r" if best_low else COLOUR_MAP
    drawn = _draw_surface(axes, _merge_near_points(found, min if best_low else max), scale, colours)
    places, amounts = zip(*found, strict=True)
    many = len(found) > canvas.MANY
    points = axes.scatter(*zip(*places, strict=True), c=amounts, norm=scale, cmap=colours, s=16 if many else 38,
                          zorder=4, edgecolors=PAPER, linewidths=0.5 if many else 0.9, label="complete",
                          rasterized=many)  # fmt: skip
    bar = made.colorbar(drawn or points, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(canvas.sanitize_label(measure_label(report.objectives[0], high)), fontsize=canvas.USUAL, color=INK)
    bar.ax.tick_params(labelsize=canvas.SMALL, labelcolor=INK, color=INK)
    canvas.set_objective_ticks(bar, report.objectives[0], (low, high))
    return True


def _merge_near_points(
    found: Sequence[tuple[SurfacePoint, float]], better: Callable[[Iterable[float]], float]
) -> dict[SurfacePoint, float]:
    """Of trials close by the best counts, in their middle: the others differ in knobs that are not seen here."""
    cells: dict[tuple[int, int], list[tuple[SurfacePoint, float]]] = {}
    fine = CELLS if len(found) > DENSE else 1000
    for (x, y), amount in found:
        cells.setdefault((round(x * fine), round(y * fine)), []).append(((x, y), amount))
    return {
        (fmean(x for (x, _), _ in members), fmean(y for (_, y), _ in members)): better(one for _, one in members)
        for members in cells.values()
    }


def _draw_surface(axes: Any, best: Mapping[SurfacePoint, float], scale: Any, colours: str) -> Any:
    """Colours between the points; None where they are too few or on a line."""
    from matplotlib.tri import TriAnalyzer, Triangulation

    places = list(best)
    if len(places) < ENOUGH or _are_collinear(places):
        return None
    triangles = Triangulation(*zip(*places, strict=True))
    flat = TriAnalyzer(triangles).get_flat_tri_mask(FLAT)
    if all(flat):
        return None
    triangles.set_mask(flat)
    amounts = [min(scale.vmax, max(scale.vmin, amount)) for amount in best.values()]
    levels = [scale.vmin + k * (scale.vmax - scale.vmin) / LEVELS for k in range(LEVELS + 1)]
    return axes.tricontourf(triangles, amounts, levels=levels, cmap=colours, norm=scale, alpha=0.85, zorder=1)


def _are_collinear(places: Sequence[tuple[float, float]]) -> bool:
    """Whether no triangle of the points has an area that can be seen."""
    (ax, ay), *others = places
    bx, by = max(others, key=lambda one: math.hypot(one[0] - ax, one[1] - ay))
    return max(abs((bx - ax) * (y - ay) - (by - ay) * (x - ax)) for x, y in others) < 1e-3


def draw_pareto(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw two objectives against each other, or all pairs of several, and mark the trials that no other beats."""
    if len(report.objectives) < 2:
        canvas.save_empty_plot("One objective has no front.", target, "pareto", form)
        return
    trials = [trial for trial in counted_trials(report) if trial.state == "complete"]
    if not trials:
        canvas.save_empty_plot("No trial is complete.", target, "pareto", form)
        return
    pairs = list(combinations(range(len(report.objectives)), 2))[:PAIRS]
    columns = min(2, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    made = canvas.create_figure(4.4 if rows == columns == 1 else 3.3 * rows + 0.5, canvas.WIDE if columns > 1 else 7.6)
    panels = made.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, (first, second) in zip(panels, pairs, strict=False):
        _draw_pareto_front(axes, report, trials, (first, second))
    for axes in panels[len(pairs) :]:
        axes.remove()
    canvas.add_legend(made, *panels[: len(pairs)])
    canvas.save_figure(made, target, "pareto", form)


def _draw_pareto_front(axes: Any, report: SweepReport, trials: Sequence[Trial], which: tuple[int, int]) -> None:
    measures = [report.objectives[one] for one in which]
    found: dict[int, SurfacePoint] = {}
    for trial in trials:
        across, up = (trial_value(trial, report.objectives, one) for one in which)
        if across is not None and up is not None:
            found[trial.number] = (across, up)
    if not found:
        canvas.write_message(axes, "no trial has both")
        return
    best = [found[one] for one in report.best if one in found]
    canvas.draw_points(axes, [place for one, place in found.items() if one not in report.best], "complete",
                       markersize=4.5, label="complete, beaten by another", alpha=0.75)  # fmt: skip
    if best:
        if len(report.objectives) == 2:
            # Between two members of the front nothing is known but that it is no worse than the worse of both.
            better = measures[0].direction == "minimize"
            line = sorted(best, reverse=not better)
            axes.step(*zip(*line, strict=True), where="post", color=TOP, linewidth=1.2, zorder=2)
        axes.plot(*zip(*best, strict=True), linestyle="", marker="D", markersize=6, color=TOP, zorder=5,
                  markeredgecolor=PAPER, markeredgewidth=0.6, label="front")  # fmt: skip
        if len(best) <= LABELLED and len(report.objectives) == 2:
            for one in report.best:
                if one in found:
                    axes.annotate(str(one), found[one], xytext=(5, 5), textcoords="offset points",
                                  fontsize=canvas.SMALL, color=INK, zorder=6)  # fmt: skip
    star = recommended_trial(report)
    if star is not None and star.number in found:
        canvas.draw_star(axes, found[star.number], f"winner: trial {star.number}")
    for place, (measure, axis, limit) in enumerate(
        zip(measures, (axes.xaxis, axes.yaxis), (axes.set_xlim, axes.set_ylim), strict=True)
    ):
        low, high = min(one[place] for one in found.values()), max(one[place] for one in found.values())
        room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        limit(low - room, high + room)
        canvas.set_objective_ticks(axis, measure, (low - room, high + room), 7)
    ends = (axes.get_xlim()[1], axes.get_ylim()[1])
    names = [
        f"{measure_label(one, end)}, {BETTER[one.direction]} is better" for one, end in zip(measures, ends, strict=True)
    ]
    canvas.style_axes(axes, names[0], names[1])


# The picture of all knobs of each trial as a line: parallel coordinates (Inselberg, 1985).

HIGHLIGHTED, IN_SO_MANY = 5, 10
"""Best trials that stand out, at most; and of how many trials one does."""

AXES = 12
"""Knobs, at most: the most important ones."""

LINES = 200
"""Of one state, at most: more make one grey area, and a file of twice the size."""

AXIS_TICKS, AXIS_INCHES, HIGH_INCHES = 7, 1.25, 4.4

DASHES: Mapping[TrialState, str] = {"pruned": "-", "complete": "-", "infeasible": "--", "failed": ":"}
"""Of the states that are drawn, the lowest first."""

AxisPoint = tuple[float, float]
Places = Sequence[float | None]
"""Where a line meets each axis; None where it does not."""


@dataclass(frozen=True)
class ParallelCoordinates:
    """The axes side by side: knobs, then objectives."""

    report: SweepReport
    knobs: Mapping[str, ParameterScale]
    ends: Sequence[ParameterScale]

    @classmethod
    def of(cls, report: SweepReport) -> "ParallelCoordinates":
        """The axes of a sweep; an objective's leaves out what lies far from the rest."""
        ends = []
        for which in range(len(report.objectives)):
            found = [one for _, one in completed_values(report, which)]
            ends.append(ParameterScale.around(axis_limits(found) if found else ()))
        # What is searched only sometimes stands first: a gap there parts no line from its objective.
        sometimes = {axis.knob for axis in report.axes if axis.conditional}
        every = parameter_scales(report)
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
            reached = trial_value(trial, self.report.objectives, which) if trial.state == "complete" else None
            place = None if reached is None else scale.place(reached)
            found.append(None if place is None else min(1.0, max(0.0, place)))
        return found

    def axes(self) -> Iterator[tuple[str, list[tuple[float, str]]]]:
        """Title, and places and texts beside each axis."""
        names = shorten_names(self.knobs)
        for knob, scale in self.knobs.items():
            yield names[knob], scale.ticks(AXIS_TICKS)
        for measure, scale in zip(self.report.objectives, self.ends, strict=True):
            better = "lower" if measure.direction == "minimize" else "higher"
            size, name = objective_unit(measure.metric, scale.high)
            found = round_ticks(scale.low, scale.high, AXIS_TICKS, size) if scale.low < scale.high else []
            title = measure_label(measure, scale.high)
            title = title if name and size > 1 else title.partition(" (")[0]
            yield f"{title}\n({better} is better)", [(scale.place(at) or 0.0, text) for at, text in found]


def draw_parallel_coordinates(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw a line for each trial across all knobs and objectives; the best stand out.

    An axis is logarithmic where the knob was searched so. Trials that still train, and those that another one went
    on with, are left out.
    """
    sheet = ParallelCoordinates.of(report)
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    if not sheet.knobs or not trials:
        said = "No trial has ended." if sheet.knobs else "No knob was searched."
        canvas.save_empty_plot(said, target, "parallel", form)
        return
    made = canvas.create_figure(HIGH_INCHES, max(canvas.WIDE, AXIS_INCHES * sheet.count))
    axes = made.add_subplot()
    best, said = _select_best(report, trials)
    crowd = max(0.15, min(0.6, 20 / len(trials)))
    for state in DASHES:
        members = [one for one in trials if one.state == state and one not in best]
        lines = [sheet.places(one) for one in canvas.thin_out(members, LINES)]
        faint = crowd if state in ("pruned", "complete") else max(0.25, crowd)
        of_all = f", {len(lines)} of {len(members):,}" if len(lines) < len(members) else ""
        _draw_broken_lines(axes, lines, colors=COLOURS[state], linewidths=1.0, alpha=faint, linestyles=DASHES[state],
                           zorder=2, label=f"{state}{of_all}")  # fmt: skip
    _draw_broken_lines(axes, [sheet.places(one) for one in best], colors=TOP, linewidths=1.6, zorder=4, label=said)
    if (star := recommended_trial(report)) is not None and report.winner is not None:
        _draw_broken_lines(axes, [sheet.places(star)], colors=INK, linewidths=1.6, linestyles="--", zorder=5,
              label=canvas.star_label(report, star))  # fmt: skip
    _draw_vertical_axes(axes, sheet)
    if len(sheet.knobs) < (every := len(searched_axes(report))):
        axes.set_title(f"the {len(sheet.knobs)} most important of {every} knobs", fontsize=SMALL, color=QUIET)
    canvas.add_legend(made, axes, columns=7)
    canvas.save_figure(made, target, "parallel", form)


def _select_best(report: SweepReport, trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Trials that stand out, and what they are: of several objectives those of the front."""
    if len(report.objectives) > 1:
        return [one for one in trials if one.number in report.best], "front"
    found = rank_trials(report)[: min(HIGHLIGHTED, math.ceil(len(trials) / IN_SO_MANY))]
    return found, f"the best {len(found)}" if len(found) > 1 else "the best"


def _draw_broken_lines(axes: Any, lines: Sequence[Places], **look: Any) -> None:
    """Lines with their gaps; what stands alone between two gaps is a dot."""
    pieces = [piece for line in lines for piece in split_at_gaps(line)]
    canvas.draw_lines(axes, [piece for piece in pieces if len(piece) > 1], **look)
    if lonely := [piece[0] for piece in pieces if len(piece) == 1]:
        axes.plot(*zip(*lonely, strict=True), linestyle="", marker=".", markersize=5, color=look["colors"],
                  alpha=look.get("alpha"), zorder=look["zorder"], rasterized=len(lonely) > canvas.MANY)  # fmt: skip


def split_at_gaps(line: Places) -> list[list[AxisPoint]]:
    """The pieces of a line between its gaps."""
    known = groupby(enumerate(line), key=lambda one: one[1] is not None)
    return [[(float(at), one) for at, one in piece if one is not None] for there, piece in known if there]


def _draw_vertical_axes(axes: Any, sheet: ParallelCoordinates) -> None:
    """The axes themselves, over the lines: their texts stand on paper."""
    axes.set_axis_off()
    axes.set_xlim(-0.45, sheet.count - 0.7)
    axes.set_ylim(-0.05, 1.17)
    axes.vlines(range(sheet.count), 0, 1, color=QUIET, linewidth=0.9, zorder=6)
    paper = {"facecolor": PAPER, "alpha": 0.75, "edgecolor": "none", "pad": 0.6}
    for at, (title, ticks) in enumerate(sheet.axes()):
        axes.hlines([place for place, _ in ticks], at - 0.02, at, color=QUIET, linewidth=0.8, zorder=6)
        for place, text in ticks:
            axes.text(at - 0.035, place, canvas.sanitize_label(break_lines(text, 14)), ha="right", va="center",
                      fontsize=SMALL, color=INK, zorder=7, linespacing=0.95, bbox=paper)  # fmt: skip
        axes.text(
            at,
            1.055,
            canvas.sanitize_label(break_lines(title, 13)),
            ha="center",
            va="bottom",
            fontsize=USUAL,
            color=INK,
        )


# The pictures of a sweep, by name: each is a function of the report, and equal reports give equal bytes.

Drawing = Callable[[SweepReport, Target, Form], None]

PICTURES: Mapping[str, Drawing] = {
    "history": draw_history,
    "curves": draw_curves,
    "importances": draw_importances,
    "slices": draw_slices,
    "contour": draw_contour,
    "parallel": draw_parallel_coordinates,
    "pareto": draw_pareto,
    "timeline": draw_timeline,
    "savings": draw_savings,
}
"""In the order of the page."""


def available_plots(report: SweepReport) -> list[str]:
    """Names of the pictures that this sweep can fill, in the order of the page.

    A front needs several objectives, a contour two numeric knobs, and all of them a trial.
    """
    if not report.trials:
        return []
    useless = set()
    if len(report.objectives) < 2:
        useless.add("pareto")
    if choose_contour_pair(report) is None:
        useless.add("contour")
    return [name for name in PICTURES if name not in useless]


def draw_all(report: SweepReport) -> dict[str, bytes]:
    """All pictures that are wanted, as SVG, by name: what the page is made with."""
    found = {}
    for name in available_plots(report):
        stream = io.BytesIO()
        PICTURES[name](report, stream, "svg")
        found[name] = stream.getvalue()
    return found


def write(report: SweepReport, folder: Path) -> list[Path]:
    """Write all pictures that are wanted as PNG, each under its name, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in available_plots(report):
        found.append(folder / f"{name}.png")
        PICTURES[name](report, found[-1], "png")
    return found
