"""`ratchet gate`: the DVC stage that decides whether the model may be promoted."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.errors import EXIT_GATE
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.gate import NoiseReport
    from ratchet.storage.layout import ProjectLayout
    from ratchet.storage.records.gate import Verdict

HELP = "stage: decide from the reports: PROMOTE, HOLD, REJECT or INVALID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="only check the verdict on file: exit 3 unless it is PROMOTE"
    )
    mode.add_argument(
        "--aa", action="store_true",
        help="A/A test: score the candidate again to estimate the noise; exit 3 if too large",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.quality_gate.rules import describe_verdict
    from ratchet.stages.gate import check_verdict, gate, run_aa_test

    project = Project(arguments.project)
    if arguments.aa:
        noise = run_aa_test(project, progress_printer(arguments))
        print_record(noise, format_noise, arguments)
        return None if noise.is_within_limits else EXIT_GATE
    if arguments.check:
        verdict = check_verdict(project)
        print_record(verdict, describe_verdict, arguments)
        return None if verdict.decision == "PROMOTE" else EXIT_GATE

    print_record(gate(project), lambda verdict: format_verdict(verdict, project.layout), arguments)
    return None


def format_verdict(verdict: "Verdict", layout: "ProjectLayout") -> str:
    """Format the decision with its reasons, and the path of the page that shows the evidence."""
    from ratchet.quality_gate.rules import describe_verdict

    return f"{describe_verdict(verdict)}\n  the evidence: {layout.gate_page}"


def format_noise(noise: "NoiseReport") -> str:
    """Format a table of the differences between two evaluations of the same model."""
    from ratchet.quality_gate.decision import format_noise_table

    return format_noise_table(list(noise.metrics), noise.batch_rows, noise.confidence)
