"""Proves row R12 for Prometheus: counters survive restarts, the dashboard has data, and each alert fires in its
case."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

import prometheus_server
import tiny_project
from monitoring_cases import (
    ALERTS,
    DASHBOARD,
    EXPRESSIONS,
    RULES,
)
from ports import free_port
from ratchet.config.machine import Machine
from ratchet.runs.directory import RunPaths, find_newest_run
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.prometheus_series import METRICS, STEP_SECONDS, PrometheusSeries
from ratchet.storage.records.gate import Verdict
from ratchet.tracking.prometheus import PrometheusExporter, RunMetricsCollector, write_verdict

PACKAGES = ("reports", "runs")


RENDERED = re.sub(r"for: \d+m", "for: 0s", RULES).replace("[10m] offset 30m", "[3s] offset 8s")
RENDERED = RENDERED.replace("ratchet_train_loss[10m]", "ratchet_train_loss[3s]")
"""The alert rules, except that minutes of waiting are replaced by seconds."""


def shown(expression: str) -> str:
    """Fill in the variables of a dashboard expression, as Grafana does."""
    return expression.replace("$run", ".*").replace("$__rate_interval", "1m").replace("$__interval", "5s")


FAULTS = [
    {"kind": "slow", "seconds": 0.1},
    {"kind": "non_finite", "step": 4, "times": 0},
    {"kind": "memory", "step": 6, "tokens": 100},
    {"kind": "hang", "step": 9, "mark": "hung"},
]
FROM_FAULTS = {"RatchetWorkerStalled", "RatchetMicroBatchShrunk"}


@contextmanager
def training(project: Any) -> Iterator["subprocess.Popen[str]"]:
    environment = tiny_project.environment() | {"RATCHET_FAULTS": json.dumps(FAULTS), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        tiny_project.command("train"), cwd=project.root, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_with_faults_fills_the_whole_dashboard_and_its_counters_survive_two_restarts(tmp_path: Path) -> None:
    port = free_port()
    machine = tiny_project.MACHINE.model_copy(
        update={
            "metrics_port": port, "replica": str(tmp_path / "replica"),
            "metrics_file": str(tmp_path / "m" / "run.prom"),
            "stall_timeout_s": 2.0, "metrics_scrape_wait_s": 60.0, "replica_interval_s": 0.5,
        }
    )  # fmt: skip
    layout = tiny_project.prepared(tmp_path / "project", tiny_project.SETTINGS.model_copy(update={"machine": machine}))
    (tmp_path / "m").mkdir()
    write_verdict(tmp_path / "m" / "run.prom", VERDICT)
    with files_served(tmp_path / "m") as files:
        targets = {"ratchet": [f"127.0.0.1:{port}"], "files": [f"127.0.0.1:{files}/run-gate.prom"]}
        with prometheus_server.serve(tmp_path / "prometheus", targets, RENDERED) as prometheus:
            began = time.time()
            with training(layout) as process:

                def alive() -> None:
                    assert process.poll() is None, process.communicate()[0]

                prometheus.wait('ratchet_failures_total{class="stalled"} > 0 and on (run) ratchet_step > 11', alive)
                process.send_signal(signal.SIGTERM)
                assert process.wait(prometheus_server.PATIENCE_S) == 75, process.communicate()[0]
            with training(layout) as process:
                told = process.communicate(timeout=prometheus_server.PATIENCE_S)[0]
                assert process.returncode == 0, told
            assert prometheus.now('last_over_time(ratchet_run_state{state="finished"}[10m]) == 1')
            check_against_the_journal(prometheus, find_newest_run(layout.runs))
            for title, expression in EXPRESSIONS.items():
                found = prometheus.since(began, shown(expression))
                assert any(isfinite(value) for _, values in found for value in values), f"{title}: {expression}"
            for name, metric in METRICS.items():
                if metric.kind == "counter":
                    assert [v for _, v in prometheus.now(f"resets({name}[1h])") if v] == [], f"{name} went back"
            fired = {labels["alertname"] for labels, _ in prometheus.since(began, 'ALERTS{alertstate="firing"}')}
            assert fired >= FROM_FAULTS
            assert prometheus.since(began, shown(DASHBOARD["annotations"]["list"][0]["expr"]))
    text = (tmp_path / "m" / "run.prom").read_text(encoding="utf-8")
    assert re.search(r'^ratchet_run_state\{[^}]*state="finished"\} 1\.0$', text, re.MULTILINE)


def check_against_the_journal(prometheus: prometheus_server.Server, paths: RunPaths | None) -> None:
    """Check that the latest values in Prometheus match the journal."""
    assert paths is not None
    events = list(JournalReader(paths.journal).read())
    series = PrometheusSeries(Machine(replica="/nowhere"))
    for event in events:
        series.update(event)
    kinds = [event.kind for event in events]
    assert kinds.count("attempt_started") == 3
    count = {"run": paths.root.name}
    stored = {name: prometheus.now(f"last_over_time({name}[5m])") for name in METRICS}
    for sample in series.samples():
        if sample.name in ("ratchet_remaining_seconds", "ratchet_run_info"):
            continue
        wanted = count | sample.labels
        found = [v for labels, v in stored[sample.name] if wanted.items() <= labels.items()]
        assert found == [pytest.approx(sample.value)], sample
    [(_, steps)] = prometheus.now(f"last_over_time({STEP_SECONDS}_count[5m])")
    assert steps == kinds.count("step")
    assert kinds.count("step_skipped") == 1


VERDICT = Verdict(
    decision="HOLD", model_digest="m" * 64, adapter_digest="a" * 64, run_id="gated", is_champion=False,
    champion_digest=None, reasons=(),
)  # fmt: skip
STEP = {"learning_rate": 0.1, "grad_norm": 1.0, "trained_tokens": 5, "input_tokens": 9, "step_s": 0.2}
READY = {"start_step": 0, "planned_steps": 100, "device": "cpu", "compute_dtype": "float32", "ranks": 1}


@contextmanager
def files_served(folder: Path) -> Iterator[int]:
    """Serve a directory over HTTP, as node_exporter serves the files of its textfile directory."""

    class Files(SimpleHTTPRequestHandler):
        extensions_map = {".prom": "text/plain; version=0.0.4"}  # noqa: RUF012

        def log_message(self, *about: object) -> None:
            """Disable the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield int(server.server_address[1])
    server.shutdown()
    server.server_close()


