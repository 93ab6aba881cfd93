"""`ratchet config`: prints the effective settings."""

import argparse
import json
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, print_text
from ratchet.cli.set_option import add_set_argument, parse_set_options
from ratchet.stages.project import open_project_or_defaults

if TYPE_CHECKING:
    from ratchet.stages.config import ConfigReport

HELP = "show every setting with its value and where the value comes from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="a section or setting, such as train or train.rank"
    )
    add_set_argument(parser, ("train", "machine", "generate"))
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of params.yaml, for editors")


def run(arguments: argparse.Namespace) -> None:
    if arguments.schema:
        from ratchet.config import params_file

        print_text(json.dumps(params_file.build_json_schema(), indent=2, ensure_ascii=False))
        return
    from ratchet.stages.config import config

    overrides = parse_set_options(arguments)
    layout = open_project_or_defaults(arguments.project, overrides)[0]
    print_record(
        config(layout, arguments.name, overrides),
        lambda report: format_config(report) + ("" if layout else "\nno project here, so these are the defaults"),
        arguments,
    )


def format_config(report: "ConfigReport") -> str:
    """Format one line for each setting."""
    rows = [("setting", "from", "value"), *((entry.name, entry.origin, entry.text) for entry in report.settings)]
    lines = [format_table(rows)]
    if report.version != report.newest_version:
        lines.append(
            f"defaults of version {report.version}; `ratchet doctor` shows what version {report.newest_version} changes"
        )
    return "\n".join(lines)
