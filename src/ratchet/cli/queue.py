"""`ratchet queue`: shows and changes the jobs of `ratchet submit`."""

import argparse
import threading
from datetime import datetime
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, print_text
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.runs.job_queue import Job
    from ratchet.stages.submit import QueueReport

HELP = "show the jobs of `ratchet submit`; cancel or repeat them; export their number to Prometheus"
SHOWN = 10
"""Number of ended jobs that are shown without `--all`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help=f"also show more than the last {SHOWN} jobs that have ended")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cancel", type=int, metavar="JOB", help="end a job; its worker saves a checkpoint and stops it")
    mode.add_argument(
        "--retry", type=int, metavar="JOB", help="put a job that failed or was cancelled into the queue again"
    )
    mode.add_argument(
        "--export-metrics", action="store_true",
        help="serve the number of jobs at machine.metrics_port, or write machine.metrics_file, until stopped",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.submit import open_queue, read_queue

    project = Project(arguments.project)
    if arguments.cancel is not None:
        print_record(open_queue(project).cancel(arguments.cancel), format_job, arguments)
    elif arguments.retry is not None:
        print_record(open_queue(project).retry(arguments.retry), format_job, arguments)
    elif arguments.export_metrics:
        from ratchet.tracking.prometheus import PrometheusExporter

        machine = project.settings.machine
        if machine.metrics_port is None and machine.metrics_file is None:
            raise SettingsError("--export-metrics: set machine.metrics_port or machine.metrics_file")
        exporter = PrometheusExporter(machine)
        exporter.add_queue(open_queue(project))
        print_text(f"exporting the jobs of queue {project.settings.promote.model_name}; stop with Ctrl-C")
        threading.Event().wait()
    else:
        report = read_queue(project)
        print_record(report, lambda record: format_queue(record, has_all=arguments.all), arguments)


def format_job(job: "Job") -> str:
    """Format the state of a job."""
    return f"job {job.id} in queue {job.queue}: {job.state}"


def format_queue(report: "QueueReport", has_all: bool) -> str:
    """Format the number of jobs in each state, and a line for each job."""
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items() if count) or "no jobs"
    title = f"queue {report.queue} in {report.where}: {counts}"
    waiting = sum(job.ended is None for job in report.jobs)
    shown = report.jobs[: None if has_all else waiting + SHOWN]
    rows = [
        ("job", "state", "priority", "attempts", "until", "run", "worker", "lease until", "settings"),
        *map(_format_row, shown),
    ]
    notes = [f"  job {job.id}: {job.note}" for job in shown if job.note and job.state not in ("running", "cancelled")]
    return "\n".join([title, *([format_table(rows)] if shown else []), *notes])


def _format_row(job: "Job") -> tuple[str, ...]:
    settings = ", ".join(filter(None, (job.revision and f"commit {job.revision[:12]}", job.changes))) or "-"
    attempts = f"{job.attempts} of {job.max_attempts}"
    return (
        str(job.id),
        job.state,
        str(job.priority),
        attempts,
        job.until,
        job.run_id or "-",
        job.worker or "-",
        "-" if job.lease_end is None or job.state != "running" else f"{datetime.fromtimestamp(job.lease_end):%H:%M:%S}",
        settings,
    )
