"""`ratchet status`: prints the progress of runs."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.stages.project import open_project_or_defaults
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.stages.status import ReplicaStatusReport, StatusReport

HELP = "show the progress of a training or generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN",
        help="run id, or its first characters (default: the latest training, and running generations or a newer "
        "unfinished one)",
    )  # fmt: skip
    parser.add_argument(
        "--replica", nargs="?", const=True, metavar="URL",
        help="show runs in this replica (default: machine.replica), from any machine",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    if arguments.replica is not None:
        from ratchet.stages.status import replica_status

        machine = open_project_or_defaults(arguments.project)[1].machine
        print_record(replica_status(machine, arguments.replica, arguments.run), format_replica_status, arguments)
        return
    from ratchet.stages.status import status

    print_record(status(ProjectLayout.find(arguments.project), arguments.run), format_status, arguments)


def format_status(report: "StatusReport") -> str:
    """Format each run in several lines, and the champion in one."""
    lines = [run.description for run in report.runs] or ["no run yet; `dvc repro` starts one"]
    if (champion := report.champion) is not None:
        forced = champion.forced
        note = f"; FORCED by {forced.actor} despite {forced.obstacle}: {forced.reason}" if forced else ""
        model = f"model {champion.model_digest[:12]}, run {champion.run_id}"
        lines.append(f"champion: version {champion.version}, {model}{note}")
    return "\n".join(lines)


def format_replica_status(report: "ReplicaStatusReport") -> str:
    """Format a single run in several lines, or all runs in one line each."""
    return "\n".join(run.description for run in report.runs) or "no run in this replica yet"
