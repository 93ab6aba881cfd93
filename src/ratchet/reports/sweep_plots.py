"""Draws the plots of a sweep: history, learning curves, hyperparameters, Pareto front, timeline, savings."""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, groupby, pairwise
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
from ratchet.storage.records.sweep import SweepReport, Trial, TrialExecution, TrialState
from ratchet.tuning.trial_summary import (
    LOSS,
    Cause,
    best_values_so_far,
    break_lines,
    completed_values,
    counted_trials,
    format_duration,
    format_number,
    format_parameter_value,
    objective_label,
    objective_unit,
    rank_trials,
    recommended_trial,
    saved_tokens_by_cause,
    shorten_names,
    superseded_numbers,
    trial_value,
    validation_curve,
)

MAX_IDLE = 0.15
"""Share of the working time above which an idle period is cut out."""

GAP = 0.02
"""Width of the gap that replaces an idle period, as a share of the working time."""

LANE_INCHES, BAR = 0.3, 0.62
"""Height of a worker's lane in inches, and the share of this height that bars fill."""
LANES = 24
"""Maximum number of workers with their own lane. With more workers, later workers of a host reuse its free lanes."""
DIGIT_POINTS, SIGN_POINTS, AXIS_SHARE = 5.2, 5.0, 0.82
"""Widths of a digit and of the symbol in a bar, in points; and the share of the figure's width that the axis fills."""
BLACK = "#000001"
"""Colour of numbers on light bars, independent of the page's theme."""
SAVED: Mapping[Cause, tuple[str, str]] = {
    "pruned": ("saved by pruning", "////"),
    "refused": ("rejected before training", "xxxx"),
}
"""Label and hatch of saved tokens, by cause."""
MAX_STEPS = 200
"""Maximum number of steps of a cumulative sum."""
BAR_WIDTH = 0.8
"""Width of a bar of tokens. Trials are 1 apart."""
PANEL_INCHES, ROW_INCHES = 2.7, 0.2
"""Height of an objective's panel, and of a row for trials without a value, in inches."""
BEST, LARGE_SYMBOLS = 3, 25
"""Number of best curves with their own style, and maximum number of large symbols on curves."""
COLUMNS, SLICE_INCHES, TICKS = 4, 2.4, 5
"""Maximum number of slices per row, height of a slice in inches, and maximum number of tick labels below a slice."""
LETTERS, UPRIGHT, SLANTING = 120, 9, 16
"""Maximum numbers of characters below a row of slices, in a line of an upright tick label, and in a slanting label."""
STRIP = 0.07
"""Height of the strip above a slice for trials without a value, as a share of the slice's height."""
GOLDEN = 0.6180339887
"""Golden ratio. Its multiples modulo 1 are evenly spread, and offset the points of one choice."""
PREFERRED = ("train.learning_rate", "train.rank")
"""Preferred hyperparameters for the two axes of the contour."""
ENOUGH = 10
"""Minimum number of points with an objective for an interpolated surface."""
LEVELS = 10
"""Number of colour levels of the surface."""
COLOUR_MAP = "cividis"
"""Colour map that is readable with all kinds of colour vision (Nuñez, Anderton and Renslow, 2018)."""
DENSE, CELLS = 60, 10
"""Number of trials above which all trials of one cell are merged to suppress noise, and number of cells per axis for
this."""
FLAT = 0.02
"""Ratio of the radii of incircle and circumcircle below which a triangle is omitted. The points of such a triangle are
nearly collinear, and do not determine a surface."""
SURFACE_MARKERS: Mapping[TrialState, Mapping[str, Any]] = {"pruned": {"markeredgecolor": INK}}
"""Marker styles over a coloured surface, where grey is not distinguishable."""
BETTER = {"minimize": "lower", "maximize": "higher"}
PAIRS, NUMBERED = 6, 12
"""Maximum numbers of pairs of objectives, and of members of the front with a number."""
HIGHLIGHTED, TRIALS_PER_HIGHLIGHT = 5, 10
"""Maximum number of highlighted best trials, and number of trials for each highlighted trial."""
MAX_AXES = 12
"""Maximum number of hyperparameters in parallel coordinates, the most important ones."""
MAX_LINES = 200
"""Maximum number of lines per state in parallel coordinates. More lines give a grey area and a file twice the size."""
AXIS_TICKS, AXIS_INCHES, HIGH_INCHES = 7, 1.25, 4.4
"""Maximum number of ticks of a parallel axis; distance between two axes, and height of the figure, in inches."""
DASHES: Mapping[TrialState, str] = {"pruned": "-", "complete": "-", "infeasible": "--", "failed": ":"}
"""Dash pattern of each state in parallel coordinates, the lowest layer first."""
Point = tuple[float, float]
Places = Sequence[float | None]
"""Position of a line on each axis. None is a gap."""
Drawing = Callable[[SweepReport, Target, Form], None]


@dataclass(frozen=True)
class SweepWorkClock:
    """Map from Unix time to seconds of work since the sweep started, which exclude long idle periods."""

    started: float
    pauses: tuple[tuple[float, float], ...]
    """Start and end of each idle period, in Unix time."""
    gap: float
    """Width of the gap that replaces an idle period, in seconds."""
    end: float
    """Last moment, in seconds of work."""

    @classmethod
    def from_spans(cls, spans: Iterable[tuple[float, float]]) -> "SweepWorkClock":
        """Create the clock from the periods in which any worker was active, in any order."""
        joined: list[tuple[float, float]] = []
        for begin, stop in sorted(spans):
            if joined and begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((begin, max(begin, stop)))
        if not joined:
            return cls(0.0, (), 0.0, 0.0)
        busy = sum(stop - begin for begin, stop in joined)
        pauses = tuple((a[1], b[0]) for a, b in pairwise(joined) if b[0] - a[1] > max(MAX_IDLE * busy, 1.0))
        clock = cls(joined[0][0], pauses, GAP * busy, 0.0)
        return cls(clock.started, pauses, clock.gap, clock.at(joined[-1][1]))

    def at(self, moment: float) -> float:
        """Return the seconds of work until this Unix time."""
        seconds = moment - self.started
        for begin, stop in self.pauses:
            if moment >= stop:
                seconds -= (stop - begin) - self.gap
            elif moment > begin:
                seconds -= (moment - begin) * (1 - self.gap / (stop - begin))
        return seconds


