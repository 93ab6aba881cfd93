"""Draws the plot of benchmarks/gate_power.py: decisions of the gate by true difference and number of samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import svg_colours
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, GREY, RED, BLACK = "#0072B2", "#DDDDDD", "#D55E00", "#000000"
"""Palette: Okabe and Ito, Color Universal Design, 2008."""
SHOWN_N = (250, 500, 1000, 2000)
COMPARED_N = (250, 1000)


@dataclass(frozen=True)
class Shares:
    """Shares of the gate's decisions on evaluations of n samples with one true difference."""

    n: int
    difference: float
    promote: float
    hold: float
    reject: float
    raw: float
    """Share promoted by a rule that only requires a score not below the champion's."""
    unpaired: float
    """Share promoted by a rule that requires overlapping intervals of two standard errors."""


def draw(shares: Sequence[Shares], margin: float, stem: Path) -> None:
    """Draw STEM.svg. The bytes are the same each time."""
    mpl.rcParams |= {"svg.hashsalt": "ratchet", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, n in zip(panels, SHOWN_N, strict=False):
        _decisions(axes, [one for one in shares if one.n == n], margin)
        axes.set_title(f"{n:,} samples")
    for axes, n in zip(panels[len(SHOWN_N) :], COMPARED_N, strict=True):
        _rules(axes, [one for one in shares if one.n == n], margin)
        axes.set_title(f"promoted by rules in use, {n:,} samples")
    panels[0].legend(loc="center right", fontsize=7)
    panels[-1].legend(loc="center left", fontsize=6.5)
    figure.supxlabel("true difference, points of accuracy (dashed: margin)", fontsize=9)
    figure.supylabel("share of evaluations", fontsize=9)
    svg_colours.save(figure, stem.with_suffix(".svg"))


def _decisions(axes: Axes, shares: Sequence[Shares], margin: float) -> None:
    points = [100 * one.difference for one in shares]
    layers = [[getattr(one, kind) for one in shares] for kind in ("promote", "hold", "reject")]
    axes.stackplot(points, *layers, colors=(BLUE, GREY, RED), labels=("PROMOTE", "HOLD", "REJECT"))
    _frame(axes, points, margin)


def _rules(axes: Axes, shares: Sequence[Shares], margin: float) -> None:
    points = [100 * one.difference for one in shares]
    axes.plot(
        points, [one.promote for one in shares], color=BLUE, marker="o", markersize=3, clip_on=False, label="this gate"
    )
    axes.plot(
        points,
        [one.raw for one in shares],
        color=RED,
        marker="s",
        markersize=3,
        clip_on=False,
        label="not below the champion",
    )
    unpaired = [one.unpaired for one in shares]
    axes.plot(
        points, unpaired, color=BLACK, marker="^", markersize=3, clip_on=False, label="intervals overlap (unpaired)"
    )
    _frame(axes, points, margin)


def _frame(axes: Axes, points: Sequence[float], margin: float) -> None:
    axes.axvline(-100 * margin, color=BLACK, linestyle="--", linewidth=0.8)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.axhline(0.05, color=BLACK, linestyle=":", linewidth=0.6)
    axes.set_xlim(min(points), max(points))
    axes.set_ylim(0, 1)
