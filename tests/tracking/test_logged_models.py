"""Tests checkpoints as logged models: once each, linked to run, data and metrics, after any interruption."""

from typing import Any

from journaled import NAME, callback, journal, points, stored
from logged_models_cases import (
    finished,
    logged,
)
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import run_logger
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


def told(layout: ProjectLayout) -> list[Any]:
    """Return the logged models without their times."""
    return [(one.model_id, one.name, one.tags, one.params, str(one.status), len(one.metrics)) for one in logged(layout)]


def test_best_and_last_are_logged_with_their_loss_and_their_data(tracked_project: ProjectLayout) -> None:
    run = finished(tracked_project)
    assert (run.paths.result / "adapter" / "adapter_model.safetensors").exists()
    callback(tracked_project, run).catch_up()
    names = {path.name for path in (tracked_project.artifacts / "models").rglob("*") if path.is_file()}
    assert names == {"adapter_config.json"}, "no weights are sent"
    best, last = logged(tracked_project)
    found = stored(tracked_project, run)
    assert (best.name, last.name) == (f"{run.spec.run_id}-best-step-10", f"{run.spec.run_id}-last-step-20")
    assert {str(one.status) for one in (best, last)} == {"READY"}
    assert {one.source_run_id for one in (best, last)} == {found.info.run_id}
    assert best.tags["ratchet.adapter_digest"] == "a" * 64
    assert (best.tags["ratchet.is_final"], last.tags["ratchet.is_final"]) == ("true", "false")
    assert "ratchet.adapter_digest" not in last.tags
    assert best.params["train.rank"] == found.data.params["train.rank"]
    [loss] = best.metrics
    assert (loss.key, loss.value, loss.step) == ("validation/loss", 0.2, 10)
    assert (loss.dataset_name, loss.dataset_digest) == ("a.jsonl, b.csv", "d" * 12)
    outputs = {(one.model_id, one.step) for one in found.outputs.model_outputs}
    assert outputs == {(best.model_id, 10), (last.model_id, 20)}
    assert [step for step, _, _ in points(tracked_project, run, "validation/loss")] == [10, 20], "of the run, once"


def test_repeating_it_adds_nothing(tracked_project: ProjectLayout) -> None:
    run = finished(tracked_project)
    callback(tracked_project, run).catch_up()
    before = told(tracked_project)
    callback(tracked_project, run).catch_up()
    with run.paths.journal.open("ab") as stream:  # a new event makes the callback check all checkpoints again
        stream.write(journal(run)[-1].line())
    callback(tracked_project, run).catch_up()
    assert told(tracked_project) == before


def test_scores_of_the_run_s_own_model_are_those_of_its_logged_model(tracked_project: ProjectLayout) -> None:
    run = finished(tracked_project)
    tracking = MlflowTracker(tracked_project, NAME)
    scores = {"test/candidate/accuracy": 0.75, "test/merged/accuracy": 0.5, "test/base/accuracy": 0.25}
    for _ in range(2):
        tracking.report(callback(tracked_project, run), scores, {}, {}, 60.0)
    best, last = logged(tracked_project)
    assert {m.key: m.value for m in best.metrics} == {
        "validation/loss": 0.2, "test/candidate/accuracy": 0.75, "test/merged/accuracy": 0.5
    }  # fmt: skip
    assert [m.key for m in last.metrics] == ["validation/loss"]
    assert stored(tracked_project, run).data.metrics["test/base/accuracy"] == 0.25


def test_registered_version_is_named_by_its_logged_model(tracked_project: ProjectLayout) -> None:
    run = finished(tracked_project)
    callback(tracked_project, run).catch_up()
    registry = MlflowModelRegistry(tracked_project, NAME)
    tags = {run_logger.ADAPTER_TAG: "a" * 64}
    for _ in range(2):
        assert registry.ensure_version("m" * 64, tracked_project.models / "x", run.spec.run_id, tags) == 1
    best, last = logged(tracked_project)
    assert best.tags[run_logger.VERSIONS_TAG] == f'[{{"name": "{NAME}", "version": "1"}}]'
    assert run_logger.VERSIONS_TAG not in last.tags
