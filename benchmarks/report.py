"""Reports the results of a benchmark: a table, a JSON file if requested, and an exit code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import surroundings
from report_rows import BUSY


def finish(rows: Sequence[dict[str, Any]], target: Path | None) -> int:
    """Print rows of name, value, target and ok, and write them to `target` if given. Return 0 if all rows are ok,
    otherwise 1.

    The file also has date, machine, versions, and the share of the CPUs that other processes used meanwhile.
    """
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['name']:{width}} {figure(row['value']):>18} {spread(row):>7}  {row['target']:15} {verdict(row)}")
    around = surroundings.since_start()
    if crowded := surroundings.warning(around["others_share"]):
        print(crowded)
    if target:
        found = {"rows": list(rows), "surroundings": around}
        target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict on a row."""
    if row["ok"]:
        return "ok"
    return "NOT OK: the machine is busy" if row.get("spread", 0.0) > BUSY else "NOT OK"


def spread(row: dict[str, Any]) -> str:
    """Return the usual notation, ± half the interquartile range. The text is empty for a single measurement."""
    return f"±{row['spread'] / 2:.0%}" if "spread" in row else ""


def figure(value: float) -> str:
    """Return a readable text of a value."""
    return f"{value:,.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.2e}"
