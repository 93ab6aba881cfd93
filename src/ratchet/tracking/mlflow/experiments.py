"""One experiment of an MLflow store: finds runs by Ratchet's run id, creates each once, and stores saved views.

The project's own MLflow store: a SQLite file, created once and opened under a lock. Used by tracking and registry.

Runs may be logged to a server instead (`machine.tracking_uri`); the registry stays in the project.

Only MlflowClient is used, with an absolute address: MLflow's fluent functions keep global state and resolve a database
path relative to the working directory.
"""

import base64
import getpass
import json
import logging
import os
import shlex
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import LockHeldError, TrackingError, TrackingSchemaError
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout

ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("model_version_tags", "value"),
)
"""Columns of MLflow's tables (3.17) that contain addresses of files."""

SERVER_TIMEOUT_S = 10.0
"""A server that does not answer the health check within this time is not used: MLflow would retry for minutes."""
HTTP_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Instead of 7 and 120 s, unless the environment sets them: callbacks send again what was not accepted."""
SETTLE_S = 2.0
"""Upper bound of the time between a query of a server and the creation of what was not found."""
LOCK_WAIT_S = 120.0  # creating the database takes 6 s, on a busy machine 40


class MlflowStore:
    """Opens a server, or the project's database, which it creates at the first use."""

    def __init__(self, layout: ProjectLayout, server: str | None = None) -> None:
        self.layout = layout
        self.server = server
        self._client: Any = None

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield MLflow's client. Raises TrackingError for every problem with its files."""
        if self._client is None:
            try:
                with self.locked():
                    self._client = (
                        _open_database(self.layout) if self.server is None else _connect_to_server(self.server)
                    )
            except TrackingSchemaError:
                raise
            except Exception as error:  # MLflow passes on what SQLite, SQLAlchemy or Alembic raise while opening
                raise self._error(error) from error
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except (MlflowException, OSError, LockHeldError) as error:
            raise self._error(error) from error

    def locked(self) -> FileLock:
        """Take the lock for creating something that must exist only once; waits for it."""
        return FileLock(self.layout.mlruns / "mlflow.lock", "the MLflow database").acquire(wait_s=LOCK_WAIT_S)

    def settle(self) -> None:
        """Wait until other machines that queried at the same time have created what they did not find.

        The lock of this machine does not exclude them. After the wait, all machines see the same.
        """
        if self.server is not None:
            time.sleep(SETTLE_S)

    def _error(self, error: Exception) -> TrackingError:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        advice = "fix the cause, then run the command again; it sends what a run lacks from its journal"
        return TrackingError(f"MLflow ({self.where}): {cause}; {advice}")

    @property
    def where(self) -> str:
        """The server, or the database file."""
        return self.server or str(self.layout.mlflow_database)


def _open_database(layout: ProjectLayout) -> Any:
    """Open MLflow's client on the project's SQLite file. The caller holds the lock."""
    client = _load_client_class()
    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # it would print a traceback besides our error
    database = layout.mlflow_database
    # Created in a scratch directory (6 s), because a half-migrated database would stay. sqlite3 leaves an empty file
    # behind when it opens one that does not exist.
    if not database.exists() or not database.stat().st_size:
        files.remove_partials(layout.mlruns)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=layout.mlruns) as scratch:
            partial = Path(scratch) / "mlflow.db"
            client(f"sqlite:///{partial}", f"sqlite:///{partial}")
            files.write_atomic(database, partial.read_bytes())
    # MLflow retries a database that cannot be opened for 100 s; SQLite itself reports the problem at once.
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        _require_schema(connection, database)
        _update_artifact_addresses(connection, layout)
    return client(f"sqlite:///{database}", f"sqlite:///{database}")


def _require_schema(connection: sqlite3.Connection, database: Path) -> None:
    """Refuse tables of another MLflow version: MLflow would change some of them unasked, and fail on others.

    Raises:
        TrackingSchemaError: names the schema found and the command that migrates it.
    """
    from alembic.script import ScriptDirectory
    from mlflow import __file__ as mlflow_file
    from mlflow.version import VERSION

    scripts = ScriptDirectory(str(Path(mlflow_file).parent / "store" / "db_migrations"))
    wanted = scripts.get_current_head()
    try:
        found = [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")]
    except sqlite3.OperationalError:  # no such table: the file is not MLflow's, or is empty
        found = []
    if found == [wanted]:
        return
    shown = f"MLflow ({database}): found tables of schema version {', '.join(found) or 'none'}"
    if found and set(found) <= {script.revision for script in scripts.walk_revisions()}:
        path, url = shlex.quote(str(database)), shlex.quote(f"sqlite:///{database}")
        raise TrackingSchemaError(
            f"{shown}, older than {wanted} of the installed MLflow ({VERSION}). While no process uses it, make a copy "
            f"and migrate: `cp {path} {path}.backup && mlflow db upgrade {url}`. Nothing was changed"
        )
    raise TrackingSchemaError(
        f"{shown}, unknown to the installed MLflow ({VERSION}, schema {wanted}): a newer MLflow wrote it. Use that "
        "version (`pip freeze` on the machine that created it shows it), or restore a backup from before. Nothing was "
        "changed"
    )


def _load_client_class() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a tool for private data sends no telemetry
    from mlflow import MlflowClient

    return MlflowClient


def _connect_to_server(server: str) -> Any:
    """Connect to a server that answers. User and password come from the environment, as MLflow documents them."""
    with suppress(urllib.error.HTTPError):  # the server answers; MLflow reports what the status means
        urllib.request.urlopen(f"{server.rstrip('/')}/health", timeout=SERVER_TIMEOUT_S).close()  # noqa: S310 (settings: http)
    for name, value in HTTP_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return _load_client_class()(server, server)


def _update_artifact_addresses(connection: sqlite3.Connection, layout: ProjectLayout) -> None:
    """Correct the addresses of a store that was moved or copied.

    MLflow stores absolute addresses, so a copied project would write into the original.
    """
    current = f"{layout.mlruns.as_uri()}/"
    moved = 0
    for table, column in ADDRESSES:
        # The part after the last `/mlruns/` does not depend on the location of the project.
        found = connection.execute(
            f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE 'file://%/mlruns/%'"  # noqa: S608 (our names)
        ).fetchall()
        for row, address in found:
            if not address.startswith(current):
                new = current + address.rpartition("/mlruns/")[2]
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))  # noqa: S608
                moved += 1
    connection.commit()
    if moved:
        print(f"ratchet: {layout.mlruns} was moved or copied; updated {moved} addresses in it", file=sys.stderr)


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
