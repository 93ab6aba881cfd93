"""Builds the charts of a sweep: history, learning curves, hyperparameters, Pareto front, timeline, savings.

Optuna's own charts of the same study are in optuna-dashboard. They do not show infeasible, pruned and continued trials,
and their parallel coordinates need WebGL, which the pages' content security policy forbids.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any, TypeVar

from ratchet.config.units import format_duration
from ratchet.reports.plots import INK, QUIET, RULE, Figure, axis, build_figure, plain
from ratchet.storage.records.sweep import ParameterAxis, SweepReport, Trial, TrialExecution, TrialState
from ratchet.tuning.trial_summary import (
    LOSS,
    Cause,
    best_values_so_far,
    break_lines,
    counted_trials,
    format_number,
    format_parameter_value,
    objective_label,
    objective_unit,
    rank_trials,
    recommended_trial,
    saved_tokens_by_cause,
    shorten_names,
    trial_value,
    validation_curve,
)

STATES: tuple[TrialState, ...] = ("complete", "pruned", "infeasible", "failed", "running")
COLOURS: Mapping[TrialState, str] = {
    "complete": "#0072b2", "pruned": "#73777e", "infeasible": "#b87a00", "failed": "#d55e00", "running": "#2f8dc4",
}  # fmt: skip
TOP = "#009e73"
"""Colour of the best trials."""
SYMBOLS: Mapping[TrialState, str] = {
    "complete": "circle", "pruned": "x", "infeasible": "triangle-up", "failed": "cross",
    "running": "square-open",
}  # fmt: skip
SAVED: Mapping[Cause, tuple[str, str]] = {
    "pruned": ("saved by pruning", "/"),
    "refused": ("rejected before training", "x"),
}
"""Label and hatch of saved tokens, by cause."""
HIGH_PX = 380
MAX_POINTS, MAX_LINES, MAX_GRID, MAX_AXES = 80, 200, 150, 12
"""Maximum numbers of points of a curve, of lines of a state in parallel coordinates, of trials in a contour (its grid
has the square of it), and of hyperparameters in parallel coordinates, the most important ones."""
MAX_IDLE, LANES = 0.15, 24
"""Share of the working time above which an idle period is cut out; and maximum number of workers with their own lane:
with more workers, later workers of a host reuse its free lanes."""
BEST, HIGHLIGHTED, TRIALS_PER_HIGHLIGHT = 3, 5, 10
"""Number of best learning curves with their own style, maximum number of highlighted best trials in parallel
coordinates, and number of trials for each of them."""
SLICES, PAIRS = 4, 6
"""Maximum numbers of slices per row, and of pairs of objectives."""
MARGIN, REACH, FEW = 0.06, 3.0, 8
"""Margin at both ends of a frame, as a share of its length; maximum reach of the frame beyond the quartiles, in
interquartile ranges; and minimum number of values for quartiles."""
BARS = 150
"""Number of trials above which tokens are shown as cumulative sums."""
PREFERRED = ("train.learning_rate", "train.rank")
"""Preferred hyperparameters for the two axes of the contour."""
T = TypeVar("T")
Point = tuple[float, float]


def build_charts(report: SweepReport) -> dict[str, list[Figure]]:
    """Return the charts that have data, by name. Equal reports give equal charts.

    A Pareto front needs several objectives, a contour two numeric hyperparameters, and all charts a trial.
    """
    if not report.trials:
        return {}
    builders: dict[str, Callable[[SweepReport], Iterable[Figure]]] = {
        "history": _build_history, "curves": _build_curves, "importances": _build_importances, "slices": _build_slices,
        "contour": _build_contour, "parallel": _build_parallel_coordinates, "pareto": _build_pareto_fronts,
        "timeline": _build_timeline, "savings": _build_savings,
    }  # fmt: skip
    charts = {name: list(build(report)) for name, build in builders.items()}
    return {name: figures for name, figures in charts.items() if figures}


def axis_limits(decisive: Sequence[float], others: Sequence[float] = ()) -> list[float]:
    """Return limits of an axis that keep the important values distinguishable.

    Outliers (beyond a quartile by more than REACH times the interquartile range) do not extend the axis. The axis
    extends towards the nearer half of `others`, by at most its own length.
    """
    known = sorted(value for value in decisive if math.isfinite(value))
    more = sorted(value for value in others if math.isfinite(value))
    if not known:
        known, more = more, []
    if not known:
        return [0.0, 1.0]
    low, high = known[0], known[-1]
    if len(known) >= FEW:
        first, third = known[len(known) // 4], known[3 * len(known) // 4]
        reach = REACH * (third - first) or math.inf
        low, high = max(low, first - reach), min(high, third + reach)
    if more:
        middle = [value for value in more if low <= value <= high] or more
        span, half = high - low or math.inf, more[len(more) // 2]
        low, high = max(low - span, min(low, middle[0], half)), min(high + span, max(high, half))
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 0.5
    return [low - margin, high + margin]


def thin_out(line: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` evenly spaced members, including the first and the last."""
    if len(line) <= most:
        return line
    return [line[round(k * (len(line) - 1) / (most - 1))] for k in range(most)]


