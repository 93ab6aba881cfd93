"""`ratchet promotions`: shows and checks the history of champions."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, align_rows, print_record
from ratchet.cli.projects import open_project
from ratchet.errors import EXIT_INPUT, EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.promotions import PromotionHistory, PromotionHistoryEntry

HELP = "show the history of promotions, and check that it is intact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--deliver", action="store_true", help="call hooks again whose delivery failed")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages.promotions import promotions

    history = promotions(open_project(arguments), deliver=arguments.deliver)
    print_record(history, format_history, arguments)
    return EXIT_INPUT if history.problems else EXIT_OK


def format_history(history: "PromotionHistory") -> str:
    """Format a table with a row for each promotion, oldest first; then notes and problems."""
    lines = _format_rows(history)
    if not history.entries:
        lines = ["the history cannot be read" if history.problems else "nothing was promoted yet"]
    lines += history.notes
    if history.entries:
        count, newest = len(history.entries), history.entries[-1].promotion.digest[:12]
        chain = f"{count} line{'s' * (count != 1)}, newest entry {newest}"
        lines.append(f"read: {chain}" if history.problems else f"the ledger is intact: {chain}")
    return "\n".join([*lines, *(f"DAMAGED: {problem}" for problem in history.problems)])


def _format_rows(history: "PromotionHistory") -> list[str]:
    """Format the table. Reason, anchor and hooks follow each row on lines of their own."""
    rows = [("time", "action", "version", "from", "model", "verdict", "by")]
    details: list[list[str]] = [[]]
    for entry in history.entries:
        promotion = entry.promotion
        before = "-" if promotion.previous_version is None else str(promotion.previous_version)
        verdict = (promotion.decision or "-") + (" FORCED" if promotion.forced else "")
        rows.append(
            (
                promotion.time,
                promotion.action,
                str(promotion.version),
                before,
                promotion.model_digest[:12],
                verdict,
                promotion.actor,
            )
        )
        details.append(_format_details(entry))
    lines = []
    for row, more in zip(align_rows(rows), details, strict=True):
        lines += [row, *(f"    {line}" for line in more)]
    return lines


def _format_details(entry: "PromotionHistoryEntry") -> list[str]:
    lines = []
    if entry.promotion.reason:
        lines.append(f"reason: {entry.promotion.reason}")
    if entry.promotion.is_anchor:
        lines.append("became the anchor")
    for delivery in entry.deliveries:
        lines.append(
            f"{delivery.hook}: {'delivered' if delivery.is_delivered else 'NOT delivered'} ({delivery.detail})"
        )
    return [*lines, *(f"{hook}: not called yet" for hook in entry.pending_hooks)]
