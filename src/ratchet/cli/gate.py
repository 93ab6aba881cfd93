"""`ratchet gate`: the DVC stage that decides whether the model may be promoted."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from ratchet.cli.output import escape_comment, print_record, print_text, progress_printer
from ratchet.errors import EXIT_GATE, SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.gate import NoiseReport
    from ratchet.storage.layout import ProjectLayout
    from ratchet.storage.records.gate import Verdict

HELP = "stage: decide from the reports: PROMOTE, HOLD, REJECT or INVALID; exit 0 for each of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true",
        help="only check the verdict on file: exit 3 unless it is PROMOTE (without --check, the exit code is 0 for "
        "every verdict, so that DVC keeps the output)",
    )  # fmt: skip
    mode.add_argument(
        "--aa", action="store_true",
        help="A/A test: score the candidate again to estimate the noise; exit 3 if too large",
    )  # fmt: skip
    parser.add_argument(
        "--markdown", action="store_true",
        help="print the verdict as Markdown, for a comment on a pull request; a verdict that is up to date is not "
        "judged again",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.quality_gate.rules import describe_verdict
    from ratchet.stages.gate import check_verdict, find_verdict, gate, run_aa_test
    from ratchet.storage.records.gate import read_champion

    if arguments.markdown and (arguments.json or arguments.aa):
        raise SettingsError(
            f"--markdown: found {'--json' if arguments.json else '--aa'} as well; leave out one of them"
        )
    project = Project(arguments.project)
    if arguments.aa:
        noise = run_aa_test(project, progress_printer(arguments))
        print_record(noise, format_noise, arguments)
        return None if noise.is_within_limits else EXIT_GATE
    if arguments.check:
        verdict = check_verdict(project)
        is_promoted = read_champion(project.layout.champion).champion_digest == verdict.model_digest
        describe = format_markdown if arguments.markdown else partial(describe_verdict, is_promoted=is_promoted)
        print_record(verdict, describe, arguments)
        return None if verdict.decision == "PROMOTE" else EXIT_GATE
    if arguments.markdown:
        print_text(format_markdown(find_verdict(project)))
        return None
    print_record(gate(project), lambda verdict: format_verdict(verdict, project.layout), arguments)
    return None


def format_verdict(verdict: "Verdict", layout: "ProjectLayout") -> str:
    """Format the decision with its reasons, and the path of the page that shows the evidence."""
    from ratchet.quality_gate.rules import describe_verdict

    return f"{describe_verdict(verdict)}\n  the evidence: {layout.gate_page}"


def format_markdown(verdict: "Verdict") -> str:
    """Format the verdict as Markdown: a heading, a table with a row for each rule, and the warnings."""
    from ratchet.quality_gate.rules import describe_changed_rules

    labels = {"pass": "pass", "fail": "**fail**", "undecided": "undecided", "invalid": "**invalid**"}
    lines = [
        f"### Ratchet gate: {verdict.decision}", "",
        f"Model `{verdict.model_digest[:12]}` of run `{verdict.run_id}`"
        f"{' (already the champion)' if verdict.is_champion else ''}", "",
        "| | rule | metric | result |", "|---|---|---|---|",
        *(
            f"| {labels[reason.outcome]} | {escape_comment(reason.rule)} | {escape_comment(reason.metric)} | "
            f"{escape_comment(reason.text)} |"
            for reason in verdict.reasons
        ),
    ]  # fmt: skip
    for note in verdict.notes:
        lines += ["", f"Note: {escape_comment(note)}"]
    if verdict.earlier_decisions:
        lines += ["", f"Note: {escape_comment(describe_changed_rules(verdict))}"]
    return "\n".join(lines)


def format_noise(noise: "NoiseReport") -> str:
    """Format a table of the differences between two evaluations of the same model."""
    from ratchet.quality_gate.decision import format_noise_table

    return format_noise_table(list(noise.metrics), noise.batch_rows, noise.confidence)
