"""Figures of a sweep, and all that they share: colours, texts, axes, and how they are written.

Figures are made without pyplot, which keeps global state and is for one thread. Colours are those of Okabe and Ito
(Color Universal Design, 2008); every state has a shape, too.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from ratchet.markup import visible
from ratchet.pages.sweep_scale import round_ticks
from ratchet.pages.sweep_trials import unit
from ratchet.records_sweep import Measure, SweepReport, Trial, TrialState

Form = Literal["auto", "png", "svg"]
"""`auto`: by the name of the file; what has no name becomes PNG."""

Target = Path | IO[bytes]
T = TypeVar("T")

Box = tuple[float, float, float, float]
"""Left, bottom, width, height."""

WIDE = 9.5
"""Inches: nine points then are well read on a page of a thousand pixels."""
DPI, DPI_WITHIN = 130, 96
"""Of a PNG, and of the pixels in an SVG."""
SMALL, USUAL = 8.0, 9.0
"""Of texts, in points."""

INK, QUIET, RULE, PAPER = "#1c1e21", "#5a6069", "#dddfdb", "#ffffff"
"""Written text and lines that decide; beside it; grid; background. On a page they follow its light and dark."""

COLOURS: Mapping[TrialState, str] = {
    "complete": "#0072b2",
    "pruned": "#8b8f96",
    "infeasible": "#e69f00",
    "failed": "#d55e00",
    "running": "#56b4e9",
}
TOP = "#009e73"
"""What is among the best."""

SHAPES: Mapping[TrialState, str] = {"complete": "o", "pruned": "x", "infeasible": "^", "failed": "P", "running": "s"}
STATES: tuple[TrialState, ...] = ("complete", "pruned", "infeasible", "failed", "running")

MANY, MANY_LINES = 150, 250
"""Points and lines from which on they are pixels within a drawing of lines, so that a page stays small. Lines that
cross in an area make large pixels: 500 of them in parallel coordinates are 0.1 MB drawn and 0.6 MB as pixels."""

POINTS = 80
"""Of one curve, at most: more cannot be told apart in a picture of this width."""

_SAVING = threading.Lock()


def figure(high: float, wide: float = WIDE) -> Any:
    """An empty figure; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(wide, high), layout="constrained", facecolor=PAPER)


def dress(axes: Any, across: str = "", up: str = "", grid: Literal["x", "y", "both", ""] = "both") -> None:
    """Names of the axes, a quiet frame, a grid."""
    axes.set_xlabel(plain(across), fontsize=USUAL, color=INK)
    axes.set_ylabel(plain(up), fontsize=USUAL, color=INK)
    axes.set_facecolor("none")
    axes.tick_params(labelsize=SMALL, labelcolor=INK, color=QUIET)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(QUIET)
        spine.set_linewidth(0.7)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.6)


def say(axes: Any, text: str) -> None:
    """What there is instead of a drawing."""
    axes.text(0.5, 0.5, plain(text), transform=axes.transAxes, ha="center", va="center", fontsize=USUAL, color=QUIET)


def nothing(text: str, target: Target, name: str, form: Form) -> None:
    """A picture that only says why it is empty."""
    made = figure(1.2)
    axes = made.add_subplot()
    axes.set_axis_off()
    say(axes, text)
    save(made, target, name, form)


def dots(axes: Any, places: Sequence[tuple[float, float]], state: TrialState, **more: Any) -> None:
    """A mark for each place, as those of this state look; what is drawn is `more`'s to change (a label, a size)."""
    if not places:
        return
    colour, hollow = COLOURS[state], state == "running"
    look: dict[str, Any] = {
        "linestyle": "", "marker": SHAPES[state], "markersize": 5 if len(places) <= MANY else 3.2, "color": colour,
        "label": state, "zorder": 4 if state == "complete" else 3,
        "markeredgecolor": colour if state in ("pruned", "running") else PAPER,
        "markeredgewidth": 1.0 if state in ("pruned", "running") else 0.5,
        "markerfacecolor": "none" if hollow else colour, "rasterized": len(places) > MANY,
    }  # fmt: skip
    axes.plot(*zip(*places, strict=True), **{**look, **more})