# Timeline of workers and their trials.


@dataclass(frozen=True)
class SweepTimelineLayout:
    """Positions of the lanes and bars of a timeline."""

    lanes: Mapping[str, int]
    """Lane of each worker."""
    clock: SweepWorkClock
    size: float
    """Seconds per unit of the axis."""

    @property
    def length(self) -> float:
        """Length of the axis, in its unit."""
        return max(self.clock.end / self.size, 1e-9)

    def at(self, moment: float) -> float:
        """Return the position of a Unix time on the axis."""
        return self.clock.at(moment) / self.size

    def box(self, execution: TrialExecution) -> canvas.Box:
        """Return the bar of one trial execution, with a minimum width."""
        begin, stop = self.at(execution.started), self.at(execution.last_seen)
        return begin, self.lanes[execution.worker] - BAR / 2, max(stop - begin, self.length * 1e-3), BAR


def draw_timeline(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the timeline: one lane per worker, one bar per trial execution.

    A trial that another worker took over has several bars joined by a thin line. All of its bars but the last are
    hatched. A diamond starts a trial that continues a pruned trial. Idle periods are cut out at a dotted line.
    """
    executions = [execution for trial in report.trials for execution in trial.executions]
    if not executions:
        canvas.save_empty_plot("No worker has run a trial.", target, "timeline", form)
        return
    lanes = assign_lanes(executions)
    clock = SweepWorkClock.from_spans((execution.started, execution.last_seen) for execution in executions)
    size, name = objective_unit("worked_seconds", clock.end)
    layout = SweepTimelineLayout(lanes, clock, size)
    names = _lane_names(lanes)
    figure = canvas.create_figure(1.2 + LANE_INCHES * len(names))
    axes = figure.add_subplot()
    many = len(executions) > canvas.MANY
    if many:
        axes.set_rasterization_zorder(4)
    _draw_bars(axes, report, layout, many)
    _draw_annotations(axes, report, layout, many)
    canvas.style_axes(axes, f"working time since the sweep started ({name})", grid="x")
    canvas.set_number_ticks(axes.xaxis, format_number, 9)
    axes.set_yticks(range(len(names)), [canvas.sanitize_label(format_parameter_value(name)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-0.01 * layout.length, 1.01 * layout.length)
    canvas.add_legend(figure, axes, columns=7)
    canvas.save_figure(figure, target, "timeline", form)


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


def _lane_names(lanes: Mapping[str, int]) -> list[str]:
    """Return the name of each lane: the worker's name, or the host if several workers share the lane."""
    members: dict[int, list[str]] = {}
    for worker, row in lanes.items():
        members.setdefault(row, []).append(worker)
    return [workers[0] if len(workers) == 1 else _worker_host(workers[0]) for _, workers in sorted(members.items())]


def _draw_bars(axes: Any, report: SweepReport, layout: SweepTimelineLayout, many: bool) -> None:
    """Draw executions coloured by outcome, and lines between the workers of one trial."""
    for state, members in canvas.group_by_state(report.trials).items():
        boxes = [layout.box(trial.executions[-1]) for trial in members if trial.executions]
        canvas.draw_boxes(axes, boxes, facecolor=COLOURS[state], edgecolor=PAPER, linewidth=0 if many else 0.5,
                          label=state, hatch="////" if state == "running" else None, zorder=3)  # fmt: skip
    earlier = [layout.box(execution) for trial in report.trials for execution in trial.executions[:-1]]
    canvas.draw_boxes(axes, earlier, facecolor="none", edgecolor=INK, linewidth=0.4 if many else 0.6, zorder=3,
                 hatch=None if many else "//////", label="taken over by another worker")  # fmt: skip
    for trial in report.trials:
        for first, second in zip(trial.executions, trial.executions[1:], strict=False):
            axes.plot([layout.at(first.last_seen), layout.at(second.started)],
                      [layout.lanes[first.worker], layout.lanes[second.worker]], color=INK,
                      linewidth=0.4 if many else 0.8, zorder=3.5)  # fmt: skip


def _draw_annotations(axes: Any, report: SweepReport, layout: SweepTimelineLayout, many: bool) -> None:
    """Draw continuation symbols, numbers in bars that are wide enough, and idle periods."""
    continuing = [trial.executions[0] for trial in report.trials if trial.continues is not None and trial.executions]
    if continuing:
        axes.plot([layout.at(execution.started) for execution in continuing],
                  [layout.lanes[execution.worker] for execution in continuing],
                  linestyle="", marker="D", markersize=2.5 if many else 5, color=PAPER, markeredgecolor=INK,
                  markeredgewidth=0.8, zorder=6, rasterized=many, label="continues a pruned trial")  # fmt: skip
    points_per_unit = AXIS_SHARE * canvas.WIDE * 72 / layout.length
    for trial in report.trials:
        for execution in trial.executions[-1:]:
            begin, _, wide, _ = layout.box(execution)
            sign = SIGN_POINTS if trial.continues is not None else 0.0
            if wide * points_per_unit >= DIGIT_POINTS * len(str(trial.number)) + 3 + sign:
                middle = begin + wide / 2 + sign / points_per_unit / 2
                axes.text(middle, layout.lanes[execution.worker], str(trial.number), ha="center", va="center_baseline",
                          fontsize=SMALL - 0.5, zorder=7,
                          color=PAPER if trial.state == "complete" else BLACK)  # fmt: skip
    for begin, stop in layout.clock.pauses:
        axes.axvline(layout.at((begin + stop) / 2), color=QUIET, linestyle=":", linewidth=1)
        axes.annotate(f"{format_duration(stop - begin)} pause", (layout.at(stop), -0.6), xytext=(3, 2), va="bottom",
                      textcoords="offset points", fontsize=SMALL, color=QUIET)  # fmt: skip


# Plot of trained and saved tokens.


def draw_savings(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the answer tokens trained in each trial, and the saved ones hatched on top.

    A trial that another trial continues is omitted. With many trials, cumulative sums are drawn instead.
    """
    superseded = superseded_numbers(report)
    trials = [trial for trial in report.trials if trial.number not in superseded]
    saved = {cause: tokens for cause, tokens in saved_tokens_by_cause(report).items() if tokens}
    if not any(trial.cost.trained_tokens for trial in trials) and not saved:
        canvas.save_empty_plot("Nothing has been trained yet.", target, "savings", form)
        return
    figure = canvas.create_figure(3.4)
    axes = figure.add_subplot()
    draw = _draw_token_bars if len(trials) <= canvas.MANY else _draw_cumulative_sums
    name = draw(axes, trials, saved)
    canvas.style_axes(axes, "trial", f"answer tokens ({name})" if name else "answer tokens", grid="y")
    margin = 0.8 + 0.01 * len(report.trials)
    axes.set_xlim(-margin, report.trials[-1].number + margin)
    axes.set_ylim(bottom=0)
    canvas.set_integer_ticks(axes.xaxis)
    canvas.set_number_ticks(axes.yaxis, format_number)
    canvas.add_legend(figure, axes, columns=7)
    canvas.save_figure(figure, target, "savings", form)


def _draw_token_bars(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """Draw a bar for each trial, and return the unit."""
    trained = {trial.number: trial.cost.trained_tokens for trial in trials}
    size, name = objective_unit(
        "all_tokens", max(*trained.values(), *(max(boxes.values()) for boxes in saved.values()), 0)
    )
    for state, members in canvas.group_by_state(trials).items():
        boxes = [
            _token_box(trial.number, 0.0, trained[trial.number] / size) for trial in members if trained[trial.number]
        ]
        canvas.draw_boxes(axes, boxes, facecolor=COLOURS[state], label=state, zorder=3)
    for cause, tokens in saved.items():
        label, hatch = SAVED[cause]
        boxes = [_token_box(number, trained.get(number, 0) / size, count / size) for number, count in tokens.items()]
        canvas.draw_boxes(
            axes, boxes, edgecolor=QUIET, facecolor="none", hatch=hatch, linewidth=0.5, label=label, zorder=2
        )
    axes.autoscale_view()
    return name


def _draw_cumulative_sums(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """Draw cumulative sums of trained tokens, with saved tokens by cause above them, and return the unit."""
    trained = list(accumulate(trial.cost.trained_tokens for trial in trials))
    layers = {
        cause: list(accumulate(tokens.get(trial.number, 0) for trial in trials)) for cause, tokens in saved.items()
    }
    size, name = objective_unit("all_tokens", trained[-1] + sum(layer[-1] for layer in layers.values()))
    seen = canvas.thin_out(range(len(trials)), MAX_STEPS)
    numbers = [trials[place].number for place in seen]
    below, above = [0.0] * len(seen), [trained[place] / size for place in seen]
    axes.fill_between(numbers, below, above, facecolor=COLOURS["complete"], linewidth=0, label="trained", zorder=3)
    for cause, layer in layers.items():
        label, hatch = SAVED[cause]
        below, above = above, [base + layer[place] / size for base, place in zip(above, seen, strict=True)]
        axes.fill_between(numbers, below, above, facecolor="none", edgecolor=QUIET, hatch=hatch, linewidth=0.6,
                          label=label, zorder=2)  # fmt: skip
    return name


def _token_box(number: int, bottom: float, high: float) -> canvas.Box:
    return number - BAR_WIDTH / 2, bottom, BAR_WIDTH, high


# Optimization history and learning curves.


def draw_history(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw each trial's objective by trial number, and the best so far as a line.

    If the objective is the validation loss, a pruned trial is drawn at its last validation loss. Trials without a value
    are drawn below, with a row for each state. A trial that another trial continues is omitted. Small triangles at the
    edge are outliers.
    """
    if not report.trials:
        canvas.save_empty_plot("No trial has started.", target, "history", form)
        return
    superseded = superseded_numbers(report)
    trials = [trial for trial in report.trials if trial.number not in superseded]
    absent = [trial for trial in trials if trial_value(trial, report.objectives) is None]
    rows = list(canvas.group_by_state(absent))
    count = len(report.objectives)
    below = ROW_INCHES * len(rows) + 0.1 if rows else 0.0
    figure = canvas.create_figure(count * PANEL_INCHES + below + 0.9)
    heights = [PANEL_INCHES] * count + ([below] if rows else [])
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).flatten().tolist()
    for index in range(count):
        _draw_objective_history(panels[index], report, trials, index)
    if rows:
        _draw_valueless_trials(panels[-1], absent, rows)
    canvas.style_axes(panels[-1], "trial", panels[-1].get_ylabel(), grid="" if rows else "both")
    # The limits are set explicitly, because a panel without values has only text.
    panels[-1].set_xlim(-0.6 - 0.01 * len(report.trials), report.trials[-1].number + 0.6 + 0.01 * len(report.trials))
    canvas.set_integer_ticks(panels[-1].xaxis)
    canvas.add_legend(figure, *panels, columns=7)
    canvas.save_figure(figure, target, "history", form)


def _draw_objective_history(axes: Any, report: SweepReport, trials: Sequence[Trial], index: int) -> None:
    objective = report.objectives[index]
    known = {
        trial.number: value for trial in trials if (value := trial_value(trial, report.objectives, index)) is not None
    }
    canvas.style_axes(axes, "", objective_label(objective, max(known.values(), default=0.0)))
    if not known:
        canvas.write_message(axes, "no trial has a value yet")
        axes.set_yticks([])
        return
    final = [known[trial.number] for trial in trials if trial.state == "complete" and trial.number in known]
    low, high = axis_limits(
        final, [known[trial.number] for trial in trials if trial.state != "complete" and trial.number in known]
    )
    axes.set_ylim(low, high)
    canvas.set_objective_ticks(axes.yaxis, objective, (low, high))
    beyond = []
    for state, members in canvas.group_by_state(trials).items():
        places = [(trial.number, known[trial.number]) for trial in members if trial.number in known]
        beyond += [(at, min(high, max(low, value)), state) for at, value in places if not low <= value <= high]
        canvas.draw_points(axes, [place for place in places if low <= place[1] <= high], state)
    _draw_outlier_marks(axes, beyond, high)
    if steps := best_values_so_far(report, index):
        line = [*steps, (report.trials[-1].number + 0.5, steps[-1][1])]
        axes.step(*zip(*line, strict=True), where="post", color=INK, linewidth=1.3, label="best so far", zorder=2)
    best = recommended_trial(report)
    if best is not None and best.number in known:
        canvas.draw_star(axes, (best.number, min(high, max(low, known[best.number]))), canvas.star_label(report, best))


def _draw_outlier_marks(axes: Any, beyond: Sequence[tuple[float, float, TrialState]], high: float) -> None:
    """Draw outliers as small triangles at the edge of the frame."""
    for state in dict.fromkeys(state for _, _, state in beyond):
        for top in (True, False):
            places = [(at, edge) for at, edge, mark_state in beyond if mark_state == state and (edge == high) == top]
            # Half of a symbol is outside the frame and must not be clipped.
            canvas.draw_points(axes, places, state, marker=10 if top else 11, markersize=4.5, label=None, clip_on=False,
                        markeredgewidth=0, markerfacecolor=COLOURS[state])  # fmt: skip


def _draw_valueless_trials(axes: Any, trials: Sequence[Trial], rows: Sequence[TrialState]) -> None:
    """Draw a row for each state of trials without a value."""
    for row, state in enumerate(rows):
        canvas.draw_points(axes, [(trial.number, row) for trial in trials if trial.state == state], state)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def draw_curves(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw each trial's validation loss by trained rows: best trials in their own styles, pruned trials in grey.

    The curve of a trial that continues a pruned trial includes the curve of the pruned trial, with a diamond at the end
    of this part.
    """
    by_number = {trial.number: trial for trial in report.trials}
    curves = {
        trial.number: line
        for trial in counted_trials(report)
        if (line := list(validation_curve(trial, by_number).items()))
    }
    if not curves:
        canvas.save_empty_plot("No trial has been validated yet.", target, "curves", form)
        return
    figure = canvas.create_figure(4.2)
    axes = figure.add_subplot()
    canvas.style_axes(axes, "trained rows", "validation loss (nats per token)")
    canvas.set_number_ticks(axes.xaxis, format_number)
    canvas.set_number_ticks(axes.yaxis, format_number)
    loss = next((index for index, objective in enumerate(report.objectives) if objective.metric == LOSS), 0)
    best = [trial.number for trial in rank_trials(report, loss) if trial.number in curves][:BEST]
    opacity = max(0.12, min(0.7, 25 / len(curves)))
    for state, members in canvas.group_by_state(by_number[number] for number in curves if number not in best).items():
        lines: list[Sequence[Point]] = [curves[trial.number] for trial in members]
        style = "--" if state in ("running", "failed") else "-"
        canvas.draw_lines(axes, lines, colors=COLOURS[state], linewidths=1.0, linestyles=style,
                       alpha=opacity if state in ("complete", "pruned") else 0.9, label=state, zorder=2)  # fmt: skip
        if state != "complete":
            canvas.draw_points(axes, [line[-1] for line in lines], state, markersize=3.5, label=None)
    for place, number in enumerate(best):
        axes.plot(*zip(*curves[number], strict=True), color=TOP if not place else INK, zorder=4 + BEST - place,
                  linestyle=("-", "--", ":")[place], linewidth=2.0 if not place else 1.2,
                  label=f"{('best', 'second', 'third')[place]}: trial {number}")  # fmt: skip
    _draw_resume_points(axes, report, by_number, curves)
    axes.set_ylim(*axis_limits([loss for line in curves.values() for _, loss in line]))
    axes.set_xlim(left=0)
    canvas.add_legend(figure, axes, columns=4)
    canvas.save_figure(figure, target, "curves", form)


def _draw_resume_points(
    axes: Any, report: SweepReport, by_number: dict[int, Trial], curves: dict[int, list[Any]]
) -> None:
    places = []
    for trial in report.trials:
        earlier = None if trial.continues is None else by_number.get(trial.continues)
        if (
            trial.number in curves
            and earlier is not None
            and (line := list(validation_curve(earlier, by_number).items()))
        ):
            places.append(line[-1])
    if places:
        size, width = (4.5, 0.9) if len(places) <= LARGE_SYMBOLS else (2.5, 0.5)
        axes.plot(*zip(*places, strict=True), linestyle="", marker="D", markersize=size, color="none", zorder=8,
                  markeredgecolor=INK, markeredgewidth=width, label="continued here")  # fmt: skip


# Plots of single hyperparameters: importance, and objective by value.


def draw_importances(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the share of the first objective's variance that each hyperparameter explains, largest first."""
    if not report.importances:
        canvas.save_empty_plot(
            "Too few trials to estimate the importance of hyperparameters.", target, "importances", form
        )
        return
    ordered = sorted(report.importances.items(), key=lambda entry: (-entry[1], entry[0]))
    names = shorten_names(report.importances)
    figure = canvas.create_figure(0.7 + 0.3 * len(ordered))
    axes = figure.add_subplot()
    canvas.style_axes(axes, "share of the objective's variance explained by the hyperparameter", grid="x")
    axes.barh(range(len(ordered)), [share for _, share in ordered], height=0.62, color=COLOURS["complete"])
    for row, (_, share) in enumerate(ordered):
        axes.annotate(f"{share:.0%}", (share, row), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=SMALL, color=INK)  # fmt: skip
    axes.set_yticks(
        range(len(ordered)),
        [canvas.sanitize_label(format_parameter_value(names[parameter])) for parameter, _ in ordered],
    )
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_xlim(0, min(1.08, 1.15 * max(0.05, *(share for _, share in ordered))))
    canvas.set_number_ticks(axes.xaxis, lambda at: f"{at:.0%}")
    canvas.save_figure(figure, target, "importances", form)


def draw_slices(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective by each hyperparameter: one slice per hyperparameter, one mark per trial.

    Trials without a value (infeasible, failed) are in a strip above all other trials. The strip shows the values that
    cannot be trained. Marks of one choice are spread horizontally to avoid overlap.
    """
    scales = parameter_scales(report)
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    if not scales or not trials:
        canvas.save_empty_plot(
            "No trial has ended." if scales else "No hyperparameter was searched.", target, "slices", form
        )
        return
    columns = min(COLUMNS, len(scales))
    rows = math.ceil(len(scales) / columns)
    figure = canvas.create_figure(SLICE_INCHES * rows + 0.6)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    known = {trial.number: value for trial in trials if (value := trial_value(trial, report.objectives)) is not None}
    final = [known[trial.number] for trial in trials if trial.state == "complete" and trial.number in known]
    low, high = axis_limits(
        final, [known[trial.number] for trial in trials if trial.state == "pruned" and trial.number in known]
    )
    strip = high + STRIP * (high - low)
    heights = {
        trial.number: min(high, max(low, known[trial.number])) if trial.number in known else strip for trial in trials
    }
    names = shorten_names(scales)
    for axes, (parameter, scale) in zip(panels, scales.items(), strict=False):
        _draw_slice(axes, report, trials, parameter, scale, heights)
        canvas.style_axes(axes, format_parameter_value(names[parameter]))
        _write_ticks(axes, scale, LETTERS // columns)
        axes.set_xlim(-0.12, 1.12)
        axes.axhline(high, color=QUIET, linewidth=0.5, linestyle=":")
    for axes in panels[len(scales) :]:
        axes.remove()
    panels[0].set_ylim(low, strip + STRIP * (high - low))
    _set_objective_ticks(panels[0], report, known, (low, high, strip))
    figure.supylabel(canvas.sanitize_label(objective_label(report.objectives[0], high)), fontsize=USUAL, color=INK)
    canvas.add_legend(figure, *panels[: len(scales)])
    canvas.save_figure(figure, target, "slices", form)


def _write_ticks(axes: Any, scale: ParameterScale, letters: int) -> None:
    """Write the tick labels of a slice, slanting if they do not fit horizontally."""
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
    axes: Any,
    report: SweepReport,
    trials: Sequence[Trial],
    parameter: str,
    scale: ParameterScale,
    heights: Mapping[int, float],
) -> None:
    spread = 0.0 if scale.choices is None else min(0.2, 0.5 / max(1, len(scale.choices)))
    star = recommended_trial(report)
    for state, members in canvas.group_by_state(trials).items():
        places = []
        for trial in members:
            place = scale.place(trial.values[parameter]) if parameter in trial.values else None
            if place is not None:
                offset = spread * ((trial.number * GOLDEN) % 1 - 0.5)
                places.append((place + offset, heights[trial.number]))
                if star is not None and trial.number == star.number:
                    canvas.draw_star(axes, places[-1], canvas.star_label(report, star))
        size = 4.2 if len(members) <= canvas.MANY else 3
        canvas.draw_points(axes, places, state, markersize=size, alpha=max(0.35, min(1.0, 60 / len(members))))


# Plots of two variables: two hyperparameters and the objective, or two objectives.


def choose_contour_pair(report: SweepReport) -> tuple[str, str] | None:
    """Return two numeric hyperparameters for the contour: learning rate and rank, else the two most important."""
    numeric = [axis.name for axis in searched_axes(report) if axis.kind != "choice"]
    if len(numeric) < 2:
        return None
    if all(parameter in numeric for parameter in PREFERRED):
        return PREFERRED
    across, up = sorted(
        numeric, key=lambda parameter: (-report.importances.get(parameter, 0.0), numeric.index(parameter))
    )[:2]
    return across, up


def draw_contour(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the first objective by two hyperparameters: trials as points, and a surface if enough trials are complete.

    The surface is interpolated linearly on Delaunay triangles of the points, on the scales of the hyperparameters. It
    shows only a local trend, because other hyperparameters differ as well. It is not extrapolated beyond the points.
    """
    hyperparameters = choose_contour_pair(report)
    trials = (
        []
        if hyperparameters is None
        else [
            trial for trial in counted_trials(report) if all(parameter in trial.values for parameter in hyperparameters)
        ]
    )
    if hyperparameters is None or not trials:
        message = "A contour needs two numeric hyperparameters." if hyperparameters is None else "No trial has started."
        canvas.save_empty_plot(message, target, "contour", form)
        return
    scales = {parameter: scale for parameter, scale in parameter_scales(report).items() if parameter in hyperparameters}
    across, up = (scales[parameter] for parameter in hyperparameters)
    places = {
        trial.number: (across.place(trial.values[hyperparameters[0]]), up.place(trial.values[hyperparameters[1]]))
        for trial in trials
    }
    known = {number: (x, y) for number, (x, y) in places.items() if x is not None and y is not None}
    if not known:
        canvas.save_empty_plot("No trial has a value of both hyperparameters.", target, "contour", form)
        return
    figure = canvas.create_figure(4.9, 7.6)
    axes = figure.add_subplot()
    names = shorten_names(axis.name for axis in report.axes)
    canvas.style_axes(
        axes, format_parameter_value(names[hyperparameters[0]]), format_parameter_value(names[hyperparameters[1]])
    )
    axes.set_xticks(*_scale_ticks(across))
    axes.set_yticks(*_scale_ticks(up))
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.06, 1.06)
    coloured = _draw_coloured_points(figure, axes, report, known)
    for state, members in canvas.group_by_state(trials).items():
        if state != "complete" or not coloured:
            look = SURFACE_MARKERS.get(state, {}) if coloured and len(members) <= canvas.MANY else {}
            canvas.draw_points(axes, [known[trial.number] for trial in members if trial.number in known], state, **look)
    star = recommended_trial(report)
    if star is not None and star.number in known:
        canvas.draw_star(axes, known[star.number], canvas.star_label(report, star))
    canvas.add_legend(figure, axes)
    canvas.save_figure(figure, target, "contour", form)


def _scale_ticks(scale: ParameterScale) -> tuple[list[float], list[str]]:
    ticks = scale.ticks(8)
    return [place for place, _ in ticks], [canvas.sanitize_label(text) for _, text in ticks]


def _draw_coloured_points(
    figure: Any, axes: Any, report: SweepReport, known: Mapping[int, tuple[float, float]]
) -> bool:
    """Draw complete trials, coloured by objective, over the surface. Return whether any trial is complete."""
    from matplotlib.colors import Normalize

    valued = [(known[trial.number], amount) for trial, amount in completed_values(report) if trial.number in known]
    if not valued:
        return False
    low, high = axis_limits([amount for _, amount in valued])
    best_low = report.objectives[0].direction == "minimize"
    scale = Normalize(low, high, clip=True)
    colours = f"{COLOUR_MAP}_r" if best_low else COLOUR_MAP
    surface = _draw_surface(axes, _merge_near_points(valued, min if best_low else max), scale, colours)
    places, amounts = zip(*valued, strict=True)
    many = len(valued) > canvas.MANY
    points = axes.scatter(*zip(*places, strict=True), c=amounts, norm=scale, cmap=colours, s=16 if many else 38,
                          zorder=4, edgecolors=PAPER, linewidths=0.5 if many else 0.9, label="complete",
                          rasterized=many)  # fmt: skip
    bar = figure.colorbar(surface or points, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(canvas.sanitize_label(objective_label(report.objectives[0], high)), fontsize=canvas.USUAL, color=INK)
    bar.ax.tick_params(labelsize=canvas.SMALL, labelcolor=INK, color=INK)
    canvas.set_objective_ticks(bar, report.objectives[0], (low, high))
    return True


def _merge_near_points(
    points: Sequence[tuple[Point, float]], better: Callable[[Iterable[float]], float]
) -> dict[Point, float]:
    """Merge nearby trials, which differ in other hyperparameters. The result is their best objective at their mean
    position."""
    cells: dict[tuple[int, int], list[tuple[Point, float]]] = {}
    cells_per_axis = CELLS if len(points) > DENSE else 1000
    for (x, y), amount in points:
        cells.setdefault((round(x * cells_per_axis), round(y * cells_per_axis)), []).append(((x, y), amount))
    return {
        (fmean(x for (x, _), _ in members), fmean(y for (_, y), _ in members)): better(amount for _, amount in members)
        for members in cells.values()
    }


def _draw_surface(axes: Any, best: Mapping[Point, float], scale: Any, colours: str) -> Any:
    """Draw the surface between the points, and return it. Return None if the points are too few or collinear."""
    from matplotlib.tri import TriAnalyzer, Triangulation

    places = list(best)
    if len(places) < ENOUGH or _are_collinear(places):
        return None
    triangles = Triangulation(*zip(*places, strict=True))
    is_flat = TriAnalyzer(triangles).get_flat_tri_mask(FLAT)
    if all(is_flat):
        return None
    triangles.set_mask(is_flat)
    amounts = [min(scale.vmax, max(scale.vmin, amount)) for amount in best.values()]
    levels = [scale.vmin + k * (scale.vmax - scale.vmin) / LEVELS for k in range(LEVELS + 1)]
    return axes.tricontourf(triangles, amounts, levels=levels, cmap=colours, norm=scale, alpha=0.85, zorder=1)


def _are_collinear(places: Sequence[tuple[float, float]]) -> bool:
    """Return whether no triangle of the points has a visible area."""
    (ax, ay), *others = places
    bx, by = max(others, key=lambda point: math.hypot(point[0] - ax, point[1] - ay))
    return max(abs((bx - ax) * (y - ay) - (by - ay) * (x - ax)) for x, y in others) < 1e-3


def draw_pareto(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw two objectives against each other, or up to PAIRS pairs of several objectives, and mark the Pareto front."""
    if len(report.objectives) < 2:
        canvas.save_empty_plot("A Pareto front needs at least two objectives.", target, "pareto", form)
        return
    trials = [trial for trial in counted_trials(report) if trial.state == "complete"]
    if not trials:
        canvas.save_empty_plot("No trial is complete.", target, "pareto", form)
        return
    pairs = list(combinations(range(len(report.objectives)), 2))[:PAIRS]
    columns = min(2, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    figure = canvas.create_figure(
        4.4 if rows == columns == 1 else 3.3 * rows + 0.5, canvas.WIDE if columns > 1 else 7.6
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, (first, second) in zip(panels, pairs, strict=False):
        _draw_pareto_front(axes, report, trials, (first, second))
    for axes in panels[len(pairs) :]:
        axes.remove()
    canvas.add_legend(figure, *panels[: len(pairs)])
    canvas.save_figure(figure, target, "pareto", form)


def _draw_pareto_front(axes: Any, report: SweepReport, trials: Sequence[Trial], indices: tuple[int, int]) -> None:
    objectives = [report.objectives[index] for index in indices]
    points: dict[int, Point] = {}
    for trial in trials:
        across, up = (trial_value(trial, report.objectives, index) for index in indices)
        if across is not None and up is not None:
            points[trial.number] = (across, up)
    if not points:
        canvas.write_message(axes, "no trial has both")
        return
    best = [points[number] for number in report.best if number in points]
    canvas.draw_points(axes, [place for number, place in points.items() if number not in report.best], "complete",
                       markersize=4.5, label="complete, dominated", alpha=0.75)  # fmt: skip
    if best:
        if len(report.objectives) == 2:
            # The corner between two members of the front has the worse of their two values in each objective.
            better = objectives[0].direction == "minimize"
            line = sorted(best, reverse=not better)
            axes.step(*zip(*line, strict=True), where="post", color=TOP, linewidth=1.2, zorder=2)
        axes.plot(*zip(*best, strict=True), linestyle="", marker="D", markersize=6, color=TOP, zorder=5,
                  markeredgecolor=PAPER, markeredgewidth=0.6, label="front")  # fmt: skip
        if len(best) <= NUMBERED and len(report.objectives) == 2:
            for number in report.best:
                if number in points:
                    axes.annotate(str(number), points[number], xytext=(5, 5), textcoords="offset points",
                                  fontsize=canvas.SMALL, color=INK, zorder=6)  # fmt: skip
    star = recommended_trial(report)
    if star is not None and star.number in points:
        canvas.draw_star(axes, points[star.number], f"winner: trial {star.number}")
    for place, (objective, axis, limit) in enumerate(
        zip(objectives, (axes.xaxis, axes.yaxis), (axes.set_xlim, axes.set_ylim), strict=True)
    ):
        low, high = (
            min(point[place] for point in points.values()),
            max(point[place] for point in points.values()),
        )
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        limit(low - margin, high + margin)
        canvas.set_objective_ticks(axis, objective, (low - margin, high + margin), 7)
    ends = (axes.get_xlim()[1], axes.get_ylim()[1])
    names = [
        f"{objective_label(objective, end)}, {BETTER[objective.direction]} is better"
        for objective, end in zip(objectives, ends, strict=True)
    ]
    canvas.style_axes(axes, names[0], names[1])


# Parallel coordinates (Inselberg, 1985): all hyperparameters of each trial as a line.


@dataclass(frozen=True)
class ParallelCoordinates:
    """Axes of parallel coordinates: hyperparameters, then objectives."""

    report: SweepReport
    hyperparameters: Mapping[str, ParameterScale]
    ends: Sequence[ParameterScale]

    @classmethod
    def from_report(cls, report: SweepReport) -> "ParallelCoordinates":
        """Return the axes of a sweep. The axis of an objective excludes outliers."""
        ends = []
        for index in range(len(report.objectives)):
            values = [value for _, value in completed_values(report, index)]
            ends.append(ParameterScale.from_numbers(axis_limits(values) if values else ()))
        # Conditional hyperparameters come first, so that their gaps do not separate lines from the objective.
        conditional = {axis.name for axis in report.axes if axis.conditional}
        all_scales = parameter_scales(report)
        important = sorted(all_scales, key=lambda parameter: -report.importances.get(parameter, 0.0))[:MAX_AXES]
        scales = {
            parameter: all_scales[parameter]
            for parameter in sorted(all_scales, key=lambda parameter: parameter not in conditional)
            if parameter in important
        }
        return cls(report, scales, ends)

    @property
    def count(self) -> int:
        """Number of axes."""
        return len(self.hyperparameters) + len(self.ends)

    def places(self, trial: Trial) -> Places:
        """Return the positions of a trial. Missing hyperparameters and objectives are gaps."""
        values = trial.values
        positions = [
            scale.place(values[parameter]) if parameter in values else None
            for parameter, scale in self.hyperparameters.items()
        ]
        for index, scale in enumerate(self.ends):
            reached = trial_value(trial, self.report.objectives, index) if trial.state == "complete" else None
            place = None if reached is None else scale.place(reached)
            positions.append(None if place is None else min(1.0, max(0.0, place)))
        return positions

    def axes(self) -> Iterator[tuple[str, list[tuple[float, str]]]]:
        """Yield the title of each axis, and positions and texts of its ticks."""
        names = shorten_names(self.hyperparameters)
        for parameter, scale in self.hyperparameters.items():
            yield names[parameter], scale.ticks(AXIS_TICKS)
        for objective, scale in zip(self.report.objectives, self.ends, strict=True):
            better = "lower" if objective.direction == "minimize" else "higher"
            size, name = objective_unit(objective.metric, scale.high)
            ticks = round_ticks(scale.low, scale.high, AXIS_TICKS, size) if scale.low < scale.high else []
            title = objective_label(objective, scale.high)
            title = title if name and size > 1 else title.partition(" (")[0]
            yield f"{title}\n({better} is better)", [(scale.place(at) or 0.0, text) for at, text in ticks]


def draw_parallel_coordinates(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw each trial as a line across all hyperparameters and objectives, with the best highlighted.

    Axes of hyperparameters with a logarithmic range are logarithmic. Running trials, and trials that another trial
    continues, are omitted.
    """
    coordinates = ParallelCoordinates.from_report(report)
    trials = [trial for trial in counted_trials(report) if trial.state != "running"]
    if not coordinates.hyperparameters or not trials:
        message = "No trial has ended." if coordinates.hyperparameters else "No hyperparameter was searched."
        canvas.save_empty_plot(message, target, "parallel", form)
        return
    figure = canvas.create_figure(HIGH_INCHES, max(canvas.WIDE, AXIS_INCHES * coordinates.count))
    axes = figure.add_subplot()
    best, message = _select_best(report, trials)
    opacity = max(0.15, min(0.6, 20 / len(trials)))
    for state in DASHES:
        members = [trial for trial in trials if trial.state == state and trial not in best]
        lines = [coordinates.places(trial) for trial in canvas.thin_out(members, MAX_LINES)]
        alpha = opacity if state in ("pruned", "complete") else max(0.25, opacity)
        of_all = f", {len(lines)} of {len(members):,}" if len(lines) < len(members) else ""
        _draw_broken_lines(axes, lines, colors=COLOURS[state], linewidths=1.0, alpha=alpha, linestyles=DASHES[state],
                           zorder=2, label=f"{state}{of_all}")  # fmt: skip
    _draw_broken_lines(
        axes, [coordinates.places(trial) for trial in best], colors=TOP, linewidths=1.6, zorder=4, label=message
    )
    if (star := recommended_trial(report)) is not None and report.winner is not None:
        _draw_broken_lines(axes, [coordinates.places(star)], colors=INK, linewidths=1.6, linestyles="--", zorder=5,
              label=canvas.star_label(report, star))  # fmt: skip
    _draw_vertical_axes(axes, coordinates)
    if len(coordinates.hyperparameters) < (count := len(searched_axes(report))):
        axes.set_title(
            f"the {len(coordinates.hyperparameters)} most important of {count} hyperparameters",
            fontsize=SMALL,
            color=QUIET,
        )
    canvas.add_legend(figure, axes, columns=7)
    canvas.save_figure(figure, target, "parallel", form)


def _select_best(report: SweepReport, trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Return the highlighted trials and their label. With several objectives, these trials are the Pareto front."""
    if len(report.objectives) > 1:
        return [trial for trial in trials if trial.number in report.best], "front"
    best = rank_trials(report)[: min(HIGHLIGHTED, math.ceil(len(trials) / TRIALS_PER_HIGHLIGHT))]
    return best, f"the best {len(best)}" if len(best) > 1 else "the best"


def _draw_broken_lines(axes: Any, lines: Sequence[Places], **look: Any) -> None:
    """Draw lines with their gaps. A single point between two gaps is drawn as a dot."""
    pieces = [piece for line in lines for piece in split_at_gaps(line)]
    canvas.draw_lines(axes, [piece for piece in pieces if len(piece) > 1], **look)
    if dots := [piece[0] for piece in pieces if len(piece) == 1]:
        axes.plot(*zip(*dots, strict=True), linestyle="", marker=".", markersize=5, color=look["colors"],
                  alpha=look.get("alpha"), zorder=look["zorder"], rasterized=len(dots) > canvas.MANY)  # fmt: skip


def split_at_gaps(line: Places) -> list[list[Point]]:
    """Split a line at its gaps."""
    known = groupby(enumerate(line), key=lambda entry: entry[1] is not None)
    return [[(float(at), place) for at, place in piece if place is not None] for segment, piece in known if segment]


def _draw_vertical_axes(axes: Any, coordinates: ParallelCoordinates) -> None:
    """Draw the axes over the lines, with a background behind their texts."""
    axes.set_axis_off()
    axes.set_xlim(-0.45, coordinates.count - 0.7)
    axes.set_ylim(-0.05, 1.17)
    axes.vlines(range(coordinates.count), 0, 1, color=QUIET, linewidth=0.9, zorder=6)
    paper = {"facecolor": PAPER, "alpha": 0.75, "edgecolor": "none", "pad": 0.6}
    for at, (title, ticks) in enumerate(coordinates.axes()):
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


# All plots of a sweep by name. Each plot is a function of the report; equal reports give equal bytes.

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
"""Drawing functions in the order of the page."""


def available_plots(report: SweepReport) -> list[str]:
    """Return the names of the plots that have data, in the order of the page.

    A Pareto front needs several objectives, a contour two numeric hyperparameters, and all plots a trial.
    """
    if not report.trials:
        return []
    omitted = set()
    if len(report.objectives) < 2:
        omitted.add("pareto")
    if choose_contour_pair(report) is None:
        omitted.add("contour")
    return [name for name in PICTURES if name not in omitted]


def draw_all(report: SweepReport) -> dict[str, bytes]:
    """Return all available plots as SVG, by name, for the page."""
    plots = {}
    for name in available_plots(report):
        stream = io.BytesIO()
        PICTURES[name](report, stream, "svg")
        plots[name] = stream.getvalue()
    return plots


def write(report: SweepReport, folder: Path) -> list[Path]:
    """Write all available plots as PNG files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in available_plots(report):
        paths.append(folder / f"{name}.png")
        PICTURES[name](report, paths[-1], "png")
    return paths
