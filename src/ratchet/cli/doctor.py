"""`ratchet doctor`: examines machine, data and base, and proposes settings."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.cli.troubleshooting import find_section
from ratchet.errors import EXIT_INPUT, UnsuitableMachineError
from ratchet.stages.project import open_project_or_defaults

if TYPE_CHECKING:
    from ratchet.stages.doctor import DoctorReport
    from ratchet.stages.machine_check import MachineCheckReport

HELP = "examine data, base and machine, and propose settings with reasons"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a single config.json")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write the proposals into params.yaml")
    mode.add_argument(
        "--require", metavar="A=B,C=D",
        help="only check this machine, and exit 69 if it does not meet these: vram=22GB,gpus=1,cuda=12.6,driver=550,"
        "ram=32GB,cpus=8,disk=50GB,python=3.11,download=50Mbps,upload=20Mbps",
    )  # fmt: skip
    parser.add_argument("--replica", metavar="URL", help="with --require: storage to measure the network with")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="with --require: also write the record to this file"
    )


def run(arguments: argparse.Namespace) -> int | None:
    layout, settings = open_project_or_defaults(arguments.project)
    if arguments.require is not None or arguments.replica or arguments.output:
        from ratchet.stages.machine_check import MachineCheckReport, check_machine

        try:
            report = check_machine(layout, settings, arguments.require, arguments.replica, arguments.output)
        except UnsuitableMachineError as error:
            if arguments.json and isinstance(error.report, MachineCheckReport):
                print_record(error.report, format_machine, arguments)
            raise
        print_record(report, format_machine, arguments)
        return None
    from ratchet.stages.doctor import doctor

    examination = doctor(layout, settings if layout else None, arguments.base, arguments.write)
    print_record(examination, format_examination, arguments)
    return EXIT_INPUT if examination.problems else None


def format_machine(report: "MachineCheckReport") -> str:
    """Format the requirements and the measured values."""
    from ratchet.stages.machine_check import format_findings

    return f"{report.machine} is admitted\n{format_findings(report)}"


def format_examination(report: "DoctorReport") -> str:
    """Format findings, proposals with their reasons, the change of params.yaml, and problems."""
    lines = ["machine, base and data", *(f"  {subject:<10} {finding}" for subject, finding in report.findings)]
    target = report.compared_with + (f" for {report.base}" if report.base is not None else "")
    if report.proposals:
        plural = "s" * (len(report.proposals) > 1)
        lines.append(f"advice: {len(report.proposals)} change{plural} to {target}")
    elif report.is_base_known:
        lines.append(f"advice: nothing to change in {target}")
    for proposal in report.proposals:
        lines += [
            f"  {proposal.key}: {_format_value(proposal.before)} → {_format_value(proposal.value)}",
            f"      {proposal.reason}",
            f"      source: {proposal.source}",
        ]
    if report.diff:
        note = "params.yaml: written" if report.was_written else "`ratchet doctor --write` makes these changes"
        lines += ["", *report.diff, "", note]
    for problem in report.problems:
        section = find_section(problem)
        lines += [f"problem: {problem}", *([f"  See {section}"] if section else [])]
    return "\n".join(lines)


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else f"{value}"
