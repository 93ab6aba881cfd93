"""`ratchet ui`: opens the MLflow UI of the project."""

import argparse

from ratchet.cli.output import print_text
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

HELP = "open the MLflow UI of this project's store, on 127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=5000, help="port of the server (default: 5000)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: this process becomes the server."""
    from ratchet.stages.ui import ui

    project = Project(arguments.project)
    if not 0 < arguments.port < 65536:
        raise SettingsError(f"--port: found {arguments.port}; expected a number from 1 to 65535")
    ui(project, arguments.port, print_text)
