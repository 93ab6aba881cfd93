"""Drawings for people, as PNG. Figures are made without pyplot, which keeps global state and is for one thread."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.run.journal import Reader, Replay

DPI = 120
CELL_INCHES = 0.28  # of one cell of a confusion matrix: a label is readable at 7 points
NUMBERS_UP_TO = 20  # labels; with more, counts in the cells are unreadable


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
