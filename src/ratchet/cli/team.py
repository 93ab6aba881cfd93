"""`ratchet team`: shows and changes users, roles and quotas of the project's tenant on an MLflow server."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.team import TeamReport

HELP = "show or change users, roles and quotas of this project on an MLflow server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--grant", metavar="USER", help="give a user a role; RATCHET_USER_PASSWORD is the password of a new user"
    )
    change.add_argument("--revoke", metavar="USER", help="take every role from a user")
    parser.add_argument("--role", choices=("viewer", "trainer", "promoter"), help="with --grant: the role")
    parser.add_argument("--quota-runs", metavar="N", help="most trainings that the tenant may have, or `none`")
    parser.add_argument(
        "--quota-disk", metavar="SIZE", help="most bytes of promoted models and replica, such as 200GB, or `none`"
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.team import TeamOptions, team

    names = ("grant", "role", "revoke", "quota_runs", "quota_disk")
    options = TeamOptions(**{name: getattr(arguments, name) for name in names})
    print_record(team(Project(arguments.project), options), format_team, arguments)


def format_team(report: "TeamReport") -> str:
    """Format the tenant, its quota, and a row for each user."""
    from ratchet.config.units import format_bytes

    limit_runs = "no quota" if report.quota_runs is None else f"quota {report.quota_runs:,}"
    limit_disk = "no quota" if report.quota_bytes is None else f"quota {format_bytes(report.quota_bytes)}"
    disk = format_bytes(report.model_bytes + report.replica_bytes)
    tenant = f"tenant {report.tenant}" if report.tenant else "the only tenant"
    lines = [
        f"project {report.model_name}, {tenant} of {report.server}",
        f"  trainings: {report.runs:,} ({limit_runs})",
        f"  disk: {disk} ({limit_disk}); {format_bytes(report.model_bytes)} in promoted models, "
        f"{format_bytes(report.replica_bytes)} in machine.replica",
    ]
    if report.created_user is not None:
        lines.append(f"  user {report.created_user} was created, with the password in RATCHET_USER_PASSWORD")
    rows = [
        (member.user, member.role + (" (administrator of the server)" if member.is_administrator else ""))
        for member in report.members
    ]
    return "\n".join([*lines, format_table([("user", "role"), *rows]) if rows else "  no user has a role"])
