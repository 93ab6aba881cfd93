"""`ratchet compare`: a page that shows several trainings side by side. Changes none of the files that it reads."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.reports import comparison, comparison_page
from ratchet.reports.comparison import NAME_SYNTAX, ComparisonIndex, PairwiseTestResult
from ratchet.stages.project import Project
from ratchet.storage.html import NONE
from ratchet.storage.records.base import Record

MAX_NAME_CHARACTERS = 80
"""Length limit of the name of a page, in characters, without its ending."""


class CompareResult(Record):
    """Result of `ratchet compare`."""

    names: tuple[str, ...]
    differences: dict[str, tuple[str, ...]]
    """Settings, data and execution facts that differ, with the value of each training."""
    figures: dict[str, tuple[str, ...]]
    """Final figures of each training, as text."""
    test_results: tuple[PairwiseTestResult, ...]
    """Paired tests on the same rows."""
    not_tested: dict[str, str]
    """Pairs that could not be tested, by reason."""
    notes: tuple[str, ...]
    page: Path


def compare(project: Project, names: Sequence[str], output: Path | None = None) -> CompareResult:
    """Compare trainings and write a page: settings that differ, final figures, and tested differences.

    Args:
        project: section gate of its settings defines the tests of differences.
        names: names of trainings (see reports/comparison.py).
        output: the page; None: experiments/pages/compare-NAMES.html.

    Raises:
        DataError: a name matches nothing, or more than one training.
        SettingsError: there are fewer than two names, too many, or the same training twice.
        DamagedFileError: a file was changed after it was written.
    """
    layout, settings = project.layout, project.settings
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise SettingsError(f"found no names; name two or more runs. To compare, {NAME_SYNTAX}")
    if len(names) < 2:
        raise SettingsError(
            f"{names[0]}: name two or more; `ratchet report {names[0]}` shows one. To compare, {NAME_SYNTAX}"
        )
    index = ComparisonIndex(layout)
    result = comparison.compare_subjects(layout, settings.gate, index.subjects(names), index)
    readable = "-".join("".join(c if c.isalnum() or c in "+._" else "_" for c in name) for name in names)
    target = output or layout.pages / f"compare-{readable[:MAX_NAME_CHARACTERS]}.html"
    comparison_page.write(result, target)
    figures = dict(comparison_page.summarize_sides(result.sides))
    return CompareResult(
        names=tuple(side.name for side in result.sides),
        differences={row.name: tuple(row.values) for row in (*result.settings, *result.execution) if row.differs},
        figures={name: tuple(values) for name, values in figures.items() if set(values) != {NONE}},
        test_results=tuple(result.test_results),
        not_tested=dict(result.not_tested),
        notes=tuple(result.notes),
        page=target,
    )
