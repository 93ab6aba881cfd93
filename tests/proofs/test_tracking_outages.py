"""Proves the README's sentence "Monitoring cannot disturb a run" for MLflow: a killed or slow server delays no
training, and MLflow receives all events later."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import mlflow_server
import tiny_project
from ports import free_port
from rank_projects import (
    EVEN,
    PATIENCE_S,
    SLOW,
    events,
    log,
    project,
    report,
    settings,
    start,
    train,
    wait_until,
)
from ratchet.reports import plots
from ratchet.runs.directory import RunPaths
from ratchet.runs.tracking_payload import METRICS
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from slow_proxy import SlowProxy, slow

PACKAGES = ("tracking", "reports", "runs")
FAR_S = 5.0


def assert_all_is_there_once(layout: ProjectLayout, tracking: MlflowTracker) -> None:
    run_id = report(layout).run_id
    found = tracking.find(run_id)
    assert found.info.status == "FINISHED"
    wanted = {key: Counter(range(1, report(layout).steps + 1)) for key in METRICS}
    wanted["validation/loss"] = Counter(report(layout).validation_loss.keys())
    told: dict[int, float] = {}
    for event in events(layout, "step"):
        told.setdefault(event.data["step"], round(event.t * 1000))
    with tracking.connected() as client:
        points = {key: client.get_metric_history(found.info.run_id, key) for key in METRICS}
        names = {item.path for item in client.list_artifacts(found.info.run_id)}
        models = client.search_logged_models([found.info.experiment_id])
    assert {key: Counter(point.step for point in history) for key, history in points.items()} == wanted
    assert {point.step: point.timestamp for point in points["train/loss"]} == told, "at the times they were done"
    assert {"train.json", "settings.yaml", "report.html"} <= names
    assert {str(model.status) for model in models} == {"READY"}
    assert len(models) == len({report(layout).best_step, report(layout).steps})


def test_a_server_that_is_killed_in_mid_run_and_comes_back_lacks_nothing(
    prepared: Path, tmp_path: Path, mlflow_template: Path, started: list[Any]
) -> None:
    port = free_port()
    chosen = settings(
        EVEN.model_copy(update={"epochs": 5}), tracking_uri=f"http://127.0.0.1:{port}", tracking_timeout_s=100
    )
    layout = project(prepared, tmp_path / "project", chosen)
    tracking = MlflowTracker(layout, chosen.promote.model_name, f"http://127.0.0.1:{port}")
    with ExitStack() as first:
        first.enter_context(mlflow_server.serve(tmp_path / "server", port, mlflow_template))
        started.append(start(layout, [SLOW]))
        wait_until(lambda: len(events(layout, "step")) > 1, *started)
        run_id = next(iter(layout.runs.iterdir())).name
        wait_until(lambda: (found := tracking.find(run_id)) and "train/loss" in found.data.metrics, *started)
    killed_at = events(layout, "step")[-1].data["step"]
    wait_until(lambda: events(layout, "step")[-1].data["step"] > killed_at + 8, *started)
    with mlflow_server.serve(tmp_path / "server", port, mlflow_template):
        said = started[0].communicate(timeout=PATIENCE_S)[1]
        assert started[0].returncode == 0, said + log(layout)
        assert_all_is_there_once(layout, tracking)
    notices = [event.data["text"] for event in events(layout, "notice") if "mlflow failed" in event.data["text"]]
    assert len(notices) <= 1, "told once"


def test_a_server_far_away_slows_nothing_and_gets_everything_later(
    prepared: Path, tmp_path: Path, mlflow_template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with mlflow_server.serve(tmp_path / "server", port, mlflow_template), slow(port, FAR_S) as proxy:
        layout = project(prepared, tmp_path / "project", settings(EVEN, tracking_uri=proxy.url, tracking_timeout_s=1))
        said = train(layout)
        passed = proxy.count("/runs/log-batch")
        assert passed <= 1, "training has ended before a second batch came through"
        assert "mlflow did not finish within 1 s; the events that it missed are in the journal" in said
        proxy.latency_s = 0.0
        before = len(proxy.passed)
        chosen = settings(EVEN, tracking_uri=proxy.url, tracking_timeout_s=100)
        tiny_project.save(layout, chosen)
        train(layout)
        assert_all_is_there_once(layout, MlflowTracker(layout, chosen.promote.model_name, proxy.url))
        asked = proxy.passed[before:]
        assert len(asked) < 60, asked
        a_stage_does_not_wait_for_it(layout, proxy)
    assert "metrics of this stage are not logged to MLflow: not complete after 0.5 s" in capsys.readouterr().err


def a_stage_does_not_wait_for_it(layout: ProjectLayout, proxy: SlowProxy) -> None:
    chosen = settings(EVEN)
    tracking = MlflowTracker(layout, chosen.promote.model_name, proxy.url)
    run_id = report(layout).run_id
    callback = tracking.create_callback(RunPaths(layout.runs / run_id), chosen, plots.draw_loss_curve)
    with tracking.connected():  # connect first; the latency increases afterwards
        proxy.latency_s = FAR_S
    before = proxy.count("/runs/log-batch")
    tracking.report(callback, {"test/candidate/accuracy": 0.5}, {}, {}, 0.5)
    assert proxy.count("/runs/log-batch") == before
    proxy.latency_s = 0.0
    wait_until(lambda: tracking.find(run_id).data.metrics.get("test/candidate/accuracy") == 0.5)