class Made:
    """A run whose events the test creates."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.port = free_port()
        self.exposition = PrometheusExporter(
            Machine(metrics_port=self.port, replica="/nowhere", metrics_scrape_wait_s=0.0)
        )
        stack.callback(self.exposition.close)
        self.figures: RunMetricsCollector = self.exposition.create_callback(name, "made")

    def tell(self, kind: str, age_s: float = 0.0, attempt: int = 1, **data: Any) -> None:
        if kind == "attempt_started":
            data |= {"pid": os.getpid(), "code_version": "1"}
        self.figures.on_events([JournalEvent(kind, time.time() - age_s, attempt, data)])


def test_every_alert_fires_when_its_case_is_provoked(tmp_path: Path) -> None:
    write_verdict(tmp_path / "run.prom", VERDICT)
    with ExitStack() as stack:
        files = stack.enter_context(files_served(tmp_path))
        runs = {name: Made(name, stack) for name in ("stuck", "sick", "well", "over", "gone")}
        targets = {"made": [f"127.0.0.1:{run.port}" for run in runs.values()]}
        targets["gate"] = [f"127.0.0.1:{files}/run-gate.prom"]
        prometheus = stack.enter_context(prometheus_server.serve(tmp_path / "prometheus", targets, RENDERED))
        for run in runs.values():
            run.tell("attempt_started", age_s=0.0 if run is not runs["stuck"] else 7200.0)
            run.tell("worker_ready", age_s=0.0 if run is not runs["stuck"] else 7200.0, **READY)
            run.tell("step", age_s=0.0 if run is not runs["stuck"] else 2000.0, step=1, loss=1.0, **STEP)
        prometheus.wait("count(ratchet_train_loss) == 5")
        prometheus.wait('count_over_time(ratchet_train_loss{run="sick"}[1m]) > 10')  # the losses before the change
        worsen(runs["sick"])
        runs["over"].figures.on_end("FAILED")
        runs["gone"].exposition.close()
        for name in ALERTS:
            prometheus.wait(f'ALERTS{{alertname="{name}", alertstate="firing"}}')
        fired = prometheus.now('max_over_time(ALERTS{alertstate="firing"}[1h])')
        texts = [one["annotations"] for one in prometheus.ask("alerts")["alerts"]]
    firing = {(labels["alertname"], labels["run"]) for labels, _ in fired}
    whose = {
        "RatchetNoProgress": "stuck", "RatchetCheckpointTooOld": "stuck", "RatchetRunFailed": "over",
        "RatchetGone": "gone", "RatchetGateFailed": "gated",
    }  # fmt: skip
    assert firing == {(name, whose.get(name, "sick")) for name in ALERTS}
    for text in texts:
        assert set(text) == {"summary", "description"}
        assert "error expanding" not in str(text) and "<no value>" not in str(text)


def worsen(run: Made) -> None:
    """Add an event for each kind of problem. The run continues."""
    memory = {"device": "cpu", "device_bytes": 1000, "allocated_bytes": 0, "host_bytes": 970}
    run.tell("memory_peak", phase="steps", peak_bytes=970, **memory)
    budget = {"tokens": 64, "failed_tokens": 128, "good_steps": 0, "wait_steps": 1, "grown": False}
    run.tell("microbatch_budget", step=2, phase="train", action="shrink", failed_tokens=128, budget=budget)
    for step in range(2, 8):
        run.tell(
            "step_skipped",
            step=step,
            action="skip",
            reason="loss is nan",
            rows=[1],
            learning_rate_scale=1.0,
            rollback_step=None,
        )
    checkpoint = {"size_bytes": 10, "bytes_written": 10, "bytes_linked": 0, "blocked_s": 0.1, "seconds": 0.2}
    run.tell("checkpoint_saved", age_s=1900.0, step=1, is_best=True, **checkpoint)
    run.tell("validation", step=1, loss=1.0, improved=True, seconds=1.0, tokens=5)
    run.tell("validation", step=7, loss=3.0, improved=False, seconds=1.0, tokens=5)
    run.tell("worker_exited", exit_code=-9, failure_class="stalled", decision="Retry", text="no heartbeat")
    for attempt in range(2, 7):
        run.tell("attempt_started", attempt=attempt)
    run.tell("worker_ready", attempt=6, **READY)
    run.tell("step", attempt=6, step=8, loss=9.0, **STEP)
