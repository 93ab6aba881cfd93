"""`ratchet base`: the DVC stage that pins the base model."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.storage.records.base import BaseCard

HELP = "stage: resolve and pin the base model, or build the tiny one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no flags of its own."""


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.base import base

    print_record(base(Project(arguments.project), progress_printer(arguments)), format_base, arguments)


def format_base(card: "BaseCard") -> str:
    """Format the pinned model in a few lines."""
    commit = f", commit {card.revision}" if card.revision else ""
    model = f"{card.architecture}, {card.parameters:,} parameters"
    lines = [f"base {card.source}: {model}, digest {card.digest[:12]}{commit}"]
    if quantization := card.quantization:
        double = ", double quantization" if quantization.double else ""
        lines.append(f"  stored in 4 bits ({quantization.kind}{double}) and used as stored")
    if unused := card.unused_tensors:
        more = " ..." if len(unused) > 1 else ""
        lines.append(
            f"  {len(unused)} stored tensors do not belong to {card.architecture} and are not loaded: {unused[0]}{more}"
        )
    return "\n".join(lines)
