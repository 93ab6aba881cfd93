"""`ratchet monitor`: compares logged answers of the deployed version with its evaluation."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, print_text, progress_printer
from ratchet.errors import EXIT_GATE, SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.storage.records.monitor import MonitorReport, MonitorTestReport

HELP = "compare answers that a server logs with the evaluation; exit 3 while there is an alarm"
LOOK_INTERVAL_S = 5.0
"""Time between two looks of `--follow`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", nargs="*", metavar="LOG", help="JSON lines of the server, a folder of them, or mlflow:EXPERIMENT"
    )
    version = parser.add_mutually_exclusive_group()
    version.add_argument("--version", type=int, metavar="N", help="a registered version (default: the champion)")
    version.add_argument("--release", type=Path, metavar="DIR", help="the version that `ratchet deploy` put into DIR")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--follow", action="store_true", help="keep reading, until there is an alarm")
    mode.add_argument(
        "--reset", action="store_true", help="acknowledge the alarms: the tests compare with the evaluation again"
    )
    mode.add_argument(
        "--accept", action="store_true", help="acknowledge the alarms: the tests compare with the requests that follow"
    )
    parser.add_argument("--reason", metavar="TEXT", help="with --reset or --accept: the reason (required)")


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.stages.monitor import MonitorOptions, monitor, reset_alarms

    is_reset = arguments.reset or arguments.accept
    if is_reset != (arguments.reason is not None):
        raise SettingsError("--reset and --accept need --reason TEXT, and --reason needs one of them")
    if is_reset == bool(arguments.logs):
        expected = "no LOG with --reset or --accept" if is_reset else "at least one LOG"
        raise SettingsError(f"found {len(arguments.logs)} logs; expected {expected}")
    project = Project(arguments.project)
    options = MonitorOptions(arguments.version, arguments.release)
    if is_reset:
        report = reset_alarms(project, arguments.reason, options, is_accepted=arguments.accept)
    elif arguments.follow:
        report = _follow(lambda: monitor(project, arguments.logs, options), progress_printer(arguments))
    else:
        report = monitor(project, arguments.logs, options)
    print_record(report, format_monitor, arguments)
    return EXIT_GATE if report.alarms else None


def _follow(look: "Callable[[], MonitorReport]", report_line: Callable[[str], None]) -> "MonitorReport":
    """Look until there is an alarm, or until Ctrl-C or SIGTERM; return the last report."""
    report = look()
    try:
        while not report.alarms:
            if report.new_requests:
                report_line(f"{report.requests:,} requests, no alarm")
            time.sleep(LOOK_INTERVAL_S)
            report = look()
    except KeyboardInterrupt:  # `ratchet.cli.main` raises it at SIGTERM as well; the state is saved
        print_text("stopped; the next call continues")
    return report


def format_monitor(report: "MonitorReport") -> str:
    """Format the tests as a table, then alarms and notes."""
    from ratchet.stages.monitor import START_SHARE

    lines = [
        f"version {report.version}: {report.requests:,} requests compared with the evaluation"
        + (f", {report.new_requests:,} of them new" if report.new_requests else ""),
        format_table(
            [("test", "values", "mean", "evaluation", "evidence", "state"), *map(_format_row, report.tests)]
        ),
        f"  an alarm needs evidence of {report.tests[0].threshold:,.0f}; within T requests, the probability of a false "
        f"alarm is at most {100 * START_SHARE:g} % + T / {report.requests_per_false_alarm:,}",
    ]  # fmt: skip
    for alarm in report.alarms:
        lines.append(f"ALARM {alarm.describe()}" + (f"; {alarm.action}" if alarm.action else ""))
    if report.alarms:
        lines.append(
            "acknowledge with `ratchet monitor --reset --reason TEXT`, or --accept if this is normal from now on"
        )
    skipped = (
        (report.duplicates, "had been counted"),
        (report.earlier, "of another version, or from before its promotion"),
        (report.unusable, "no request"),
    )
    if any(count for count, _ in skipped):
        lines.append("lines left out: " + ", ".join(f"{count:,} {why}" for count, why in skipped if count))
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _format_row(test: "MonitorTestReport") -> tuple[str, ...]:
    state = "ok"
    if test.alarm is not None:
        state = f"ALARM: changed since {test.alarm.start_time or f'number {test.alarm.start:,}'}"
    elif test.learning:
        state = f"learning, {test.learning} more"
    value = "" if test.value is None else f"{test.value:.4g}"
    reference = f"{test.reference:.4g} ({test.reference_rows:,} {'accepted' if test.is_accepted else 'rows'})"
    return test.test, f"{test.observed:,}", value, reference, f"{test.evidence:,.3g}", state
