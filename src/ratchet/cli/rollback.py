"""`ratchet rollback`: makes an earlier version champion again."""

import argparse
from functools import partial

from ratchet.cli.output import add_json_argument, print_record
from ratchet.cli.projects import open_project
from ratchet.cli.promote import format_promotion
from ratchet.errors import EXIT_OK

HELP = "make an earlier version champion again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("version", type=int, nargs="?", help="registered version (default: the previous champion)")
    parser.add_argument("--reason", metavar="TEXT", help="the reason; recorded in the ledger")
    parser.add_argument("--dry-run", action="store_true", help="only list the steps")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages.promote import PromoteOptions, rollback

    project = open_project(arguments)
    options = PromoteOptions(reason=arguments.reason, dry_run=arguments.dry_run)
    result = rollback(project, arguments.version, options)
    print_record(result, partial(format_promotion, layout=project.layout), arguments)
    return EXIT_OK
