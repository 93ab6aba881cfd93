"""Several trainings side by side: runs, trials, versions, seeds. Reads what is there, and changes nothing of it."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import SettingsError
from ratchet.reports import comparison, comparison_page
from ratchet.reports.comparison import HOW, ComparisonIndex, PairwiseTestResult, RunComparison
from ratchet.reports.forest_plot import format_p_value
from ratchet.storage.html import NONE
from ratchet.storage.layout import ProjectLayout

LONGEST_NAME = 80
"""Characters of the page's name."""
CELL = 36
"""Characters of a cell in the terminal."""


def compare(layout: ProjectLayout, settings: Settings, names: Sequence[str], output: Path | None) -> str:
    """The verb: writes the page, and returns what differs, the final figures and the differences that were tested.

    Args:
        layout: the project.
        settings: its settings; of section gate, how differences are tested.
        names: what is compared, see reports/comparison.
        output: the page; None: experiments/pages/compare-NAMES.html.

    Raises:
        DataError: a name that nothing has, or several have.
        SettingsError: fewer than two names, too many, or one thing twice.
        DamagedFileError: a file that was to be read is not as it was written.
    """
    if len(names) < 2:
        raise SettingsError(f"{names[0]}: name two or more; `ratchet report {names[0]}` shows one. To compare, {HOW}")
    known = ComparisonIndex(layout)
    found = comparison.compare_subjects(layout, settings.gate, known.subjects(names), known)
    target = output or layout.pages / f"compare-{default_file_name(names)}.html"
    comparison_page.write(found, target)
    return f"{describe(found)}\n  page: {target}"


def default_file_name(names: Sequence[str]) -> str:
    """Names as part of a file's name."""
    text = "-".join("".join(sign if sign.isalnum() or sign in "+._" else "_" for sign in name) for name in names)
    return text[:LONGEST_NAME]


def describe(found: RunComparison) -> str:
    """What differs, for the terminal."""
    heads = ["", *(side.name for side in found.sides)]
    differing = [row for row in (*found.settings, *found.manner) if row.differs]
    lines = [f"note: {note}" for note in found.notes]
    if differing:
        lines += ["what differs", *_format_table([heads, *([row.name, *row.values] for row in differing)])]
    else:
        lines.append("settings, data, base and the way they were carried out are the same")
    figures = [
        [name, *values] for name, values in comparison_page.summarize_sides(found.sides) if set(values) != {NONE}
    ]
    lines += ["figures", *_format_table([heads, *figures])]
    if found.findings:
        lines += ["differences on the same rows", *(f"  {_format_finding(one)}" for one in found.findings)]
    lines += [
        f"not tested, {why}: {pairs}" for why, pairs in comparison_page.group_incomparable_pairs(found.silences).items()
    ]
    return "\n".join(lines)


def _format_finding(one: PairwiseTestResult) -> str:
    first, second = (comparison_page.format_value(one, value) for value in one.values)
    p = format_p_value(one.p_adjusted).replace("\u00a0", " ")
    how = f"p {p if p.startswith('<') else f'= {p}'} after Holm, n {one.n:,}"
    if one.is_real:
        return f"{one.metric} ({one.rows}): {one.leader} better than {one.other}, {first} to {second}; {how}"
    return f"{one.metric} ({one.rows}): {one.leader} {first}, {one.other} {second}: cannot be told apart; {how}"


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, two spaces in."""
    cut = [[_truncate_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cut)
    return [f"  {line}".rstrip() for line in lines]


def _truncate_cell(cell: str) -> str:
    return cell if len(cell) <= CELL else f"{cell[: CELL - 1]}\u2026"
