"""`ratchet init`: creates a project."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record

if TYPE_CHECKING:
    from ratchet.stages.init import InitResult

HELP = "create a project directory around your data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="rows: JSON, JSONL, CSV, TSV or Parquet"
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="column with the user's text (default: detected)")
    parser.add_argument("--response", metavar="COLUMN", help="column with the answer or label (default: detected)")
    parser.add_argument("--base", default="tiny", metavar="MODEL", help="hub id or directory (default: a tiny model)")
    parser.add_argument("--revision", metavar="REV", help="commit, tag or branch of a hub id")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.init import init

    result = init(
        arguments.directory, arguments.data, prompt=arguments.prompt, response=arguments.response,
        base=arguments.base, revision=arguments.revision,
    )  # fmt: skip
    print_record(result, format_init, arguments)


def format_init(result: "InitResult") -> str:
    """Format the findings about the data, and the next command."""
    kind = "labels, so accuracy per class is measured" if result.task == "labels" else "free text"
    count = result.unusable_rows
    unusable = f" ({count} of them malformed, or without prompt or response)" if count else ""
    return (
        f"{result.directory}: {result.rows} rows{unusable}, read as {result.schema_name}; the responses look like "
        f"{kind} (prepare.task)\n"
        f"  settings: params.yaml    base model: {result.base}\n"
        f"  promoted models are signed with key {result.key}: back up .ratchet/private.pem, it is not in git\n"
        f"  next: cd {shlex.quote(str(result.directory))} && dvc repro"
    )
