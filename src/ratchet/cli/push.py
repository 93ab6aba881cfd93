"""`ratchet push`: uploads the exported model to the Hugging Face hub."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.push import PushResult

HELP = "upload the exported model to the Hugging Face hub, if the gate decided PROMOTE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repository", metavar="REPO", help="OWNER/NAME on the hub; created if it does not exist")
    kind = parser.add_mutually_exclusive_group()
    for name, text in (
        ("adapter", "the adapter and the tokenizer (default)"),
        ("merged", "the merged model"),
        ("gguf", "the GGUF files"),
    ):
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, default="adapter", help=text)
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--force", action="store_true", help="push against the gate; the card shows it")
    parser.add_argument("--reason", metavar="TEXT", help="with --force: the reason (required)")
    card = parser.add_argument_group("model card")
    card.add_argument("--license", metavar="ID", help="licence of the model (default: that of the base)")
    card.add_argument("--language", metavar="CODE", action="append", default=[], help="such as en; may be repeated")
    card.add_argument(
        "--dataset", metavar="ID", action="append", default=[],
        help="dataset on the hub, in addition to those of prepare.sources; may be repeated",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.registry.hub_card import CardMetadata
    from ratchet.stages.push import PushOptions, push

    metadata = CardMetadata(arguments.license, tuple(arguments.language), tuple(arguments.dataset))
    options = PushOptions(arguments.kind, arguments.private, arguments.force, arguments.reason, metadata)
    project = Project(arguments.project)
    result = push(project, arguments.repository, options, progress_printer(arguments))
    print_record(result, format_push, arguments)


def format_push(result: "PushResult") -> str:
    """Format the commit, the signer, notes and warnings."""
    push = result.push
    form = {"adapter": "the adapter", "merged": "the merged model", "gguf": "the GGUF files"}[push.kind]
    model = f"model {push.model_digest[:12]} ({form})"
    state = "is now in" if result.is_new else "was already in"
    lines = [
        f"{model} {state} {push.url}, revision {push.revision}",
        f"signed by {push.signed_by}; recorded in experiments/pushes.jsonl: commit this file",
        *result.notes,
        *(f"warning: {text}" for text in result.warnings),
    ]
    return "\n  ".join(lines)
