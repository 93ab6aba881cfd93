"""Draws the dashboard of deploy/monitoring/ from Prometheus's answers to its expressions. Grafana is not needed.

Panels have Grafana's positions, titles, units and names of series, and show the answer of each expression. Grafana
draws more details.
"""

import json
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

DASHBOARD = Path(__file__).parents[1] / "deploy" / "monitoring" / "dashboard.json"


@dataclass(frozen=True)
class Palette:
    """Colours of a dashboard."""

    page: str
    card: str
    edge: str
    grid: str
    ink: str
    series: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """Return settings of Matplotlib for these colours."""
        ink = dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), self.ink)
        edges = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), self.edge)
        places = {"figure.facecolor": self.page, "axes.facecolor": self.card, "grid.color": self.grid}
        return ink | edges | places | {"axes.prop_cycle": cycler(color=self.series)}


LIGHT = Palette(
    "#f2f3f5", "#ffffff", "#d8dbe0", "#e6e8eb", "#1c1e21",
    ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4A4E55"),
)  # fmt: skip
"""Series: Okabe and Ito, Color Universal Design, 2008."""
DARK = Palette(
    "#0d1013", "#181b20", "#3a4047", "#2a2f35", "#e3e6e9",
    ("#5aa9e0", "#f0803c", "#2fbf95", "#dd8fba", "#e6a417", "#9bd4f5", "#c3c8ce"),
)  # fmt: skip
GRID = 24
"""Columns of Grafana's grid."""
WIDTH_INCHES, CELL_INCHES, DPI = 14.0, 0.32, 85
TICKS_INCHES = 0.72
"""Width for the numbers of an axis."""
MOST_SERIES = 14
CROWDED = 8
"""With more series than this, the names of series are small."""

Series = tuple[dict[str, str], list[tuple[float, float]]]
"""Labels of a series, and pairs of Unix time and value."""
Ask = Callable[[str], Sequence[Series]]


def draw(ask: Ask, target: Path, dark: bool, interval: str = "10s") -> list[str]:
    """Draw all panels. Return the titles of panels without data.

    Args:
        ask: answers an expression over the displayed time.
        target: PNG file.
        dark: for a dark page.
        interval: Grafana's $__rate_interval, at least four times the scrape interval.
    """
    letters = {"font.size": 8, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(letters | (DARK if dark else LIGHT).settings()):
        return _draw(ask, target, interval)


def _draw(ask: Ask, target: Path, interval: str) -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(WIDTH_INCHES, rows * CELL_INCHES))
    empty = []
    for panel in panels:
        found = [
            (named(query["legendFormat"], labels), values)
            for query in panel["targets"]
            for labels, values in ask(rendered(query["expr"], interval))
            if any(math.isfinite(value) for _, value in values)
        ]
        if not found:
            empty.append(panel["title"])
        frame = placed(figure, panel["gridPos"], rows)
        inches = panel["gridPos"]["w"] / GRID * WIDTH_INCHES
        title = textwrap.fill(panel["title"], int(inches * 12))
        frame.text(0.02, 0.97, title, va="top", weight="bold", fontsize=9, transform=frame.transAxes)
        (stat if panel["type"] == "stat" else curves)(frame, panel, found)
    figure.savefig(target, dpi=DPI, metadata={"Software": None})
    return empty


def rendered(expression: str, interval: str) -> str:
    """Return the expression with values for Grafana's variables."""
    return expression.replace("$run", ".*").replace("$__rate_interval", interval).replace("$__interval", "1s")


def named(legend: str, labels: dict[str, str]) -> str:
    """Return the name of a series, with `{{label}}` filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()


def placed(figure: Figure, place: dict[str, int], rows: int) -> Axes:
    """Return a card at a position of the grid."""
    gap_x, gap_y = 0.0025, 0.1 / rows
    axes = figure.add_axes(
        (place["x"] / GRID + gap_x, 1 - (place["y"] + place["h"]) / rows + gap_y,
         place["w"] / GRID - 2 * gap_x, place["h"] / rows - 2 * gap_y)
    )  # fmt: skip
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(True)
    return axes


def stat(frame: Axes, panel: dict[str, Any], found: Sequence[tuple[str, list[tuple[float, float]]]]) -> None:
    """Draw the last value in large letters, or the name of the series that has the latest value."""
    if not found:
        frame.text(0.5, 0.42, "No data", ha="center", va="center", fontsize=14, alpha=0.6, transform=frame.transAxes)
        return
    name, values = max(found, key=lambda one: one[1][-1][0])
    unit = panel["fieldConfig"]["defaults"].get("unit")
    text = name if panel["options"]["textMode"] == "name" else written(values[-1][1], unit)
    frame.text(
        0.5, 0.42, text, ha="center", va="center", fontsize=16 if len(text) < 16 else 12, transform=frame.transAxes
    )


def curves(frame: Axes, panel: dict[str, Any], found: Sequence[tuple[str, list[tuple[float, float]]]]) -> None:
    """Draw lines over time."""
    inches = panel["gridPos"]["w"] / GRID * WIDTH_INCHES
    left = TICKS_INCHES / inches
    crowded = len(found) > CROWDED
    bottom, letters = (0.38, 5.6) if crowded else (0.3, 6.5)
    axes = frame.inset_axes((left, bottom, 0.97 - left, 0.82 - bottom))
    if not found:
        axes.text(0.5, 0.5, "No data", ha="center", va="center", alpha=0.6, transform=axes.transAxes)
    began = min((values[0][0] for _, values in found), default=0.0)
    for number, (name, values) in enumerate(found[:MOST_SERIES]):
        axes.plot(
            [at - began for at, _ in values], [value for _, value in values], label=name, linewidth=1.2,
            color=f"C{number}", linestyle=("-", "--", ":")[number // len(LIGHT.series) % 3],
        )  # fmt: skip
    unit = panel["fieldConfig"]["defaults"].get("unit")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.tick_params(labelsize=7, length=2)
    axes.grid(visible=True, linewidth=0.6)
    more = f"  and {len(found) - MOST_SERIES} more" if len(found) > MOST_SERIES else None
    if found:
        columns = 2 if panel["gridPos"]["w"] < 12 else 4
        frame.legend(
            *axes.get_legend_handles_labels(), loc="lower left", ncols=columns, fontsize=letters, frameon=False,
            title=more, title_fontsize=6.5, borderaxespad=0.2, columnspacing=1.0, handlelength=1.4,
        )  # fmt: skip


def written(value: float, unit: str | None) -> str:
    """Return a value with its unit. `unit` is a name of Grafana."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit in ("bytes", "Bps"):
        power = next((power for power in (3, 2, 1) if abs(value) >= 1024**power), 0)
        size = f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
        return size + "/s" * (unit == "Bps")
    if unit == "s":
        return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"
    return f"{value:.1e}" if unit == "sci" else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
