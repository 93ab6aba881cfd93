"""Time in the picture of the workers: hours in which nobody worked are cut out."""

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
    format_knob_value,
    format_number,
    objective_unit,
    saved_tokens_by_cause,
    superseded_numbers,
)

LONG = 0.15
"""Pauses of more than this share of the time in which somebody worked are cut."""

SEAM = 0.02
"""Of the time in which somebody worked: width of what stands for a pause."""


@dataclass(frozen=True)
class SweepWorkClock:
    """Seconds of work since the sweep began, by Unix time."""

    begun: float
    pauses: tuple[tuple[float, float], ...]
    """Begin and end of each, in Unix time."""
    seam: float
    """Seconds that stand for a pause."""
    end: float
    """The last moment, in seconds of work."""

    @classmethod
    def of(cls, spans: Iterable[tuple[float, float]]) -> "SweepWorkClock":
        """From when till when anybody worked, in any order."""
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
        made = cls(joined[0][0], pauses, SEAM * busy, 0.0)
        return cls(made.begun, pauses, made.seam, made.at(joined[-1][1]))

    def at(self, moment: float) -> float:
        """Seconds of work until this Unix time."""
        found = moment - self.begun
        for begin, stop in self.pauses:
            if moment >= stop:
                found -= (stop - begin) - self.seam
            elif moment > begin:
                found -= (moment - begin) * (1 - self.seam / (stop - begin))
        return found


# The picture of who worked on which trial when.

LANE_INCHES, BAR = 0.3, 0.62
"""Height of a worker, and the share of it that its bars fill."""

LANES = 24
"""Workers that have a lane each; with more, one that began after another of its host had ended has that one's lane."""

LETTER_POINTS, SIGN_POINTS, WITHIN = 5.2, 5.0, 0.82
"""Width of a digit in a bar, of the sign before it; share of the picture that the axis fills."""

BLACK = "#000001"
"""Of numbers on light bars, on light paper and on dark: no colour that follows the paper."""


@dataclass(frozen=True)
class SweepTimelineLayout:
    """Where things lie."""

    lanes: Mapping[str, int]
    """By worker."""
    clock: SweepWorkClock
    size: float
    """Seconds of the unit of the axis."""

    @property
    def long(self) -> float:
        """The whole axis."""
        return max(self.clock.end / self.size, 1e-9)

    def at(self, moment: float) -> float:
        """A Unix time on the axis."""
        return self.clock.at(moment) / self.size

    def box(self, take: TrialExecution) -> canvas.Box:
        """Of one worker's time with a trial; one that took no time is seen, too."""
        begin, stop = self.at(take.begun), self.at(take.seen)
        return begin, self.lanes[take.worker] - BAR / 2, max(stop - begin, self.long * 1e-3), BAR


