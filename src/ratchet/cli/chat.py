"""`ratchet chat`: a conversation with a model in the terminal."""

import argparse

from ratchet.cli.generate import add_model_argument
from ratchet.cli.set_option import add_set_argument, parse_set_options
from ratchet.stages.project import Project

HELP = "chat with a model in this terminal; /help lists the commands"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_set_argument(parser, ("generate", "machine"))


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.chat import chat

    chat(Project(arguments.project, parse_set_options(arguments)), arguments.model)
