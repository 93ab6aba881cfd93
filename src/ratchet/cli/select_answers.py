"""`ratchet select`: chooses among generated answers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.select_answers import SelectResult

HELP = "choose among generated answers and write the chosen ones, or pairs of answers, as training data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("answers", nargs="+", type=Path, metavar="ANSWERS", help="outputs of `ratchet generate`")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the rows, such as data/raw/selected.jsonl"
    )
    parser.add_argument(
        "--pairs", action="store_true",
        help="write pairs of a chosen and a rejected answer to each prompt, for preference tuning (select.pairs)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="the file of prompts, if the directory of the generation no longer exists",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.select_answers import select

    result = select(
        Project(arguments.project), arguments.answers, arguments.output, arguments.prompts,
        progress_printer(arguments), pairs=arguments.pairs,
    )  # fmt: skip
    print_record(result, format_selection, arguments)


def format_selection(result: "SelectResult") -> str:
    """Format how many answers were chosen, and how many each filter dropped."""
    if result.was_written_before:
        return f"{result.output}: written before from these answers and settings; nothing to do"
    from ratchet.config.units import format_count
    from ratchet.stages.select_answers import format_filters

    card = result.card
    kind = "row" if card.pairs is None else "pair"
    answers, prompts = format_count(card.answers, "answer"), format_count(card.prompts, "prompt")
    lines = [
        f"{format_count(card.rows, kind)} of {answers}, for {card.prompts_with_rows:,} of {prompts}",
        *format_filters(card),
    ]
    if card.without_reference:
        effect = "their answers were not compared with one" if card.pairs is None else "they have no pairs"
        lines.append(f"  prompts without a reference: {card.without_reference:,}; {effect}")
    reward = card.spec.select.reward
    has_reward, uses_scores = reward.command or reward.function, reward.select_best or reward.min_score is not None
    if has_reward and not uses_scores and card.pairs is None:
        lines.append(
            "  note: the scores of select.reward were written, but chose no answers; set select.reward.min_score or "
            "select.reward.select_best, or use --pairs"
        )
    return "\n".join([*lines, f"  {result.output}"])
