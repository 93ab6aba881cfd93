"""`ratchet adapters`: a directory from which vLLM and llama.cpp serve several adapters on one base."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, progress_printer
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.storage.records.export import AdapterServer

HELP = "write a directory from which vLLM and llama.cpp serve several adapters on one base"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write")
    parser.add_argument(
        "named", nargs="+", metavar="NAME=ADAPTER", help="name for requests, and directory of a saved adapter"
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.adapters import adapters

    named: dict[str, Path] = {}
    for text in arguments.named:
        name, separator, path = text.partition("=")
        if not (name and separator and path) or name in named:
            raise SettingsError(f"adapters: found {text!r}; expected NAME=ADAPTER, each name once")
        named[name] = Path(path)
    server = adapters(Project(arguments.project), arguments.directory, named, progress_printer(arguments))
    print_record(server, format_server, arguments)


def format_server(server: "AdapterServer") -> str:
    """Format a line for the base and for each adapter."""
    rows = [("", "KL, nats", "same token", "KL of the base", "rank")]
    rows.append(("base", f"{server.base.kl:.2g}", f"{server.base.greedy_agreement:.2%}", "-", "-"))
    for found in server.adapters:
        distance = found.distance
        rows.append(
            (
                found.name,
                f"{distance.kl:.2g}",
                f"{distance.greedy_agreement:.2%}",
                f"{found.effect:.2g}",
                str(found.rank),
            )
        )
    return (
        f"{server.base_file} with {len(server.adapters)} adapters in one server, compared with base + adapter:\n"
        f"{format_table(rows)}\n  tested in {server.runtime}; not verified in vLLM; SERVE.md has the commands"
    )