def _group_by_state(trials: Iterable[Trial]) -> dict[TrialState, list[Trial]]:
    groups: dict[TrialState, list[Trial]] = {state: [] for state in STATES}
    for trial in trials:
        groups[trial.state].append(trial)
    return {state: members for state, members in groups.items() if members}


def _draw_marks(
    places: Sequence[tuple[Any, Any]], state: TrialState, trials: Sequence[Trial],
    values: Mapping[int, float] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Draw a mark for each trial of a state. `values`: values on the vertical axis by trial. If a mark is not at its
    value (outside the frame, or none), no mark of this state shows its height."""
    if values is not None and any(values.get(t.number) != y for t, (_, y) in zip(trials, places, strict=True)):
        more["hovertemplate"] = "trial %{text}<extra>" + state + "</extra>"
    marker = {
        "symbol": SYMBOLS[state],
        "color": COLOURS[state],
        "size": 7,
        "line": {"color": COLOURS[state], "width": 1},
    }
    return {
        "x": [x for x, _ in places], "y": [y for _, y in places], "mode": "markers", "name": state, "marker": marker,
        "text": [trial.number for trial in trials],
        "hovertemplate": "trial %{text}: %{y:.4g}<extra>" + state + "</extra>",
        **more,
    }  # fmt: skip


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))


def _draw_star(report: SweepReport, places: Mapping[int, tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    """Mark the trial that the sweep recommends."""
    trial = recommended_trial(report)
    if trial is not None and (at := places.get(trial.number)) is not None:
        name = f"{'best' if report.winner is None else 'winner'}: trial {trial.number}"
        marker = {"symbol": "star", "size": 15, "color": TOP, "line": {"color": INK, "width": 1}}
        yield {"x": [at[0]], "y": [at[1]], "mode": "markers", "name": name, "marker": marker}


def _join_lines(lines: Iterable[Sequence[tuple[float, float | None]]]) -> dict[str, list[float | None]]:
    """Return several lines as one trace. A gap separates them."""
    points: list[tuple[float | None, float | None]] = []
    for line in lines:
        points += [*thin_out(line, MAX_POINTS), (None, None)]
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)


def _searched_axes(report: SweepReport) -> list[ParameterAxis]:
    """Return the axes of sampled hyperparameters, without those that are tied to another hyperparameter."""
    return [axis for axis in report.axes if axis.kind != "tie"]


def _axis_range(searched: ParameterAxis, report: SweepReport) -> tuple[float, float, bool]:
    """Return both ends of a numeric axis, extended by the trials' values, and whether it is logarithmic.

    Trials of a forked study may have values outside the range of the search space.
    """
    numbers = [trial.values[searched.name] for trial in report.trials if _is_number(trial.values.get(searched.name))]
    ends = [float(end) for end in (searched.low, searched.high, *numbers) if end is not None] or [0.0, 1.0]
    return min(ends), max(ends), searched.log and min(ends) > 0


def _axis_choices(searched: ParameterAxis, report: SweepReport) -> dict[str, str]:
    """Return the label of each choice, by its key."""
    items = [*searched.choices, *(t.values[searched.name] for t in report.trials if searched.name in t.values)]
    return {_choice_key(item): _wrap(format_parameter_value(item)) for item in items}


def _choice_key(item: Any) -> str:
    """Return a text that is equal for equal values only: labels are cut, and 1 is not true."""
    return plain(json.dumps(item, default=str))


def _axis_value(searched: ParameterAxis, trial: Trial) -> str | float | None:
    """Return the value of a trial on an axis: text for a choice, else a number; None if it has none."""
    if searched.name not in trial.values:
        return None
    item = trial.values[searched.name]
    if searched.kind == "choice":
        return _choice_key(item)
    return float(item) if _is_number(item) else None


def _parameter_ticks(searched: ParameterAxis, report: SweepReport, most: int) -> list[float]:
    low, high, log = _axis_range(searched, report)
    ticks = choose_ticks(low, high, log, most)
    return [tick for tick in ticks if tick.is_integer()] or [low, high] if searched.kind == "int" else ticks


def _parameter_axis(searched: ParameterAxis, report: SweepReport, **more: Any) -> dict[str, Any]:
    """Return an axis of Plotly for a hyperparameter."""
    title = format_parameter_value(shorten_names(one.name for one in report.axes)[searched.name])
    if searched.kind == "choice":
        choices = _axis_choices(searched, report)
        order = {"categoryorder": "array", "categoryarray": list(choices)}
        return axis(title, type="category", **order, tickvals=list(choices), ticktext=list(choices.values()), **more)
    low, high, log = _axis_range(searched, report)
    if low < high:
        numbers = _parameter_ticks(searched, report, 5)
        more |= {"tickvals": numbers, "ticktext": [format_number(number) for number in numbers]}
    return axis(title, type="log" if log else "linear", **more)


def _wrap(text: str) -> str:
    """Break a label into two lines of Plotly's text."""
    return plain(break_lines(text, 14)).replace("\n", "<br>")


def _objective_axes(report: SweepReport) -> tuple[list[float], list[str]]:
    """Return unit and label of each objective."""
    sizes, labels = [], []
    for index, objective in enumerate(report.objectives):
        values = [trial_value(trial, report.objectives, index) for trial in report.trials]
        most = max((value for value in values if value is not None), default=0.0)
        sizes.append(objective_unit(objective.metric, most)[0])
        labels.append(objective_label(objective, most))
    return sizes, labels


def _build_history(report: SweepReport) -> Iterator[Figure]:
    """Yield the objective by trial number for each objective. A pruned trial is at its last validation loss.

    Trials without a value are in a row for each state below the others. Trials that others continue are omitted.
    """
    sizes, labels = _objective_axes(report)
    trials = counted_trials(report)
    for index, size in enumerate(sizes):
        known = {trial.number: value / size for trial in trials
                 if (value := trial_value(trial, report.objectives, index)) is not None}  # fmt: skip
        groups = _group_by_state(trials)
        low, high = axis_limits(
            [known[t.number] for t in groups.get("complete", ()) if t.number in known],
            [known[t.number] for t in trials if t.state != "complete" and t.number in known],
        )
        data: list[dict[str, Any]] = []
        absent = [state for state, members in groups.items() if any(t.number not in known for t in members)]
        clip = partial(_clip, low=low, high=high)
        inside = {number: clip(value) for number, value in known.items()}
        rows = {state: low - (row + 0.5) * 0.09 * (high - low) for row, state in enumerate(absent)}
        for state, members in groups.items():
            places = [(t.number, inside.get(t.number, rows.get(state))) for t in members]
            data.append(_draw_marks(places, state, members, known))
        best = [(number, clip(value / size)) for number, value in best_values_so_far(report, index)]
        if best:
            best.append((report.trials[-1].number, best[-1][1]))
            line = {"color": INK, "width": 1.5, "shape": "hv"}
            data.append({**_join_lines([best]), "mode": "lines", "name": "best so far", "line": line})
        data += _draw_star(report, {number: (number, value) for number, value in inside.items()})
        frame = [low - 0.09 * (high - low) * len(rows), high]
        look = {"x": 1, "xref": "paper", "xanchor": "right", "showarrow": False, "font": {"size": 10}}
        notes = [{"text": state, "y": at, **look} for state, at in rows.items()]
        up = axis(labels[index], range=frame)
        yield build_figure(data, HIGH_PX, xaxis=axis("trial"), yaxis=up, annotations=notes)


def _build_curves(report: SweepReport) -> Iterator[Figure]:
    """Yield each trial's validation loss by trained rows: best trials in their own styles, pruned trials in grey.

    The curve of a trial that continues a pruned trial includes the curve of the pruned trial, with a diamond at the end
    of this part.
    """
    by_number = {trial.number: trial for trial in report.trials}
    curves = {t.number: list(validation_curve(t, by_number).items()) for t in counted_trials(report)}
    curves = {number: line for number, line in curves.items() if line}
    if not curves:
        return
    loss = next((index for index, objective in enumerate(report.objectives) if objective.metric == LOSS), 0)
    best = [trial.number for trial in rank_trials(report, loss) if trial.number in curves][:BEST]
    data: list[dict[str, Any]] = []
    for state, members in _group_by_state(by_number[number] for number in curves if number not in best).items():
        line = {"color": COLOURS[state], "width": 1, "dash": "dash" if state in ("running", "failed") else "solid"}
        joined = _join_lines(curves[trial.number] for trial in members)
        data.append({**joined, "mode": "lines", "name": state, "line": line, "opacity": 0.6, "hoverinfo": "skip"})
        if state != "complete":
            ends = [curves[trial.number][-1] for trial in members]
            data.append(_draw_marks(ends, state, members, showlegend=False))
    for place, number in reversed(list(enumerate(best))):
        line = {"color": INK if place else TOP, "width": 1.5 if place else 3, "dash": ("solid", "dash", "dot")[place]}
        name = f"{('best', 'second', 'third')[place]}: trial {number}"
        data.append({**_join_lines([curves[number]]), "mode": "lines", "name": name, "line": line})
    earlier = [by_number.get(trial.continues) for trial in report.trials if trial.continues is not None]
    ends = [found[-1] for trial in earlier if trial and (found := list(validation_curve(trial, by_number).items()))]
    if ends:
        marker = {"symbol": "diamond-open", "size": 9, "color": INK}
        places = {"x": [x for x, _ in ends], "y": [y for _, y in ends]}
        data.append({**places, "mode": "markers", "name": "continued here", "marker": marker})
    frame = axis_limits([value for curve in curves.values() for _, value in curve])
    yield build_figure(data, HIGH_PX, xaxis=axis("trained rows", rangemode="tozero"),
                       yaxis=axis("validation loss", range=frame))  # fmt: skip


def _build_importances(report: SweepReport) -> Iterator[Figure]:
    """Yield the share of the first objective's variance that each hyperparameter explains, largest first."""
    if not report.importances:
        return
    ordered = sorted(report.importances.items(), key=lambda entry: (-entry[1], entry[0]))
    names = shorten_names(report.importances)
    bars = {
        "type": "bar", "orientation": "h", "x": [share for _, share in ordered],
        "y": [plain(format_parameter_value(names[name])) for name, _ in ordered],
        "marker": {"color": COLOURS["complete"]}, "text": [f"{share:.0%}" for _, share in ordered],
        "textposition": "outside", "cliponaxis": False,
    }  # fmt: skip
    across = axis("share of the objective's variance explained by the hyperparameter", tickformat=".0%")
    yield build_figure(
        [bars], 110 + 26 * len(ordered), xaxis=across, yaxis={"type": "category", "autorange": "reversed"}
    )


def _build_slices(report: SweepReport) -> Iterator[Figure]:
    """Yield the first objective by each hyperparameter: one slice per hyperparameter, one mark per trial.

    Trials without a value (infeasible, failed) are above all other trials: these values cannot be trained.
    """
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    searched = _searched_axes(report)
    if not searched or not trials:
        return
    sizes, labels = _objective_axes(report)
    known = {trial.number: value / sizes[0] for trial in trials
             if (value := trial_value(trial, report.objectives)) is not None}  # fmt: skip
    groups = _group_by_state(trials)
    final, pruned = (
        [known[t.number] for t in groups.get(state, ()) if t.number in known] for state in ("complete", "pruned")
    )
    low, high = axis_limits(final, pruned)
    strip = high + 0.1 * (high - low)
    heights = {t.number: _clip(known[t.number], low, high) if t.number in known else strip for t in trials}
    for first in range(0, len(searched), SLICES):
        row = searched[first : first + SLICES]
        data: list[dict[str, Any]] = []
        layout: dict[str, Any] = {}
        for panel, one in enumerate(row):
            name, share = str(panel + 1) if panel else "", 1 / SLICES
            layout[f"xaxis{name}"] = _parameter_axis(
                one, report, domain=[panel * share, (panel + 0.85) * share], nticks=5
            )
            places = {t.number: (x, heights[t.number]) for t in trials if (x := _axis_value(one, t)) is not None}
            for state, members in groups.items():
                there = [trial for trial in members if trial.number in places]
                marks = _draw_marks([places[trial.number] for trial in there], state, there, known, xaxis=f"x{name}")
                data.append({**marks, "legendgroup": state, "showlegend": not panel, "opacity": 0.8})
            star = {"xaxis": f"x{name}", "legendgroup": "star", "showlegend": not panel}
            data += [{**trace, **star} for trace in _draw_star(report, places)]
        edge = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": high, "y1": high,
                "line": {"color": QUIET, "width": 1, "dash": "dot"}}  # fmt: skip
        up = axis(labels[0], range=[low, strip + 0.06 * (high - low)])
        yield build_figure(data, HIGH_PX - 60, yaxis=up, shapes=[edge], **layout)


