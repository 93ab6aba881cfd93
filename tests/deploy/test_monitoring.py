"""Tests of the alert rules and the dashboard: tools accept them, alerts fire at their thresholds, and names match
the metrics."""

import re
import subprocess

import yaml

import prometheus_server
from monitoring_cases import ALERTS, DASHBOARD, EXPRESSIONS, MONITORING
from ratchet.runs.prometheus_series import METRICS, STEP_SECONDS

SUFFIX = re.compile(r"_(bucket|sum|count)$")


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bratchet_[a-z_]+", expression))


def test_promtool_finds_nothing_wrong_with_rules_and_configuration() -> None:
    promtool = prometheus_server.program("promtool")
    for arguments in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_at_their_thresholds_and_not_below() -> None:
    command = [prometheus_server.program("promtool"), "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    quiet, loud = yaml.safe_load((MONITORING / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    assert [case["exp_samples"] for case in quiet["promql_expr_test"]] == [[]]
    expected = str([case["exp_samples"] for case in loud["promql_expr_test"]])
    assert set(re.findall(r'alertname="(\w+)"', expected)) == set(ALERTS)
    used = [names_in(" ".join(one["series"] for one in test["input_series"])) for test in (quiet, loud)]
    assert used[0] == used[1]


def test_every_name_is_a_known_metric_and_nearly_every_metric_is_used() -> None:
    used = set()
    for expression in (*EXPRESSIONS.values(), *(rule["expr"] for rule in ALERTS.values())):
        for name in names_in(expression):
            known = SUFFIX.sub("", name) if SUFFIX.sub("", name) == STEP_SECONDS else name
            assert known in METRICS, f"{name} in {expression}"
            used.add(known)
    assert set(METRICS) - used == {
        "ratchet_run_info", "ratchet_ranks", "ratchet_steps_total", "ratchet_checkpoints_total",
        "ratchet_checkpoint_step", "ratchet_micro_batch_limit_tokens", "ratchet_worker_cpus_used",
        "ratchet_worker_resident_memory_bytes",
    }, "what neither dashboard nor alerts show"  # fmt: skip


def test_names_and_units_follow_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"ratchet(_[a-z]+)+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)", name), name
        assert metric.help and not metric.help.endswith(".")


def test_the_dashboard_is_valid_for_grafana() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("stat", "timeseries")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${source}"}
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["source"]["type"] == "datasource"
    assert variables["run"]["definition"] == "label_values(ratchet_run_info, run)"
