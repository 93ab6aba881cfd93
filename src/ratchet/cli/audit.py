"""`ratchet audit`: one page about the origin of a promoted model, with the check of each fact."""

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import escape_comment, print_record
from ratchet.errors import EXIT_GATE, EXIT_INPUT, SettingsError
from ratchet.redaction import write_stderr
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.audit import AuditFact, AuditReport

HELP = (
    "who trained, judged, approved, promoted and deployed a model, on which data; exit 3 if a proof does not fit, 2 if "
    "the model's files are not here"
)

TITLES = {
    "model": "Model", "data": "Data", "training": "Training", "judgement": "Judgement", "approvals": "Approvals",
    "promotion": "Promotion", "deployment": "Deployment",
}  # fmt: skip
MARKS = {"verified": "ok", "unverified": "?", "contradicted": "!!"}
"""Marks of the facts in the terminal."""
CELLS = {"verified": "ok", "unverified": "not verifiable here", "contradicted": "**does not fit**"}
WIDTH = 120
"""Columns of the page in the terminal."""
_LINK = re.compile(r"([^\s`|(]*(?:@|://|www\.)[^\s`|]*[^\s`|).,;:])")
"""A word that a page could show as a link, such as an address or an e-mail address."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version", nargs="?", type=int, metavar="VERSION", help="a registered version (default: the champion)"
    )
    parser.add_argument(
        "--release", action="append", default=[], type=Path, metavar="DIR",
        help="also check the releases of this version in a directory of `ratchet deploy`; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--markdown", action="store_true", help="print the page as Markdown, with the digest of each file"
    )


def run(arguments: argparse.Namespace) -> int | None:
    from ratchet.stages.audit import audit

    if arguments.markdown and arguments.json:
        raise SettingsError("--markdown: found --json as well; leave out one of them")
    report = audit(Project(arguments.project), arguments.version, arguments.release)
    print_record(report, format_markdown if arguments.markdown else format_audit, arguments)
    if not report.is_consistent:
        return EXIT_GATE
    if not report.files:
        write_stderr(
            "ratchet audit: the audit is incomplete: the model's files are not on this machine; copy its folder below "
            "mlruns/models/, or set machine.tracking_uri to its server\n"
        )
        return EXIT_INPUT
    return None


def format_audit(report: "AuditReport") -> str:
    """Format the page for the terminal: a line for each fact with its proof, then the summary."""
    from ratchet.storage import digests

    lines = [
        f"Audit of {report.model_name}, version {report.version} (model {report.model_digest[: digests.SHORT]}), "
        f"{report.time}"
    ]
    width = min(28, max(len(fact.name) for fact in report.facts))
    for section, title in TITLES.items():
        lines += ["", title]
        for fact in report.facts:
            if fact.section == section:
                lines += _format_fact(fact, width)
    lines += ["", summarize(report)]
    for status, heading in (("contradicted", "does not fit"), ("unverified", "not verifiable here")):
        lines += [f"  {heading}: {one.name} ({one.proof})" for one in report.facts if one.status == status]
    return "\n".join(lines)


def _format_fact(fact: "AuditFact", width: int) -> Iterator[str]:
    head = f"  {MARKS[fact.status]:2}  {fact.name:{width}}  "
    text = fact.text if fact.status == "unverified" else f"{fact.text} [{fact.proof}]"
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * (width + 8), break_on_hyphens=False
    )  # fmt: skip


def summarize(report: "AuditReport") -> str:
    """Return the numbers of facts that were verified, that could not be, and that do not fit."""
    verified, unverified, contradicted = (
        len(report.list_facts(status)) for status in ("verified", "unverified", "contradicted")
    )
    facts = "1 fact" if verified == 1 else f"{verified:,} facts"
    do_not = "does not" if contradicted == 1 else "do not"
    return f"{facts} verified, {unverified:,} not verifiable here, {contradicted:,} {do_not} fit"


def format_markdown(report: "AuditReport") -> str:
    """Format the page as Markdown: a table for each section, the summary, and the digest of each file."""
    lines = [f"# Audit of {_escape(report.model_name)}, version {report.version}", ""]
    lines += [f"Model `{report.model_digest}`, {report.time}. **{summarize(report)}.**"]
    for section, title in TITLES.items():
        lines += ["", f"## {title}", "", "| check | fact | value | proof, or reason |", "|---|---|---|---|"]
        lines += [
            f"| {CELLS[fact.status]} | {_escape(fact.name)} | {_escape(fact.text)} | {_escape(fact.proof)} |"
            for fact in report.facts
            if fact.section == section
        ]
    if report.files:
        lines += ["", "## Files of the model", "", "| file | SHA-256 |", "|---|---|"]
        lines += [f"| {_escape(name)} | `{sha}` |" for name, sha in sorted(report.files.items())]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Escape text for a cell of a table. Words that would become links are shown as code."""
    parts = _LINK.split(text)  # every second part is such a word
    return "".join(f"`{part}`" if number % 2 else _escape_part(part) for number, part in enumerate(parts))


def _escape_part(text: str) -> str:
    """Escape a part of a text, and keep the white space at its ends."""
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    return text if start >= end else f"{text[:start]}{escape_comment(text[start:end])}{text[end:]}"
