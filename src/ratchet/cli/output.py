"""Output that all commands share: results and progress on standard output, and text tables."""

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ratchet.storage.records.base import Record

R = TypeVar("R", bound="Record")


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format each row as a line with left-aligned columns; the first row contains the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format aligned rows as text, indented by two spaces."""
    return "\n".join(f"  {line}".rstrip() for line in align_rows(rows))


def print_text(text: str) -> None:
    """Print one or several lines. After the pipe or terminal is closed (`| head`), the command continues silently."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)


def print_record(record: R, format_record: Callable[[R], str], arguments: argparse.Namespace) -> None:
    """Print a command's result: as text, or with `--json` as the JSON of the record that the Python API returns."""
    if arguments.json:
        print_text(json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False))
    else:
        print_text(format_record(record))


def progress_printer(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints an indented line: to standard output, or with `--json` to standard error."""
    if arguments.json:
        return lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    return lambda text: print_text(f"  {text}")
