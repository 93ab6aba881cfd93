"""`ratchet promotions`: shows and checks the history of champions."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import align_rows, print_record
from ratchet.config.units import format_count
from ratchet.errors import EXIT_INPUT
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.promotions import PromotionHistory, PromotionHistoryEntry

HELP = "show the history of promotions, and check that it is intact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deliver", action="store_true", help="call hooks again whose delivery failed")


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.stages.promotions import promotions

    history = promotions(Project(arguments.project), deliver=arguments.deliver)
    print_record(history, format_history, arguments)
    return EXIT_INPUT if history.problems else None


def format_history(history: "PromotionHistory") -> str:
    """Format a table with a row for each promotion, oldest first; then notes and problems."""
    if count := len(history.entries):
        chain = f"{format_count(count, 'line')}, newest entry {history.entries[-1].promotion.digest[:12]}"
        state = f"read: {chain}" if history.problems else f"the ledger is intact: {chain}"
        lines = [*_format_rows(history), *history.notes, state]
    else:
        lines = ["the history cannot be read" if history.problems else "nothing was promoted yet", *history.notes]
    return "\n".join([*lines, *(f"DAMAGED: {problem}" for problem in history.problems)])


def _format_rows(history: "PromotionHistory") -> list[str]:
    """Format the table. Reason, anchor and hooks follow each row on lines of their own."""
    rows = [("time", "action", "version", "from", "model", "verdict", "by")]
    for entry in history.entries:
        promotion = entry.promotion
        before = "-" if promotion.previous_version is None else str(promotion.previous_version)
        verdict = (promotion.decision or "-") + (" FORCED" if promotion.forced else "")
        rows.append((
            promotion.time, promotion.action, str(promotion.version), before, promotion.model_digest[:12], verdict,
            promotion.actor,
        ))  # fmt: skip
    heading, *aligned = align_rows(rows)
    lines = [heading]
    for row, entry in zip(aligned, history.entries, strict=True):
        lines += [row, *(f"    {line}" for line in _format_details(entry))]
    return lines


def _format_details(entry: "PromotionHistoryEntry") -> list[str]:
    from ratchet.registry.keys import SHOWN_DIGITS

    lines = []
    if entry.promotion.reason:
        lines.append(f"reason: {entry.promotion.reason}")
    if (approvals := entry.promotion.approvals) is not None:
        lines += [
            f"approved by {approver.actor} ({approver.signer[:SHOWN_DIGITS]}, {approver.time})"
            for approver in approvals.approvers
        ]
        if approvals.missing:
            lines.append(f"LACKED {approvals.missing} of {approvals.required} approvals")
    if entry.promotion.is_anchor:
        lines.append("became the anchor")
    for delivery in entry.deliveries:
        state = "delivered" if delivery.is_delivered else "NOT delivered"
        lines.append(f"{delivery.hook}: {state} ({delivery.detail})")
    return [*lines, *(f"{hook}: not called yet" for hook in entry.pending_hooks)]
