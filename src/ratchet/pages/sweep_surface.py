"""Pictures of how two things go together: two knobs and the objective, two objectives."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import INK, PAPER, TOP, Form, Target
from ratchet.pages.sweep_scale import Scale, frame, knob_scales, searched
from ratchet.pages.sweep_trials import (
    chosen,
    complete,
    counted,
    measure_name,
    short_names,
    shown,
    value,
)
from ratchet.records_sweep import SweepReport, Trial, TrialState

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

Point = tuple[float, float]


def pair(report: SweepReport) -> tuple[str, str] | None:
    """The two numeric knobs of the contour: learning rate and rank, else the two most important ones."""
    numeric = [axis.knob for axis in searched(report) if axis.kind != "choice"]
    if len(numeric) < 2:
        return None
    if all(knob in numeric for knob in PREFERRED):
        return PREFERRED
    across, up = sorted(numeric, key=lambda knob: (-report.importances.get(knob, 0.0), numeric.index(knob)))[:2]
    return across, up


def contour(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective over two knobs: trials as points, the space between them where there are enough.

    The colours between points are linear over Delaunay triangles of the points, on the scales of the knobs; where
    other knobs differ, too, they show no more than what lies near. Nothing is drawn beyond the points.
    """
    knobs = pair(report)
    trials = [] if knobs is None else [one for one in counted(report) if all(knob in one.values for knob in knobs)]
    if knobs is None or not trials:
        said = "A contour needs two numeric knobs." if knobs is None else "No trial has begun."
        canvas.nothing(said, target, "contour", form)
        return
    scales = {knob: scale for knob, scale in knob_scales(report).items() if knob in knobs}
    across, up = (scales[knob] for knob in knobs)
    places = {one.number: (across.place(one.values[knobs[0]]), up.place(one.values[knobs[1]])) for one in trials}
    known = {number: (x, y) for number, (x, y) in places.items() if x is not None and y is not None}
    if not known:
        canvas.nothing("No trial has a place on both axes.", target, "contour", form)
        return
    made = canvas.figure(4.9, 7.6)
    axes = made.add_subplot()
    names = short_names(axis.knob for axis in report.axes)
    canvas.dress(axes, shown(names[knobs[0]]), shown(names[knobs[1]]))
    axes.set_xticks(*_ticked(across))
    axes.set_yticks(*_ticked(up))
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.06, 1.06)
    coloured = _coloured(made, axes, report, known)
    for state, members in canvas.by_state(trials).items():
        if state != "complete" or not coloured:
            look = INKED.get(state, {}) if coloured and len(members) <= canvas.MANY else {}
            canvas.dots(axes, [known[one.number] for one in members if one.number in known], state, **look)
    star = chosen(report)
    if star is not None and star.number in known:
        canvas.star(axes, known[star.number], canvas.star_title(report, star))
    canvas.legend(made, axes)
    canvas.save(made, target, "contour", form)


def _ticked(scale: Scale) -> tuple[list[float], list[str]]:
    found = scale.ticks(8)
    return [place for place, _ in found], [canvas.plain(text) for _, text in found]


