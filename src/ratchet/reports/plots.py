"""Plots of runs, evaluations, adapters and quantization, as figures of Plotly and as pages of their own.

A figure is the JSON that Plotly's library draws in the browser, so nothing heavy is imported. Colours are those of
light mode, for all kinds of colour vision (Okabe and Ito, Color Universal Design, 2008); templates/charts.js has the
colours of dark mode.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.train import Train
from ratchet.reports import pages
from ratchet.runs.journal import JournalReader, ReplayFilter
from ratchet.storage import files
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis, QuantizationReport, parse_module_name

Figure = dict[str, Any]
"""`data` and `layout` of a figure of Plotly."""
INK, QUIET, RULE = "#1c1e21", "#5a6069", "#dddfdb"
"""Colours of text and main lines, secondary text, and grid."""
COLOURS = ("#0072b2", "#c25700", "#00795a", "#b0498a", "#946200", "#2f8dc4", "#4a4e55")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("triangle-down", "square", "cross", "x", "diamond", "triangle-up", "circle", "star", "pentagon", "hexagon")
PANELS, PANEL_PX = 4, 250
"""Maximum number of panels per row of a figure, and height of a panel in pixels."""
COLOUR_QUANTILES = (0.02, 0.98)
"""Quantiles of gradient norms at the ends of the colour scale."""
MAX_KINDS = 16
"""Maximum number of layer kinds on an axis."""


@dataclass(frozen=True)
class TimelineLane:
    """One run in a timeline. Times are seconds since the start of the run."""

    name: str
    attempts: Sequence[tuple[float, float]]
    """Start and end of each worker."""
    steps: Sequence[tuple[float, int]]
    checkpoints: Sequence[float]
    marks: Sequence[tuple[float, str]]
    """Time and kind of each event."""
    succeeded: bool
    """Whether the run ended as expected."""


def plain(text: str) -> str:
    """Escape a text for Plotly, which reads some HTML tags in names and labels."""
    return escape_invisible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": plain(title)}, **more}


def translucent(colour: str) -> str:
    """Return a hexadecimal colour with an opacity, for areas. A page uses it in light and dark mode."""
    return f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},0.2)"


def build_figure(data: Iterable[Mapping[str, Any]], height_px: int, **layout: Any) -> Figure:
    """Return a figure. `layout` has the keys of Plotly's layout."""
    return {"data": list(data), "layout": {"height": height_px, **layout}}


def panel_axes(
    number: int, count: int, columns: int, gap: tuple[float, float] = (0.05, 0.12)
) -> dict[str, list[float]]:
    """Return the domains of a panel in a grid: `x` and `y`, shares of the figure's width and height."""
    rows = math.ceil(count / columns)
    row, column = divmod(number, columns)
    wide, high = (1 + gap[0]) / columns, (1 + gap[1]) / rows
    return {"x": [column * wide, column * wide + wide - gap[0]], "y": [1 - row * high - high + gap[1], 1 - row * high]}


def _panel_name(number: int) -> str:
    return str(number + 1) if number else ""


def _write(title: str, target: Path, note: str = "", **content: Any) -> None:
    """Write a page with one picture. `content` has one of the values `figure`, `confusion` and `curves`."""
    values: dict[str, Any] = {"figure": None, "confusion": None, "curves": None, **content}
    files.write_atomic(target, pages.render("picture", title=title, sections=(), note=note, **values))


def draw_loss_curve(journal: Path, target: Path, train: Train) -> None:
    """Write a page with training and validation loss by optimizer step."""
    _write("Loss", target, "Training and validation loss by optimizer step.", figure=build_loss_figure(journal, train))


