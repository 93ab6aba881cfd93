"""The pictures of a sweep, by name: each is a function of the report, and equal reports give equal bytes."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

from ratchet.pages.sweep_canvas import Form, Target
from ratchet.pages.sweep_course import curves, history
from ratchet.pages.sweep_knobs import importances, slices
from ratchet.pages.sweep_parallel import parallel
from ratchet.pages.sweep_surface import contour, pair, pareto
from ratchet.pages.sweep_timeline import timeline
from ratchet.pages.sweep_tokens import savings
from ratchet.records_sweep import SweepReport

Drawing = Callable[[SweepReport, Target, Form], None]

PICTURES: Mapping[str, Drawing] = {
    "history": history,
    "curves": curves,
    "importances": importances,
    "slices": slices,
    "contour": contour,
    "parallel": parallel,
    "pareto": pareto,
    "timeline": timeline,
    "savings": savings,
}
"""In the order of the page."""


def wanted(report: SweepReport) -> list[str]:
    """Names of the pictures that this sweep can fill, in the order of the page.

    A front needs several objectives, a contour two numeric knobs, and all of them a trial.
    """
    if not report.trials:
        return []
    useless = set()
    if len(report.objectives) < 2:
        useless.add("pareto")
    if pair(report) is None:
        useless.add("contour")
    return [name for name in PICTURES if name not in useless]


def drawn(report: SweepReport) -> dict[str, bytes]:
    """All pictures that are wanted, as SVG, by name: what the page is made with."""
    found = {}
    for name in wanted(report):
        stream = io.BytesIO()
        PICTURES[name](report, stream, "svg")
        found[name] = stream.getvalue()
    return found


def write(report: SweepReport, folder: Path) -> list[Path]:
    """Write all pictures that are wanted as PNG, each under its name, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in wanted(report):
        found.append(folder / f"{name}.png")
        PICTURES[name](report, found[-1], "png")
    return found