def choose_contour_pair(report: SweepReport) -> tuple[ParameterAxis, ParameterAxis] | None:
    """Return two numeric hyperparameters for the contour: learning rate and rank, else the two most important."""
    numeric = {one.name: one for one in _searched_axes(report) if one.kind != "choice"}
    if len(numeric) < 2:
        return None
    names = list(PREFERRED)
    if not all(name in numeric for name in PREFERRED):
        names = sorted(numeric, key=lambda name: -report.importances.get(name, 0.0))
    return numeric[names[0]], numeric[names[1]]


def _build_contour(report: SweepReport) -> Iterator[Figure]:
    """Yield the first objective by two hyperparameters: trials as marks, over a surface between the complete ones.

    Plotly interpolates the surface. It is a local trend, because other hyperparameters differ as well.
    """
    pair = choose_contour_pair(report)
    if pair is None:
        return
    known = {
        trial.number: (x, y)
        for trial in counted_trials(report)
        if (x := _axis_value(pair[0], trial)) is not None and (y := _axis_value(pair[1], trial)) is not None
    }
    if not known:
        return
    sizes, labels = _objective_axes(report)
    better = min if report.objectives[0].direction == "minimize" else max
    best: dict[tuple[Any, Any], float] = {}
    for trial in thin_out(rank_trials(report), MAX_GRID):
        value = trial_value(trial, report.objectives)
        if trial.number in known and value is not None:
            place = known[trial.number]
            best[place] = better(value / sizes[0], best.get(place, value / sizes[0]))
    columns, rows = (sorted({place[k] for place in best}) for k in range(2))
    data: list[dict[str, Any]] = []
    if len(columns) > 1 and len(rows) > 1:
        data.append({
            "type": "contour", "x": columns, "y": rows, "z": [[best.get((x, y)) for x in columns] for y in rows],
            "connectgaps": True, "colorscale": "Cividis", "reversescale": better is min, "opacity": 0.85,
            "zmin": axis_limits(list(best.values()))[0], "zmax": axis_limits(list(best.values()))[1],
            "contours": {"coloring": "heatmap"}, "line": {"width": 0.5}, "hoverinfo": "z",
            "colorbar": {"title": {"text": plain(labels[0]), "side": "right"}, "thickness": 12},
        })  # fmt: skip
    for state, members in _group_by_state(t for t in counted_trials(report) if t.number in known).items():
        data.append(_draw_marks([known[trial.number] for trial in members], state, members))
    data += _draw_star(report, known)
    yield build_figure(
        data, HIGH_PX + 80, xaxis=_parameter_axis(pair[0], report), yaxis=_parameter_axis(pair[1], report)
    )