def star(axes: Any, place: tuple[float, float], label: str) -> None:
    """The trial that the sweep recommends."""
    axes.plot(
        *place, linestyle="", marker="*", markersize=13, color=TOP, markeredgecolor=INK, markeredgewidth=0.7,
        label=plain(label), zorder=6, clip_on=False,
    )  # fmt: skip


def star_title(report: SweepReport, trial: Trial) -> str:
    """`winner: trial 7`; `best` where no finalists were compared."""
    return f"{'best' if report.winner is None else 'winner'}: trial {trial.number}"


def strokes(axes: Any, lines: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    """Many lines of one look; each is thinned to the points that can be seen."""
    from matplotlib.collections import LineCollection

    if lines:
        drawn = [thinned(line, POINTS) for line in lines]
        label = look.pop("label", None)
        axes.add_collection(LineCollection(drawn, rasterized=len(lines) > MANY_LINES, **look), autolim=True)
        if label:
            axes.plot([], [], color=look.get("colors"), linestyle=look.get("linestyles", "-"), label=plain(label))


def thinned(line: Sequence[T], most: int) -> Sequence[T]:
    """So many members at most, evenly spread, the first and the last among them."""
    if len(line) <= most:
        return line
    return [line[round(k * (len(line) - 1) / (most - 1))] for k in range(most)]


def boxes(axes: Any, found: Iterable[Box], **look: Any) -> None:
    """Rectangles of one look as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners, codes = [], []
    for left, bottom, wide, high in found:
        corners += [(left, bottom), (left + wide, bottom), (left + wide, bottom + high), (left, bottom + high)]
        corners.append((left, bottom))
        codes += [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
    if corners:
        axes.add_patch(PathPatch(Outline(corners, codes), **{"linewidth": 0, **look}))


def wholes(axis: Any, most: int = 12) -> None:
    """Ticks of an axis at whole numbers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}" if float(at).is_integer() else ""))


def figures(axis: Any, written: Callable[[float], str], most: int = 6) -> None:
    """Ticks of an axis, written in our way."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda at, _: plain(written(at))))


def amounts(axis: Any, measure: Measure, limits: tuple[float, float], most: int = 6) -> None:
    """Ticks of an axis between two values of an objective, in its unit."""
    low, high = limits
    size, _ = unit(measure.metric, high)
    found = round_ticks(low, high, most, size)
    axis.set_ticks([place for place, _ in found], labels=[text for _, text in found])


def legend(made: Any, *panels: Any, columns: int = 6) -> None:
    """What the marks of these panels mean, once each, below the picture."""
    found: dict[str, Any] = {}
    for axes in panels:
        for drawn, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, drawn)
    if found:
        made.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=SMALL,
                    frameon=False, labelcolor=INK, handletextpad=0.5, columnspacing=1.6)  # fmt: skip


def save(made: Any, target: Target, name: str, form: Form) -> None:
    """Write a figure; equal figures give equal bytes.

    Args:
        made: the figure.
        target: file or stream.
        name: of the picture; names of what is drawn twice in it (SVG) are made from it.
        form: of the file.
    """
    from matplotlib import rc_context

    kind = form
    if kind == "auto":
        kind = "svg" if isinstance(target, Path) and target.suffix == ".svg" else "png"
    # Texts of an SVG stay texts: they are read aloud, found, and a fifth of the size. Only the SVG writer reads these
    # two, and it has no argument for them; one thread at a time, or another would restore them before they are read.
    with _SAVING, rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        if kind == "svg":
            made.savefig(target, format=kind, dpi=DPI_WITHIN, metadata={"Date": None})
        else:
            made.savefig(target, format=kind, dpi=DPI)


def plain(text: str) -> str:
    """A text of others as it may stand in a picture: no formula, and only letters that the font has."""
    known = _letters()
    return "".join(one if ord(one) in known or one == "\n" else "□" for one in visible(text)).replace("$", r"\$")


@cache
def _letters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def by_state(trials: Iterable[Trial]) -> dict[TrialState, list[Trial]]:
    """Trials of each state, in the order of STATES; states that nobody has are left out."""
    found: dict[TrialState, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.state, []).append(trial)
    return {state: found[state] for state in STATES if state in found}
