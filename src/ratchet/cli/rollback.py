"""`ratchet rollback`: makes an earlier version champion again."""

import argparse
from functools import partial

from ratchet.cli.output import print_record
from ratchet.cli.promote import format_promotion
from ratchet.stages.project import Project

HELP = "make an earlier version champion again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", type=int, nargs="?", help="registered version (default: the previous champion)")
    parser.add_argument(
        "--reason", metavar="TEXT", help="the reason; required for a version that was rolled back itself"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the steps")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.promote import PromoteOptions, rollback

    project = Project(arguments.project)
    options = PromoteOptions(reason=arguments.reason, dry_run=arguments.dry_run)
    result = rollback(project, arguments.version, options)
    print_record(result, partial(format_promotion, layout=project.layout), arguments)
