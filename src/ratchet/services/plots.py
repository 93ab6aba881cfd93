"""Drawings for people, as PNG. Figures are made without pyplot, which keeps global state and is for one thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.run.journal import Reader, Replay

DPI = 120
CELL_INCHES = 0.28  # of one cell of a confusion matrix: a label is readable at 7 points
NUMBERS_UP_TO = 20  # labels; with more, counts in the cells are unreadable

LANE_INCHES = 0.42  # of one training in a timeline: bar, curve of steps and marks are told apart
MARKERS = "vsPXD^o<>dph8"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Told apart with every kind of colour vision (Okabe and Ito, Color Universal Design, 2008)."""


@dataclass(frozen=True)
class Lane:
    """One training in a timeline; times in seconds since it began."""

    name: str
    attempts: Sequence[tuple[float, float]]
    """Begin and end of each worker."""
    steps: Sequence[tuple[float, int]]
    checkpoints: Sequence[float]
    marks: Sequence[tuple[float, str]]
    """What happened to it, by kind."""
    well: bool
    """Ended as it should."""


def loss_curve(journal: Path, target: Path) -> None:
    """Draw training and validation loss (nats per answer token) by optimizer step."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {"step": [], "validation": []}
    replay = Replay()
    for event in Reader(journal).read():
        if event.kind in curves and replay.new(event):
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


def confusion_matrix(labels: Sequence[str], matrix: Sequence[Sequence[int]], target: Path) -> None:
    """Draw counts of answers.

    Args:
        labels: in the order of rows and columns.
        matrix: matrix[i][j] counts rows of true label i that were answered j; more columns than labels are allowed
            (answers that are no label), and are called `other`.
        target: the PNG to write.
    """
    from matplotlib.figure import Figure

    columns = len(matrix[0]) if matrix else len(labels)
    answers = [*labels, *["other"] * (columns - len(labels))]
    side = max(4.0, CELL_INCHES * len(answers))
    figure = Figure(figsize=(side + 2, side + 1), layout="constrained")
    axes = figure.add_subplot(xlabel="answer", ylabel="truth")
    # Coloured by share of the row, so that rare labels are seen as well as frequent ones.
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


def timeline(lanes: Sequence[Lane], target: Path) -> None:
    """Draw what happened to several trainings, one above the other.

    Bars are workers, the line in a bar is the step (it falls back where steps are done again), ticks below are
    checkpoints, signs are faults by kind.
    """
    from matplotlib.figure import Figure

    last_step = max((step for lane in lanes for _, step in lane.steps), default=1)
    figure = Figure(figsize=(11, 1.6 + LANE_INCHES * len(lanes)), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds since the training began")
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
    axes.set_yticks(range(len(lanes)), [lane.name if lane.well else f"{lane.name} (not well)" for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    if kinds:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(target, format="png", dpi=DPI)
