"""`ratchet select`: chooses among a teacher's answers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, print_record, progress_printer
from ratchet.cli.projects import open_project
from ratchet.errors import EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.select_answers import SelectResult

HELP = "choose among a teacher's answers and write the chosen ones as training data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("answers", nargs="+", type=Path, metavar="ANSWERS", help="outputs of `ratchet generate`")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the rows, such as data/raw/selected.jsonl"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="the file of prompts, if the directory of the generation no longer exists",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages.select_answers import select

    result = select(
        open_project(arguments), arguments.answers, arguments.output, arguments.prompts, progress_printer(arguments)
    )
    print_record(result, format_selection, arguments)
    return EXIT_OK


def format_selection(result: "SelectResult") -> str:
    """Format how many answers were chosen, and how many each filter dropped."""
    if result.was_written_before:
        return f"{result.output}: written before from these answers and settings; nothing to do"
    from ratchet.stages.select_answers import format_filters

    card = result.card
    lines = [
        f"{card.rows:,} rows of {card.answers:,} answers, for {card.prompts_with_rows:,} of {card.prompts:,} prompts",
        *format_filters(card),
    ]
    if card.without_reference:
        lines.append(
            f"  {card.without_reference:,} prompts have no reference: their answers were not compared with one"
        )
    return "\n".join([*lines, f"  {result.output}"])
