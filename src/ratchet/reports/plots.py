"""Draws the plots of runs, evaluations, adapters and quantization as PNG.

Figures are created without pyplot, which keeps global state and is not thread-safe.
"""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

from ratchet.runs.journal import JournalReader, ReplayFilter
from ratchet.storage.records.training import (
    AdapterAnalysis,
    ModuleAnalysis,
    QuantizationCost,
    QuantizationReport,
    parse_module_name,
)

if TYPE_CHECKING:  # a supervisor imports this module, and verdict_page imports scipy, which takes 0.7 s
    from ratchet.reports.verdict_page import ReliabilityDiagramBin

DPI = 120
CELL_INCHES = 0.28
"""Size in inches of a cell of a confusion matrix, in which a label of 7 points is readable."""
NUMBERS_UP_TO = 20
"""Maximum number of labels for which the cells contain counts. With more labels, the counts are unreadable."""
LANE_INCHES = 0.42
"""Height in inches of a run in a timeline, at which bar, step curve and symbols are distinguishable."""
MARKERS = "vsPXD^o<>dph8"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Colours for all kinds of colour vision (Okabe and Ito, Color Universal Design, 2008)."""
PANELS = 4
"""Maximum number of panels per row of a figure."""
PANEL_INCHES = (2.7, 2.6)
"""Width and height of a panel in inches."""
COLOUR_QUANTILES = (0.02, 0.98)
"""Quantiles of gradient norms at the ends of the colour scale."""
AXIS_LABELS = 12
"""Maximum number of labels on an axis of modules."""

COST_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00")
"""Colours of quantization variants: NF4 blue, FP4 orange, lighter with double quantization (Okabe and Ito 2008)."""
MAX_KINDS = 16
"""Maximum number of layer kinds on the axis, at which the name of a projection is readable at 7 points."""
DOT_SHARE = 0.18
"""Width of one variant's dots, as a share of the width of one kind."""
MAX_CURVES = 12
"""Maximum number of precision-recall curves. Labels with the lowest average precision are shown."""
CURVE_COLOURS = COLOURS[:-1]
"""Colours of precision-recall curves. Black is the mean."""
STYLES = ("-", "--")
"""Line styles of precision-recall curves, one for each pass through the colours."""
GRID = 100
"""Number of intervals of recall at which the mean curve is computed."""
LEGEND_CHARACTERS = 28
"""Maximum number of characters of a label in the legend."""


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