def _build_pareto_fronts(report: SweepReport) -> Iterator[Figure]:
    """Yield two objectives against each other, for up to PAIRS pairs, with the Pareto front marked."""
    sizes, labels = _objective_axes(report)
    complete = [trial for trial in counted_trials(report) if trial.state == "complete"]
    for pair in list(combinations(range(len(report.objectives)), 2))[:PAIRS] if complete else ():
        found = {t.number: [trial_value(t, report.objectives, index) for index in pair] for t in complete}
        points = {number: ((values[0] or 0.0) / sizes[pair[0]], (values[1] or 0.0) / sizes[pair[1]])
                  for number, values in found.items() if None not in values}  # fmt: skip
        front = [trial for trial in complete if trial.number in report.best and trial.number in points]
        others = [trial for trial in complete if trial.number in points and trial not in front]
        marks: dict[str, Any] = {"marker": {"symbol": "diamond", "size": 10, "color": TOP}, "name": "front"}
        if len(report.objectives) == 2:
            front.sort(key=lambda trial: points[trial.number])
            marks |= {"mode": "lines+markers+text", "line": {"color": TOP, "width": 1, "shape": "hv"},
                      "text": [str(trial.number) for trial in front], "textposition": "top right"}  # fmt: skip
            if report.objectives[0].direction == "maximize":
                marks["line"] = {"color": TOP, "width": 1, "shape": "vh"}
        data = [
            _draw_marks([points[t.number] for t in others], "complete", others, name="complete, dominated"),
            _draw_marks([points[t.number] for t in front], "complete", front, **marks),
            *_draw_star(report, points),
        ]
        better = ["lower" if report.objectives[index].direction == "minimize" else "higher" for index in pair]
        across, up = (axis(f"{labels[index]}, {word} is better") for index, word in zip(pair, better, strict=True))
        yield build_figure(data, HIGH_PX + 40, xaxis=across, yaxis=up)


