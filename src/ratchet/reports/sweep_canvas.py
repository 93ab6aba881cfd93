"""Scales, axes, colours, file output and page embedding for all plots of a sweep."""

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
from ratchet.tuning.trial_summary import format_number, format_parameter_value, is_same_value, objective_unit

CENTRE = 0.5
"""Position of the value on an axis with a single value."""

STEPS = (1, 2, 5)
"""Round tick steps, times a power of ten."""

MARGIN, REACH, FEW = 0.06, 3.0, 8
"""Margin at both ends of a frame, as a share of its length; maximum reach of the frame beyond the quartiles, in
interquartile ranges; and minimum number of values for quartiles."""

DOUBLINGS = 8
"""Maximum number of powers of two on a logarithmic integer axis, as for ranks 4, 8, 16."""

Form = Literal["auto", "png", "svg"]
"""File format. `auto` uses the ending of the file name, and PNG for streams."""
Target = Path | IO[bytes]
T = TypeVar("T")
Box = tuple[float, float, float, float]
"""Left, bottom, width, height."""
WIDE = 9.5
"""Width of a figure in inches, at which text of nine points is readable on a page of a thousand pixels."""
DPI, DPI_WITHIN = 130, 96
"""Resolution of a PNG, and of pixel images inside an SVG, in dots per inch."""
SMALL, USUAL = 8.0, 9.0
"""Font sizes in points."""
INK, QUIET, RULE, PAPER = "#1c1e21", "#5a6069", "#dddfdb", "#ffffff"
"""Colours of text and main lines, secondary text, grid, and background. In a page, these colours follow its theme."""
COLOURS: Mapping[TrialState, str] = {
    "complete": "#0072b2",
    "pruned": "#8b8f96",
    "infeasible": "#e69f00",
    "failed": "#d55e00",
    "running": "#56b4e9",
}
TOP = "#009e73"
"""Colour of the best trials."""
SHAPES: Mapping[TrialState, str] = {"complete": "o", "pruned": "x", "infeasible": "^", "failed": "P", "running": "s"}
STATES: tuple[TrialState, ...] = ("complete", "pruned", "infeasible", "failed", "running")
MANY, MANY_LINES = 150, 250
"""Numbers of points and of lines above which an SVG contains them as pixels, to limit its size. The limit for lines is
higher, because crossing lines rasterize badly: 500 lines of parallel coordinates are 0.1 MB as vectors and 0.6 MB as
pixels.
"""
MAX_POINTS = 80
"""Maximum number of points per curve. More points are indistinguishable at this width."""
_SAVE_LOCK = threading.Lock()
PX_PER_POINT, MIN_SCALE = 1.5, 0.65
"""Pixels per point in a wide page, which give all plots the page's font size, and minimum scale in a narrow page."""
PNG = b"\x89PNG"
"""First bytes of a PNG."""
VARIABLES = {
    INK: "ink",
    QUIET: "quiet",
    RULE: "rule",
    PAPER: "paper",
    TOP: "top",
    **{colour: state for state, colour in COLOURS.items()},
}
"""Colours of plots, and the CSS variables of reports/sweep.css that replace them in a page."""
_OMITTED = (
    re.compile(r"<metadata>.*?</metadata>", re.S),
    # This rule would apply to the whole page.
    re.compile(r"<style[^>]*>.*?</style>", re.S),
)
_STYLE = re.compile(r' style="([^"]*)"')
_FAMILY = re.compile(r"font-family:[^;]*;? ?")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_GROUP = re.compile(r'<g id="[^"]*"')
_LINES = re.compile(r"\s*\n\s*")
_FRAME = re.compile(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>')
_FILL = re.compile(r' fill="([^"]*)"')
_ZERO_ROTATION = re.compile(r' transform="rotate\(-0 [^)]*\)"')


@dataclass(frozen=True)
class ParameterScale:
    """Map from values of a hyperparameter to positions from 0 to 1 on an axis."""

    low: float
    """Lower end of the axis of numbers; unused for choices."""
    high: float
    """Upper end of the axis of numbers; unused for choices."""
    log: bool = False
    integer: bool = False
    choices: tuple[Any, ...] | None = None

    @classmethod
    def from_axis(cls, axis: ParameterAxis, values: Iterable[Any]) -> "ParameterScale":
        """Return the scale of a hyperparameter: its range in the search space, extended by the trials' values.

        Trials of a forked study may have values outside the range.
        """
        items = list(values)
        if axis.kind == "choice":
            extra = [item for item in items if not any(is_same_value(item, choice) for choice in axis.choices)]
            unique = [
                item
                for place, item in enumerate(extra)
                if not any(is_same_value(item, earlier) for earlier in extra[:place])
            ]
            return cls(0.0, 1.0, choices=(*axis.choices, *unique))
        numbers = [float(item) for item in items if _is_number(item)]
        ends = [float(end) for end in (axis.low, axis.high) if end is not None] + numbers
        return cls.from_numbers(ends, log=axis.log, integer=axis.kind == "int")

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], log: bool = False, integer: bool = False) -> "ParameterScale":
        """Return a scale from the minimum to the maximum of these numbers."""
        known = [number for number in numbers if math.isfinite(number) and (number > 0 or not log)]
        return cls(min(known, default=1.0), max(known, default=1.0), log, integer)

    def place(self, item: Any) -> float | None:
        """Return the position of a value, or None if it is not on the axis."""
        if self.choices is not None:
            rank = next((k for k, choice in enumerate(self.choices) if is_same_value(choice, item)), None)
            return None if rank is None else self._share(rank, 0, len(self.choices) - 1)
        if not _is_number(item) or not math.isfinite(item) or (self.log and item <= 0):
            return None
        low, middle, high = (math.log(number) if self.log else number for number in (self.low, float(item), self.high))
        return self._share(middle, low, high)

    @staticmethod
    def _share(value: float, low: float, high: float) -> float:
        return CENTRE if high <= low else (value - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return positions and texts of at most `most` ticks (`most` is at least two), in order."""
        if self.choices is not None:
            return self._choice_ticks(most)
        if self.low >= self.high:
            return [(CENTRE, format_number(self.low))]
        numbers = self._log_ticks(most) if self.log else self._linear_ticks(most)
        return [(self.place(number) or 0.0, format_number(number)) for number in numbers]

    def _choice_ticks(self, most: int) -> list[tuple[float, str]]:
        choices = self.choices or ()
        stride = max(1, math.ceil(len(choices) / most))
        return [(self.place(choice) or 0.0, format_parameter_value(choice)) for choice in choices[::stride]]

    def _linear_ticks(self, most: int) -> list[float]:
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(factor * power for factor in (*STEPS, 10, 20, 50) if span / (factor * power) <= most - 1)
        step = max(1.0, round(step)) if self.integer else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        ticks = [round(k * step, 12) for k in range(first, last + 1)]
        return ticks if len(ticks) > 1 else [self.low, self.high]

    def _log_ticks(self, most: int) -> list[float]:
        doublings = self._powers(2)
        if self.integer and 2 <= len(doublings) <= min(most, DOUBLINGS):
            return doublings
        tens = self._powers(10)
        if len(tens) >= 2:
            stride = math.ceil(len(tens) / most)
            ticks = [factor * ten for ten in self._powers(10, beyond=True) for factor in STEPS]
            finer = [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]
            return finer if len(finer) <= most else tens[::stride]
        if self.integer and len(doublings) >= 2:
            return doublings[:: math.ceil(len(doublings) / most)]
        return [self.low, self.high]

    def _powers(self, root: int, beyond: bool = False) -> list[float]:
        """Return the powers of `root` within the axis. `beyond` adds the next lower power."""
        first, last = math.log(self.low, root), math.log(self.high, root)
        start = math.floor(first + 1e-9) if beyond else math.ceil(first - 1e-9)
        return [float(root) ** k for k in range(start, math.floor(last + 1e-9) + 1)]


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def searched_axes(report: SweepReport) -> list[ParameterAxis]:
    """Return the axes of sampled hyperparameters, without those that are tied to another hyperparameter."""
    return [axis for axis in report.axes if axis.kind != "tie"]


def parameter_scales(report: SweepReport) -> dict[str, ParameterScale]:
    """Return the scale of each searched hyperparameter over all trials."""
    return {
        axis.name: ParameterScale.from_axis(
            axis, (trial.values[axis.name] for trial in report.trials if axis.name in trial.values)
        )
        for axis in searched_axes(report)
    }


def round_ticks(low: float, high: float, most: int, size: float = 1.0) -> list[tuple[float, str]]:
    """Return round numbers between two ends and their texts, in units of `size`."""
    scale = ParameterScale(low / size, high / size)
    span = high - low
    return [(low + share * span, text) for share, text in scale.ticks(most)]


def axis_limits(decisive: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float]:
    """Return limits of an axis that keep the important values distinguishable.

    Outliers (beyond a quartile by more than REACH times the interquartile range) do not extend the axis. The axis
    extends towards the nearer half of `others`, by at most its own length.
    """
    known = sorted(value for value in decisive if math.isfinite(value))
    more = sorted(value for value in others if math.isfinite(value))
    if not known:
        known, more = more, []
    if not known:
        return 0.0, 1.0
    low, high = _bulk_range(known)
    if more:
        middle = [value for value in more if low <= value <= high] or more
        span, half = high - low or math.inf, more[len(more) // 2]
        low, high = max(low - span, min(low, middle[0], half)), min(high + span, max(high, half))
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def _bulk_range(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = ordered[0], ordered[-1]
    if len(ordered) < FEW:
        return low, high
    first, third = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    reach = REACH * (third - first) or math.inf
    return max(low, first - reach), min(high, third + reach)


# Shared style of all figures of a sweep. Figures are created without pyplot, which keeps global state and is not
# thread-safe. Colours are those of Okabe and Ito (Color Universal Design, 2008); every state also has its own shape.


def create_figure(high: float, wide: float = WIDE) -> Any:
    """Create an empty figure. Sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(wide, high), layout="constrained", facecolor=PAPER)