def read_loss_curves(journal: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the steps and losses of the training (`step`) and of the validations (`validation`)."""
    curves: dict[str, list[tuple[int, float]]] = {"step": [], "validation": []}
    replay = ReplayFilter()
    for event in JournalReader(journal).read():
        if event.kind in curves and replay.is_new(event):
            curves[event.kind].append((event.data["step"], event.data["loss"]))
    return curves


def build_loss_figure(journal: Path, train: Train) -> Figure:
    """Return the figure of training and validation loss by optimizer step."""
    curves = read_loss_curves(journal)
    data = [
        {
            "x": [step for step, _ in curves[kind]], "y": [loss for _, loss in curves[kind]], "name": name,
            "mode": mode, "line": {"color": COLOURS[number], "width": 1.4},
        }
        for number, (kind, name, mode) in enumerate(
            (("step", "training", "lines"), ("validation", "validation", "lines+markers"))
        )
        if curves[kind]
    ]  # fmt: skip
    return build_figure(data, 360, xaxis=axis("optimizer step"), yaxis=axis(f"loss ({train.loss_description})"))


def draw_confusion_matrix(labels: Sequence[str], matrix: Sequence[Sequence[int]], target: Path) -> None:
    """Write a page with a confusion matrix. See `pages.describe_confusion`."""
    _write("Confusion matrix", target, confusion=pages.describe_confusion(labels, matrix))


def draw_precision_recall(curves: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """Write a page with the precision-recall curves of the worst labels. See `pages.describe_precision_recall`."""
    _write("Precision and recall", target, curves=pages.describe_precision_recall(curves))


def draw_timeline(lanes: Sequence[TimelineLane], target: Path) -> None:
    """Write a page with the timelines of several runs, one above the other.

    Each bar is a worker. The line in a bar is the step, which falls back where steps are repeated. Ticks below a bar
    are checkpoints, and symbols are faults by kind.
    """
    last_step = max((step for lane in lanes for _, step in lane.steps), default=1)
    bars: list[tuple[float, float, int]] = []
    lines: list[tuple[float | None, float | None]] = []
    kinds: dict[str, list[tuple[float, int]]] = {}
    for row, lane in enumerate(lanes):
        for begin, end in lane.attempts:
            bars.append((begin, end, row))
            lines += [(at, row + 0.3 - 0.6 * step / last_step) for at, step in lane.steps if begin <= at <= end]
            lines.append((None, None))
        for at, kind in lane.marks:
            kinds.setdefault(kind, []).append((at, row))
    saved = [(at, row + 0.36) for row, lane in enumerate(lanes) for at in lane.checkpoints]
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": "worker", "base": [begin for begin, _, _ in bars],
            "x": [end - begin for begin, end, _ in bars], "y": [row for *_, row in bars], "width": 0.6,
            "marker": {"color": RULE},
        },
        {**_points(lines), "mode": "lines", "name": "step", "line": {"color": QUIET, "width": 1}, "hoverinfo": "skip"},
        {
            **_points(saved), "mode": "markers", "name": "checkpoint",
            "marker": {"symbol": "line-ns-open", "size": 5, "color": QUIET},
        },
    ]  # fmt: skip
    for number, (kind, found) in enumerate(sorted(kinds.items())):
        marker = {"symbol": SYMBOLS[number % len(SYMBOLS)], "color": COLOURS[number % len(COLOURS)], "size": 9}
        data.append({**_points(found), "mode": "markers", "name": plain(kind), "marker": marker})
    names = [plain(lane.name if lane.succeeded else f"{lane.name} (failed)") for lane in lanes]
    ticks = {"tickvals": list(range(len(lanes))), "ticktext": names, "range": [len(lanes) - 0.4, -0.6]}
    figure = build_figure(data, 150 + 34 * len(lanes), barmode="overlay", yaxis=ticks,
                          xaxis=axis("seconds since the start of training", rangemode="tozero"))  # fmt: skip
    _write("Timeline of trials", target, "Bars are workers, lines in them steps; symbols are faults.", figure=figure)


def _points(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, list[float | None]]:
    return {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]}


def build_gradient_map(analysis: AdapterAnalysis) -> Figure:
    """Return the figure of the gradient norm of every module over time.

    There is one panel per kind of module, with one line per layer: a model of 32 layers with seven kinds gives seven
    panels of 32 lines. All panels share one logarithmic colour scale. Modules without a gradient are empty.
    """
    kinds = _group_modules_by_kind(analysis)
    norms = sorted(norm for module in analysis.modules.values() for norm in module.gradient_norms if norm > 0) or [1.0]
    # Extreme values are clipped: a few modules with tiny gradients would compress the scale of all other modules.
    least, most = (math.log10(norms[int(share * (len(norms) - 1))]) for share in COLOUR_QUANTILES)
    ticks = [least + (most - least) * k / 4 for k in range(5)]
    columns = max(1, min(PANELS, len(kinds)))
    data: list[dict[str, Any]] = []
    titles = []
    layout: dict[str, Any] = {
        "coloraxis": {
            "cmin": least, "cmax": most, "colorscale": "Cividis",
            "colorbar": {"title": {"text": "gradient norm before clipping", "side": "right"}, "tickvals": ticks,
                         "ticktext": [f"{10**tick:.2g}" for tick in ticks], "thickness": 12},
        },
    }  # fmt: skip
    for number, (kind, members) in enumerate(kinds.items()):
        panel, domain = _panel_name(number), panel_axes(number, len(kinds), columns)
        rows = [[math.log10(norm) if norm > 0 else None for norm in module.gradient_norms] for _, module in members]
        layers = [".".join(map(str, numbers)) or "-" for numbers, _ in members]
        if analysis.steps and all(len(row) == len(analysis.steps) for row in rows):
            data.append({
                "type": "heatmap", "x": analysis.steps, "y": layers, "z": rows, "coloraxis": "coloraxis",
                "xaxis": f"x{panel}", "yaxis": f"y{panel}",
                "hovertemplate": "step %{x}, layer %{y}: 10^%{z:.2f}<extra></extra>",
            })  # fmt: skip
        is_last = number >= len(kinds) - columns
        layout[f"xaxis{panel}"] = axis("optimizer step" if is_last else "", domain=domain["x"], anchor=f"y{panel}")
        layout[f"yaxis{panel}"] = axis("" if number % columns else "layer", domain=domain["y"], anchor=f"x{panel}",
                                       type="category", autorange="reversed")  # fmt: skip
        titles.append({
            "text": plain(kind), "showarrow": False, "xref": "paper", "yref": "paper", "x": domain["x"][0],
            "y": domain["y"][1], "xanchor": "left", "yanchor": "bottom",
        })  # fmt: skip
    rows_count = math.ceil(len(kinds) / columns) or 1
    return build_figure(data, 80 + PANEL_PX * rows_count, annotations=titles, margin={"t": 30}, **layout)


def build_update_figure(analysis: AdapterAnalysis) -> Figure:
    """Return the figure of update size, effective rank and singular values of the modules by depth and kind."""
    data: list[dict[str, Any]] = []
    for number, (kind, members) in enumerate(_group_modules_by_kind(analysis).items()):
        colour = COLOURS[number % len(COLOURS)]
        depths = [numbers[0] if numbers else 0 for numbers, _ in members]
        spectrum = _typical_spectrum([module.singular_values for _, module in members])
        for panel, (x, y) in enumerate(
            (
                (depths, [module.update_ratio or None for _, module in members]),
                (depths, [module.effective_rank for _, module in members]),
                (list(range(1, len(spectrum) + 1)), spectrum),
            )
        ):
            data.append({
                "x": x, "y": y, "mode": "lines+markers", "name": plain(kind), "legendgroup": kind,
                "showlegend": not panel, "line": {"color": colour, "width": 1},
                "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 6, "color": colour},
                "xaxis": f"x{_panel_name(panel)}", "yaxis": f"y{_panel_name(panel)}",
            })  # fmt: skip
    unchanged = [(name, analysis.modules[name].update_ratio) for name in analysis.unchanged_modules]
    rings = [(max(0, parse_module_name(name).layer), ratio) for name, ratio in unchanged if ratio > 0]
    if rings:
        ring = {"symbol": "circle-open", "size": 13, "color": "#d55e00", "line": {"width": 2}}
        data.append({**_points(rings), "mode": "markers", "name": "barely moved", "marker": ring})
    has_ratio = any(module.update_ratio for module in analysis.modules.values())
    ranks = sorted({module.rank for module in analysis.modules.values()})
    shapes = [
        {"type": "line", "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": rank, "y1": rank,
         "line": {"color": QUIET, "width": 1, "dash": "dash"}}
        for rank in (ranks[:: math.ceil(len(ranks) / 4)] if ranks else ())
    ]  # fmt: skip
    titles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("update over weight (Frobenius norms)", "layer", {"type": "log" if has_ratio else "linear"}),
        ("effective rank (dashed: rank)", "layer", {"rangemode": "tozero"}),
        ("singular values relative to the first, median", "direction", {"range": [0, 1.05]}),
    )
    layout: dict[str, Any] = {}
    for panel, (title, across, more) in enumerate(titles):
        name, domain = _panel_name(panel), panel_axes(panel, 3, 3, (0.09, 0.0))
        layout[f"xaxis{name}"] = axis(across, domain=domain["x"], anchor=f"y{name}")
        layout[f"yaxis{name}"] = axis(title, anchor=f"x{name}", **more)
    return build_figure(data, 400, shapes=shapes, **layout)


def _group_modules_by_kind(analysis: AdapterAnalysis) -> dict[str, list[tuple[tuple[int, ...], ModuleAnalysis]]]:
    """Return the modules of each kind with their numbers (layer first). Kinds are in model order."""
    groups: dict[str, list[tuple[tuple[int, ...], ModuleAnalysis]]] = {}
    for name, module in analysis.modules.items():
        kind, numbers = parse_module_name(name)
        groups.setdefault(kind, []).append((numbers, module))
    return {kind: sorted(members, key=lambda member: member[0]) for kind, members in groups.items()}


def _typical_spectrum(spectra: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over modules of each singular value, relative to the first singular value of its module."""
    nonzero = [values for values in spectra if values and values[0] > 0]
    longest = max(map(len, nonzero), default=0)
    return [statistics.median(values[k] / values[0] for values in nonzero if k < len(values)) for k in range(longest)]


def draw_quantization_report(report: QuantizationReport, target: Path) -> None:
    """Write a page with the cost of 4-bit quantization: size against divergence, and error of the layers by kind."""
    full, variants = report.costs[0], report.costs[1:]
    kinds = list(dict.fromkeys(parse_module_name(name).kind for cost in variants for name in cost.layers))
    visible = kinds[:MAX_KINDS]
    data: list[dict[str, Any]] = []
    for number, cost in enumerate(variants):
        name, colour = plain(cost.name), COLOURS[number % len(COLOURS)]
        share = 100 * cost.weight_bytes / full.weight_bytes
        dots = [(parse_module_name(layer).kind, found.output_error) for layer, found in cost.layers.items()]
        dots = [(kind, error) for kind, error in dots if kind in visible]
        style: dict[str, Any] = {"mode": "markers", "name": name, "legendgroup": name}
        data.append({**style, "x": [share], "y": [cost.kl], "marker": {"color": colour, "size": 12}})
        data.append({
            **style, "type": "box", "x": [plain(kind) for kind, _ in dots], "y": [error for _, error in dots],
            "xaxis": "x2", "yaxis": "y2", "showlegend": False, "boxpoints": "all", "jitter": 0.4, "pointpos": 0,
            "fillcolor": "rgba(0,0,0,0)", "line": {"color": "rgba(0,0,0,0)"}, "marker": {"color": colour, "size": 5},
            "offsetgroup": name, "hoveron": "points",
        })  # fmt: skip
        del data[-1]["mode"]
    more = f" (the first {len(visible)} of {len(kinds)} kinds)" if len(visible) < len(kinds) else ""
    figure = build_figure(
        data, 460, boxmode="group",
        xaxis=axis("model size, % of full precision", domain=[0, 0.34]),
        yaxis=axis("KL divergence from full precision (nats)", rangemode="tozero"),
        xaxis2=axis(f"layers by name, one dot each{more}", domain=[0.44, 1], anchor="y2", type="category"),
        yaxis2=axis("relative output error", rangemode="tozero", anchor="x2"),
    )  # fmt: skip
    note = f"{report.rows:,} validation rows, {report.tokens:,} answer tokens, {report.dtype}."
    _write("Cost of quantization", target, note, figure=figure)