# Parallel coordinates (Inselberg, 1985): all hyperparameters of each trial as a line.


def choose_ticks(low: float, high: float, log: bool, most: int = 7) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, or both ends if there are fewer than two."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1, 2, 5), (1,)):
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            if 2 <= len(ticks) <= most:
                return ticks
        return [low, high] if len(ticks) < 2 else list(thin_out(ticks, most))
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 5, 10, 20, 50) if (high - low) / (f * power) <= most - 1)
    ticks = [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]


def _build_parallel_coordinates(report: SweepReport) -> Iterator[Figure]:
    """Yield each trial as a line across all hyperparameters and objectives, with the best highlighted.

    Running trials, and trials that another trial continues, are omitted. A hyperparameter that was not searched in a
    trial is a gap, so conditional hyperparameters come first.
    """
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    searched = sorted(_searched_axes(report), key=lambda one: -report.importances.get(one.name, 0.0))[:MAX_AXES]
    searched.sort(key=lambda one: (not one.conditional, report.axes.index(one)))
    if not searched or not trials:
        return
    names = shorten_names(one.name for one in searched)
    sizes, labels = _objective_axes(report)
    places: dict[int, list[float | None]] = {trial.number: [] for trial in trials}
    titles: list[str] = []
    ticks: list[list[tuple[float, str]]] = []

    def add_axis(
        title: str, values: Mapping[int, float | None], limits: tuple[float, float, bool], marks: Sequence[float]
    ) -> None:
        low, high, log = limits
        scale: Callable[[float], float] = math.log if log else float
        span = scale(high) - scale(low)

        def place(value: float) -> float:
            return min(1.0, max(0.0, (scale(value) - scale(low)) / span)) if span else 0.5

        for trial in trials:
            value = values[trial.number]
            places[trial.number].append(None if value is None else place(value))
        titles.append(title)
        ticks.append([(place(mark), format_number(mark)) for mark in marks])

    for one in searched:
        found = {trial.number: _axis_value(one, trial) for trial in trials}
        title = _wrap(format_parameter_value(names[one.name]))
        if one.kind == "choice":
            choices = _axis_choices(one, report)
            keys = list(choices)
            ranks = {number: None if key is None else float(keys.index(str(key))) for number, key in found.items()}
            add_axis(title, ranks, (0.0, len(keys) - 1.0, False), ())
            places_of = [k / (len(keys) - 1) if len(keys) > 1 else 0.5 for k in range(len(keys))]
            ticks[-1] = list(zip(places_of, choices.values(), strict=True))
        else:
            numbers = {n: None if value is None else float(value) for n, value in found.items()}
            low, high, log = _axis_range(one, report)
            add_axis(title, numbers, (low, high, log), _parameter_ticks(one, report, 7) if low < high else [low])
    for index, objective in enumerate(report.objectives):
        values = {t.number: trial_value(t, report.objectives, index) if t.state == "complete" else None for t in trials}
        scaled = {number: None if value is None else value / sizes[index] for number, value in values.items()}
        low, high = axis_limits([value for value in scaled.values() if value is not None])
        better = "lower" if objective.direction == "minimize" else "higher"
        title = f"{_wrap(labels[index])}<br>({better} is better)"
        add_axis(title, scaled, (low, high, False), choose_ticks(low, high, False))
    yield _draw_parallel_axes(report, trials, places, titles, ticks)


