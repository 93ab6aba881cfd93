"""Files that DVC's own commands read: metrics.json in the output of each stage, and the data of the plots in dvc.yaml.

`dvc metrics` and `dvc exp show` give each figure a column, so all stages together have at most twelve, with different
names. dvc.yaml names each of these files, and DVC reports a missing one as an error: a file without data has only its
header.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.reports import plots
from ratchet.storage import files

if TYPE_CHECKING:
    from ratchet.evaluation.metrics import CalibrationBin, ConfusionMatrix

METRICS_FILE = "metrics.json"
PLOTS_FOLDER = "plots"
TEST_FIGURES = 4
"""Maximum number of figures of stage evaluate."""
TEST_METRICS = (
    "accuracy", "preference_accuracy", "macro_f1", "exact_match", "token_f1", "answer_loss", "calibration_error",
    "general_perplexity",
)  # fmt: skip
"""Metrics of the evaluation that matter to most projects, most important first."""
MAX_CURVE_POINTS = 500
"""Maximum number of points of a curve. DVC puts all of them into a page, once for each compared revision."""


def write_metrics(folder: Path, figures: Mapping[str, float | str]) -> None:
    """Write the figures of a stage into its output, without those that are not finite, for which JSON has no value."""
    finite = {name: value for name, value in figures.items() if isinstance(value, str) or math.isfinite(value)}
    files.write_json(folder / METRICS_FILE, finite)


def select_test_figures(values: Mapping[str, float], chosen: Sequence[str]) -> dict[str, float]:
    """Return the most important metrics of an evaluation: those that the project chose, then TEST_METRICS."""
    names = [name for name in dict.fromkeys((*chosen, *TEST_METRICS)) if name in values]
    return {f"test_{name}": values[name] for name in names[:TEST_FIGURES]}


def write_loss_curves(journal: Path, folder: Path) -> None:
    """Write training and validation loss by optimizer step into `folder`, the output of stage train."""
    curves = plots.read_loss_curves(journal)
    for name, kind in (("training", "step"), ("validation", "validation")):
        _write_table(folder / PLOTS_FOLDER / f"{name}.csv", ("step", "loss"), _average_points(curves[kind]))


def _average_points(curve: Sequence[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    """Average neighbouring points, so that at most MAX_CURVE_POINTS remain; each has the last step of its points."""
    size = math.ceil(len(curve) / MAX_CURVE_POINTS) or 1
    for start in range(0, len(curve), size):
        points = curve[start : start + size]
        yield points[-1][0], math.fsum(loss for _, loss in points) / len(points)


def write_label_plots(folder: Path, matrix: "ConfusionMatrix | None", bins: "Sequence[CalibrationBin]") -> None:
    """Write confusion and calibration of the candidate into `folder`, the output of stage evaluate.

    The confusion table has a line for each test row, because DVC's template counts lines.
    """
    answers = [
        (label, answer)
        for label, counts in (zip(matrix.labels, matrix.matrix, strict=True) if matrix else ())
        for answer, count in zip(matrix.columns if matrix else (), counts, strict=True)
        for _ in range(count)
    ]
    _write_table(folder / PLOTS_FOLDER / "confusion.csv", ("actual", "predicted"), answers)
    points = [(group.confidence, group.accuracy, group.rows) for group in bins]
    _write_table(folder / PLOTS_FOLDER / "calibration.csv", ("confidence", "accuracy", "rows"), points)


def _write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    files.write_atomic(path, text.getvalue())
