"""Draws the timeline of a sweep's workers without idle periods, and the tokens saved by pruning."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ratchet.reports import sweep_canvas as canvas
from ratchet.reports.sweep_canvas import COLOURS, INK, PAPER, QUIET, SMALL, Form, Target
from ratchet.storage.records.sweep import SweepReport, Trial, TrialExecution
from ratchet.tuning.trial_summary import (
    Cause,
    format_duration,
    format_number,
    format_parameter_value,
    objective_unit,
    saved_tokens_by_cause,
    superseded_numbers,
)

LONG = 0.15
"""Idle periods longer than this share of the working time are cut out."""

SEAM = 0.02
"""Width of the gap that replaces an idle period, as a share of the working time."""


@dataclass(frozen=True)
class SweepWorkClock:
    """Maps Unix time to seconds of work since the sweep started."""

    started: float
    pauses: tuple[tuple[float, float], ...]
    """Start and end of each idle period, in Unix time."""
    seam: float
    """Width of the gap for an idle period, in seconds."""
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
        pauses = tuple((a[1], b[0]) for a, b in pairwise(joined) if b[0] - a[1] > max(LONG * busy, 1.0))
        clock = cls(joined[0][0], pauses, SEAM * busy, 0.0)
        return cls(clock.started, pauses, clock.seam, clock.at(joined[-1][1]))

    def at(self, moment: float) -> float:
        """Return the seconds of work until this Unix time."""
        seconds = moment - self.started
        for begin, stop in self.pauses:
            if moment >= stop:
                seconds -= (stop - begin) - self.seam
            elif moment > begin:
                seconds -= (moment - begin) * (1 - self.seam / (stop - begin))
        return seconds


# Timeline of workers and their trials.

LANE_INCHES, BAR = 0.3, 0.62
"""Height of a worker's lane, and the share of it that bars fill."""

LANES = 24
"""Maximum number of workers with their own lane. Beyond it, later workers of a host reuse a free lane of that host."""

LETTER_POINTS, SIGN_POINTS, WITHIN = 5.2, 5.0, 0.82
"""Widths of a digit and of the symbol in a bar, and the share of the figure's width that the axis fills."""

BLACK = "#000001"
"""Colour of numbers on light bars, independent of the page's theme."""


@dataclass(frozen=True)
class SweepTimelineLayout:
    """Positions of lanes and bars."""

    lanes: Mapping[str, int]
    """Lane of each worker."""
    clock: SweepWorkClock
    size: float
    """Seconds per unit of the axis."""

    @property
    def long(self) -> float:
        """Length of the axis."""
        return max(self.clock.end / self.size, 1e-9)

    def at(self, moment: float) -> float:
        """Return the position of a Unix time on the axis."""
        return self.clock.at(moment) / self.size

    def box(self, take: TrialExecution) -> canvas.Box:
        """Return the bar of one trial execution, with a minimum width."""
        begin, stop = self.at(take.started), self.at(take.last_seen)
        return begin, self.lanes[take.worker] - BAR / 2, max(stop - begin, self.long * 1e-3), BAR