def _draw_parallel_axes(
    report: SweepReport,
    trials: Sequence[Trial],
    places: Mapping[int, Sequence[float | None]],
    titles: Sequence[str],
    ticks: Sequence[Sequence[tuple[float, str]]],
) -> Figure:
    if len(report.objectives) > 1:
        best, label = [trial for trial in trials if trial.number in report.best], "front"
    else:
        best = rank_trials(report)[: min(HIGHLIGHTED, math.ceil(len(trials) / TRIALS_PER_HIGHLIGHT))]
        label = f"the best {len(best)}" if len(best) > 1 else "the best"

    def lines(members: Iterable[Trial], name: str, colour: str, **look: Any) -> dict[str, Any]:
        joined = _join_lines([(float(k), place) for k, place in enumerate(places[t.number])] for t in members)
        line = {"color": colour, "width": look.pop("width", 1), "dash": look.pop("dash", "solid")}
        return {**joined, "mode": "lines", "name": name, "line": line, "hoverinfo": "skip", **look}

    data = []
    for state, members in _group_by_state(trial for trial in trials if trial not in best).items():
        shown = thin_out(members, MAX_LINES)
        name = f"{state}, {len(shown)} of {len(members):,}" if len(shown) < len(members) else state
        dash = {"infeasible": "dash", "failed": "dot"}.get(state, "solid")
        data.append(lines(shown, name, COLOURS[state], dash=dash, opacity=max(0.15, min(0.6, 20 / len(trials)))))
    data.append(lines(best, label, TOP, width=2))
    star = recommended_trial(report)
    if star is not None and report.winner is not None and star.number in places:
        data.append(lines([star], f"winner: trial {star.number}", INK, width=2, dash="dash"))
    marks = [(k, place, text) for k, found in enumerate(ticks) for place, text in found]
    data.append({
        "x": [k for k, *_ in marks], "y": [place for _, place, _ in marks], "text": [f"{text} " for *_, text in marks],
        "mode": "text", "textposition": "middle left", "showlegend": False, "hoverinfo": "skip", "cliponaxis": False,
    })  # fmt: skip
    uprights = [{"type": "line", "x0": k, "x1": k, "y0": 0, "y1": 1, "line": {"color": QUIET, "width": 1}}
                for k in range(len(titles))]  # fmt: skip
    across = {"side": "top", "tickvals": list(range(len(titles))), "ticktext": list(titles), "showgrid": False,
              "range": [-0.6, len(titles) - 0.7], "tickangle": 0,
              "ticklabeloverflow": "allow", "showline": False}  # fmt: skip
    return build_figure(data, HIGH_PX + 80, xaxis=across, shapes=uprights, margin={"l": 20, "r": 60, "t": 70},
                        yaxis={"visible": False, "range": [-0.04, 1.04]},
                        legend={"y": -0.02, "yanchor": "top"})  # fmt: skip


