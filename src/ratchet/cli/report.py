"""`ratchet report`: an HTML page about one training, or about the answers of a generation."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.report import ReportResult

HELP = "write a page about a training (curves, evaluation, provenance) or about generated answers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="as for compare, or an output of generate (default: the latest run)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: in experiments/pages)")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.report import report

    print_record(report(Project(arguments.project), arguments.run, arguments.output), format_report, arguments)


def format_report(result: "ReportResult") -> str:
    """Format the final figures and the path of the page."""
    lines = [result.text, ""] if result.text else [result.title]
    lines += [f"  {name:22} {value}" for name, value in result.figures.items()]
    return "\n".join([*lines, f"  page: {result.page}"])