def draw_timeline(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the timeline: one lane per worker, one bar per trial execution.

    A trial that another worker took over has several bars joined by a thin line; all but the last are hatched. A
    diamond
    starts a trial that continues a pruned one. Idle periods are cut out at a dotted line.
    """
    takes = [take for trial in report.trials for take in trial.executions]
    if not takes:
        canvas.save_empty_plot("No worker has run a trial.", target, "timeline", form)
        return
    lanes = assign_lanes(takes)
    clock = SweepWorkClock.from_spans((take.started, take.last_seen) for take in takes)
    size, name = objective_unit("worked_seconds", clock.end)
    track = SweepTimelineLayout(lanes, clock, size)
    names = _lane_names(lanes)
    figure = canvas.create_figure(1.2 + LANE_INCHES * len(names))
    axes = figure.add_subplot()
    many = len(takes) > canvas.MANY
    if many:
        axes.set_rasterization_zorder(4)
    _draw_bars(axes, report, track, many)
    _draw_annotations(axes, report, track, many)
    canvas.style_axes(axes, f"working time since the sweep started ({name})", grid="x")
    canvas.set_number_ticks(axes.xaxis, format_number, 9)
    axes.set_yticks(range(len(names)), [canvas.sanitize_label(format_parameter_value(one)) for one in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-0.01 * track.long, 1.01 * track.long)
    canvas.add_legend(figure, axes, columns=7)
    canvas.save_figure(figure, target, "timeline", form)


def assign_lanes(takes: Iterable[TrialExecution]) -> dict[str, int]:
    """Assign a lane to each worker, in order of their first trial."""
    spans: dict[str, tuple[float, float]] = {}
    for take in sorted(takes, key=lambda take: (take.started, take.worker)):
        started, seen = spans.get(take.worker, (take.started, take.last_seen))
        spans[take.worker] = (started, max(seen, take.last_seen))
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
    """Return the name of each lane: the worker, or the host of several workers."""
    members: dict[int, list[str]] = {}
    for worker, row in lanes.items():
        members.setdefault(row, []).append(worker)
    return [found[0] if len(found) == 1 else _worker_host(found[0]) for _, found in sorted(members.items())]


def _draw_bars(axes: Any, report: SweepReport, track: SweepTimelineLayout, many: bool) -> None:
    """Draw executions coloured by outcome, and lines between the workers of one trial."""
    for state, members in canvas.group_by_state(report.trials).items():
        boxes = [track.box(one.executions[-1]) for one in members if one.executions]
        canvas.draw_boxes(axes, boxes, facecolor=COLOURS[state], edgecolor=PAPER, linewidth=0 if many else 0.5,
                          label=state, hatch="////" if state == "running" else None, zorder=3)  # fmt: skip
    away = [track.box(take) for trial in report.trials for take in trial.executions[:-1]]
    canvas.draw_boxes(axes, away, facecolor="none", edgecolor=INK, linewidth=0.4 if many else 0.6, zorder=3,
                 hatch=None if many else "//////", label="taken over by another worker")  # fmt: skip
    for trial in report.trials:
        for first, second in zip(trial.executions, trial.executions[1:], strict=False):
            axes.plot([track.at(first.last_seen), track.at(second.started)],
                      [track.lanes[first.worker], track.lanes[second.worker]], color=INK,
                      linewidth=0.4 if many else 0.8, zorder=3.5)  # fmt: skip


def _draw_annotations(axes: Any, report: SweepReport, track: SweepTimelineLayout, many: bool) -> None:
    """Draw continuation symbols, numbers in bars that are wide enough, and idle periods."""
    continuing = [one.executions[0] for one in report.trials if one.continues is not None and one.executions]
    if continuing:
        axes.plot([track.at(take.started) for take in continuing], [track.lanes[take.worker] for take in continuing],
                  linestyle="", marker="D", markersize=2.5 if many else 5, color=PAPER, markeredgecolor=INK,
                  markeredgewidth=0.8, zorder=6, rasterized=many, label="continues a pruned trial")  # fmt: skip
    points = WITHIN * canvas.WIDE * 72 / track.long
    for trial in report.trials:
        for take in trial.executions[-1:]:
            begin, _, wide, _ = track.box(take)
            aside = SIGN_POINTS if trial.continues is not None else 0.0
            if wide * points >= LETTER_POINTS * len(str(trial.number)) + 3 + aside:
                axes.text(begin + wide / 2 + aside / points / 2, track.lanes[take.worker], str(trial.number),
                          ha="center", va="center_baseline", fontsize=SMALL - 0.5, zorder=7,
                          color=PAPER if trial.state == "complete" else BLACK)  # fmt: skip
    for begin, stop in track.clock.pauses:
        axes.axvline(track.at((begin + stop) / 2), color=QUIET, linestyle=":", linewidth=1)
        axes.annotate(f"{format_duration(stop - begin)} pause", (track.at(stop), -0.6), xytext=(3, 2), va="bottom",
                      textcoords="offset points", fontsize=SMALL, color=QUIET)  # fmt: skip


# Plot of trained and saved tokens.

SAVED: Mapping[Cause, tuple[str, str]] = {
    "pruned": ("saved by pruning", "////"),
    "refused": ("rejected before training", "xxxx"),
}
"""Label and hatch."""

STEPS = 200
"""Maximum number of steps of the cumulative sum."""

WIDTH = 0.8
"""Width of a bar. Trials are 1 apart."""


def draw_savings(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the answer tokens trained in each trial, and the saved ones hatched on top.

    A trial that another one continues is omitted. With many trials, cumulative sums are drawn.
    """
    old = superseded_numbers(report)
    trials = [trial for trial in report.trials if trial.number not in old]
    saved = {cause: found for cause, found in saved_tokens_by_cause(report).items() if found}
    if not any(trial.cost.trained_tokens for trial in trials) and not saved:
        canvas.save_empty_plot("Nothing has been trained yet.", target, "savings", form)
        return
    figure = canvas.create_figure(3.4)
    axes = figure.add_subplot()
    draw = _draw_token_bars if len(trials) <= canvas.MANY else _draw_cumulative_sums
    name = draw(axes, trials, saved)
    canvas.style_axes(axes, "trial", f"answer tokens ({name})" if name else "answer tokens", grid="y")
    room = 0.01 * len(report.trials)
    axes.set_xlim(-0.8 - room, report.trials[-1].number + 0.8 + room)
    axes.set_ylim(bottom=0)
    canvas.set_integer_ticks(axes.xaxis)
    canvas.set_number_ticks(axes.yaxis, format_number)
    canvas.add_legend(figure, axes, columns=7)
    canvas.save_figure(figure, target, "savings", form)


def _draw_token_bars(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """Draw a bar for each trial. Returns the unit."""
    trained = {one.number: one.cost.trained_tokens for one in trials}
    size, name = objective_unit(
        "all_tokens", max(*trained.values(), *(max(boxes.values()) for boxes in saved.values()), 0)
    )
    for state, members in canvas.group_by_state(trials).items():
        boxes = [_token_box(one.number, 0.0, trained[one.number] / size) for one in members if trained[one.number]]
        canvas.draw_boxes(axes, boxes, facecolor=COLOURS[state], label=state, zorder=3)
    for cause, tokens in saved.items():
        label, hatch = SAVED[cause]
        boxes = [_token_box(one, trained.get(one, 0) / size, count / size) for one, count in tokens.items()]
        canvas.draw_boxes(
            axes, boxes, edgecolor=QUIET, facecolor="none", hatch=hatch, linewidth=0.5, label=label, zorder=2
        )
    axes.autoscale_view()
    return name


def _draw_cumulative_sums(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """Draw cumulative sums of trained tokens, and of saved tokens by cause above them. Returns the unit."""
    done = list(accumulate(one.cost.trained_tokens for one in trials))
    layers = {cause: list(accumulate(found.get(one.number, 0) for one in trials)) for cause, found in saved.items()}
    size, name = objective_unit("all_tokens", done[-1] + sum(layer[-1] for layer in layers.values()))
    seen = canvas.thin_out(range(len(trials)), STEPS)
    numbers = [trials[one].number for one in seen]
    below, above = [0.0] * len(seen), [done[one] / size for one in seen]
    axes.fill_between(numbers, below, above, facecolor=COLOURS["complete"], linewidth=0, label="trained", zorder=3)
    for cause, layer in layers.items():
        label, hatch = SAVED[cause]
        below, above = above, [base + layer[one] / size for base, one in zip(above, seen, strict=True)]
        axes.fill_between(numbers, below, above, facecolor="none", edgecolor=QUIET, hatch=hatch, linewidth=0.6,
                          label=label, zorder=2)  # fmt: skip
    return name


def _token_box(number: int, bottom: float, high: float) -> canvas.Box:
    return number - WIDTH / 2, bottom, WIDTH, high