def draw_loss_curve(journal: Path, target: Path | IO[bytes]) -> None:
    """Draw training and validation loss (nats per answer token) by optimizer step."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {"step": [], "validation": []}
    replay = ReplayFilter()
    for event in JournalReader(journal).read():
        if event.kind in curves and replay.is_new(event):
            curves[event.kind].append((event.data["step"], event.data["loss"]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per answer token)")
    for kind, label, style in (("step", "training", "-"), ("validation", "validation", "o-")):
        if curves[kind]:
            axes.plot(*zip(*curves[kind], strict=True), style, label=label, linewidth=1, markersize=4)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(target, format="png", dpi=DPI)


def draw_confusion_matrix(labels: Sequence[str], matrix: Sequence[Sequence[int]], target: Path) -> None:
    """Draw a confusion matrix.

    Args:
        labels: Labels in the order of rows and columns.
        matrix: matrix[i][j] counts rows of true label i that were answered with label j. Columns beyond the labels
            count answers that are not labels; these columns are named `other`.
        target: PNG file to write.
    """
    from matplotlib.figure import Figure

    columns = len(matrix[0]) if matrix else len(labels)
    labels = [label.replace("$", r"\$") for label in labels]  # a dollar sign would start a formula
    answers = [*labels, *["other"] * (columns - len(labels))]
    side = max(4.0, CELL_INCHES * len(answers))
    figure = Figure(figsize=(side + 2, side + 1), layout="constrained")
    axes = figure.add_subplot(xlabel="answer", ylabel="truth")
    # Colours show the share of the row, so that rare labels are as visible as frequent ones.
    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(len(answers)), answers, rotation=90, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    if len(labels) <= NUMBERS_UP_TO:
        for i, row in enumerate(matrix):
            for j, count in enumerate(row):
                if count:
                    shade = "white" if shares[i][j] > 0.5 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=7, color=shade)
    figure.colorbar(image, ax=axes, label="share of the true label", shrink=0.6)
    figure.savefig(target, format="png", dpi=DPI)


def draw_timeline(lanes: Sequence[TimelineLane], target: Path) -> None:
    """Draw the timelines of several runs, one above the other.

    Each bar is a worker. The line in a bar is the step, which falls back where steps are repeated. Ticks below a bar
    are checkpoints, and symbols are faults by kind.
    """
    from matplotlib.figure import Figure

    last_step = max((step for lane in lanes for _, step in lane.steps), default=1)
    figure = Figure(figsize=(11, 1.6 + LANE_INCHES * len(lanes)), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds since the start of training")
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row, lane in enumerate(lanes):
        axes.broken_barh([(a, b - a) for a, b in lane.attempts], (row - 0.3, 0.6), color="#d9d9d9", zorder=1)
        for begin, end in lane.attempts:
            points = [(at, row + 0.3 - 0.6 * step / last_step) for at, step in lane.steps if begin <= at <= end]
            if points:
                axes.plot(*zip(*points, strict=True), color="#404040", linewidth=1, zorder=2)
        axes.vlines(lane.checkpoints, row + 0.3, row + 0.42, color="#404040", linewidth=0.7, zorder=2)
        for at, kind in lane.marks:
            kinds.setdefault(kind, []).append((at, row))
    for number, (kind, places) in enumerate(sorted(kinds.items())):
        axes.plot(
            *zip(*places, strict=True), linestyle="", label=kind, zorder=3, markersize=6, markeredgecolor="white",
            marker=MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)],
        )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [lane.name if lane.succeeded else f"{lane.name} (failed)" for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    if kinds:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(target, format="png", dpi=DPI)


def draw_gradient_map(analysis: AdapterAnalysis) -> bytes:
    """Draw the gradient norm of every module over time, as PNG.

    There is one panel per kind of module, with one line per layer: a model of 32 layers with seven kinds gives seven
    panels of 32 lines. All panels share one logarithmic colour scale. Modules without a gradient are grey.
    """
    from matplotlib.colors import LogNorm

    kinds = _group_modules_by_kind(analysis)
    norms = sorted(norm for module in analysis.modules.values() for norm in module.gradient_norms if norm > 0) or [1.0]
    # Extreme values are clipped: a few modules with tiny gradients would compress the scale of all other modules.
    least, most = (norms[int(share * (len(norms) - 1))] for share in COLOUR_QUANTILES)
    scale = LogNorm(vmin=least, vmax=most * (1 + 1e-9))
    figure, panels = _create_panels(len(kinds))
    image = None
    for axes, (kind, members) in zip(panels, kinds.items(), strict=True):
        axes.set_title(kind, fontsize=8)
        axes.set_facecolor("#c8c8c8")
        axes.tick_params(axis="x", labelsize=7)
        rows = [[norm if norm > 0 else math.nan for norm in module.gradient_norms] for _, module in members]
        if analysis.steps and all(len(row) == len(analysis.steps) for row in rows):
            image = axes.pcolormesh(_step_edges(analysis.steps), range(len(rows) + 1), rows, norm=scale, cmap="cividis")
        stride = math.ceil(len(members) / AXIS_LABELS)
        layers = [".".join(map(str, numbers)) or "-" for numbers, _ in members[::stride]]
        axes.set_yticks([line + 0.5 for line in range(0, len(members), stride)], layers, fontsize=7)
        axes.set_ylim(len(members), 0)
    if image is not None:
        figure.colorbar(image, ax=panels, label="gradient norm before clipping", pad=0.01, aspect=30, extend="both")
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    return _encode_png(figure)


def draw_updates(analysis: AdapterAnalysis) -> bytes:
    """Draw update size, effective rank and singular values of the modules by depth and kind, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    ratio, rank, spectrum = figure.subplots(1, 3)
    for number, (kind, members) in enumerate(_group_modules_by_kind(analysis).items()):
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4,
            "linewidth": 0.8, "label": kind,
        }  # fmt: skip
        depths = [numbers[0] if numbers else 0 for numbers, _ in members]
        ratio.plot(depths, [module.update_ratio or math.nan for _, module in members], **style)
        rank.plot(depths, [module.effective_rank for _, module in members], **style)
        if values := _typical_spectrum([module.singular_values for _, module in members]):
            spectrum.plot(range(1, len(values) + 1), values, **style)
    unchanged = [
        (parse_module_name(name).layer, analysis.modules[name].update_ratio) for name in analysis.unchanged_modules
    ]
    rings = [(max(0, layer), value) for layer, value in unchanged if value > 0]
    if rings:
        ratio.plot(
            *zip(*rings, strict=True), "o", markersize=10, fillstyle="none", color="#D55E00", label="barely moved"
        )
    ranks = sorted({module.rank for module in analysis.modules.values()})
    for adapter_rank in ranks[:: math.ceil(len(ranks) / 4)] if ranks else ():
        rank.axhline(adapter_rank, color="#808080", linestyle="--", linewidth=0.8)
    if any(module.update_ratio for module in analysis.modules.values()):
        ratio.set_yscale("log")
    rank.set_ylim(bottom=0)
    spectrum.set_ylim(0, 1.05)
    ratio.set(title="update over weight", xlabel="layer", ylabel="Frobenius norms")
    rank.set(title="effective rank (dashed: rank)", xlabel="layer")
    spectrum.set(title="singular values relative to the first", xlabel="direction", ylabel="median over layers")
    for axes in (ratio, rank, spectrum):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    if analysis.modules:
        figure.legend(*ratio.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return _encode_png(figure)


def _group_modules_by_kind(analysis: AdapterAnalysis) -> dict[str, list[tuple[tuple[int, ...], ModuleAnalysis]]]:
    """Return the modules of each kind with their numbers (layer first). Kinds are in model order."""
    groups: dict[str, list[tuple[tuple[int, ...], ModuleAnalysis]]] = {}
    for name, module in analysis.modules.items():
        kind, numbers = parse_module_name(name)
        groups.setdefault(kind, []).append((numbers, module))
    return {kind: sorted(members, key=lambda member: member[0]) for kind, members in groups.items()}


def _create_panels(count: int) -> tuple[Any, list[Any]]:
    """Create a figure with this many axes, PANELS per row."""
    from matplotlib.figure import Figure

    columns = max(1, min(PANELS, count))
    rows = max(1, math.ceil(count / columns))
    wide, high = PANEL_INCHES
    figure = Figure(figsize=(max(5.0, wide * columns + 1.2), high * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten().tolist()
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
    return figure, panels[:count]


def _step_edges(steps: Sequence[int]) -> list[float]:
    """Return the borders of the columns of steps: the midpoints between neighbouring steps, and both outer borders."""
    midpoints = [(a + b) / 2 for a, b in pairwise(steps)]
    return [steps[0] - 0.5, *midpoints, steps[-1] + 0.5]


def _typical_spectrum(spectra: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over modules of each singular value, relative to the first singular value of its module."""
    nonzero = [values for values in spectra if values and values[0] > 0]
    longest = max(map(len, nonzero), default=0)
    return [statistics.median(values[k] / values[0] for values in nonzero if k < len(values)) for k in range(longest)]


def _encode_png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


# Cost of 4-bit quantization: size against divergence, and error of the layers by kind.


def draw_quantization_report(report: QuantizationReport, target: Path) -> None:
    """Draw the report as a PNG."""
    from matplotlib.figure import Figure

    full, variants = report.costs[0], report.costs[1:]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    _draw_sizes(left, full, variants)
    _draw_layers(right, variants)
    figure.suptitle(f"{report.rows} validation rows, {report.tokens} answer tokens, {report.dtype}", fontsize=9)
    figure.savefig(target, format="png", dpi=DPI)


def _draw_sizes(axes: Any, full: QuantizationCost, variants: tuple[QuantizationCost, ...]) -> None:
    for colour, cost in zip(COST_COLOURS, variants, strict=False):
        share = 100 * cost.weight_bytes / full.weight_bytes
        axes.plot(share, cost.kl, "o", color=colour, markersize=9, label=cost.name)
    axes.set_xlabel("model size, % of full precision")
    axes.set_ylabel("KL divergence from full precision (nats)")
    axes.set_ylim(0, 1.1 * max(cost.kl for cost in variants) or 1)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_layers(axes: Any, variants: tuple[QuantizationCost, ...]) -> None:
    kinds = list(dict.fromkeys(parse_module_name(name).kind for cost in variants for name in cost.layers))
    visible = kinds[:MAX_KINDS]
    for number, (colour, cost) in enumerate(zip(COST_COLOURS, variants, strict=False)):
        shift = DOT_SHARE * (number - (len(variants) - 1) / 2)
        dots = [
            (visible.index(kind) + shift, layer.output_error)
            for name, layer in cost.layers.items()
            if (kind := parse_module_name(name).kind) in visible
        ]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, alpha=0.6, label=cost.name)
    axes.set_xticks(range(len(visible)), visible, rotation=45, ha="right", fontsize=7)
    more = f" (the first {len(visible)} of {len(kinds)} kinds)" if len(visible) < len(kinds) else ""
    axes.set_xlabel(f"layers by name, one dot each{more}")
    axes.set_ylabel("relative output error")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)


# Precision-recall curves of labels, and reliability diagrams, as PNG.


def draw_precision_recall(curves: Mapping[str, Mapping[str, Any]], target: Path | IO[bytes]) -> None:
    """Draw the curves of the worst labels, and the mean over all labels in black.

    Args:
        curves: `precision`, `recall` (both from the lowest threshold on) and `average_precision` of each label.
        target: PNG file to write. Labels without points (scores that are not numbers) are omitted.
    """
    from matplotlib.figure import Figure

    known = {label: curve for label, curve in curves.items() if curve["precision"]}
    worst = sorted(known, key=lambda label: (known[label]["average_precision"], label))[:MAX_CURVES]
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="recall", ylabel="precision", xlim=(-0.01, 1.01), ylim=(-0.01, 1.03))
    for i, label in enumerate(worst):
        colour, style = CURVE_COLOURS[i % len(CURVE_COLOURS)], STYLES[i // len(CURVE_COLOURS) % len(STYLES)]
        curve = known[label]
        axes.step(
            curve["recall"], curve["precision"], where="post", color=colour, linestyle=style, linewidth=1.2,
            label=f"{_shorten_label(label)}  {curve['average_precision']:.3f}",
        )  # fmt: skip
    if known:
        recall = [i / GRID for i in range(GRID + 1)]
        mean = [fmean(_precision_at_recall(curve, r) for curve in known.values()) for r in recall]
        value = fmean(curve["average_precision"] for curve in known.values())
        axes.plot(recall, mean, color="black", linewidth=2.2, label=f"mean of {len(known)} labels  {value:.3f}")
        title = "average precision" + (f" (lowest {len(worst)})" if len(worst) < len(known) else "")
        figure.legend(title=title, loc="outside right upper", fontsize=8, title_fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "no label has a curve", ha="center", va="center")
    axes.grid(alpha=0.3)
    figure.savefig(target, format="png", dpi=DPI)


def draw_reliability(bars: Sequence["ReliabilityDiagramBin"], error: float, target: Path | IO[bytes]) -> None:
    """Draw the accuracy of the most likely label by its probability, and the number of prompts per bin below.

    Args:
        bars: Bins of probability that are not empty.
        error: Expected calibration error.
        target: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    middles, widths = [(bar.low + bar.high) / 2 for bar in bars], [0.94 * (bar.high - bar.low) for bar in bars]
    upper.bar(middles, [bar.accuracy for bar in bars], widths, color=CURVE_COLOURS[0], alpha=0.6)
    errors = [[bar.accuracy - bar.accuracy_low for bar in bars], [bar.accuracy_high - bar.accuracy for bar in bars]]
    upper.errorbar(middles, [bar.accuracy for bar in bars], errors, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    upper.plot([0, 1], [0, 1], "--", color="black", linewidth=1)
    upper.plot(
        [bar.confidence for bar in bars], [bar.accuracy for bar in bars], "o", color=CURVE_COLOURS[3], markersize=4
    )
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    upper.set_title(f"expected calibration error {error:.3f}", fontsize=10)
    lower.bar(middles, [bar.n for bar in bars], widths, color="#808080")
    lower.set(xlabel="probability of the most likely label", ylabel="prompts")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(target, format="png", dpi=DPI)


def _shorten_label(label: str) -> str:
    """Shorten a label for a legend, and escape dollar signs, which would start a formula."""
    text = label if len(label) <= LEGEND_CHARACTERS else f"{label[: LEGEND_CHARACTERS - 1]}…"
    return text.replace("$", r"\$").removeprefix("_")  # matplotlib omits names with a leading _ from legends


def _precision_at_recall(curve: Mapping[str, Any], recall: float) -> float:
    """Return the highest precision that a threshold achieves at this recall or higher."""
    return max((p for p, r in zip(curve["precision"], curve["recall"], strict=True) if r >= recall), default=0.0)
