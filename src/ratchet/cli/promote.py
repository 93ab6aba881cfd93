"""`ratchet promote`: registers the exported model and makes it champion."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.registry.outbox import HookDelivery
    from ratchet.stages.promote import PromotionResult

HELP = "register the exported model and make it champion"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true",
        help="promote against the verdict, or without approvals; your name and the reason are recorded",
    )  # fmt: skip
    parser.add_argument("--reason", metavar="TEXT", help="with --force: the reason (required)")
    parser.add_argument(
        "--anchor", action="store_true", help="also make it the anchor, which no later model may fall behind"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the steps")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.promote import PromoteOptions, promote

    project = Project(arguments.project)
    options = PromoteOptions(
        force=arguments.force, reason=arguments.reason, dry_run=arguments.dry_run, anchor=arguments.anchor
    )
    print_record(promote(project, options), partial(format_promotion, layout=project.layout), arguments)


def format_promotion(result: "PromotionResult", layout: ProjectLayout) -> str:
    """Format the champion, or the plan of a dry run; then notes, warnings, and the deliveries to hooks."""
    if result.plan:
        lines = ["dry run, nothing was changed; these steps would follow:", *result.plan]
    else:
        lines = _format_champion(result, layout)
    lines += [*result.notes, *(f"warning: {text}" for text in result.warnings)]
    return "\n  ".join([*lines, *map(format_delivery, result.deliveries)])


def _format_champion(result: "PromotionResult", layout: ProjectLayout) -> list[str]:
    from ratchet.registry.keys import SHOWN_DIGITS
    from ratchet.registry.promotion import version_label

    champion, entry = result.champion, result.promotion
    if entry is None:
        return [f"{version_label(champion)} is champion already"]
    when = "again" if entry.action == "rollback" else "now"
    before = f", before it was {version_label(result.replaced)}" if result.replaced else ""
    paths = [layout.champion, *([layout.approvals] if entry.approvals is not None else []), layout.promotions]
    if entry.action == "promote" and layout.test_set_uses.exists():
        paths.append(layout.test_set_uses)
    *names, last = (str(path.relative_to(layout.root)) for path in paths)
    files = f"{', '.join(names)} and {last}"
    lines = [f"{version_label(champion)} is champion {when}{before}; commit {files}"]
    if (forced := champion.forced) and entry.action == "promote":
        lines.append(f"FORCED by {forced.actor} despite {forced.obstacle}: {forced.reason}")
    elif entry.approvals is not None:
        approvers = (f"{one.actor} ({one.signer[:SHOWN_DIGITS]})" for one in entry.approvals.approvers)
        lines.append(f"approved by {', '.join(approvers)}")
    return lines


def format_delivery(delivery: "HookDelivery") -> str:
    """Format the delivery to a hook, or a warning with the command that tries again."""
    from ratchet.http_client import format_attempts

    if delivery.is_delivered:
        return f"{delivery.hook}: delivered ({delivery.detail})"
    return (
        f"warning: {delivery.hook}: not delivered ({delivery.detail}; {format_attempts(delivery.attempts)}). The "
        "promotion is unaffected. `ratchet promotions --deliver` tries again"
    )
