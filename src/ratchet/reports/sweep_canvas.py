"""Where a knob's value lies in a picture, from 0 to 1, and what stands beside the axis."""

import base64
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from ratchet.storage.html import Html, escape_invisible, tag, void_tag
from ratchet.storage.records.sweep import ParameterAxis, SweepObjective, SweepReport, Trial, TrialState
from ratchet.tuning.trial_summary import format_knob_value, format_number, is_same_value, objective_unit

CENTRE = 0.5
"""Where everything lies on an axis without extent."""

STEPS = (1, 2, 5)
"""Round numbers, by power of ten."""

MARGIN, REACH, FEW = 0.06, 3.0, 8
"""Of a frame: left free at both ends; how far it goes beyond the quartiles; values from which on quartiles say much."""

DOUBLINGS = 8
"""Powers of two on a logarithmic axis of whole numbers, at most: ranks are 4, 8, 16 and so on."""


@dataclass(frozen=True)
class ParameterScale:
    """One axis."""

    low: float
    high: float
    """Of numbers; not read where there are choices."""
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, axis: ParameterAxis, values: Iterable[Any]) -> "ParameterScale":
        """The scale of a knob: its range in the search space, and what lies outside of it (a forked study's trials)."""
        found = list(values)
        if axis.kind == "choice":
            extra = [item for item in found if not any(is_same_value(item, one) for one in axis.choices)]
            unique = [
                item for place, item in enumerate(extra) if not any(is_same_value(item, one) for one in extra[:place])
            ]
            return cls(0.0, 1.0, choices=(*axis.choices, *unique))
        numbers = [float(one) for one in found if _is_number(one)]
        ends = [float(one) for one in (axis.low, axis.high) if one is not None] + numbers
        return cls.around(ends, log=axis.log, whole=axis.kind == "int")

    @classmethod
    def around(cls, numbers: Sequence[float], log: bool = False, whole: bool = False) -> "ParameterScale":
        """From the least to the greatest of these numbers."""
        known = [one for one in numbers if math.isfinite(one) and (one > 0 or not log)]
        return cls(min(known, default=1.0), max(known, default=1.0), log, whole)

    def place(self, item: Any) -> float | None:
        """Where a value lies; None where it lies nowhere."""
        if self.choices is not None:
            rank = next((k for k, one in enumerate(self.choices) if is_same_value(one, item)), None)
            return None if rank is None else self._share(rank, 0, len(self.choices) - 1)
        if not _is_number(item) or not math.isfinite(item) or (self.log and item <= 0):
            return None
        low, at, high = (math.log(one) if self.log else one for one in (self.low, float(item), self.high))
        return self._share(at, low, high)

    @staticmethod
    def _share(at: float, low: float, high: float) -> float:
        return CENTRE if high <= low else (at - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Places and texts, so many at most (but two at least), in order."""
        if self.choices is not None:
            return self._choice_ticks(most)
        if self.low >= self.high:
            return [(CENTRE, format_number(self.low))]
        found = self._log_ticks(most) if self.log else self._linear_ticks(most)
        return [(self.place(one) or 0.0, format_number(one)) for one in found]

    def _choice_ticks(self, most: int) -> list[tuple[float, str]]:
        choices = self.choices or ()
        every = max(1, math.ceil(len(choices) / most))
        return [(self.place(one) or 0.0, format_knob_value(one)) for one in choices[::every]]

    def _linear_ticks(self, most: int) -> list[float]:
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(factor * power for factor in (*STEPS, 10, 20, 50) if span / (factor * power) <= most - 1)
        step = max(1.0, round(step)) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        found = [round(k * step, 12) for k in range(first, last + 1)]
        return found if len(found) > 1 else [self.low, self.high]

    def _log_ticks(self, most: int) -> list[float]:
        doublings = self._powers(2)
        if self.whole and 2 <= len(doublings) <= min(most, DOUBLINGS):
            return doublings
        tens = self._powers(10)
        if len(tens) >= 2:
            every = math.ceil(len(tens) / most)
            found = [factor * ten for ten in self._powers(10, beyond=True) for factor in STEPS]
            finer = [one for one in found if self.low * (1 - 1e-9) <= one <= self.high * (1 + 1e-9)]
            return finer if len(finer) <= most else tens[::every]
        if self.whole and len(doublings) >= 2:
            return doublings[:: math.ceil(len(doublings) / most)]
        return [self.low, self.high]

    def _powers(self, root: int, beyond: bool = False) -> list[float]:
        """Powers of a number on the axis; `beyond`: the next below, too."""
        first, last = math.log(self.low, root), math.log(self.high, root)
        start = math.floor(first + 1e-9) if beyond else math.ceil(first - 1e-9)
        return [float(root) ** k for k in range(start, math.floor(last + 1e-9) + 1)]


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def searched_axes(report: SweepReport) -> list[ParameterAxis]:
    """Axes of knobs that were drawn; a tie only repeats another one."""
    return [axis for axis in report.axes if axis.kind != "tie"]


def parameter_scales(report: SweepReport) -> dict[str, ParameterScale]:
    """The scale of each searched knob, over all that was tried."""
    return {
        axis.knob: ParameterScale.of(
            axis, (trial.values[axis.knob] for trial in report.trials if axis.knob in trial.values)
        )
        for axis in searched_axes(report)
    }


def round_ticks(low: float, high: float, most: int, size: float = 1.0) -> list[tuple[float, str]]:
    """Round numbers between two ends and their texts, written in units of `size`."""
    scale = ParameterScale(low / size, high / size)
    span = high - low
    return [(low + share * span, text) for share, text in scale.ticks(most)]


def axis_limits(decisive: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float]:
    """From where to where an axis goes so that what decides can be told apart.

    Values far from the rest (above the third quartile, or below the first, by more than REACH times what lies between
    them) do not stretch it. It goes towards the nearer half of `others`, by its own length at most.
    """
    known = sorted(one for one in decisive if math.isfinite(one))
    more = sorted(one for one in others if math.isfinite(one))
    if not known:
        known, more = more, []
    if not known:
        return 0.0, 1.0
    low, high = _bulk_range(known)
    if more:
        middle = [one for one in more if low <= one <= high] or more
        span, half = high - low or math.inf, more[len(more) // 2]
        low, high = max(low - span, min(low, middle[0], half)), min(high + span, max(high, half))
    room = MARGIN * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _bulk_range(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = ordered[0], ordered[-1]
    if len(ordered) < FEW:
        return low, high
    first, third = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    reach = REACH * (third - first) or math.inf
    return max(low, first - reach), min(high, third + reach)


# Figures of a sweep, and all that they share: colours, texts, axes, and how they are written.
#
# Figures are made without pyplot, which keeps global state and is for one thread. Colours are those of Okabe and Ito
# (Color Universal Design, 2008); every state has a shape, too.

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


def create_figure(high: float, wide: float = WIDE) -> Any:
    """An empty figure; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(wide, high), layout="constrained", facecolor=PAPER)


