"""`ratchet watch`: shows active runs on the terminal."""

import argparse
import sys

from ratchet.stages.project import open_project_or_defaults

HELP = "show active runs on this terminal, wherever they were started"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="id, or its first characters (default: all active runs)")
    parser.add_argument("--once", action="store_true", help="draw once and end")
    parser.add_argument(
        "--replica", nargs="?", const=True, metavar="URL",
        help="show runs in this replica (default: machine.replica), trained on any machine",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.watch import watch

    layout, settings = open_project_or_defaults(arguments.project)
    watch(layout, settings.machine, sys.stdout, arguments.runs, arguments.replica, arguments.once)
