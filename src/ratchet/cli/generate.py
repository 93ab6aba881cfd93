"""`ratchet generate`: answers every prompt of a file."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, print_text, progress_printer
from ratchet.cli.set_option import add_set_argument, parse_set_options
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.generate import GenerateResult

HELP = "answer every prompt of a file; run it again to resume"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, metavar="PROMPTS", help="JSON, JSONL, CSV, TSV or Parquet")
    parser.add_argument("--output", type=Path, metavar="FILE", help="one record per answer, .jsonl or .parquet")
    add_model_argument(parser)
    add_set_argument(parser, ("generate", "machine"))
    parser.add_argument("--stream", action="store_true", help="write no file: show each answer while it is generated")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--model`: which model answers."""
    parser.add_argument(
        "--model", default="adapter", metavar="MODEL",
        help="base, adapter, merged, champion, v3, a directory, a .gguf file, or http(s)://HOST[#MODEL] "
        "(default: adapter)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.console.callback import ConsoleCallback
    from ratchet.console.terminal import is_live_terminal
    from ratchet.evaluation.answer_analysis import summarize_generation
    from ratchet.stages.generate import generate, stream_answers

    project = Project(arguments.project, parse_set_options(arguments))
    if arguments.stream and arguments.json:
        raise SettingsError("--json: --stream shows text; leave out one of the two")
    if arguments.stream:
        if arguments.output is not None:
            raise SettingsError(f"--output {arguments.output}: --stream writes no file; leave out one of the two")
        count = stream_answers(project, arguments.prompts, arguments.model, sys.stdout)
        print_text(f"{count:,} answers shown, none written")
        return
    if arguments.output is None:
        raise SettingsError("--output: name a file that ends in .jsonl or .parquet (or watch answers with --stream)")
    is_live = is_live_terminal(sys.stdout) and not (arguments.json or arguments.quiet)
    result = generate(
        project, arguments.prompts, arguments.output, arguments.model, progress_printer(arguments),
        create_console=ConsoleCallback if is_live else None,
    )  # fmt: skip
    print_record(result, format_generation, arguments)
    if not arguments.json and not result.was_written_before:
        print_text("\n".join(summarize_generation(result.output, project.settings.prepare.task)))


def format_generation(result: "GenerateResult") -> str:
    """Format how many answers were written, how they ended, and their model."""
    from ratchet.config.units import format_count

    card = result.card
    if result.was_written_before:
        return f"{result.output}: written before from these prompts, settings and model (generation {card.id})"
    ends = ", ".join(f"{count:,} {name}" for name, count in card.finish.items())
    left_out = f"; {format_count(card.faults, 'record')} left out" if card.faults else ""
    counts = f"{format_count(card.answers, 'answer')} to {format_count(card.prompts, 'prompt')}"
    return (
        f"generation {card.id}: {counts} ({ends}){left_out}\n"
        f"  {card.tokens:,} tokens, of prompts {card.prompt_tokens:,}; model {card.spec.model.digest[:12]} "
        f"({card.model_name})\n  {result.output}"
    )
