"""`ratchet COMMAND`: reads the command line, runs the command, and turns errors into messages and exit codes.

Each command is a module of this package with its help, its flags, one call and its output. A module imports what its
command needs when the command runs: `ratchet --help` and `ratchet status` load neither torch nor MLflow.
"""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from ratchet.cli import (
    base,
    chaos,
    chat,
    compare,
    config,
    deploy,
    distill,
    doctor,
    evaluate,
    export,
    forecast,
    gate,
    generate,
    init,
    keys,
    prepare,
    promote,
    promotions,
    report,
    reset,
    rollback,
    select_answers,
    status,
    sweep,
    train,
    ui,
    verify,
    watch,
)
from ratchet.config.extras import explained_imports
from ratchet.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, RatchetError
from ratchet.models.lazy_imports import import_model_libraries, set_library_defaults
from ratchet.redaction import print_exception, redact_stderr, write_stderr
from ratchet.runs.signals import die_with_parent, list_stop_signals


class Command(Protocol):
    """A module of this package that implements a command."""

    HELP: str
    """One line, for `ratchet --help` and `ratchet COMMAND --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's own flags."""

    def run(self, arguments: argparse.Namespace, /) -> int | None:
        """Run the command and return its exit code; None is EXIT_OK. Raises RatchetError."""


COMMANDS: Mapping[str, Command] = {
    "init": init,
    "base": base, "prepare": prepare, "distill": distill, "train": train, "sweep": sweep,
    "evaluate": evaluate, "export": export, "gate": gate,
    "promote": promote, "rollback": rollback, "promotions": promotions, "deploy": deploy, "keys": keys,
    "generate": generate, "chat": chat, "select": select_answers,
    "forecast": forecast, "doctor": doctor, "config": config, "status": status, "watch": watch,
    "compare": compare, "report": report, "verify": verify, "reset": reset, "chaos": chaos, "ui": ui,
}  # fmt: skip
"""Every command, in the order of `ratchet --help`."""

DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
}  # fmt: skip
"""Errors of the user's disk. Any other OSError is a bug of Ratchet and shows its traceback."""

TEXT_COMMANDS = {"chat", "ui", "watch"}
"""Commands without `--json`, because they return no record."""

MODEL_COMMANDS = {"base", "distill", "export", "evaluate", "forecast", "doctor"}
"""Commands that load models in this process. These commands import the model libraries as a worker does, in 2 s instead
of 5 s and with 70 MiB less memory."""


class VersionAction(argparse.Action):
    """Prints the version. It is read only on demand, because reading it takes a tenth of the time of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version and exit."""
        from importlib.metadata import version

        print(f"ratchet {version('ratchet-llm')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ratchet", description="QLoRA fine-tuning: a run never loses a step, and a worse model never ships."
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="show Ratchet's version and exit")
    parser.add_argument(
        "--project", type=Path, default=Path(), metavar="DIR", help="project directory (default: the current one)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        if name not in TEXT_COMMANDS:
            subparser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


@redact_stderr()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `ratchet.errors`)."""
    options = build_parser().parse_args(arguments)
    set_library_defaults()
    if "DVC_STAGE" in os.environ:
        # If dvc is killed, the kernel sends SIGTERM to this process, which saves a checkpoint and ends.
        die_with_parent(signal.SIGTERM)
    sys.excepthook = print_exception
    for number in list_stop_signals():  # so that scratch directories are removed; a supervisor installs its own handler
        signal.signal(number, _raise_interrupt)
    try:
        with explained_imports():
            if options.command in MODEL_COMMANDS and getattr(options, "require", None) is None:
                import_model_libraries()
            return COMMANDS[options.command].run(options) or EXIT_OK
    except KeyboardInterrupt:
        write_stderr(f"ratchet {options.command}: interrupted; outputs are consistent, run the command again\n")
        return EXIT_INTERRUPTED
    except RatchetError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            _ignore_stop_signals()
        write_stderr(f"ratchet {options.command}: {error}{error.advice}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        text = f"{error.filename or 'a file'}: {error.strerror}; outputs are consistent: fix this and run it again"
        write_stderr(f"ratchet {options.command}: {text}\n")
        return EXIT_INPUT


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_stop_signals()
    raise KeyboardInterrupt


def _ignore_stop_signals() -> None:
    """Ignore further stop signals, because a second signal would interrupt the cleanup."""
    for number in list_stop_signals():
        signal.signal(number, signal.SIG_IGN)
