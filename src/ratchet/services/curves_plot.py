"""Precision-recall curves of labels, and how far their probabilities can be relied on, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from ratchet.pages.reliability import Bar

DPI = 120
SHOWN = 12
"""Labels, at most: those with the lowest average precision, which are where a model goes wrong."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Told apart with every kind of colour vision (Okabe and Ito, Color Universal Design, 2008)."""
STYLES = ("-", "--")
"""Of lines, one for each round of the colours."""
GRID = 100
LONGEST = 28
"""Characters of a label in the legend."""


def precision_recall(curves: Mapping[str, Mapping[str, Any]], target: Path | IO[bytes]) -> None:
    """Draw the curves of the worst labels, and the mean over all labels in black.

    Args:
        curves: per label `precision`, `recall` (from the lowest threshold on) and `average_precision`.
        target: the PNG to write. Labels without points (scores that are no number) are left out.
    """
    from matplotlib.figure import Figure

    known = {label: curve for label, curve in curves.items() if curve["precision"]}
    worst = sorted(known, key=lambda label: (known[label]["average_precision"], label))[:SHOWN]
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="recall", ylabel="precision", xlim=(-0.01, 1.01), ylim=(-0.01, 1.03))
    for i, label in enumerate(worst):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        curve = known[label]
        axes.step(
            curve["recall"], curve["precision"], where="post", color=colour, linestyle=style, linewidth=1.2,
            label=f"{_short(label)}  {curve['average_precision']:.3f}",
        )  # fmt: skip
    if known:
        recall = [i / GRID for i in range(GRID + 1)]
        mean = [fmean(_at(curve, r) for curve in known.values()) for r in recall]
        value = fmean(curve["average_precision"] for curve in known.values())
        axes.plot(recall, mean, color="black", linewidth=2.2, label=f"mean of {len(known)} labels  {value:.3f}")
        title = "average precision" + (f" (lowest {len(worst)})" if len(worst) < len(known) else "")
        figure.legend(title=title, loc="outside right upper", fontsize=8, title_fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "no label has a curve", ha="center", va="center")
    axes.grid(alpha=0.3)
    figure.savefig(target, format="png", dpi=DPI)


def reliability(bars: Sequence[Bar], error: float, target: Path | IO[bytes]) -> None:
    """Draw how often the likeliest label is right by its probability, and below it how many prompts there are.

    Args:
        bars: of ranges of probability that are not empty.
        error: expected calibration error.
        target: the PNG to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    middles, widths = [(bar.low + bar.high) / 2 for bar in bars], [0.94 * (bar.high - bar.low) for bar in bars]
    upper.bar(middles, [bar.right for bar in bars], widths, color=COLOURS[0], alpha=0.6)
    off = [[bar.right - bar.least for bar in bars], [bar.most - bar.right for bar in bars]]
    upper.errorbar(middles, [bar.right for bar in bars], off, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    upper.plot([0, 1], [0, 1], "--", color="black", linewidth=1)
    upper.plot([bar.confidence for bar in bars], [bar.right for bar in bars], "o", color=COLOURS[3], markersize=4)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share that is right")
    upper.set_title(f"expected calibration error {error:.3f}", fontsize=10)
    lower.bar(middles, [bar.n for bar in bars], widths, color="#808080")
    lower.set(xlabel="probability of the likeliest label", ylabel="prompts")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(target, format="png", dpi=DPI)


def _short(label: str) -> str:
    """For a legend; a dollar sign would begin a formula."""
    text = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
    return text.replace("$", r"\$").removeprefix("_")  # matplotlib leaves names with _ out of legends


def _at(curve: Mapping[str, Any], recall: float) -> float:
    """Highest precision at this recall or a higher one, which is what can be had by choosing a threshold."""
    return max((p for p, r in zip(curve["precision"], curve["recall"], strict=True) if r >= recall), default=0.0)
