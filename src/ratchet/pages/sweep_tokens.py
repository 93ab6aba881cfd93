"""The picture of what was trained, and of what was not."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ratchet.pages import sweep_canvas as canvas
from ratchet.pages.sweep_canvas import COLOURS, QUIET, Form, Target
from ratchet.pages.sweep_savings import Cause, avoided_tokens
from ratchet.pages.sweep_trials import number, superseded, unit
from ratchet.records_sweep import SweepReport, Trial

SAVED: Mapping[Cause, tuple[str, str]] = {
    "pruned": ("saved by pruning", "////"),
    "refused": ("refused before training", "xxxx"),
}
"""Label and hatch."""

STEPS = 200
"""Of a sum over trials, at most."""

WIDTH = 0.8
"""Of a bar; trials are 1 apart."""


def savings(report: SweepReport, target: Target, form: Form = "auto") -> None:
    """Draw the answer tokens that each trial was trained on, and on top of them, hatched, those that were saved.

    A pruned trial that another one goes on with is left to that one. Of many trials the sums until each are drawn.
    """
    old = superseded(report)
    trials = [trial for trial in report.trials if trial.number not in old]
    saved = {cause: found for cause, found in avoided_tokens(report).items() if found}
    if not any(trial.cost.trained_tokens for trial in trials) and not saved:
        canvas.nothing("Nothing has been trained.", target, "savings", form)
        return
    made = canvas.figure(3.4)
    axes = made.add_subplot()
    draw = _bars if len(trials) <= canvas.MANY else _sums
    name = draw(axes, trials, saved)
    canvas.dress(axes, "trial", f"answer tokens ({name})" if name else "answer tokens", grid="y")
    room = 0.01 * len(report.trials)
    axes.set_xlim(-0.8 - room, report.trials[-1].number + 0.8 + room)
    axes.set_ylim(bottom=0)
    canvas.wholes(axes.xaxis)
    canvas.figures(axes.yaxis, number)
    canvas.legend(made, axes, columns=7)
    canvas.save(made, target, "savings", form)


def _bars(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """A bar for each trial; in which unit."""
    trained = {one.number: one.cost.trained_tokens for one in trials}
    size, name = unit("all_tokens", max(*trained.values(), *(max(found.values()) for found in saved.values()), 0))
    for state, members in canvas.by_state(trials).items():
        found = [_bar(one.number, 0.0, trained[one.number] / size) for one in members if trained[one.number]]
        canvas.boxes(axes, found, facecolor=COLOURS[state], label=state, zorder=3)
    for cause, tokens in saved.items():
        label, hatch = SAVED[cause]
        found = [_bar(one, trained.get(one, 0) / size, count / size) for one, count in tokens.items()]
        canvas.boxes(axes, found, edgecolor=QUIET, facecolor="none", hatch=hatch, linewidth=0.5, label=label, zorder=2)
    axes.autoscale_view()
    return name


def _sums(axes: Any, trials: Sequence[Trial], saved: Mapping[Cause, Mapping[int, int]]) -> str:
    """What was trained until each trial, and above it what was saved until then, by cause; in which unit."""
    done = list(accumulate(one.cost.trained_tokens for one in trials))
    layers = {cause: list(accumulate(found.get(one.number, 0) for one in trials)) for cause, found in saved.items()}
    size, name = unit("all_tokens", done[-1] + sum(layer[-1] for layer in layers.values()))
    seen = canvas.thinned(range(len(trials)), STEPS)
    numbers = [trials[one].number for one in seen]
    below, above = [0.0] * len(seen), [done[one] / size for one in seen]
    axes.fill_between(numbers, below, above, facecolor=COLOURS["complete"], linewidth=0, label="trained", zorder=3)
    for cause, layer in layers.items():
        label, hatch = SAVED[cause]
        below, above = above, [base + layer[one] / size for base, one in zip(above, seen, strict=True)]
        axes.fill_between(numbers, below, above, facecolor="none", edgecolor=QUIET, hatch=hatch, linewidth=0.6,
                          label=label, zorder=2)  # fmt: skip
    return name


def _bar(number: int, bottom: float, high: float) -> canvas.Box:
    return number - WIDTH / 2, bottom, WIDTH, high
