"""How every benchmark ends: a table, perhaps a JSON file, and an exit code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def finish(rows: Sequence[dict[str, Any]], target: Path | None) -> int:
    """Print rows of name, value, target and ok, write them to `target` if there is one; 0 if all are ok, else 1."""
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        judged = "ok" if row["ok"] else "NOT OK"
        print(f"{row['name']:{width}} {_figure(row['value']):>18}  {row['target']:15} {judged}")
    if target:
        target.write_text(json.dumps({"rows": list(rows)}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


def _figure(value: float) -> str:
    return f"{value:,.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.2e}"
