"""The pictures of a panel as PNG, for slides and reviews."""

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ratchet import files
from ratchet.appraisal import words
from ratchet.appraisal.page import bars
from ratchet.appraisal.panel import Panel
from ratchet.errors import SettingsError
from ratchet.services import curves_plot, plots
from ratchet.services.metrics import OTHER

CONFUSION, CURVES, RELIABILITY = "confusion.png", "precision_recall.png", "reliability.png"

LABELS_DRAWN = 200
"""Of a confusion matrix: with more the picture is larger than what reads it bears."""


def write(panel: Panel, folder: Path) -> list[Path]:
    """Draw what there is: confusion.png, precision_recall.png, reliability.png; each is whole or not there.

    Raises:
        SettingsError: the folder cannot be made.
    """
    labels = panel.labels
    if labels is None:
        return []
    wanted: dict[str, Callable[[Path], None]] = {}
    names, matrix = labels.confusion.labels, labels.confusion.matrix
    if len(names) <= LABELS_DRAWN:
        shown = [*(words.cut(name) for name in names), OTHER]
        wanted[CONFUSION] = lambda target: plots.confusion_matrix(shown, matrix, target)
    if (likely := labels.likely) is not None:
        wanted[CURVES] = lambda target: curves_plot.precision_recall(likely.curves, target)
        drawn, error = bars(likely), likely.calibration.error
        wanted[RELIABILITY] = lambda target: curves_plot.reliability(drawn, error, target)
    try:
        files.make_directory(folder)
    except (FileExistsError, NotADirectoryError) as error:
        raise SettingsError(f"{folder}: no folder can be made there for the pictures ({error.strerror})") from None
    for name, draw in wanted.items():
        aside = folder / f"{files.PARTIAL}{name}"
        draw(aside)
        files.publish(aside, folder / name)
    return [folder / name for name in wanted]


def remove(folder: Path, but: Collection[Path]) -> None:
    """Remove those that an earlier `write` drew, and the folder if nothing else is in it."""
    for path in (folder / name for name in (CONFUSION, CURVES, RELIABILITY)):
        if path not in but:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