# Timeline of workers and their trials, and tokens.


def assign_lanes(executions: Iterable[TrialExecution]) -> dict[str, int]:
    """Assign a lane to each worker, in order of their first trial."""
    spans: dict[str, tuple[float, float]] = {}
    for execution in sorted(executions, key=lambda execution: (execution.started, execution.worker)):
        started, seen = spans.get(execution.worker, (execution.started, execution.last_seen))
        spans[execution.worker] = (started, max(seen, execution.last_seen))
    if len(spans) <= LANES:
        return {worker: row for row, worker in enumerate(spans)}
    lanes: dict[str, int] = {}
    until: list[tuple[str, float]] = []
    for worker, (started, seen) in spans.items():
        host = _worker_host(worker)
        row = next((row for row, (owner, end) in enumerate(until) if owner == host and end <= started), len(until))
        until[row : row + 1] = [(host, seen)]
        lanes[worker] = row
    return lanes


def _worker_host(worker: str) -> str:
    return worker.rpartition("/")[0] or worker


def find_pauses(spans: Iterable[Point]) -> list[Point]:
    """Return the periods in which no worker was active, if they are long compared with the working time."""
    joined: list[Point] = []
    for begin, stop in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((begin, max(begin, stop)))
    busy = sum(stop - begin for begin, stop in joined)
    return [(a[1], b[0]) for a, b in pairwise(joined) if b[0] - a[1] > max(MAX_IDLE * busy, 1.0)]


