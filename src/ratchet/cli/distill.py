"""`ratchet distill`: computes a teacher's probabilities for the training rows."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.distill import DistillResult

HELP = "optional stage: compute a larger model's probabilities for the training rows (train.distill)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--forecast", action="store_true", help="only report how much disk and memory the teacher needs"
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.distill import distill

    result = distill(Project(arguments.project), forecast=arguments.forecast, on_progress=progress_printer(arguments))
    print_record(result, format_distillation, arguments)


def format_distillation(result: "DistillResult") -> str:
    """Format the teacher's outputs in a few lines, or the disk and memory that the teacher needs."""
    from ratchet.models.teacher import describe_embedding_padding

    card = result.card
    if card is None:
        return "\n".join(result.text)
    text = (
        f"teacher outputs {card.digest[:12]}: {card.rows:,} rows, {card.positions:,} answer tokens, the "
        f"{card.top_k} most probable tokens of each at temperature {card.temperature:g}\n"
        f"  the teacher's own loss on the answers: {card.teacher_loss:.4f} nats a token; it has "
        f"{card.teacher_parameters:,} parameters, the base {card.base_parameters:,} "
        f"({card.base_parameters / card.teacher_parameters:.1%})\n"
        f"  {card.left_out:.2%} of the probability is beyond the {card.top_k} tokens and is learned as one sum"
    )
    if padding := describe_embedding_padding(card.teacher_rows, card.base_rows, card.tokens):
        text += f"\n  {padding}"
    if result.was_computed_before:
        text += "\n  computed before, used as it is"
    return text
