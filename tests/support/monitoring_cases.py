"""Cases for alert rules and the dashboard in a real Prometheus, with real and constructed runs."""

import json
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]}
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