def _build_timeline(report: SweepReport) -> Iterator[Figure]:
    """Yield one lane per worker, and one bar per trial execution.

    A trial that another worker took over has several bars joined by a thin line. All of its bars but the last are
    hatched. A diamond starts a trial that continues a pruned trial. Idle periods are cut out at a dotted line.
    """
    executions = [execution for trial in report.trials for execution in trial.executions]
    if not executions:
        return
    lanes = assign_lanes(executions)

    def moment(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")

    def bars(found: Sequence[tuple[Trial, TrialExecution]], name: str, colour: str, hatch: str) -> dict[str, Any]:
        return {
            "type": "bar", "orientation": "h", "name": name, "width": 0.62,
            "base": [moment(one.started) for _, one in found],
            "x": [max(1.0, 1000 * (one.last_seen - one.started)) for _, one in found],
            "y": [lanes[one.worker] for _, one in found], "text": [str(trial.number) for trial, _ in found],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
            "marker": {"color": colour, "line": {"color": QUIET, "width": 0.5},
                       "pattern": {"shape": hatch, "fgcolor": QUIET, "size": 5}},
            "hovertemplate": "trial %{text}<extra>" + name + "</extra>",
        }  # fmt: skip

    data = []
    for state, members in _group_by_state(report.trials).items():
        last = [(trial, trial.executions[-1]) for trial in members if trial.executions]
        data.append(bars(last, state, COLOURS[state], "/" if state == "running" else ""))
    earlier = [(trial, execution) for trial in report.trials for execution in trial.executions[:-1]]
    if earlier:
        data.append(bars(earlier, "taken over by another worker", "rgba(0,0,0,0)", "x"))
        joints = [pair for trial in report.trials for pair in pairwise(trial.executions)]
        data.append({
            "x": [x for a, b in joints for x in (moment(a.last_seen), moment(b.started), None)],
            "y": [y for a, b in joints for y in (lanes[a.worker], lanes[b.worker], None)],
            "mode": "lines", "showlegend": False, "line": {"color": INK, "width": 1}, "hoverinfo": "skip",
        })  # fmt: skip
    continuing = [trial.executions[0] for trial in report.trials if trial.continues is not None and trial.executions]
    if continuing:
        marker = {"symbol": "diamond-open", "size": 9, "color": INK}
        data.append({"x": [moment(one.started) for one in continuing], "y": [lanes[one.worker] for one in continuing],
                     "mode": "markers", "name": "continues a pruned trial", "marker": marker})  # fmt: skip
    pauses = find_pauses((one.started, one.last_seen) for one in executions)
    notes = [{"x": moment(stop), "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False,
              "text": f"{format_duration(stop - begin)} pause"} for begin, stop in pauses]  # fmt: skip
    edges = [{"type": "line", "x0": moment(stop), "x1": moment(stop), "yref": "paper", "y0": 0, "y1": 1,
              "line": {"color": QUIET, "dash": "dot", "width": 1}} for _, stop in pauses]  # fmt: skip
    rows: dict[int, list[str]] = {}
    for worker, row in lanes.items():
        rows.setdefault(row, []).append(worker)
    labels = [plain(format_parameter_value(rows[row][0] if len(rows[row]) == 1 else _worker_host(rows[row][0])))
              for row in sorted(rows)]  # fmt: skip
    across = axis("time (UTC)", type="date", rangebreaks=[{"bounds": [moment(a), moment(b)]} for a, b in pauses])
    up = {"tickvals": sorted(rows), "ticktext": labels, "range": [len(rows) - 0.4, -0.6], "showgrid": False}
    yield build_figure(data, 150 + 34 * len(rows), barmode="overlay", xaxis=across, yaxis=up, annotations=notes,
                       shapes=edges, legend={"y": 1.06})  # fmt: skip


def _build_savings(report: SweepReport) -> Iterator[Figure]:
    """Yield the answer tokens trained in each trial, and the saved ones hatched on top.

    A trial that another trial continues is omitted. With many trials, cumulative sums are drawn instead.
    """
    trials = counted_trials(report)
    trained = {trial.number: trial.cost.trained_tokens for trial in trials}
    saved = {cause: tokens for cause, tokens in saved_tokens_by_cause(report).items() if tokens}
    if not any(trained.values()) and not saved:
        return
    layers: list[tuple[str, str, str, Mapping[int, int]]] = [
        (state, COLOURS[state], "", {trial.number: trained[trial.number] for trial in members})
        for state, members in _group_by_state(trials).items()
    ]
    layers += [(SAVED[cause][0], RULE, SAVED[cause][1], tokens) for cause, tokens in saved.items()]
    data: list[dict[str, Any]] = []
    for name, colour, hatch, tokens in layers:
        pattern = {"shape": hatch, "fgcolor": QUIET, "size": 6}
        if len(trials) <= BARS:
            data.append({"type": "bar", "x": list(tokens), "y": list(tokens.values()), "name": name,
                         "marker": {"color": colour, "pattern": pattern}})  # fmt: skip
        else:
            sums = list(zip(trained, accumulate(tokens.get(number, 0) for number in trained), strict=True))
            data.append({**_join_lines([sums]), "name": name, "stackgroup": "all", "mode": "none",
                         "fillcolor": colour, "fillpattern": {**pattern, "fgopacity": 0.6}})  # fmt: skip
    yield build_figure(data, HIGH_PX - 60, barmode="stack", xaxis=axis("trial"), yaxis=axis("answer tokens"))
