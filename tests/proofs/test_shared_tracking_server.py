"""Proves row R12 on a shared MLflow server: machines do not disturb each other's runs, and an outage does not stop a
training."""

import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mlflow_server
import postgres
import tiny_project
from mlflow_server import running
from ports import free_port
from ratchet.config.settings import Settings
from ratchet.errors import TrackingError
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import SweepReport
from ratchet.storage.records.training import TrainReport
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import HOST_TAG, RUN_TAG
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker

PACKAGES = ("tracking", "reports")
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "artifacts"


@dataclass(frozen=True)
class Servers:
    """Addresses of the running servers."""

    mlflow: str
    storage: str


def storage_client(address: str) -> Any:
    import boto3

    return boto3.client(
        "s3", endpoint_url=address, region_name=KEYS["AWS_DEFAULT_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"], aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("servers")
    storage, mlflow = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", storage.rpartition(":")[2]]
    with postgres.serve() as database, running(moto, storage, logs / "moto", KEYS):
        storage_client(storage).create_bucket(Bucket=BUCKET)
        address = mlflow.removeprefix("http://")
        extra = KEYS | {  # the same keys as in deploy/compose.yaml
            "AWS_ENDPOINT_URL": storage,
            "MLFLOW_BACKEND_STORE_URI": database.database().replace("postgresql://", "postgresql+psycopg://"),
            "MLFLOW_ARTIFACTS_DESTINATION": f"s3://{BUCKET}",
            "MLFLOW_SERVER_ALLOWED_HOSTS": address,
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with running(mlflow_server.command(address), f"{mlflow}/health", logs / "mlflow", extra):
            yield Servers(mlflow, storage)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    train = tiny_project.TRAIN.model_copy(update={"epochs": 1.0})
    return tiny_project.prepared(
        tmp_path_factory.mktemp("template") / "project", tiny_project.SETTINGS.model_copy(update={"train": train})
    )


def project(template: ProjectLayout, root: Path, server: str) -> tuple[ProjectLayout, Settings]:
    from ratchet.config import params_file

    shutil.copytree(template.root, root)
    layout = ProjectLayout(root)
    settings = params_file.load(layout.params)
    machine = settings.machine.model_copy(update={"tracking_uri": server, "tracking_timeout_s": 60.0})
    settings = settings.model_copy(update={"machine": machine})
    tiny_project.save(layout, settings)
    return layout, settings


def test_a_training_is_shown_on_the_server_and_its_files_lie_in_the_object_store(
    servers: Servers, template: ProjectLayout, tmp_path: Path
) -> None:
    layout, settings = project(template, tmp_path / "project", servers.mlflow)
    done = tiny_project.ratchet(layout, "train")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = TrainReport.load(layout.train_report).run_id
    tracking = MlflowTracker(layout, settings.promote.model_name, servers.mlflow)
    found = tracking.find(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.tags[HOST_TAG] == socket.gethostname()
    report = TrainReport.load(layout.train_report)
    with tracking.connected() as client:
        losses = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "validation/loss")}
        assert losses == pytest.approx(report.validation_loss)
        sent = Path(client.download_artifacts(found.info.run_id, "train.json", str(tmp_path)))
    assert digests.hash_file(sent) == digests.hash_file(layout.train_report)
    listed = storage_client(servers.storage).list_objects_v2(Bucket=BUCKET)["Contents"]
    assert any(entry["Key"].endswith(f"{found.info.run_id}/artifacts/train.json") for entry in listed)
    assert not layout.mlflow_database.exists()
    again = tiny_project.ratchet(layout, "train")
    assert again.returncode == 0, again.stderr
    assert tracking.find(run_id).info.run_id == found.info.run_id


def test_two_machines_that_begin_one_run_at_once_agree_on_one(
    servers: Servers, template: ProjectLayout, tmp_path: Path
) -> None:
    machines = [
        MlflowTracker(project(template, tmp_path / name, servers.mlflow)[0], "race", servers.mlflow) for name in "abc"
    ]
    with machines[0].connected():
        pass  # creates the experiment
    with ThreadPoolExecutor(len(machines)) as threads:
        made = list(threads.map(lambda tracking: tracking.find_or_create("0" * 16, 1_000), machines))
    assert len({run.info.run_id for run in made}) == 1


def test_what_another_machine_trains_is_left_alone(servers: Servers, template: ProjectLayout, tmp_path: Path) -> None:
    layout, _ = project(template, tmp_path / "project", servers.mlflow)
    tracking = MlflowTracker(layout, "others", servers.mlflow)
    with tracking.connected() as client:
        run = tracking.find_or_create("1" * 16, 1_000)
        client.set_tag(run.info.run_id, HOST_TAG, "another-machine")
    assert tracking.reconcile(layout.runs) == []
    assert tracking.find("1" * 16).info.status == "RUNNING"
    assert tracking.find("1" * 16).data.tags[RUN_TAG] == "1" * 16


def test_a_sweep_of_another_machine_is_left_alone(servers: Servers, template: ProjectLayout, tmp_path: Path) -> None:
    layout, _ = project(template, tmp_path / "project", servers.mlflow)
    tracking = MlflowTracker(layout, "sweeps of others", servers.mlflow)
    sweeps = MlflowSweepTracker(tracking, lambda _: {})
    sweeps.update(
        SweepReport(
            study="lora", storage="postgres", sampler="TPE", pruner="", versions={}, objectives=(), trials=(), axes=(),
            data_digest="d" * 64, base_digest="b" * 64, planned_trials=2,
        )
    )  # fmt: skip
    with tracking.connected() as client:
        experiment = client.get_experiment_by_name(tracking.name).experiment_id
        [parent] = client.search_runs([experiment])
        client.set_tag(parent.info.run_id, HOST_TAG, "another-machine")
        assert sweeps.reconcile(lambda study: False) == []
        client.set_tag(parent.info.run_id, HOST_TAG, socket.gethostname())
        assert len(sweeps.reconcile(lambda study: False)) == 1
        assert client.get_run(parent.info.run_id).info.status == "KILLED"


def test_a_server_that_is_gone_costs_a_notice_and_no_training(template: ProjectLayout, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    layout, settings = project(template, tmp_path / "project", nobody)
    machine = settings.machine.model_copy(update={"tracking_timeout_s": 2.0})
    tiny_project.save(layout, settings.model_copy(update={"machine": machine}))
    done = tiny_project.ratchet(layout, "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert nobody in done.stderr
    assert layout.train_report.exists()
    with pytest.raises(
        TrackingError, match=f"MLflow \\({nobody}\\): .*refused.*it sends what a run lacks from its journal"
    ):
        MlflowTracker(layout, "model", nobody).find("2" * 16)
