"""Tests the plot of precision-recall curves: its choice of labels, and unusual curves."""

import io
import math
from typing import Any

import matplotlib.figure

from ratchet.reports import plots
from sweep_plots_cases import figures  # noqa: F401 (a fixture)


def curve(average_precision: float) -> dict[str, Any]:
    return {"precision": [0.5, 0.8, 1.0], "recall": [1.0, 0.5, 0.0], "average_precision": average_precision}


def legend(figure: matplotlib.figure.Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_worst_labels_are_shown_and_the_mean_of_all(figures: list[matplotlib.figure.Figure]) -> None:
    target = io.BytesIO()
    plots.draw_precision_recall({f"label {i:02}": curve(i / 40) for i in range(40)}, target)
    assert target.getvalue().startswith(b"\x89PNG")
    names = legend(figures[0])
    assert names[:-1] == [f"label {i:02}  {i / 40:.3f}" for i in range(12)]
    assert names[-1] == f"mean of 40 labels  {sum(range(40)) / 40 / 40:.3f}"
    looks = {(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].lines}
    assert len(looks) == 13  # no two lines look alike


def test_the_mean_curve_is_of_what_can_be_had_at_a_recall(figures: list[matplotlib.figure.Figure]) -> None:
    perfect = {"precision": [1.0, 1.0], "recall": [1.0, 0.0], "average_precision": 1.0}
    plots.draw_precision_recall({"a": curve(0.7), "b": perfect}, io.BytesIO())
    mean = figures[0].axes[0].lines[-1].get_ydata()
    assert (mean[0], mean[50], mean[51], mean[100]) == (1.0, 0.9, 0.75, 0.75)


def test_odd_labels_and_curves_without_points(figures: list[matplotlib.figure.Figure]) -> None:
    nothing = {"precision": [], "recall": [], "average_precision": math.nan}
    names = ["_hidden", "costs $5 and $6", "x" * 60, "\N{SNOWMAN}"]
    plots.draw_precision_recall({**{name: curve(0.5) for name in names}, "none": nothing}, io.BytesIO())
    shown = legend(figures[0])
    assert len(shown) == len(names) + 1
    assert shown[-1] == "mean of 4 labels  0.500"
    assert max(map(len, shown)) < 40


def test_no_curve_at_all_is_said(figures: list[matplotlib.figure.Figure]) -> None:
    plots.draw_precision_recall({}, io.BytesIO())
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["no label has a curve"]
