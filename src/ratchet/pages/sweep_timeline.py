"""The picture of who worked on which trial when."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import COLOURS, INK, PAPER, QUIET, SMALL, Form, Target
from ratchet.pages.sweep_clock import Clock
from ratchet.pages.sweep_trials import duration, number, shown, unit
from ratchet.records_sweep import SweepReport, Take

LANE_INCHES, BAR = 0.3, 0.62
"""Height of a worker, and the share of it that its bars fill."""

LANES = 24
"""Workers that have a lane each; with more, one that began after another of its host had ended has that one's lane."""

LETTER_POINTS, SIGN_POINTS, WITHIN = 5.2, 5.0, 0.82
"""Width of a digit in a bar, of the sign before it; share of the picture that the axis fills."""

BLACK = "#000001"
"""Of numbers on light bars, on light paper and on dark: no colour that follows the paper."""


@dataclass(frozen=True)
class Track:
    """Where things lie."""

    lanes: Mapping[str, int]
    """By worker."""
    clock: Clock
    size: float
    """Seconds of the unit of the axis."""

    @property
    def long(self) -> float:
        """The whole axis."""
        return max(self.clock.end / self.size, 1e-9)

    def at(self, moment: float) -> float:
        """A Unix time on the axis."""
        return self.clock.at(moment) / self.size

    def box(self, take: Take) -> canvas.Box:
        """Of one worker's time with a trial; one that took no time is seen, too."""
        begin, stop = self.at(take.begun), self.at(take.seen)
        return begin, self.lanes[take.worker] - BAR / 2, max(stop - begin, self.long * 1e-3), BAR


def timeline(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw who worked on which trial when: a lane a worker, a bar each time that it had a trial.

    A trial that was taken over has several bars, joined by a thin line; all but the last are hatched. A diamond begins
    one that goes on with a pruned trial. Pauses in which nobody worked are cut out, at a dotted line.
    """
    takes = [take for trial in report.trials for take in trial.takes]
    if not takes:
        canvas.nothing("No worker has had a trial.", target, "timeline", form)
        return
    lanes = lanes_of(takes)
    clock = Clock.of((take.begun, take.seen) for take in takes)
    size, name = unit("worked_seconds", clock.end)
    track = Track(lanes, clock, size)
    names = _names(lanes)
    made = canvas.figure(1.2 + LANE_INCHES * len(names))
    axes = made.add_subplot()
    many = len(takes) > canvas.MANY
    if many:
        axes.set_rasterization_zorder(4)
    _bars(axes, report, track, many)
    _signs(axes, report, track, many)
    canvas.dress(axes, f"time worked since the sweep began ({name})", grid="x")
    canvas.figures(axes.xaxis, number, 9)
    axes.set_yticks(range(len(names)), [canvas.plain(shown(one)) for one in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-0.01 * track.long, 1.01 * track.long)
    canvas.legend(made, axes, columns=7)
    canvas.save(made, target, "timeline", form)


def lanes_of(takes: Iterable[Take]) -> dict[str, int]:
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
        host = _host(worker)
        row = next((row for row, (owner, end) in enumerate(until) if owner == host and end <= begun), len(until))
        until[row : row + 1] = [(host, seen)]
        lanes[worker] = row
    return lanes


def _host(worker: str) -> str:
    return worker.rpartition("/")[0] or worker


def _names(lanes: Mapping[str, int]) -> list[str]:
    """What stands beside each lane: the worker, or the host of several."""
    members: dict[int, list[str]] = {}
    for worker, row in lanes.items():
        members.setdefault(row, []).append(worker)
    return [found[0] if len(found) == 1 else _host(found[0]) for _, found in sorted(members.items())]


def _bars(axes: Any, report: SweepReport, track: Track, many: bool) -> None:
    """Who had what, by what came of it, and lines between the workers of one trial."""
    for state, members in canvas.by_state(report.trials).items():
        found = [track.box(one.takes[-1]) for one in members if one.takes]
        canvas.boxes(axes, found, facecolor=COLOURS[state], edgecolor=PAPER, linewidth=0 if many else 0.5, label=state,
                     hatch="////" if state == "running" else None, zorder=3)  # fmt: skip
    away = [track.box(take) for trial in report.trials for take in trial.takes[:-1]]
    canvas.boxes(axes, away, facecolor="none", edgecolor=INK, linewidth=0.4 if many else 0.6, zorder=3,
                 hatch=None if many else "//////", label="taken over by another worker")  # fmt: skip
    for trial in report.trials:
        for first, second in zip(trial.takes, trial.takes[1:], strict=False):
            axes.plot([track.at(first.seen), track.at(second.begun)],
                      [track.lanes[first.worker], track.lanes[second.worker]], color=INK,
                      linewidth=0.4 if many else 0.8, zorder=3.5)  # fmt: skip


def _signs(axes: Any, report: SweepReport, track: Track, many: bool) -> None:
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
        axes.annotate(f"{duration(stop - begin)} pause", (track.at(stop), -0.6), xytext=(3, 2), va="bottom",
                      textcoords="offset points", fontsize=SMALL, color=QUIET)  # fmt: skip
