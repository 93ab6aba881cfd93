"""Proves row R12 for several machines: a shared MLflow server has each step once, even if the leading machine is
lost."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import mlflow_server
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
    world,
)
from ratchet.runs.tracking_payload import METRICS
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import HOST_TAG

PACKAGES = ("tracking", "reports", "runs")


def shown(tracking: MlflowTracker, run_id: str) -> Any:
    """Return the steps on the server by metric with their counts. The counts are empty before the server has the
    run."""
    with tracking.connected() as client:
        found = tracking.find(run_id)
        if found is None:
            return {key: Counter[int]() for key in METRICS}
        return {key: Counter(p.step for p in client.get_metric_history(found.info.run_id, key)) for key in METRICS}


def leads(layout: ProjectLayout) -> bool:
    return bool(events(layout, "worker_ready")[-1].data["has_rank_zero"])


def test_a_shared_server_has_each_step_once_although_the_leading_machine_is_lost(
    prepared: Path, tmp_path: Path, mlflow_template: Path, started: list[Any]
) -> None:
    with mlflow_server.serve(tmp_path / "server", free_port(), mlflow_template) as server:
        chosen = settings(
            EVEN.model_copy(update={"epochs": 20}), nodes="1:2", rendezvous=f"127.0.0.1:{free_port()}",
            checkpoint_every=4, tracking_uri=server, tracking_timeout_s=100, grace_period_s=100,
        )  # fmt: skip
        machines = [project(prepared, tmp_path / name, chosen) for name in ("first", "second")]
        tracking = MlflowTracker(machines[0], chosen.promote.model_name, server)
        started.append(start(machines[0], [SLOW]))
        wait_until(lambda: len(events(machines[0], "step")) > 1, *started)
        started.append(start(machines[1], [SLOW]))
        wait_until(lambda: world(machines[0]) == world(machines[1]) == 2, *started)
        run_id = next(iter(machines[0].runs.iterdir())).name
        assert leads(machines[0]) != leads(machines[1])
        lost, left = (0, 1) if leads(machines[0]) else (1, 0)
        began = events(machines[lost], "step")[-1].data["step"]
        wait_until(lambda: shown(tracking, run_id)["train/loss"][began + 2], *started)
        started[lost].kill()
        wait_until(lambda: leads(machines[left]), started[left])
        began = events(machines[left], "worker_ready")[-1].data["start_step"]
        wait_until(lambda: shown(tracking, run_id)["train/loss"][began + 2], started[left])
        started[left].send_signal(signal.SIGTERM)
        said = started[left].communicate(timeout=PATIENCE_S)[1]
        assert started[left].returncode == 75, said + log(machines[left])
        done = events(machines[left], "step")[-1].data["step"]
        by_key = shown(tracking, run_id)
        by_key.pop("validation/loss")
        assert by_key == {key: Counter(range(1, done + 1)) for key in by_key}
        assert tracking.find(run_id).info.status == "KILLED"
        train(machines[left])
        assert events(machines[left], "worker_ready")[-1].data["start_step"] == done
        by_key = shown(tracking, run_id)
        assert by_key.pop("validation/loss") == Counter(report(machines[left]).validation_loss.keys())
        assert by_key == {key: Counter(range(1, report(machines[left]).steps + 1)) for key in by_key}
        found = tracking.find(run_id)
        assert found.info.status == "FINISHED"
        assert HOST_TAG in found.data.tags
        with tracking.connected() as client:
            assert "train.json" in {item.path for item in client.list_artifacts(found.info.run_id)}
