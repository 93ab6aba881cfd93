"""Proves row R12 for "ratchet ui": it sends the events that MLflow missed and ends runs of dead processes."""

from pathlib import Path

from journaled import NAME, attempt, callback, journal, opened, points, seal_result, stored
from mlflow_server import opened_ui
from ports import free_port
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import SweepReport
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker

PACKAGES = ("stages", "reports", "tracking")


def test_with_a_server_it_says_where_runs_are_and_opens_the_project_s_own_store(
    tracked_project: ProjectLayout, tmp_path: Path
) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    machine = Settings().machine.model_copy(update={"tracking_uri": server})
    tracked_project.params.write_text(params_file.dump(Settings(machine=machine)), encoding="utf-8")
    with opened_ui(tracked_project, tmp_path / "log") as ui:
        said = ui.said
    assert f"runs and sweeps are shown on {server} (machine.tracking_uri); this is the project's own store" in said
    assert f"the server's views are not available: MLflow ({server})" in said


def test_what_was_killed_is_ended_and_completed_and_what_is_trained_is_left(
    tracked_project: ProjectLayout, tmp_path: Path
) -> None:
    killed, alive = opened(tracked_project, seed=1), opened(tracked_project, seed=2)
    for run in (killed, alive):
        attempt(run, 1, 1, 10)
        callback(tracked_project, run).on_events(journal(run))
    attempt(killed, 1, 11, 20)  # MLflow does not receive these steps
    killed.close()
    study = SweepReport(
        study="lora",
        storage="journal",
        sampler="TPE",
        pruner="",
        versions={},
        objectives=(),
        data_digest="d" * 64,
        base_digest="b" * 64,
        planned_trials=2,
        axes=(),
        trials=(),
    )
    sweeps = MlflowSweepTracker(MlflowTracker(tracked_project, NAME), lambda _: {})
    sweeps.update(study)
    with opened_ui(tracked_project, tmp_path / "log") as ui:
        said = ui.said
    assert f"run {killed.spec.run_id}: was RUNNING in MLflow, but is not in training; now KILLED" in said
    assert alive.spec.run_id not in said
    assert "sweep lora: was RUNNING in MLflow, but is not active; now KILLED" in said
    assert stored(tracked_project, killed).info.status == "KILLED"
    assert stored(tracked_project, alive).info.status == "RUNNING"
    assert [step for step, _, _ in points(tracked_project, killed, "train/loss")] == list(range(1, 21))


def test_finished_runs_that_mlflow_never_heard_of_are_sent(tracked_project: ProjectLayout, tmp_path: Path) -> None:
    """MLflow was unavailable from the first to the last step of the runs."""
    finished, stopped = opened(tracked_project, seed=5), opened(tracked_project, seed=6)
    for run in (finished, stopped):
        attempt(run, 1, 1, 20)
    seal_result(finished.paths)
    finished.journal.append("finished", step=20, reason="completed", adapter_digest="a" * 64)
    for run in (finished, stopped):
        run.close()
    with opened_ui(tracked_project, tmp_path / "log") as ui:
        said = ui.said
    assert f"run {finished.spec.run_id}: was missing in MLflow; sent" in said
    assert stopped.spec.run_id not in said  # this run is sent when it resumes
    assert stored(tracked_project, finished).info.status == "FINISHED"
    assert [step for step, _, _ in points(tracked_project, finished, "train/loss")] == list(range(1, 21))
    with opened_ui(tracked_project, tmp_path / "log") as ui:
        assert finished.spec.run_id not in ui.said
