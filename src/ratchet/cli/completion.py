"""`ratchet completion`: prints the script with which a shell completes commands, flags and files."""

import argparse
from pathlib import Path

from ratchet.cli.output import print_text

HELP = 'print the completion script of a shell; in bash: eval "$(ratchet completion bash)"'
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> None:
    import shtab

    parser = arguments.parser
    for command in (parser, *parser.commands.values()):
        for action in command._actions:
            if action.type is Path:
                kind = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
                action.complete = kind
    print_text(shtab.complete(parser, arguments.shell))
