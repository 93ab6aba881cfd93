"""`ratchet init`: creates a project."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.errors import SettingsError

if TYPE_CHECKING:
    from ratchet.stages.init import InitResult

HELP = "create a project directory around your data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="a new or empty directory (default: the example's name)"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="rows: JSON, JSONL, CSV, TSV or Parquet")
    parser.add_argument(
        "--example", metavar="NAME", help="use an example's settings, for a task or a GPU; an unknown NAME lists all"
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="column with the user's text (default: detected)")
    parser.add_argument("--response", metavar="COLUMN", help="column with the answer or label (default: detected)")
    parser.add_argument(
        "--rejected", metavar="COLUMN", help="column with the rejected answer of a pair (default: detected)"
    )
    parser.add_argument("--base", metavar="MODEL", help="hub id or directory (default: a tiny model)")
    parser.add_argument("--revision", metavar="REV", help="commit, tag or branch of a hub id")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.init import init

    if (directory := arguments.directory or arguments.example) is None:
        raise SettingsError("DIR: missing; name a new directory")
    result = init(
        directory, arguments.data, example=arguments.example, prompt=arguments.prompt, response=arguments.response,
        rejected=arguments.rejected, base=arguments.base, revision=arguments.revision,
    )  # fmt: skip
    print_record(result, format_init, arguments)


def format_init(result: "InitResult") -> str:
    """Format the findings about the data, and the next command."""
    directory = shlex.quote(str(result.directory))
    example = f" (example {result.example}, see README.md)" if result.example else ""
    lines = [
        f"  settings: params.yaml{example}    base model: {result.base}",
        f"  promoted models are signed with key {result.key}: back up .ratchet/private.pem, it is not in git",
    ]
    if not result.rows:
        step = (
            f"copy your rows to {directory}/data/raw/rows.jsonl, then cd {directory} && dvc add data/raw && dvc repro"
        )
        return "\n".join([f"{result.directory}: no rows yet", *lines, f"  next: {step}"])
    kinds = {
        "labels": "the responses look like labels, so accuracy per class is measured",
        "text": "the responses look like free text",
        "preferences": "pairs of answers, so the model learns to prefer the chosen ones by train.objective dpo"
        if result.objective == "dpo"
        else "answers labelled true or false, so the model learns to prefer the former by train.objective kto",
    }
    count = result.unusable_rows
    unusable = f" ({count} of them malformed, or without prompt or response)" if count else ""
    found = (
        f"{result.directory}: {result.rows} rows{unusable}, read as {result.schema_name}; "
        f"{kinds[result.task]} (prepare.task)"
    )
    warnings = [f"  warning: {text}" for text in result.warnings]
    return "\n".join([found, *warnings, *lines, f"  next: cd {directory} && dvc repro"])
