"""`ratchet compare`: several trainings side by side. Reads files and changes none."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.reports import comparison, comparison_page
from ratchet.reports.comparison import HOW, ComparisonIndex, PairwiseTestResult
from ratchet.stages.project import Project
from ratchet.storage.html import NONE
from ratchet.storage.records.base import Record

LONGEST_NAME = 80
"""Characters of the page's name."""


class CompareResult(Record):
    """Result of `ratchet compare`."""

    names: tuple[str, ...]
    differences: dict[str, tuple[str, ...]]
    """Settings, data and circumstances that differ, with the value of each training."""
    figures: dict[str, tuple[str, ...]]
    """Final figures as text, of each training."""
    test_results: tuple[PairwiseTestResult, ...]
    """Paired tests on the same rows."""
    not_tested: dict[str, str]
    """Pairs that could not be tested, by reason."""
    notes: tuple[str, ...]
    page: Path


def compare(project: Project, names: Sequence[str], output: Path | None = None) -> CompareResult:
    """Compare trainings and write a page: settings that differ, final figures, and tested differences.

    Args:
        project: the project; section gate of its settings says how differences are tested.
        names: what to compare (see reports/comparison.py).
        output: the page; None: experiments/pages/compare-NAMES.html.

    Raises:
        DataError: a name that matches nothing, or more than one thing.
        SettingsError: fewer than two names, too many, or the same thing twice.
        DamagedFileError: a file differs from what was written.
    """
    layout, settings = project.layout, project.settings
    if len(names) < 2:
        raise SettingsError(f"{names[0]}: name two or more; `ratchet report {names[0]}` shows one. To compare, {HOW}")
    known = ComparisonIndex(layout)
    found = comparison.compare_subjects(layout, settings.gate, known.subjects(names), known)
    target = output or layout.pages / f"compare-{default_file_name(names)}.html"
    comparison_page.write(found, target)
    figures = dict(comparison_page.summarize_sides(found.sides))
    return CompareResult(
        names=tuple(side.name for side in found.sides),
        differences={row.name: tuple(row.values) for row in (*found.settings, *found.execution) if row.differs},
        figures={name: tuple(values) for name, values in figures.items() if set(values) != {NONE}},
        test_results=tuple(found.test_results),
        not_tested=comparison_page.group_incomparable_pairs(found.incomparable_pairs),
        notes=tuple(found.notes),
        page=target,
    )


def default_file_name(names: Sequence[str]) -> str:
    """Names as part of a file's name."""
    text = "-".join("".join(sign if sign.isalnum() or sign in "+._" else "_" for sign in name) for name in names)
    return text[:LONGEST_NAME]
