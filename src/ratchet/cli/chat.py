"""`ratchet chat`: a conversation with a model in the terminal."""

import argparse

from ratchet.cli.generate import add_model_argument
from ratchet.cli.projects import open_project
from ratchet.errors import EXIT_OK

HELP = "chat with a model in this terminal; /help lists the commands"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_model_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages.chat import chat

    chat(open_project(arguments), arguments.model)
    return EXIT_OK
