"""`ratchet COMMAND`: reads the command line, runs the command, and turns errors into messages and exit codes.

Each command is a module of this package with its help, its flags, one call and its output. A module imports what its
command needs when the command runs: `ratchet --help` and `ratchet status` load neither torch nor MLflow.
"""

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from ratchet.cli import (
    adapters,
    approve,
    audit,
    base,
    chaos,
    chat,
    compare,
    completion,
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
    label,
    monitor,
    prepare,
    promote,
    promotions,
    push,
    queue,
    report,
    reset,
    rollback,
    select_answers,
    status,
    submit,
    sweep,
    team,
    train,
    ui,
    verify,
    watch,
    work,
)
from ratchet.cli.output import discard_unwritten_errors, print_error, print_text
from ratchet.cli.parser import CommandParser
from ratchet.config.extras import SENTRY_VARIABLE, TRACE_VARIABLES, explained_imports
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, RatchetError
from ratchet.models.lazy_imports import import_model_libraries, set_library_defaults
from ratchet.redaction import SETTING_PREFIX, print_exception, redact_stderr, write_stderr
from ratchet.runs.signals import die_with_starter, list_stop_signals
from ratchet.stages.project import Project
from ratchet.storage.progress import report_step


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
    "submit": submit, "work": work, "queue": queue,
    "evaluate": evaluate, "export": export, "gate": gate,
    "promote": promote, "approve": approve, "rollback": rollback, "promotions": promotions, "deploy": deploy,
    "monitor": monitor, "adapters": adapters, "push": push, "keys": keys, "audit": audit, "team": team,
    "generate": generate, "chat": chat, "select": select_answers, "label": label,
    "forecast": forecast, "doctor": doctor, "config": config, "status": status, "watch": watch,
    "compare": compare, "report": report, "verify": verify, "reset": reset, "chaos": chaos, "ui": ui,
    "completion": completion,
}  # fmt: skip
"""Every command, in the order of `ratchet --help`."""

DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR,
    errno.ENOTDIR,
}  # fmt: skip
"""Errors of the user's disk. Any other OSError is a bug of Ratchet and shows its traceback."""

TEXT_COMMANDS = {"chat", "completion", "ui", "watch"}
"""Commands without `--json`, because they return no record."""

MODEL_COMMANDS = {"adapters", "base", "distill", "export", "evaluate", "forecast", "doctor"}
"""Commands that load models in this process. These commands import the model libraries as a worker does, in 2 s instead
of 5 s and with 70 MiB less memory."""


class VersionAction(argparse.Action):
    """Prints the version. It is read only on demand, because reading it takes a tenth of the time of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version and exit."""
        from importlib.metadata import version

        parser._print_message(f"ratchet {version('ratchet-llm')}\n", sys.stdout)
        parser.exit()


