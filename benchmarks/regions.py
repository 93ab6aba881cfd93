"""Fills regions of a document with the results of benchmarks.

A region begins with a line `<!-- measured: NAME -->` and ends with `<!-- end -->`. Other text is not changed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from report import figure, spread, verdict
from surroundings import describe, warning

Shown = Literal["all", "missed"]
"""Rows in the document: all rows, or only rows that are not ok, for benchmarks with about a hundred rows."""

MOST_LOSS = 0.05
"""Share by which a ratio to a peer may be worse than in the landed document, in addition to the spreads of both."""
_RATIO = re.compile(r"\bours / (?!of )|/ ours\b")
"""Names of rows that compare Ratchet with a peer in the same run. Absolute times depend on the machine."""
_ROW = re.compile(
    r"^\| (?P<name>.+?) \| (?P<value>[-\d.,e+]+) \| (?:±(?P<half>\d+)%)? ?\| (?P<target>[<>]=) ", re.MULTILINE
)

_REGION = re.compile(r"(<!-- measured: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """Result of one benchmark."""

    name: str
    command: str
    begun: datetime
    took_s: float
    planned_s: float | None = None
    """Planned seconds on two idle cores; None without a planned time."""
    rows: Sequence[dict[str, Any]] = ()
    surroundings: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    """Skipped peers or parts, or the whole benchmark; each with its reason."""
    failure: str = ""
    """Reason for the absence of rows."""

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Rows that are not ok."""
        return [row for row in self.rows if not row["ok"]]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and no target was missed. A skipped part that is reported does not count as a
        failure."""
        return not self.failure and not self.missed


def names(text: str) -> list[str]:
    """Return the regions of a document, in order."""
    return [found["name"] for found in _REGION.finditer(text)]


def filled(text: str, name: str, content: str) -> str:
    """Return the document with this content in a region; the markers stay. Raises KeyError unless the region exists
    once."""
    if names(text).count(name) != 1:
        raise KeyError(f"one line <!-- measured: {name} --> and its <!-- end --> are needed")

    def put(found: re.Match[str]) -> str:
        return f"{found[1]}{content.strip()}\n{found[3]}" if found["name"] == name else found[0]

    return _REGION.sub(put, text)


def regressions(text: str, outcome: Outcome) -> list[str]:
    """Return a line for each ratio to a peer that is worse than in a landed document.

    A ratio is worse if it is more than MOST_LOSS plus the spreads of both measurements (half the interquartile range)
    below the landed ratio, or above it for a target `<=`. Only rows with a target are compared, which shows the better
    direction, and no differences from 1 (`less 1`), which are rounding.
    """
    region = next((found[0] for found in _REGION.finditer(text) if found["name"] == outcome.name), "")
    landed = {row["name"].replace("\\|", "|"): row for row in _ROW.finditer(region)}
    lines = []
    for row in outcome.rows:
        before = landed.get(row["name"])
        if before is None or not _RATIO.search(row["name"]) or row["name"].endswith("less 1"):
            continue
        value, reference = row["value"], float(before["value"].replace(",", ""))
        if value <= 0 or reference <= 0 or not row["target"].startswith(before["target"]):
            continue
        loss = 1 - value / reference if before["target"] == ">=" else value / reference - 1
        allowed = MOST_LOSS + row.get("spread", 0.0) / 2 + int(before["half"] or 0) / 100
        if loss > allowed:
            name = f"{outcome.name}: {row['name']}"
            lines.append(f"{name}: {value:.3f}, landed {reference:.3f}: {loss:.0%} worse, {allowed:.0%} allowed")
    return lines


def written(outcome: Outcome, shown: Shown) -> str:
    """Return the content of a benchmark's region."""
    lines = [f"`{outcome.command}`, {outcome.begun:%-d %B %Y}, {outcome.took_s:,.0f} s."]
    if crowded := warning(outcome.surroundings.get("others_share", 0.0)):
        lines[0] += f" **Busy machine**: {crowded}."
    if outcome.failure:
        lines[0] += f" **Failed**: {_inline(outcome.failure)}."
    lines += [f"Skipped: {_inline(text)}" for text in outcome.skipped]
    rows = outcome.rows if shown == "all" else outcome.missed
    if shown == "missed" and outcome.rows:
        lines.append(_counted(outcome))
    text = "\n\n".join(lines)
    return f"{text}\n\n{_table(rows)}" if rows else text


def summary(outcomes: Sequence[Outcome], around: dict[str, Any]) -> str:
    """Return machine and versions, and a line per benchmark."""
    lines = [
        f"{outcomes[0].begun:%-d %B %Y}; {describe(around['machine'], around['versions'])}",
        "",
        "| benchmark | s | planned, s | taken by others | rows | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for one in outcomes:
        others = f"{100 * one.surroundings['others_share']:.0f} %" if one.surroundings else ""
        planned = f"{one.planned_s:,.0f}" if one.planned_s else ""
        lines.append(f"| {one.name} | {one.took_s:,.0f} | {planned} | {others} | {len(one.rows)} | {_note(one)} |")
    lines.append(f"| **all** | {sum(one.took_s for one in outcomes):,.0f} | | | | |")
    return "\n".join(lines)


def _note(outcome: Outcome) -> str:
    """Return a line about a failure, missed targets, skipped parts and a busy machine, or `ok`."""
    if outcome.failure:
        return f"failed: {_inline(outcome.failure)}"
    notes = [f"{len(outcome.missed)} not ok"] if outcome.missed else []
    notes += [f"skipped: {_inline(text)}" for text in outcome.skipped]
    notes += ["busy machine"] if warning(outcome.surroundings.get("others_share", 0.0)) else []
    return "; ".join(notes) or "ok"


def _counted(outcome: Outcome) -> str:
    missed = len(outcome.missed)
    return f"{len(outcome.rows)} rows, {'all ok' if not missed else f'{missed} of them not ok'}."


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| | value | spread | target | |", "|---|---:|---:|---|---|"]
    for row in rows:
        cells = (_cell(row["name"]), figure(row["value"]), spread(row), _cell(row["target"]), verdict(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _inline(text: str) -> str:
    """Return a message without mark-up and table borders, for a line of a document."""
    return re.sub(r"[`|<>]", "", " ".join(text.split()))[:300]