def style_axes(axes: Any, across: str = "", up: str = "", grid: Literal["x", "y", "both", ""] = "both") -> None:
    """Set axis names, frame and grid."""
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
    """Write a message in place of a plot."""
    axes.text(
        0.5, 0.5, sanitize_label(text), transform=axes.transAxes, ha="center", va="center", fontsize=USUAL, color=QUIET
    )


def save_empty_plot(text: str, target: Target, name: str, form: Form) -> None:
    """Write a picture with a text that explains why there is no plot."""
    figure = create_figure(1.2)
    axes = figure.add_subplot()
    axes.set_axis_off()
    write_message(axes, text)
    save_figure(figure, target, name, form)


def draw_points(axes: Any, places: Sequence[tuple[float, float]], state: TrialState, **more: Any) -> None:
    """Draw a marker at each position in the style of the state. `more` overrides arguments such as label and size."""
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
    """Mark the trial that the sweep recommends."""
    axes.plot(
        *place, linestyle="", marker="*", markersize=13, color=TOP, markeredgecolor=INK, markeredgewidth=0.7,
        label=sanitize_label(label), zorder=6, clip_on=False,
    )  # fmt: skip


def star_label(report: SweepReport, trial: Trial) -> str:
    """Return a label such as `winner: trial 7`, or `best: trial 7` without a final round."""
    return f"{'best' if report.winner is None else 'winner'}: trial {trial.number}"


