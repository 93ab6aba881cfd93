"""Cases for `ratchet init`: settings and rules that fit the data, with real git and real DVC."""

import json
from pathlib import Path
from typing import Any

from ratchet.config import params_file
from ratchet.config.gate import MustNotRegressRule
from ratchet.config.settings import Settings
from ratchet.stages import init
from ratchet.storage.layout import ProjectLayout


def made(folder: Path, rows: list[dict[str, Any]], **columns: str) -> Settings:
    """Create a project from these rows and return its settings."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    init.init(folder / "project", folder / "rows.jsonl", **columns)
    return params_file.load(ProjectLayout(folder / "project").params)


def requests(count: int) -> list[dict[str, Any]]:
    topics = ["refund", "parcel", "login"]
    return [{"prompt": f"please see to my {topics[n % 3]} {n}", "response": topics[n % 3]} for n in range(count)]


def regressions(settings: Settings) -> dict[str, float]:
    return {rule.against: rule.margin for rule in settings.gate.rules if isinstance(rule, MustNotRegressRule)}
