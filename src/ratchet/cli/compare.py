"""`ratchet compare`: several trainings side by side."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.reports.comparison import PairwiseTestResult
    from ratchet.stages.compare import CompareResult

MAX_CELL_CHARACTERS = 36
"""Length limit of the text of a table cell, in characters; longer text is truncated."""

HELP = "compare trainings: settings that differ, curves, scores, and which differences are significant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", metavar="A",
        help="a run (id, or its beginning), a trial (SWEEP/NUMBER), a version (v3, champion, anchor), or seeds "
        "(A+B+C); LABEL=A gives it a name",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: in experiments/pages)")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.compare import compare

    print_record(compare(Project(arguments.project), arguments.names, arguments.output), format_comparison, arguments)


def format_comparison(result: "CompareResult") -> str:
    """Format the settings that differ, the final figures and the tested differences."""
    lines = [f"note: {note}" for note in result.notes]
    if result.differences:
        lines += ["differences", _format_values(result.names, result.differences)]
    else:
        lines.append("settings, data, base and circumstances are the same")
    lines += ["figures", _format_values(result.names, result.figures)]
    if result.test_results:
        lines += ["differences on the same rows", *(f"  {_format_finding(finding)}" for finding in result.test_results)]
    lines += [f"not tested, {reason}: {pairs}" for reason, pairs in result.not_tested.items()]
    return "\n".join([*lines, f"  page: {result.page}"])


def _format_finding(finding: "PairwiseTestResult") -> str:
    from ratchet.reports import comparison_page
    from ratchet.reports.pages import format_p_value

    first, second = (comparison_page.format_value(finding, value) for value in finding.values)
    p = format_p_value(finding.p_adjusted).replace("\u00a0", " ")
    how = f"p {p if p.startswith('<') else f'= {p}'} after Holm, n {finding.n:,}"
    head = f"{finding.metric} ({finding.rows}): {finding.leader}"
    if finding.is_significant:
        return f"{head} better than {finding.other}, {first} to {second}; {how}"
    return f"{head} {first}, {finding.other} {second}: no significant difference; {how}"


def _format_values(names: Sequence[str], values: Mapping[str, Sequence[str]]) -> str:
    """Format a table with a column for each training."""
    rows = [["", *names], *([name, *row] for name, row in values.items())]
    limit = MAX_CELL_CHARACTERS
    return format_table(
        [[cell if len(cell) <= limit else f"{cell[: limit - 1]}\u2026" for cell in row] for row in rows]
    )
