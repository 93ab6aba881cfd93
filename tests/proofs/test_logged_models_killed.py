"""Proves row R12 for models in MLflow: if a process dies while it logs a model, the next process completes the
model."""

from typing import Any

import pytest

from journaled import callback, stored
from logged_models_cases import (
    finished,
    logged,
)
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("tracking",)


@pytest.mark.parametrize("call", ["create_logged_model", "log_batch", "log_outputs", "finalize_logged_model"])
def test_whoever_dies_in_between_the_next_one_completes_it(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    import mlflow

    run = finished(tracked_project)
    original = getattr(mlflow.MlflowClient, call)
    models_made: list[str] = []

    def dies(client: Any, *arguments: Any, **options: Any) -> Any:
        about_a_model = call != "log_batch" or any(m.model_id for m in options.get("metrics", ()))
        done = original(client, *arguments, **options)
        if about_a_model:
            models_made.append(call)
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patched:
        patched.setattr(mlflow.MlflowClient, call, dies)
        with pytest.raises(KeyboardInterrupt):
            callback(tracked_project, run).catch_up()
    assert models_made == [call]
    callback(tracked_project, run).catch_up()
    best, last = logged(tracked_project)
    assert [str(one.status) for one in (best, last)] == ["READY", "READY"]
    assert [len(one.metrics) for one in (best, last)] == [1, 1]
    assert len(stored(tracked_project, run).outputs.model_outputs) == 2
