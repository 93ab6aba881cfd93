"""`ratchet config`: prints the effective settings."""

import argparse
import json
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, format_table, print_record, print_text
from ratchet.cli.projects import open_project_or_defaults
from ratchet.errors import EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.config import ConfigReport

HELP = "show every setting with its value and where the value comes from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="a section or setting, such as train or train.rank"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of params.yaml, for editors")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.schema:
        from ratchet.config import params_file

        print_text(json.dumps(params_file.build_json_schema(), indent=2, ensure_ascii=False))
        return EXIT_OK
    from ratchet.stages.config import config

    print_record(config(open_project_or_defaults(arguments)[0], arguments.name), format_config, arguments)
    return EXIT_OK


def format_config(report: "ConfigReport") -> str:
    """Format one line for each setting."""
    rows = [("setting", "from", "value"), *((entry.name, entry.origin, entry.text) for entry in report.settings)]
    lines = [format_table(rows)]
    if report.version != report.newest_version:
        lines.append(
            f"defaults of version {report.version}; `ratchet doctor` shows what version {report.newest_version} changes"
        )
    return "\n".join(lines)
