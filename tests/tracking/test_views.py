"""Tests saved views and the description in MLflow's own format; edits of a person are kept."""

import base64
import json
import zlib
from typing import Any

from journaled import NAME
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import NOTE_TAG, VIEW_TAG, VIEWS, Experiment, write_views


def tags(layout: ProjectLayout) -> dict[str, str]:
    with MlflowTracker(layout, NAME).connected() as client:
        return dict(client.get_experiment_by_name(NAME).tags)


def state(text: str) -> dict[str, Any]:
    """Decode the state as MLflow's page does."""
    packed = json.loads(text)["state"].removeprefix("deflate;")
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def test_views_are_there_with_their_columns(tracked_project: ProjectLayout) -> None:
    addresses = MlflowTracker(tracked_project, NAME).views("http://127.0.0.1:5000/")
    found = tags(tracked_project)
    runs = state(found[f"{VIEW_TAG}ratchet-runs"])
    assert {"params.`train.learning_rate`", "metrics.`validation/loss`", "tags.`ratchet.status`"} <= set(
        runs["selectedColumns"]
    )
    sweeps = state(found[f"{VIEW_TAG}ratchet-sweeps"])
    assert sweeps["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "ratchet.sweep"}]
    assert set(addresses) == {view.name for view in VIEWS}
    assert addresses["Runs"] == (
        "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=ratchet-runs"
    )
    assert all(len(text) < 5000 for text in found.values()), "as much as MLflow stores"


def test_writing_them_again_changes_nothing_and_what_a_person_changed_stays(tracked_project: ProjectLayout) -> None:
    place = Experiment(tracked_project, NAME, None)
    write_views(place)
    before = tags(tracked_project)
    write_views(place)
    assert tags(tracked_project) == before
    changed = json.loads(before[f"{VIEW_TAG}ratchet-runs"]) | {"updatedAt": 2**41, "name": "mine"}
    with place.connected() as client:
        client.set_experiment_tag(place.id, f"{VIEW_TAG}ratchet-runs", json.dumps(changed))
        client.set_experiment_tag(place.id, f"{VIEW_TAG}ratchet-best", "torn")
        client.set_experiment_tag(place.id, NOTE_TAG, "our words")
    write_views(place)
    found = tags(tracked_project)
    assert json.loads(found[f"{VIEW_TAG}ratchet-runs"])["name"] == "mine"
    assert found[f"{VIEW_TAG}ratchet-best"] == before[f"{VIEW_TAG}ratchet-best"]
    assert found[NOTE_TAG] == "our words"
