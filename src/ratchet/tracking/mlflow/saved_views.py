"""What MLflow's pages show at first: saved views of the runs with our columns, and words about the keys.

MLflow (3.17) keeps a view that people share as a tag of the experiment, `mlflow.sharedViewState.KEY`: a JSON object
with a name, two times, and the state of the page as JSON of its own, deflated. The menu "Saved views" lists them.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.tracking.mlflow.experiments import Experiment

VIEW_TAG = "mlflow.sharedViewState."
NOTE_TAG = "mlflow.note.content"
NOTE_BEGINS = "**Trainings of Ratchet**"
NOTE = f"""{NOTE_BEGINS}, one run each; of a sweep, its trials below it.

- `train/…` and `validation/loss` by optimizer step, at the time each step was first done, once, across restarts.
- `system/…` by sample, `memory/…` in bytes, `test/WHO/…` of the stage evaluate (candidate, base, champion, …).
- Parameters: what identifies the run, nine settings, and of the others those that are no default. All of them: the
  artifact `settings.yaml`.
- Runs that differ in their seed alone share the tag `ratchet.seeds_of`.
- Weights are not here: kept checkpoints are logged models without files, found by `ratchet.adapter_digest`.
- Saved views (above the table): Runs, Best first, Seeds, Sweeps.
"""
DATE = "attributes.start_time"


@dataclass(frozen=True)
class View:
    """A saved view of the table of runs."""

    key: str
    name: str
    columns: tuple[str, ...]
    """As MLflow names them: `metrics.`KEY``."""
    search: str = ""
    order_by: str = DATE
    ascending: bool = False
    group_by_tag: str = ""


def _columns(params: Sequence[str], metrics: Sequence[str], tags: Sequence[str]) -> tuple[str, ...]:
    kinds = (("params", params), ("metrics", metrics), ("tags", tags))
    return tuple(f"{kind}.`{key}`" for kind, keys in kinds for key in keys)


_SETTINGS = ("train.learning_rate", "train.rank", "train.epochs", "train.batch_rows", "train.seed")
_FIGURES = ("validation/loss", "test/candidate/accuracy", "train/tokens_per_second", "memory/peak_bytes")
_STATE = ("ratchet.status", "ratchet.attempts", "ratchet.verdict", "ratchet.version")

VIEWS = (
    View("ratchet-runs", "Runs", _columns(_SETTINGS, _FIGURES, _STATE)),
    View(
        "ratchet-best", "Best first", _columns(_SETTINGS, _FIGURES, _STATE),
        order_by="metrics.`validation/loss`", ascending=True,
    ),
    View(
        "ratchet-seeds", "Seeds", _columns(("train.seed",), _FIGURES, ("ratchet.seeds_of",)),
        group_by_tag="ratchet.seeds_of",
    ),
    View(
        "ratchet-sweeps", "Sweeps",
        _columns(
            ("train.learning_rate", "train.rank", "train.alpha", "train.batch_rows"),
            ("trial/validation_loss", "validation/loss"),
            ("ratchet.trial", "ratchet.trial_state", "ratchet.trial_reason"),
        ),
        search="tags.`ratchet.sweep_role` = 'trial'", group_by_tag="ratchet.sweep",
    ),
)  # fmt: skip


def write(experiment: Experiment) -> None:
    """Store views and words, each unless it is there: what somebody changed by hand stays as it is.

    Raises:
        TrackingError: MLflow cannot be read or written.
    """
    with experiment.connected() as client:
        about = client.get_experiment(experiment.id)
        wanted = {VIEW_TAG + view.key: _envelope(view, int(about.creation_time or 0)) for view in VIEWS}
        for tag, text in wanted.items():
            if _is_ours(about.tags.get(tag)) and about.tags.get(tag) != text:
                client.set_experiment_tag(experiment.id, tag, text)
        note = about.tags.get(NOTE_TAG, "")
        if note != NOTE and (not note or note.startswith(NOTE_BEGINS)):
            client.set_experiment_tag(experiment.id, NOTE_TAG, NOTE)


def address(server: str, experiment_id: str, view: View) -> str:
    """Where MLflow's page shows a view."""
    runs = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    return f"{runs}?workflowType=machine_learning&viewStateShareKey={view.key}"


def _is_ours(text: str | None) -> bool:
    """Whether a view is missing, or as some version of us wrote it: a hand leaves a later time of change."""
    if text is None:
        return True
    try:
        told = json.loads(text)
        return bool(told["createdAt"] == told["updatedAt"])
    except (ValueError, TypeError, KeyError):
        return True


def _envelope(view: View, created_ms: int) -> str:
    grouped = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": view.group_by_tag}]}
    state: dict[str, Any] = {
        "searchFilter": view.search, "orderByKey": view.order_by, "orderByAsc": view.ascending, "startTime": "ALL",
        "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": list(view.columns), "columnOrder": list(view.columns),
        "groupBy": grouped if view.group_by_tag else None,
    }  # fmt: skip
    packed = base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode())).decode()
    told = {"name": view.name, "createdAt": created_ms, "updatedAt": created_ms, "state": f"deflate;{packed}"}
    return json.dumps(told, separators=(",", ":"))
