"""`ratchet reset`: removes a run, after the user confirms."""

import argparse
import sys
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.errors import SettingsError
from ratchet.stages.project import open_project_or_defaults
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.stages.reset import ReplicaResetResult, ResetResult, ResetTarget

HELP = "remove the directory of a training or generation, after asking"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="run id, or its first characters")
    parser.add_argument(
        "--replica", nargs="?", const=True, metavar="URL",
        help="remove the run from this replica (default: machine.replica), not from this machine",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.reset import reset, reset_replica

    def confirm(description: str) -> bool:
        return arguments.yes or ask(description)

    if arguments.replica is not None:
        machine = open_project_or_defaults(arguments.project)[1].machine
        remote = reset_replica(machine, arguments.replica, arguments.run, lambda target: confirm(target.description))
        print_record(remote, format_replica_reset, arguments)
    else:
        layout = ProjectLayout.find(arguments.project)
        result = reset(layout, arguments.run, lambda target: confirm(format_target(target)))
        print_record(result, format_reset, arguments)


def ask(description: str) -> bool:
    """Show what would be removed and read the answer. Raises SettingsError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise SettingsError(
            f"{description}\n  nothing was removed: no terminal to ask on; `--yes` removes it without asking"
        )
    print(f"{description}\nremove it permanently? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def format_target(target: "ResetTarget") -> str:
    """Describe the files that would be removed, and those that stay."""
    from ratchet.config.units import format_bytes

    size = format_bytes(target.size_bytes)
    result = "its result is complete" if target.has_result else "it has no result yet"
    if target.kind == "generation":
        planned = "?" if target.planned_steps is None else f"{target.planned_steps:,}"
        return (
            f"generation {target.run_id}: {target.step:,} of {planned} answers, {size}; {result}\n"
            "  output files that were written from it stay as they are"
        )
    lines = [f"run {target.run_id}: step {target.step} of {target.planned_steps or '?'}, {size}; {result}"]
    if target.is_train_output:
        lines.append("  experiments/train comes from it: those files stay, but the run cannot be resumed")
    if target.champion == "current":
        lines.append("  the champion comes from it: the promoted model stays in mlruns/")
    elif target.champion == "earlier":
        lines.append("  an earlier champion comes from it: the promoted model stays in mlruns/")
    return "\n".join(lines)


def format_reset(result: "ResetResult") -> str:
    """Format whether the run was removed."""
    if not result.was_removed:
        return f"run {result.target.run_id} was kept"
    return f"{format_target(result.target)}\nremoved"


def format_replica_reset(result: "ReplicaResetResult") -> str:
    """Format whether the run was removed."""
    if not result.was_removed:
        return f"run {result.target.run_id} was kept"
    return f"{result.target.description}\nremoved from the replica"
