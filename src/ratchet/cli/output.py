"""Output that all commands share: results and progress on standard output, and text tables."""

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ratchet.cli.troubleshooting import find_section
from ratchet.redaction import print_exception, redact, write_stderr
from ratchet.storage.progress import clear_progress

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


def escape_comment(text: str) -> str:
    """Escape text for a cell of a table in a comment, where more characters have a meaning than in a file."""
    from ratchet.registry.deployment.model_card import escape_markdown

    return re.sub("([@#~&])", r"\\\1", escape_markdown(text))


def print_text(text: str, end: str = "\n") -> None:
    """Print one or several lines. After the pipe or terminal is closed (`| head`), the command continues silently.

    Raises OSError if they cannot be written for another reason, such as a full disk.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise OSError(error.errno, error.strerror, "standard output") from None


def discard_unwritten_errors() -> None:
    """Discard what standard error does not take, such as a closed terminal, and everything after it."""
    try:
        sys.stderr.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nothing:  # another object in sys.stderr would not last: see `redact_stderr`
            os.dup2(nothing.fileno(), sys.stderr.fileno())


def print_record(record: R, format_record: Callable[[R], str], arguments: argparse.Namespace) -> None:
    """Print a command's result: as text, or with `--json` as the JSON of the record that the Python API returns."""
    arguments.has_result = True
    clear_progress()  # a bar would break long lines
    if arguments.json:
        print_text(json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False))
    else:
        print_text(format_record(record))


def print_error(error: BaseException, text: str, exit_code: int, arguments: argparse.Namespace) -> None:
    """Print why a command failed: on standard error, after the traceback if `--verbose` is set, with a link to the
    section of the documentation that says more, if there is one.

    With `--json`, it is also printed as the result, unless the command has printed a result before.
    """
    if arguments.verbose:
        print_exception(type(error), error, error.__traceback__)
    section = find_section(text)
    write_stderr(f"ratchet {arguments.command}: {text}\n" + (f"See {section}\n" if section else ""))
    if getattr(arguments, "json", False) and not getattr(arguments, "has_result", False):
        failure = {"type": type(error).__name__, "message": redact(text), "exit_code": exit_code, "help": section}
        with suppress(OSError):  # standard output is full, and standard error has the reason
            print_text(json.dumps({"error": failure}, indent=2, ensure_ascii=False))


def progress_printer(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints an indented line: to standard output, or with `--json` to standard error. With
    `--quiet`, it prints nothing."""
    if arguments.quiet:
        return lambda text: None
    if arguments.json:
        return lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    return lambda text: print_text(f"  {text}")