def style_axes(axes: Any, across: str = "", up: str = "", grid: Literal["x", "y", "both", ""] = "both") -> None:
    """Names of the axes, a quiet frame, a grid."""
    axes.set_xlabel(sanitize_label(across), fontsize=USUAL, color=INK)
    axes.set_ylabel(sanitize_label(up), fontsize=USUAL, color=INK)
    axes.set_facecolor("none")
    axes.tick_params(labelsize=SMALL, labelcolor=INK, color=QUIET)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(QUIET)
        spine.set_linewidth(0.7)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.6)


def write_message(axes: Any, text: str) -> None:
    """What there is instead of a drawing."""
    axes.text(
        0.5, 0.5, sanitize_label(text), transform=axes.transAxes, ha="center", va="center", fontsize=USUAL, color=QUIET
    )


def save_empty_plot(text: str, target: Target, name: str, form: Form) -> None:
    """A picture that only says why it is empty."""
    made = create_figure(1.2)
    axes = made.add_subplot()
    axes.set_axis_off()
    write_message(axes, text)
    save_figure(made, target, name, form)


def draw_points(axes: Any, places: Sequence[tuple[float, float]], state: TrialState, **more: Any) -> None:
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


def draw_star(axes: Any, place: tuple[float, float], label: str) -> None:
    """The trial that the sweep recommends."""
    axes.plot(
        *place, linestyle="", marker="*", markersize=13, color=TOP, markeredgecolor=INK, markeredgewidth=0.7,
        label=sanitize_label(label), zorder=6, clip_on=False,
    )  # fmt: skip


def star_label(report: SweepReport, trial: Trial) -> str:
    """`winner: trial 7`; `best` where no finalists were compared."""
    return f"{'best' if report.winner is None else 'winner'}: trial {trial.number}"


def draw_lines(axes: Any, lines: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    """Many lines of one look; each is thinned to the points that can be seen."""
    from matplotlib.collections import LineCollection

    if lines:
        drawn = [thin_out(line, POINTS) for line in lines]
        label = look.pop("label", None)
        axes.add_collection(LineCollection(drawn, rasterized=len(lines) > MANY_LINES, **look), autolim=True)
        if label:
            axes.plot(
                [], [], color=look.get("colors"), linestyle=look.get("linestyles", "-"), label=sanitize_label(label)
            )


def thin_out(line: Sequence[T], most: int) -> Sequence[T]:
    """So many members at most, evenly spread, the first and the last among them."""
    if len(line) <= most:
        return line
    return [line[round(k * (len(line) - 1) / (most - 1))] for k in range(most)]


def draw_boxes(axes: Any, found: Iterable[Box], **look: Any) -> None:
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


def set_integer_ticks(axis: Any, most: int = 12) -> None:
    """Ticks of an axis at whole numbers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}" if float(at).is_integer() else ""))


def set_number_ticks(axis: Any, written: Callable[[float], str], most: int = 6) -> None:
    """Ticks of an axis, written in our way."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda at, _: sanitize_label(written(at))))


def set_objective_ticks(axis: Any, measure: SweepObjective, limits: tuple[float, float], most: int = 6) -> None:
    """Ticks of an axis between two values of an objective, in its unit."""
    low, high = limits
    size, _ = objective_unit(measure.metric, high)
    found = round_ticks(low, high, most, size)
    axis.set_ticks([place for place, _ in found], labels=[text for _, text in found])


def add_legend(made: Any, *panels: Any, columns: int = 6) -> None:
    """What the marks of these panels mean, once each, below the picture."""
    found: dict[str, Any] = {}
    for axes in panels:
        for drawn, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, drawn)
    if found:
        made.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=SMALL,
                    frameon=False, labelcolor=INK, handletextpad=0.5, columnspacing=1.6)  # fmt: skip