def _coloured(made: Any, axes: Any, report: SweepReport, known: Mapping[int, tuple[float, float]]) -> bool:
    """Complete trials as points whose colour is the objective, over the space between them; whether there are any."""
    from matplotlib.colors import Normalize

    found = [(known[trial.number], amount) for trial, amount in complete(report) if trial.number in known]
    if not found:
        return False
    low, high = frame([amount for _, amount in found])
    best_low = report.objectives[0].direction == "minimize"
    scale = Normalize(low, high, clip=True)
    colours = f"{COLOUR_MAP}_r" if best_low else COLOUR_MAP
    drawn = _surface(axes, _merged(found, min if best_low else max), scale, colours)
    places, amounts = zip(*found, strict=True)
    many = len(found) > canvas.MANY
    points = axes.scatter(*zip(*places, strict=True), c=amounts, norm=scale, cmap=colours, s=16 if many else 38,
                          zorder=4, edgecolors=PAPER, linewidths=0.5 if many else 0.9, label="complete",
                          rasterized=many)  # fmt: skip
    bar = made.colorbar(drawn or points, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(canvas.plain(measure_name(report.objectives[0], high)), fontsize=canvas.USUAL, color=INK)
    bar.ax.tick_params(labelsize=canvas.SMALL, labelcolor=INK, color=INK)
    canvas.amounts(bar, report.objectives[0], (low, high))
    return True


def _merged(found: Sequence[tuple[Point, float]], better: Callable[[Iterable[float]], float]) -> dict[Point, float]:
    """Of trials close by the best counts, in their middle: the others differ in knobs that are not seen here."""
    cells: dict[tuple[int, int], list[tuple[Point, float]]] = {}
    fine = CELLS if len(found) > DENSE else 1000
    for (x, y), amount in found:
        cells.setdefault((round(x * fine), round(y * fine)), []).append(((x, y), amount))
    return {
        (fmean(x for (x, _), _ in members), fmean(y for (_, y), _ in members)): better(one for _, one in members)
        for members in cells.values()
    }


def _surface(axes: Any, best: Mapping[Point, float], scale: Any, colours: str) -> Any:
    """Colours between the points; None where they are too few or on a line."""
    from matplotlib.tri import TriAnalyzer, Triangulation

    places = list(best)
    if len(places) < ENOUGH or _on_a_line(places):
        return None
    triangles = Triangulation(*zip(*places, strict=True))
    flat = TriAnalyzer(triangles).get_flat_tri_mask(FLAT)
    if all(flat):
        return None
    triangles.set_mask(flat)
    amounts = [min(scale.vmax, max(scale.vmin, amount)) for amount in best.values()]
    levels = [scale.vmin + k * (scale.vmax - scale.vmin) / LEVELS for k in range(LEVELS + 1)]
    return axes.tricontourf(triangles, amounts, levels=levels, cmap=colours, norm=scale, alpha=0.85, zorder=1)


def _on_a_line(places: Sequence[tuple[float, float]]) -> bool:
    """Whether no triangle of the points has an area that can be seen."""
    (ax, ay), *others = places
    bx, by = max(others, key=lambda one: math.hypot(one[0] - ax, one[1] - ay))
    return max(abs((bx - ax) * (y - ay) - (by - ay) * (x - ax)) for x, y in others) < 1e-3


def pareto(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw two objectives against each other, or all pairs of several, and mark the trials that no other beats."""
    if len(report.objectives) < 2:
        canvas.nothing("One objective has no front.", target, "pareto", form)
        return
    trials = [trial for trial in counted(report) if trial.state == "complete"]
    if not trials:
        canvas.nothing("No trial is complete.", target, "pareto", form)
        return
    pairs = list(combinations(range(len(report.objectives)), 2))[:PAIRS]
    columns = min(2, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    made = canvas.figure(4.4 if rows == columns == 1 else 3.3 * rows + 0.5, canvas.WIDE if columns > 1 else 7.6)
    panels = made.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, (first, second) in zip(panels, pairs, strict=False):
        _front(axes, report, trials, (first, second))
    for axes in panels[len(pairs) :]:
        axes.remove()
    canvas.legend(made, *panels[: len(pairs)])
    canvas.save(made, target, "pareto", form)


def _front(axes: Any, report: SweepReport, trials: Sequence[Trial], which: tuple[int, int]) -> None:
    measures = [report.objectives[one] for one in which]
    found: dict[int, Point] = {}
    for trial in trials:
        across, up = (value(trial, report.objectives, one) for one in which)
        if across is not None and up is not None:
            found[trial.number] = (across, up)
    if not found:
        canvas.say(axes, "no trial has both")
        return
    best = [found[one] for one in report.best if one in found]
    canvas.dots(axes, [place for one, place in found.items() if one not in report.best], "complete", markersize=4.5,
                label="complete, beaten by another", alpha=0.75)  # fmt: skip
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
    star = chosen(report)
    if star is not None and star.number in found:
        canvas.star(axes, found[star.number], f"winner: trial {star.number}")
    for place, (measure, axis, limit) in enumerate(
        zip(measures, (axes.xaxis, axes.yaxis), (axes.set_xlim, axes.set_ylim), strict=True)
    ):
        low, high = min(one[place] for one in found.values()), max(one[place] for one in found.values())
        room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        limit(low - room, high + room)
        canvas.amounts(axis, measure, (low - room, high + room), 7)
    ends = (axes.get_xlim()[1], axes.get_ylim()[1])
    names = [
        f"{measure_name(one, end)}, {BETTER[one.direction]} is better" for one, end in zip(measures, ends, strict=True)
    ]
    canvas.dress(axes, names[0], names[1])
