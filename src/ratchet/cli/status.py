"""`ratchet status`: prints the progress of runs."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, print_record
from ratchet.cli.projects import find_layout, open_project_or_defaults
from ratchet.errors import EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.status import ReplicaStatusReport, StatusReport

HELP = "show the progress of a training or generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN",
        help="run id, or its first characters (default: the latest training and all running generations)",
    )  # fmt: skip
    parser.add_argument(
        "--replica", nargs="?", const=True, metavar="URL",
        help="show runs in this replica (default: machine.replica), from any machine",
    )  # fmt: skip
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.replica is not None:
        from ratchet.stages.status import replica_status

        machine = open_project_or_defaults(arguments)[1].machine
        print_record(replica_status(machine, arguments.replica, arguments.run), format_replica_status, arguments)
        return EXIT_OK
    from ratchet.stages.status import status

    print_record(status(find_layout(arguments), arguments.run), format_status, arguments)
    return EXIT_OK


def format_status(report: "StatusReport") -> str:
    """Format each run in several lines, and the champion in one."""
    lines = [run.description for run in report.runs] or ["no run yet; `dvc repro` starts one"]
    if (champion := report.champion) is not None:
        forced = champion.forced
        note = f"; FORCED by {forced.actor} against {forced.decision}: {forced.reason}" if forced else ""
        model = f"model {champion.model_digest[:12]}, run {champion.run_id}"
        lines.append(f"champion: version {champion.version}, {model}{note}")
    return "\n".join(lines)


def format_replica_status(report: "ReplicaStatusReport") -> str:
    """Format a single run in several lines, or all runs in one line each."""
    return "\n".join(run.description for run in report.runs) or "no run in this replica yet"