def save_figure(made: Any, target: Target, name: str, form: Form) -> None:
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


def sanitize_label(text: str) -> str:
    """A text of others as it may stand in a picture: no formula, and only letters that the font has."""
    known = _font_characters()
    return "".join(one if ord(one) in known or one == "\n" else "□" for one in escape_invisible(text)).replace(
        "$", r"\$"
    )


@cache
def _font_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def group_by_state(trials: Iterable[Trial]) -> dict[TrialState, list[Trial]]:
    """Trials of each state, in the order of STATES; states that nobody has are left out."""
    found: dict[TrialState, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.state, []).append(trial)
    return {state: found[state] for state in STATES if state in found}


# A drawing as part of a page: it takes the page's colours, light or dark, and letters, and loads nothing.

PX_A_POINT, LEAST = 1.5, 0.65
"""On a wide page, where letters of all pictures have the size of the text around them; share of it on a narrow one."""

PNG = b"\x89PNG"

VARIABLES = {
    INK: "ink",
    QUIET: "quiet",
    RULE: "rule",
    PAPER: "paper",
    TOP: "top",
    **{colour: state for state, colour in COLOURS.items()},
}
"""Colours of pictures, and the CSS variables of reports/sweep.css that stand for them on a page."""

_LEFT_OUT = (
    re.compile(r"<metadata>.*?</metadata>", re.S),
    # It would hold for the whole page.
    re.compile(r"<style[^>]*>.*?</style>", re.S),
)
_STYLE = re.compile(r' style="([^"]*)"')
_FAMILY = re.compile(r"font-family:[^;]*;? ?")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_GROUP = re.compile(r'<g id="[^"]*"')
_LINES = re.compile(r"\s*\n\s*")
_FRAME = re.compile(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>')
_FILL = re.compile(r' fill="([^"]*)"')
_STILL = re.compile(r' transform="rotate\(-0 [^)]*\)"')


def render_figure(drawing: bytes, title: str, note: str, said: str) -> Html:
    """A figure with its caption.

    Args:
        drawing: SVG as matplotlib writes it, or PNG.
        title: of the picture.
        note: how it is read.
        said: what it shows, for those who hear it.
    """
    if drawing.startswith(PNG):
        source = f"data:image/png;base64,{base64.b64encode(drawing).decode('ascii')}"
        shown = void_tag("img", src=source, alt=said)
    else:
        shown = _embed_svg(drawing.decode("utf-8"), said)
    caption = tag("figcaption", title, tag("span", f" {note}"))
    frame = tag("div", shown, class_="scroll", role="region", aria_label=title, tabindex="0")
    return tag("figure", caption, frame, class_="picture")


def _embed_svg(text: str, said: str) -> Html:
    """An SVG file's content as an element of a page."""
    for pattern in _LEFT_OUT:
        text = pattern.sub("", text)
    found = _FRAME.search(text)
    if found is None:
        raise ValueError("the drawing is no SVG with a view box")
    inner = text[found.end() : text.rindex("</svg>")]
    # Ids of groups come again in each picture, and nobody refers to them.
    inner = _LINES.sub(" ", _GROUP.sub("<g", inner)).replace("> <", "><")
    inner = _STILL.sub("", inner.replace("xlink:href=", "href="))
    # Of the ground of hatches; a colour that is no style gives way to the page's own for rectangles.
    inner = _STYLE.sub(_style_with_page_colours, _FILL.sub(r' style="fill: \1; stroke: none"', inner))
    widest = float(found[1].split()[2]) * PX_A_POINT
    size = f"min-width:{widest * LEAST:.0f}px;max-width:{widest:.0f}px"
    return tag("svg", Html(inner), viewBox=found[1], style=size, role="img", aria_label=said)


def _style_with_page_colours(found: re.Match[str]) -> str:
    """A style in the page's colours; letters are the page's, too."""
    style = _FAMILY.sub("", found[1])
    style = _COLOUR.sub(lambda one: f"var(--{VARIABLES[one[0]]})" if one[0] in VARIABLES else one[0], style)
    return f' style="{style}"'
