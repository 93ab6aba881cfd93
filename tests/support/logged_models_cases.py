"""Checkpoints of a finished run as logged models."""

from typing import Any

from journaled import NAME, attempt, opened, seal_result
from ratchet.runs.directory import RunDirectory
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker


def finished(layout: ProjectLayout) -> RunDirectory:
    """Create a finished run with best step 10 and last step 20, in the state that a training leaves."""
    run = opened(layout)
    attempt(run, 1, 1, 20)
    run.journal.append("finished", step=20, reason="completed", adapter_digest="a" * 64)
    seal_result(run.paths)
    run.close()
    return run


def logged(layout: ProjectLayout) -> list[Any]:
    with MlflowTracker(layout, NAME).connected() as client:
        experiment = client.get_experiment_by_name(NAME).experiment_id
        found = client.search_logged_models([experiment])
        return sorted((client.get_logged_model(one.model_id) for one in found), key=lambda one: one.name)
