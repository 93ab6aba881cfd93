"""`ratchet work`: runs jobs of the queue on this machine."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.config.units import format_count
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.work import WorkReport

HELP = "run jobs of `ratchet submit` on this machine, one after the other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exit-when-idle", nargs="?", const=0.0, type=float, metavar="SECONDS",
        help="end as soon as no job waits, or after this time without one (default: wait for jobs forever)",
    )  # fmt: skip
    parser.add_argument(
        "--on-idle",
        metavar="COMMAND",
        help="with --exit-when-idle: run a command at the end, such as `shutdown -h now`",
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.work import work

    report = work(Project(arguments.project), progress_printer(arguments), arguments.exit_when_idle, arguments.on_idle)
    print_record(report, format_work, arguments)


def format_work(report: "WorkReport") -> str:
    """Format the number of jobs."""
    failed = f", failed attempts at {', '.join(map(str, sorted(set(report.failed))))}" if report.failed else ""
    return f"worker {report.worker}: {format_count(len(report.done), 'job')} done{failed}"