def draw_lines(axes: Any, lines: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    """Draw many lines of one style, each thinned to the number of visible points."""
    from matplotlib.collections import LineCollection

    if lines:
        thinned = [thin_out(line, MAX_POINTS) for line in lines]
        label = look.pop("label", None)
        axes.add_collection(LineCollection(thinned, rasterized=len(lines) > MANY_LINES, **look), autolim=True)
        if label:
            axes.plot(
                [], [], color=look.get("colors"), linestyle=look.get("linestyles", "-"), label=sanitize_label(label)
            )


def thin_out(line: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` evenly spaced members, including the first and the last."""
    if len(line) <= most:
        return line
    return [line[round(k * (len(line) - 1) / (most - 1))] for k in range(most)]


def draw_boxes(axes: Any, boxes: Iterable[Box], **look: Any) -> None:
    """Draw rectangles of one style as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners, codes = [], []
    for left, bottom, wide, high in boxes:
        corners += [(left, bottom), (left + wide, bottom), (left + wide, bottom + high), (left, bottom + high)]
        corners.append((left, bottom))
        codes += [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
    if corners:
        axes.add_patch(PathPatch(Outline(corners, codes), **{"linewidth": 0, **look}))


def set_integer_ticks(axis: Any, most: int = 12) -> None:
    """Set ticks at integers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}" if float(at).is_integer() else ""))


def set_number_ticks(axis: Any, format_tick: Callable[[float], str], most: int = 6) -> None:
    """Set ticks at round numbers, with texts from `format_tick`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda at, _: sanitize_label(format_tick(at))))


def set_objective_ticks(axis: Any, objective: SweepObjective, limits: tuple[float, float], most: int = 6) -> None:
    """Set the ticks of an axis for an objective, in its unit."""
    low, high = limits
    size, _ = objective_unit(objective.metric, high)
    ticks = round_ticks(low, high, most, size)
    axis.set_ticks([place for place, _ in ticks], labels=[text for _, text in ticks])


def add_legend(figure: Any, *panels: Any, columns: int = 6) -> None:
    """Add a legend below the figure, with each label of these axes once."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handles, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handles)
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=SMALL,
                    frameon=False, labelcolor=INK, handletextpad=0.5, columnspacing=1.6)  # fmt: skip


def save_figure(figure: Any, target: Target, name: str, form: Form) -> None:
    """Write a figure. Equal figures give equal bytes.

    Args:
        figure: The figure.
        target: File or stream.
        name: Name of the plot. Ids inside an SVG derive from it.
        form: Format of the file.
    """
    from matplotlib import rc_context

    kind = form
    if kind == "auto":
        kind = "svg" if isinstance(target, Path) and target.suffix == ".svg" else "png"
    # SVG text stays text: it is accessible, searchable, and a fifth of the size of outlines. The SVG writer reads these
    # two settings and has no arguments for them. The lock prevents another thread from restoring them too early.
    with _SAVE_LOCK, rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        if kind == "svg":
            figure.savefig(target, format=kind, dpi=DPI_WITHIN, metadata={"Date": None})
        else:
            figure.savefig(target, format=kind, dpi=DPI)


def sanitize_label(text: str) -> str:
    """Escape a text for matplotlib: no formulas, and a box for each letter that the font lacks."""
    known = _font_characters()
    return "".join(
        letter if ord(letter) in known or letter == "\n" else "□" for letter in escape_invisible(text)
    ).replace("$", r"\$")


@cache
def _font_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def group_by_state(trials: Iterable[Trial]) -> dict[TrialState, list[Trial]]:
    """Group trials by state, in the order of STATES. Empty states are omitted."""
    groups: dict[TrialState, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.state, []).append(trial)
    return {state: groups[state] for state in STATES if state in groups}


# Embedding of a figure in a page, with the page's fonts and its light or dark colours, and without external resources.


def render_figure(drawing: bytes, title: str, note: str, description: str) -> Html:
    """Render a figure with its caption.

    Args:
        drawing: SVG as written by matplotlib, or PNG.
        title: Title of the plot.
        note: Explanation of how to read the plot.
        description: Description for screen readers.
    """
    if drawing.startswith(PNG):
        source = f"data:image/png;base64,{base64.b64encode(drawing).decode('ascii')}"
        image = void_tag("img", src=source, alt=description)
    else:
        image = _embed_svg(drawing.decode("utf-8"), description)
    caption = tag("figcaption", title, tag("span", f" {note}"))
    frame = tag("div", image, class_="scroll", role="region", aria_label=title, tabindex="0")
    return tag("figure", caption, frame, class_="picture")


def _embed_svg(text: str, description: str) -> Html:
    """Convert an SVG file to an element of a page."""
    for pattern in _OMITTED:
        text = pattern.sub("", text)
    frame = _FRAME.search(text)
    if frame is None:
        raise ValueError("the drawing is not an SVG with a view box")
    inner = text[frame.end() : text.rindex("</svg>")]
    # Group ids repeat in each plot and are not referenced.
    inner = _LINES.sub(" ", _GROUP.sub("<g", inner)).replace("> <", "><")
    inner = _ZERO_ROTATION.sub("", inner.replace("xlink:href=", "href="))
    # The background of hatches becomes a style, because the page's rules for rectangles would override an attribute.
    inner = _STYLE.sub(_style_with_page_colours, _FILL.sub(r' style="fill: \1; stroke: none"', inner))
    widest = float(frame[1].split()[2]) * PX_PER_POINT
    size = f"min-width:{widest * MIN_SCALE:.0f}px;max-width:{widest:.0f}px"
    return tag("svg", Html(inner), viewBox=frame[1], style=size, role="img", aria_label=description)


def _style_with_page_colours(match: re.Match[str]) -> str:
    """Replace the colours of a style by the page's variables, and remove fonts."""
    style = _FAMILY.sub("", match[1])
    style = _COLOUR.sub(lambda colour: f"var(--{VARIABLES[colour[0]]})" if colour[0] in VARIABLES else colour[0], style)
    return f' style="{style}"'
