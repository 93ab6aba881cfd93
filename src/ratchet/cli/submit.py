"""`ratchet submit`: adds a whole run to the queue."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.config.units import format_count
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.submit import SubmittedJob

HELP = "add a whole run (other settings, data, base or commit) to the queue of `ratchet work`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of this job, such as train.rank=8 or base.source=DIR; of any section but machine",
    )  # fmt: skip
    parser.add_argument(
        "--revision", metavar="REV",
        help="use settings and files of this commit, tag or branch (default: params.yaml now, files of the worker)",
    )  # fmt: skip
    parser.add_argument(
        "--until", choices=("train", "export", "evaluate", "gate"), default="train", help="last stage (default: train)"
    )
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="higher ones are begun first (default: 0)")
    parser.add_argument(
        "--attempts", type=int, default=5, metavar="N", help="attempts until the job fails for good (default: 5)"
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.config.params_file import parse_changes
    from ratchet.stages.submit import submit

    submitted = submit(
        Project(arguments.project), parse_changes(arguments.set), revision=arguments.revision, until=arguments.until,
        priority=arguments.priority, max_attempts=arguments.attempts,
    )  # fmt: skip
    print_record(submitted, format_submission, arguments)


def format_submission(submitted: "SubmittedJob") -> str:
    """Format the number of the job, its settings and its place."""
    job = submitted.job
    details = "".join(f", {text}" for text in (job.changes, job.revision and f"commit {job.revision[:12]}") if text)
    waiting = f"{format_count(submitted.waiting, 'job')} waiting"
    return f"job {job.id} in queue {job.queue}: until {job.until}{details}; {waiting} (`ratchet work` runs them)"