def draw_timeline(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw who worked on which trial when: a lane a worker, a bar each time that it had a trial.

    A trial that was taken over has several bars, joined by a thin line; all but the last are hatched. A diamond begins
    one that goes on with a pruned trial. Pauses in which nobody worked are cut out, at a dotted line.
    """
    takes = [take for trial in report.trials for take in trial.takes]
    if not takes:
        canvas.save_empty_plot("No worker has had a trial.", target, "timeline", form)
        return
    lanes = assign_lanes(takes)
    clock = SweepWorkClock.of((take.begun, take.seen) for take in takes)
    size, name = objective_unit("worked_seconds", clock.end)
    track = SweepTimelineLayout(lanes, clock, size)
    names = _lane_names(lanes)
    made = canvas.create_figure(1.2 + LANE_INCHES * len(names))
    axes = made.add_subplot()
    many = len(takes) > canvas.MANY
    if many:
        axes.set_rasterization_zorder(4)
    _draw_bars(axes, report, track, many)
    _draw_annotations(axes, report, track, many)
    canvas.style_axes(axes, f"time worked since the sweep began ({name})", grid="x")
    canvas.set_number_ticks(axes.xaxis, format_number, 9)
    axes.set_yticks(range(len(names)), [canvas.sanitize_label(format_knob_value(one)) for one in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-0.01 * track.long, 1.01 * track.long)
    canvas.add_legend(made, axes, columns=7)
    canvas.save_figure(made, target, "timeline", form)


def assign_lanes(takes: Iterable[TrialExecution]) -> dict[str, int]:
    """The lane of each worker, in the order in which they came."""
    spans: dict[str, tuple[float, float]] = {}
    for take in sorted(takes, key=lambda take: (take.begun, take.worker)):
        begun, seen = spans.get(take.worker, (take.begun, take.seen))
        spans[take.worker] = (begun, max(seen, take.seen))
    if len(spans) <= LANES:
        return {worker: row for row, worker in enumerate(spans)}
    lanes: dict[str, int] = {}
    until: list[tuple[str, float]] = []
    for worker, (begun, seen) in spans.items():
        host = _worker_host(worker)
        row = next((row for row, (owner, end) in enumerate(until) if owner == host and end <= begun), len(until))
        until[row : row + 1] = [(host, seen)]
        lanes[worker] = row
    return lanes


def _worker_host(worker: str) -> str:
    return worker.rpartition("/")[0] or worker


def _lane_names(lanes: Mapping[str, int]) -> list[str]:
    """What stands beside each lane: the worker, or the host of several."""
    members: dict[int, list[str]] = {}
    for worker, row in lanes.items():
        members.setdefault(row, []).append(worker)
    return [found[0] if len(found) == 1 else _worker_host(found[0]) for _, found in sorted(members.items())]


def _draw_bars(axes: Any, report: SweepReport, track: SweepTimelineLayout, many: bool) -> None:
    """Who had what, by what came of it, and lines between the workers of one trial."""
    for state, members in canvas.group_by_state(report.trials).items():
        found = [track.box(one.takes[-1]) for one in members if one.takes]
        canvas.draw_boxes(axes, found, facecolor=COLOURS[state], edgecolor=PAPER, linewidth=0 if many else 0.5,
                          label=state, hatch="////" if state == "running" else None, zorder=3)  # fmt: skip
    away = [track.box(take) for trial in report.trials for take in trial.takes[:-1]]
    canvas.draw_boxes(axes, away, facecolor="none", edgecolor=INK, linewidth=0.4 if many else 0.6, zorder=3,
                 hatch=None if many else "//////", label="taken over by another worker")  # fmt: skip
    for trial in report.trials:
        for first, second in zip(trial.takes, trial.takes[1:], strict=False):
            axes.plot([track.at(first.seen), track.at(second.begun)],
                      [track.lanes[first.worker], track.lanes[second.worker]], color=INK,
                      linewidth=0.4 if many else 0.8, zorder=3.5)  # fmt: skip


def _draw_annotations(axes: Any, report: SweepReport, track: SweepTimelineLayout, many: bool) -> None:
    """Where pruned trials go on, numbers in bars that are wide enough, and pauses."""
    went_on = [one.takes[0] for one in report.trials if one.continues is not None and one.takes]
    if went_on:
        axes.plot([track.at(take.begun) for take in went_on], [track.lanes[take.worker] for take in went_on],
                  linestyle="", marker="D", markersize=2.5 if many else 5, color=PAPER, markeredgecolor=INK,
                  markeredgewidth=0.8, zorder=6, rasterized=many, label="goes on with a pruned one")  # fmt: skip
    points = WITHIN * canvas.WIDE * 72 / track.long
    for trial in report.trials:
        for take in trial.takes[-1:]:
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


# The picture of what was trained, and of what was not.

SAVED: Mapping[Cause, tuple[str, str]] = {
    "pruned": ("saved by pruning", "////"),
    "refused": ("refused before training", "xxxx"),
}
"""Label and hatch."""

STEPS = 200
"""Of a sum over trials, at most."""

WIDTH = 0.8
"""Of a bar; trials are 1 apart."""


def draw_savings(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the answer tokens that each trial was trained on, and on top of them, hatched, those that were saved.

    A pruned trial that another one goes on with is left to that one. Of many trials the sums until each are drawn.
    """
    old = superseded_numbers(report)
    trials = [trial for trial in report.trials if trial.number not in old]
    saved = {cause: found for cause, found in saved_tokens_by_cause(report).items() if found}
    if not any(trial.cost.trained_tokens for trial in trials) and not saved:
        canvas.save_empty_plot("Nothing has been trained.", target, "savings", form)
        return
    made = canvas.create_figure(3.4)
    axes = made.add_subplot()
    draw = _draw_token_bars if len(trials) <= canvas.MANY else _draw_cumulative_sums
    name = draw(axes, trials, saved)
    canvas.style_axes(axes, "trial", f"answer tokens ({name})" if name else "answer tokens", grid="y")
    room = 0.01 * len(report.trials)
    axes.set_xlim(-0.8 - room, report.trials[-1].number + 0.8 + room)
    axes.set_ylim(bottom=0)
    canvas.set_integer_ticks(axes.xaxis)
    canvas.set_number_ticks(axes.yaxis, format_number)
    canvas.add_legend(made, axes, columns=7)
    canvas.save_figure(made, target, "savings", form)


def _draw_token_bars(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """A bar for each trial; in which unit."""
    trained = {one.number: one.cost.trained_tokens for one in trials}
    size, name = objective_unit(
        "all_tokens", max(*trained.values(), *(max(found.values()) for found in saved.values()), 0)
    )
    for state, members in canvas.group_by_state(trials).items():
        found = [_token_box(one.number, 0.0, trained[one.number] / size) for one in members if trained[one.number]]
        canvas.draw_boxes(axes, found, facecolor=COLOURS[state], label=state, zorder=3)
    for cause, tokens in saved.items():
        label, hatch = SAVED[cause]
        found = [_token_box(one, trained.get(one, 0) / size, count / size) for one, count in tokens.items()]
        canvas.draw_boxes(
            axes, found, edgecolor=QUIET, facecolor="none", hatch=hatch, linewidth=0.5, label=label, zorder=2
        )
    axes.autoscale_view()
    return name


def _draw_cumulative_sums(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """What was trained until each trial, and above it what was saved until then, by cause; in which unit."""
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
