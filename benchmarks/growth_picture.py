"""Draws the plot of benchmarks/growth.py: constant and linear quantities by steps, rows and rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import svg_colours
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, BLACK = "#0072B2", "#D55E00", "#000000"
"""Palette: Okabe and Ito, Color Universal Design, 2008."""
WINDOW_STEPS = 50
MB = 1e6


@dataclass(frozen=True)
class Growth:
    """All measurements."""

    steps: dict[str, Any]
    """Results of one training of many steps (growth_cell.py)."""
    ranks: Sequence[dict[str, Any]]
    rows: dict[int, list[dict[str, Any]]]
    """Results by number of rows, one per turn."""


def windows(steps: dict[str, Any]) -> list[float]:
    """Return tokens per second of each window of WINDOW_STEPS steps. An incomplete window at the end is left out."""
    starts = range(0, len(steps["step_s"]) - WINDOW_STEPS + 1, WINDOW_STEPS)
    return [
        sum(steps["tokens"][start : start + WINDOW_STEPS]) / sum(steps["step_s"][start : start + WINDOW_STEPS])
        for start in starts
    ]


def draw(found: Growth, stem: Path) -> None:
    """Draw STEM.svg."""
    mpl.rcParams |= {"svg.hashsalt": "ratchet", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    panels = figure.subplots(2, 3)
    _steps(panels[0], found.steps)
    _others(panels[1], found)
    svg_colours.save(figure, stem.with_suffix(".svg"))


def _steps(panels: Sequence[Axes], steps: dict[str, Any]) -> None:
    """Draw memory and speed of a training by step."""
    speed = windows(steps)
    places = [WINDOW_STEPS * (number + 1) for number in range(len(speed))]
    _line(panels[0], places, speed, "tokens/s", "optimizer steps")
    samples = steps["samples"]
    places = [one["step"] for one in samples]
    _line(panels[1], places, [one["resident_bytes"] / MB for one in samples], "resident memory, MB", "optimizer steps")
    _line(panels[2], places, [one["journal_bytes"] / MB for one in samples], "on the disk, MB", "optimizer steps")
    panels[2].lines[0].set_label("journal")
    saved = [one for one in samples if one["checkpoint_bytes"]]
    sizes = [one["checkpoint_bytes"] / MB for one in saved]
    panels[2].plot([one["step"] for one in saved], sizes, color=RED, label="newest checkpoint")
    panels[2].legend(fontsize=7)


def _others(panels: Sequence[Axes], found: Growth) -> None:
    """Draw the cost of data and adapters by size."""
    counts = sorted(found.rows)
    for axes, title, keys in (
        (panels[0], "tokens/s", ("tokens_per_s",)),
        (panels[1], "data ready after, s", ("verify_s", "open_s", "packed_s")),
    ):
        for turn in range(len(found.rows[counts[0]])):
            values = [sum(found.rows[count][turn][key] for key in keys) for count in counts]
            axes.plot(counts, values, color=BLUE, marker="o", markersize=3, linewidth=0.8)
        _frame(axes, title, "rows")
        axes.set_xscale("log")
    sizes = [one["bytes"] / MB for one in found.ranks]
    thousands = [one["parameters"] / 1000 for one in found.ranks]
    _line(panels[2], thousands, sizes, "checkpoint, MB", "trainable parameters, thousands")
    panels[2].lines[0].set_marker("o")


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], title: str, below: str) -> None:
    axes.plot(x, y, color=BLUE, markersize=3)
    _frame(axes, title, below)


def _frame(axes: Axes, title: str, below: str) -> None:
    """Set labels. The axis begins at zero, so that only a constant quantity looks flat."""
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.set_ylim(bottom=0, top=1.15 * max(max(line.get_ydata()) for line in axes.lines))
