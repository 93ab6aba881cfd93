"""Proves that the pictures of any sweep are legible."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib.figure
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import sweep_example as example
from ratchet.reports import sweep_canvas as canvas
from ratchet.reports import sweep_plots
from ratchet.storage.records.sweep import SweepReport
from sweep_plots_cases import (
    FORTY,
    REPORTS,
    figures,  # noqa: F401 (a fixture)
    svg,
)

PACKAGES = ("reports",)


@pytest.mark.parametrize("name", REPORTS)
def test_every_sweep_can_be_drawn_legibly(name: str, figures: list[matplotlib.figure.Figure]) -> None:
    report = REPORTS[name]()
    for picture in sweep_plots.PICTURES:
        drawn = svg(picture, report).decode()
        assert [*clashes(figures.pop())] == [], picture
        assert ElementTree.fromstring(drawn).tag.endswith("svg")  # noqa: S314 (what we have just written)
        # This checks the numbers of paths and axes. Other texts may contain these words.
        assert not re.search(r"\b(nan|inf)\b", re.sub(r"<text[^>]*>[^<]*</text>", "", drawn))
        assert not re.search(r"<text[^>]*>-?(nan|inf)</text>", drawn)


def clashes(figure: matplotlib.figure.Figure) -> Iterator[str]:
    """Yield the texts of a figure that are cut off, and neighboring labels on an axis that overlap."""
    figure.dpi = canvas.DPI
    painter = FigureCanvasAgg(figure).get_renderer()
    figure.draw(painter)
    on_axes: set[Text] = set()
    seen: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = axis.get_major_ticks()
            on_axes |= {label for tick in ticks for label in (tick.label1, tick.label2)}
            low, high = sorted(axis.get_view_interval())
            room = 1e-9 * (high - low)
            texts = [
                tick.label1
                for tick in ticks
                if axes.axison and tick.label1.get_visible() and low - room <= tick.get_loc() <= high + room
            ]
            seen |= set(texts)
            upright = [text for text in texts if text.get_text() and not text.get_rotation()]
            boxes = [text.get_window_extent(painter) for text in upright]
            for place, (one, other) in enumerate(pairwise(boxes)):
                if one.overlaps(other):
                    yield f"{upright[place].get_text()!r} meets {upright[place + 1].get_text()!r}"
    wide, high = figure.bbox.width, figure.bbox.height
    for text in {*figure.findobj(Text)} - on_axes | seen:
        box = text.get_window_extent(painter)
        if text.get_text().strip() and not (box.x0 > -2 and box.y0 > -2 and box.x1 < wide + 2 and box.y1 < high + 2):
            yield f"{text.get_text()!r} is cut off"


def test_equal_reports_give_equal_bytes_also_in_threads_and_other_reports_others() -> None:
    again = SweepReport.model_validate_json(FORTY.model_dump_json())
    names = sweep_plots.available_plots(FORTY)
    alone = {name: svg(name, FORTY) for name in names}
    with ThreadPoolExecutor(4) as pool:
        together = dict(zip(names, pool.map(lambda name: svg(name, again), names), strict=True))
    assert together == alone
    assert sweep_plots.draw_all(FORTY) == alone
    other = sweep_plots.draw_all(example.report(39))
    # Both reports have the same importances.
    assert [name for name in alone if other[name] == alone[name]] == ["importances"]
