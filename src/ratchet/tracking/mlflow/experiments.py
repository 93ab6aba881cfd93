"""One experiment of an MLflow store: finds runs by Ratchet's run id, creates each once, and stores saved views."""

import base64
import getpass
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.store import SETTLE_S, MlflowStore

RUN_TAG = "ratchet.run_id"
HOST_TAG = "ratchet.host"
"""Machine of the last attempt. On a shared server, each machine ends only runs that it started."""
ATTEMPTS_TAG = "ratchet.attempts"
SWEEP_TAG = "ratchet.sweep"
LATE_TAG = "ratchet.created_late"
"""Marks a run whose creation took so long that other machines may not have seen it when they chose theirs."""
JOURNAL_TAG = "ratchet.journal_bytes"
"""How much of the journal MLflow has, with all files. Written last, so that a run without it is incomplete."""

MAX_PARALLEL_CALLS = 8
"""Parallel calls to a server, where latency dominates the cost of a call."""
MAX_COLLISIONS = 20
"""Attempts at one batch before the error is raised. Measured with four processes that log overlapping batches at the
same moment: 12 % of the first attempts collide, none of the second ones."""


class Experiment:
    """An experiment in the project's own MLflow store, or on a server; opened, and created, at the first use.

    Every method raises TrackingError if MLflow cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, name: str, server: str | None) -> None:
        self.layout = layout
        self.name = name
        self.store = MlflowStore(layout, server)
        self._id = ""

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield MLflow's client with the experiment created; failures are TrackingErrors."""
        with self.store.connected() as client:
            if not self._id:
                with self.store.locked():
                    found = client.get_experiment_by_name(self.name)
                    uri = None if self.store.server else self.layout.artifacts.as_uri()  # a server sets its own
                    self._id = str(found.experiment_id if found else client.create_experiment(self.name, uri))
            yield client

    @property
    def id(self) -> str:
        """MLflow's id of the experiment; reads it if it is not known yet."""
        if not self._id:
            with self.connected():
                pass
        return self._id

    def find(self, run_id: str) -> Any:
        """MLflow's run of Ratchet's run id, or None. If several machines created one, all of them find the same."""
        with self.connected() as client:
            found = client.search_runs([self._id], f"tags.`{RUN_TAG}` = '{run_id}'")
            return min(found, key=_precedence, default=None)

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """MLflow's run of this run id; created once, by one process.

        MLflow has no unique key for it. Machines that query at the same time all create a run, wait for each other
        (`MlflowStore.settle`), and keep the first one by `_precedence`. A machine whose run took longer to create than
        the others wait marks it as late, because the others may have decided without it.
        """
        with self.connected() as client, self.store.locked():
            queried_s = time.monotonic()
            if (found := self.find(run_id)) is not None:
                return found
            created = client.create_run(self._id, start_ms, _tags_at_creation(run_id), run_id)
            if self.store.server is not None and time.monotonic() - queried_s > SETTLE_S:
                client.set_tag(created.info.run_id, LATE_TAG, "true")
            self.store.settle()
            if (first := self.find(run_id)).info.run_id != created.info.run_id:
                client.delete_run(created.info.run_id)
            return first

    def running_runs(self) -> list[Any]:
        """MLflow's RUNNING runs that Ratchet created."""
        with self.connected() as client:
            found = client.search_runs([self._id], "attributes.status = 'RUNNING'")
            return [run for run in found if RUN_TAG in run.data.tags]

    def known_run_ids(self) -> set[str]:
        """Run ids of all runs that Ratchet created."""
        found, token = set[str](), None
        with self.connected() as client:
            while True:
                page = client.search_runs([self._id], f"tags.`{RUN_TAG}` != ''", page_token=token)
                found |= {run.data.tags[RUN_TAG] for run in page}
                token = page.token
                if not token:
                    return found

    def call_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make these calls of a client, in parallel on a server. Returns their results in order.

        Raises the error of one of them after all have ended.
        """
        if self.store.server is None or len(calls) < 2:  # a file takes one writer at a time
            return [call() for call in calls]
        found: list[Any] = [None] * len(calls)
        failures: list[Exception] = []
        remaining = iter(enumerate(calls))

        def work() -> None:
            for number, call in remaining:
                try:
                    found[number] = call()
                except Exception as error:
                    failures.append(error)

        # No thread pool of the standard library: at exit Python waits for its threads, however slow a server is.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(MAX_PARALLEL_CALLS, len(calls)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return found


def log_batch(client: Any, mlflow_id: str, **batch: Any) -> None:
    """Call MLflow's `log_batch`; repeat the call while another process stores some of the same points.

    Of a batch with points that are stored already, MLflow 3.17 reads which ones are missing and inserts those in a
    second step, in no transaction with the first: a point that another process inserts in between fails the whole
    batch with a violated UNIQUE constraint. Points that are stored are never stored twice, so the call can be repeated.

    Args:
        client: MLflow's.
        mlflow_id: MLflow's id of the run.
        batch: `metrics`, `params` and `tags`, as MLflow's `log_batch` takes them.

    Raises:
        MlflowException: any other error, or a collision at every one of MAX_COLLISIONS attempts.
    """
    from mlflow.exceptions import MlflowException

    for attempt in range(1, MAX_COLLISIONS + 1):
        try:
            client.log_batch(mlflow_id, **batch)
            return
        except MlflowException as error:
            if attempt == MAX_COLLISIONS or not _is_insert_collision(error):
                raise


def _is_insert_collision(error: Exception) -> bool:
    """Whether a database (SQLite, PostgreSQL, MySQL) refused a row because another process had just inserted it."""
    return any(word in str(error) for word in ("IntegrityError", "UniqueViolation"))


def _precedence(run: Any) -> tuple[bool, int, str]:
    """Order of several runs of one run id; the least is kept: created in time, then oldest, then by id."""
    return LATE_TAG in run.data.tags, run.info.start_time, run.info.run_id


def run_tags(tags: Mapping[str, str]) -> list[Any]:
    """Tags as MLflow's calls take them."""
    from mlflow.entities import RunTag

    return [RunTag(key, value) for key, value in tags.items()]


