"""`ratchet approve`: shows a verdict, and approves its promotion."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.approve import ApprovalReport

HELP = "show a verdict, and approve the promotion of its model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "verdict", nargs="?", metavar="VERDICT",
        help="sign an approval of the verdict with these first digits (default: only show the verdict and its digits)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.approve import approve

    project = Project(arguments.project)
    print_record(approve(project, arguments.verdict), partial(format_approval, root=project.root), arguments)


def format_approval(report: "ApprovalReport", root: Path) -> str:
    """Format the verdict, its approvals, and the next step."""
    from ratchet.config.units import format_count
    from ratchet.quality_gate.rules import describe_verdict
    from ratchet.registry.keys import SHOWN_DIGITS
    from ratchet.storage.html import escape_invisible

    verdict, digest = report.verdict, report.verdict_digest[:12]
    against = f"champion {verdict.champion_digest[:12]}" if verdict.champion_digest else "no champion"
    _, *reasons = escape_invisible(describe_verdict(verdict)).splitlines()
    lines = [
        f"verdict {digest}: {verdict.decision} for model {verdict.model_digest[:12]} of run {verdict.run_id}, "
        f"against {against}, as {report.model_name}",
        *reasons,
        *(f"  proposed by {proposal}" for proposal in report.proposals),
    ]
    if report.own is not None:
        checked = "judged again on this machine: the same verdict"
        lines.append(f"  {checked if report.is_judged_here else 'not judged again: this machine has no evaluation'}")
    lines += [
        f"  approved by {approver.actor} ({approver.signer[:SHOWN_DIGITS]}, {approver.time})"
        for approver in report.approvers
    ]
    lines += [f"  does not count: {problem}" for problem in report.problems]
    lines += [f"  note: {note}" for note in report.notes]
    state = "has all approvals: `ratchet promote`"
    if report.missing:
        state = f"lacks {format_count(report.missing, 'approval')} (promote.approvals: {report.required})"
    lines.append(f"  {state}")
    if report.own is None:
        return "\n".join([*lines, f"nothing was signed; to approve it: ratchet approve {digest}"])
    where = f"commit {report.file.relative_to(root)}" if report.file is not None else ""
    where += f"; {report.server} has it, too" if report.server else ""
    return "\n".join([*lines, f"{'approved' if report.is_new else 'approved already'}; {where}"])