def build_parser() -> CommandParser:
    """Build the parser of the command line."""
    parser = CommandParser(
        prog="ratchet", description="QLoRA fine-tuning: a run never loses a step, and a worse model never ships."
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="show Ratchet's version and exit")
    parser.add_argument(
        "--project", type=Path, default=Path(), metavar="DIR", help="project directory (default: the current one)"
    )
    parser.set_defaults(quiet=False, verbose=False, parser=parser)
    _add_verbosity(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        if name not in TEXT_COMMANDS:
            subparser.add_argument("--json", action="store_true", help="print the result as JSON")
        _add_verbosity(subparser)
        parser.commands[name] = subparser
    return parser


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add `-q` and `-v`, which may precede or follow the command. So no parser of a command has a default."""
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument(
        "-q", "--quiet", action="store_true", default=argparse.SUPPRESS,
        help="show no progress: only the result, warnings and errors",
    )  # fmt: skip
    verbosity.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS,
        help="also show timings, log records of libraries, and the traceback of an error",
    )  # fmt: skip


@redact_stderr()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `ratchet.errors`)."""
    options = build_parser().parse_args(arguments)
    set_library_defaults()
    if "DVC_STAGE" in os.environ or "RATCHET_JOB" in os.environ:
        # If dvc or `ratchet work` is killed, this process gets SIGTERM: it saves a checkpoint and ends.
        die_with_starter(signal.SIGTERM)
    sys.excepthook = print_exception
    for number in list_stop_signals():  # so that scratch directories are removed; a supervisor installs its own handler
        signal.signal(number, _raise_interrupt)
    _report_variables(options)
    report = _open_report(options.command)
    try:
        with _show_log_records(options.verbose), _show_progress(options), explained_imports():
            if options.command in MODEL_COMMANDS and getattr(options, "require", None) is None:
                if options.command not in ("forecast", "doctor"):  # these two work without a project
                    Project(options.project)  # reports a mistake in params.yaml before the seconds of the libraries
                with report_step("loading libraries"):
                    import_model_libraries(in_own_process=True)
            return report(COMMANDS[options.command].run(options) or EXIT_OK, None)
    except KeyboardInterrupt as error:
        text = "interrupted; outputs are consistent, run the command again"
        print_error(error, text, EXIT_INTERRUPTED, options)
        return report(EXIT_INTERRUPTED, error)
    except RatchetError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            _ignore_stop_signals()
        print_error(error, f"{error}{error.advice}", error.exit_code, options)
        return report(error.exit_code, error)
    except Exception as error:
        if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
            report(EXIT_BUG, error)
            raise
        text = f"{error.filename or 'a file'}: {error.strerror}; outputs are consistent: fix this and run it again"
        print_error(error, text, EXIT_INPUT, options)
        return report(EXIT_INPUT, error)
    finally:
        # What was written to a terminal or pipe that is closed by now is discarded. Python would try again at its end,
        # and replace the exit code by 120.
        print_text("", end="")
        discard_unwritten_errors()


def _report_variables(options: argparse.Namespace) -> None:
    """Print the environment variables that replace settings of params.yaml."""
    names = sorted(name for name in os.environ if name.startswith(SETTING_PREFIX))
    if names and not options.quiet and options.command != "completion":
        write_stderr(f"ratchet {options.command}: settings from the environment: {', '.join(names)}\n")


def _open_report(command: str) -> Callable[[int, BaseException | None], int]:
    """Begin to report the command, if the environment names a service. The function that is returned sends the report
    and returns the exit code."""
    if not any(map(os.environ.get, (*TRACE_VARIABLES, SENTRY_VARIABLE))):
        return lambda exit_code, error: exit_code
    from ratchet.tracking import telemetry

    return telemetry.open_report(command)


@contextmanager
def _show_progress(options: argparse.Namespace) -> Iterator[None]:
    """Show the progress of the command, unless the user wants none. With `--verbose`, show how long it took."""
    from ratchet.config.units import format_duration
    from ratchet.console.progress import show_progress

    start_s = time.monotonic()
    if options.quiet:
        yield
        return
    try:
        with show_progress(sys.stderr, has_timings=options.verbose):
            yield
    finally:
        if options.verbose:
            write_stderr(f"  ratchet {options.command}: {format_duration(time.monotonic() - start_s)}\n")


@contextmanager
def _show_log_records(is_verbose: bool) -> Iterator[None]:
    """Print what libraries log during a verbose command, such as each request over the network."""
    if not is_verbose:
        yield
        return
    import logging

    root = logging.getLogger()
    level = root.level
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(logging.Formatter("  %(name)s: %(message)s"))
    root.addHandler(output)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(output)
        root.setLevel(level)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_stop_signals()
    raise KeyboardInterrupt


def _ignore_stop_signals() -> None:
    """Ignore further stop signals, because a second signal would interrupt the cleanup."""
    for number in list_stop_signals():
        signal.signal(number, signal.SIG_IGN)