def _tags_at_creation(run_id: str) -> dict[str, str]:
    tags = {RUN_TAG: run_id, "mlflow.source.name": "ratchet", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


# Saved views of the runs table, and a description of the metric keys.
#
# MLflow (3.17) stores a shared view as a tag of the experiment, `mlflow.sharedViewState.KEY`: a JSON object with a
# two times, and the state of the page as deflated JSON. The menu "Saved views" lists them.

VIEW_TAG = "mlflow.sharedViewState."
NOTE_TAG = "mlflow.note.content"
NOTE_BEGINS = "**Trainings of Ratchet**"
NOTE = f"""{NOTE_BEGINS}, one run each; trials of a sweep are below their sweep.

- `train/…` and `validation/loss` by optimizer step, with the time at which each step was first done.
- `system/…` by sample, `memory/…` in bytes, `test/MODEL/…` from stage evaluate (candidate, base, champion, …).
- Parameters: identity of the run, nine settings, and other settings that differ from their defaults. The artifact
  `settings.yaml` has all of them.
- Runs that differ only in their seed share the tag `ratchet.seed_group`.
- Weights are not here: checkpoints are logged models without files, found by `ratchet.adapter_digest`.
- Saved views (above the table): Runs, Best first, Seeds, Sweeps.
"""
DATE = "attributes.start_time"


@dataclass(frozen=True)
class ExperimentView:
    """A saved view of the table of runs."""

    key: str
    name: str
    columns: tuple[str, ...]
    """In MLflow's notation: `metrics.`KEY``."""
    search: str = ""
    order_by: str = DATE
    ascending: bool = False
    group_by_tag: str = ""


def _view_columns(params: Sequence[str], metrics: Sequence[str], tags: Sequence[str]) -> tuple[str, ...]:
    kinds = (("params", params), ("metrics", metrics), ("tags", tags))
    return tuple(f"{kind}.`{key}`" for kind, keys in kinds for key in keys)


_SETTINGS = ("train.learning_rate", "train.rank", "train.epochs", "train.batch_size", "train.seed")
_FIGURES = ("validation/loss", "test/candidate/accuracy", "train/tokens_per_second", "memory/peak_bytes")
_STATE = ("ratchet.status", "ratchet.attempts", "ratchet.verdict", "ratchet.version")

VIEWS = (
    ExperimentView("ratchet-runs", "Runs", _view_columns(_SETTINGS, _FIGURES, _STATE)),
    ExperimentView(
        "ratchet-best", "Best first", _view_columns(_SETTINGS, _FIGURES, _STATE),
        order_by="metrics.`validation/loss`", ascending=True,
    ),
    ExperimentView(
        "ratchet-seeds", "Seeds", _view_columns(("train.seed",), _FIGURES, ("ratchet.seed_group",)),
        group_by_tag="ratchet.seed_group",
    ),
    ExperimentView(
        "ratchet-sweeps", "Sweeps",
        _view_columns(
            ("train.learning_rate", "train.rank", "train.alpha", "train.batch_size"),
            ("trial/validation_loss", "validation/loss"),
            ("ratchet.trial", "ratchet.trial_state", "ratchet.trial_reason"),
        ),
        search="tags.`ratchet.sweep_role` = 'trial'", group_by_tag="ratchet.sweep",
    ),
)  # fmt: skip


def write_views(experiment: Experiment) -> None:
    """Store views and description, unless a person changed them.

    Raises:
        TrackingError: MLflow cannot be read or written.
    """
    with experiment.connected() as client:
        about = client.get_experiment(experiment.id)
        wanted = {VIEW_TAG + view.key: _envelope(view, int(about.creation_time or 0)) for view in VIEWS}
        for tag, text in wanted.items():
            if _is_unedited(about.tags.get(tag)) and about.tags.get(tag) != text:
                client.set_experiment_tag(experiment.id, tag, text)
        note = about.tags.get(NOTE_TAG, "")
        if note != NOTE and (not note or note.startswith(NOTE_BEGINS)):
            client.set_experiment_tag(experiment.id, NOTE_TAG, NOTE)


def view_url(server: str, experiment_id: str, view: ExperimentView) -> str:
    """Address of a view in MLflow's UI."""
    runs = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    return f"{runs}?workflowType=machine_learning&viewStateShareKey={view.key}"


def _is_unedited(text: str | None) -> bool:
    """Whether a view is missing, or as a version of Ratchet wrote it; an edit in the UI sets a later time of update."""
    if text is None:
        return True
    try:
        view = json.loads(text)
        return bool(view["createdAt"] == view["updatedAt"])
    except (ValueError, TypeError, KeyError):
        return True


def _envelope(view: ExperimentView, created_ms: int) -> str:
    grouped = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": view.group_by_tag}]}
    state: dict[str, Any] = {
        "searchFilter": view.search, "orderByKey": view.order_by, "orderByAsc": view.ascending, "startTime": "ALL",
        "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": list(view.columns), "columnOrder": list(view.columns),
        "groupBy": grouped if view.group_by_tag else None,
    }  # fmt: skip
    packed = base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode())).decode()
    content = {"name": view.name, "createdAt": created_ms, "updatedAt": created_ms, "state": f"deflate;{packed}"}
    return json.dumps(content, separators=(",", ":"))
