"""The picture of what 4 bits cost: bytes against divergence, and the error of the layers by kind."""

from pathlib import Path
from typing import Any

from ratchet.model.names import place
from ratchet.records_model import QuantizationCost, QuantizationReport

DPI = 120
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00")
"""Okabe and Ito, Color Universal Design, 2008: NF4 blue, FP4 orange, paler with double quantisation."""
KINDS_AT_MOST = 16
"""Kinds of layers that are told apart on the axis: a projection's name is readable at 7 points."""
DOT_SHARE = 0.18
"""Of the place of one kind, for one variant."""


def draw(report: QuantizationReport, target: Path) -> None:
    """Draw the report as a PNG."""
    from matplotlib.figure import Figure

    full, variants = report.costs[0], report.costs[1:]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    _sizes(left, full, variants)
    _layers(right, variants)
    figure.suptitle(f"{report.rows} validation rows, {report.tokens} answer tokens, {report.dtype}", fontsize=9)
    figure.savefig(target, format="png", dpi=DPI)


def _sizes(axes: Any, full: QuantizationCost, variants: tuple[QuantizationCost, ...]) -> None:
    for colour, cost in zip(COLOURS, variants, strict=False):
        share = 100 * cost.weight_bytes / full.weight_bytes
        axes.plot(share, cost.kl, "o", color=colour, markersize=9, label=cost.name)
    axes.set_xlabel("size of the model, % of full precision")
    axes.set_ylabel("KL divergence from full precision (nats)")
    axes.set_ylim(0, 1.1 * max(cost.kl for cost in variants) or 1)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _layers(axes: Any, variants: tuple[QuantizationCost, ...]) -> None:
    kinds = list(dict.fromkeys(place(name).kind for cost in variants for name in cost.layers))
    shown = kinds[:KINDS_AT_MOST]
    for number, (colour, cost) in enumerate(zip(COLOURS, variants, strict=False)):
        shift = DOT_SHARE * (number - (len(variants) - 1) / 2)
        dots = [
            (shown.index(kind) + shift, layer.output_error)
            for name, layer in cost.layers.items()
            if (kind := place(name).kind) in shown
        ]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, alpha=0.6, label=cost.name)
    axes.set_xticks(range(len(shown)), shown, rotation=45, ha="right", fontsize=7)
    more = f" (the first {len(shown)} of {len(kinds)} kinds)" if len(shown) < len(kinds) else ""
    axes.set_xlabel(f"layers by name, a dot each{more}")
    axes.set_ylabel("error of the output, relative")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
