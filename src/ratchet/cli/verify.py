"""`ratchet verify`: checks sealed and signed files."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.errors import EXIT_INPUT

if TYPE_CHECKING:
    from ratchet.stages.verify import VerifyFinding, VerifyReport

HELP = "check every byte of sealed directories, runs or whole projects, and signatures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a sealed directory, a run, a promoted model or a project"
    )
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE",
        help="PEM file of the key that must have signed (default: any key in keys.json)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.stages.verify import verify

    project = arguments.project if arguments.project != Path() else None
    report = verify(arguments.paths, arguments.public_key, project)
    print_record(report, format_verification, arguments)
    return None if report.is_intact else EXIT_INPUT


def format_verification(report: "VerifyReport") -> str:
    """Format a line for each finding: `ok  PATH  KIND  DIGEST  SIZE`, or e.g. `DAMAGED PATH: PROBLEM`."""
    return "\n".join(map(_format_finding, report.findings))


def _format_finding(finding: "VerifyFinding") -> str:
    from ratchet.storage import digests

    if finding.status != "ok":
        return f"{finding.status.upper()} {finding.path}: {finding.text}"
    columns = ["ok", str(finding.path), finding.kind]
    if finding.digest is not None:
        columns.append(finding.digest[: digests.SHORT])
    if finding.size_bytes is not None:
        columns.append(f"{finding.size_bytes:,} bytes")
    return "  ".join([*columns, *([finding.text] if finding.text else [])])
