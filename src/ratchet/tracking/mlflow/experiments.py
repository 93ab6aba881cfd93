"""Opens an MLflow store and one experiment in it: finds runs by Ratchet's run id, creates each run once, saves views.

The project's own store is a SQLite file, which is created once and opened under a lock. Runs may be logged to a server
instead, and models registered there (`config.mlflow_environment`).

Only MlflowClient is used, with an absolute address. MLflow's fluent functions keep global state, and resolve a database
path relative to the working directory.
"""

import base64
import getpass
import json
import logging
import os
import re
import shlex
import sqlite3
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.errors import (
    LockHeldError,
    PermissionRefusedError,
    TrackingError,
    TrackingSchemaError,
    TrackingServerError,
)
from ratchet.http_client import describe_error
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
"""Limit of the health check. A server that does not answer within this time is not used, because MLflow would retry for
minutes."""
HTTP_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Maximum retries, and timeout of a request in seconds, unless the environment sets them. They are lower than MLflow's
defaults (7 and 120), because callbacks send failed data again anyway."""
UNAUTHENTICATED, FORBIDDEN = 401, 403
"""Statuses with which a server, or the proxy in front of it, refuses the password or token, and the user's role."""
USER, WORKSPACE = "MLFLOW_TRACKING_USERNAME", "MLFLOW_WORKSPACE"
"""Environment variables that MLflow's client reads."""
SETTLE_S = 2.0
"""Assumed upper bound of the time in which a machine queries a server for a run, does not find it, and creates it."""
LOCK_WAIT_S = 120.0
"""Longest wait for the lock of the database. Creating the database takes 6 s, and 40 s on a busy machine."""

RUN_TAG = "ratchet.run_id"
HOST_TAG = "ratchet.host"
"""Name of the machine of the last attempt. On a shared server, a machine ends only runs that have its name."""
ATTEMPTS_TAG = "ratchet.attempts"
SWEEP_TAG = "ratchet.sweep"
LATE_TAG = "ratchet.created_late"
"""Marks a run whose creation took so long that other machines may have chosen among the runs of this run id without
it."""
JOURNAL_TAG = "ratchet.journal_bytes"
"""Number of bytes of the journal when all its points and all files were sent. This tag is written last, so a run
without the tag is incomplete."""

MAX_PARALLEL_CALLS = 8
"""Maximum number of parallel calls to a server. Calls are parallel, because latency dominates the cost of a call."""
MAX_COLLISIONS = 20
"""Number of attempts at one batch before the error is raised. Measured with four processes that log overlapping batches
at the same moment: 12 % of the first attempts collide, and no second attempt."""


class MlflowStore:
    """A server, or the project's database, which is created at the first use."""

    def __init__(
        self, layout: ProjectLayout, server: str | None = None, advice: str = "", needed_roles: str = ""
    ) -> None:
        self.layout = layout
        self.server = server
        self._needed_roles = needed_roles
        self._advice = f"fix the cause, then run the command again{advice}"
        self._client: Any = None

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield MLflow's client. Raises TrackingError for every error of MLflow, of its files and of the lock."""
        if self._client is None:
            try:
                with self.locked():
                    self._client = (
                        _open_database(self.layout) if self.server is None else _connect_to_server(self.server)
                    )
            except TrackingSchemaError:
                raise
            except Exception as error:  # MLflow passes on all errors of SQLite, SQLAlchemy and Alembic
                raise self._error(error) from error
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except (MlflowException, OSError, LockHeldError) as error:
            raise self._error(error) from error

    def locked(self) -> FileLock:
        """Wait for the store's lock and take it. Code that creates an object which must exist only once needs this
        lock."""
        return FileLock(self.layout.mlruns / "mlflow.lock", "the MLflow database").acquire(wait_s=LOCK_WAIT_S)

    def settle(self) -> None:
        """Wait until other machines that queried the server at the same time have created their runs.

        The lock of this machine does not exclude other machines. After the wait, all machines see the same runs.
        """
        if self.server is not None:
            time.sleep(SETTLE_S)

    def _error(self, error: Exception) -> TrackingError:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        status = None if self.server is None else find_http_status(error)
        if status == UNAUTHENTICATED:
            return TrackingServerError(
                f"MLflow ({self.where}): the server refused the access (status {status}); check MLFLOW_TRACKING_TOKEN, "
                f"or {USER} and MLFLOW_TRACKING_PASSWORD"
            )
        if status == FORBIDDEN:
            user, workspace = os.environ.get(USER), os.environ.get(WORKSPACE)
            return PermissionRefusedError(
                f"MLflow ({self.where}{f', workspace {workspace}' if workspace else ''}): the server refused the "
                f"access to {f'user {user}' if user else 'this user'} (status {status}); {self._needed_roles}. An "
                f"administrator gives roles: `ratchet team --grant {user or 'USER'} --role ROLE`"
            )
        kind = TrackingError if self.server is None else TrackingServerError
        return kind(f"MLflow ({self.where}): {cause}; {self._advice}")

    @property
    def where(self) -> str:
        """Address of the server, or path of the database file."""
        return self.server or str(self.layout.mlflow_database)


def find_http_status(error: Exception) -> int | None:
    """Return the status with which the server answered, if the error has one."""
    if (response := getattr(error.__cause__ or error, "response", None)) is not None:
        return int(response.status_code)
    found = re.search(r"failed with error code (\d{3})", str(error))  # a refusal whose body is not JSON
    if found:
        return int(found[1])
    get_status = getattr(error, "get_http_status_code", None)
    return int(get_status()) if get_status is not None else None


def _open_database(layout: ProjectLayout) -> Any:
    """Open MLflow's client on the project's SQLite file. The caller holds the lock."""
    client = _load_client_class()
    # Without this, MLflow prints a traceback in addition to our error.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    database = layout.mlflow_database
    # The database is created in a scratch directory (6 s), because after a crash in between, a half-migrated database
    # would be used. A file of size 0 is not a database: sqlite3 leaves one behind when it opens a missing file.
    if not database.exists() or not database.stat().st_size:
        files.remove_partials(layout.mlruns)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=layout.mlruns) as scratch:
            partial = Path(scratch) / "mlflow.db"
            client(f"sqlite:///{partial}", f"sqlite:///{partial}")
            files.write_atomic(database, partial.read_bytes())
    # If a database cannot be opened, MLflow retries for 100 s. SQLite itself reports the problem at once.
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        _require_schema(connection, database)
        _update_artifact_addresses(connection, layout)
    return client(f"sqlite:///{database}", f"sqlite:///{database}")


def _require_schema(connection: sqlite3.Connection, database: Path) -> None:
    """Refuse tables of another MLflow version. MLflow would migrate some versions without asking, and fail on others.

    Raises:
        TrackingSchemaError: the schema has another version. For an older one, the message names the command that
            migrates it.
    """
    from alembic.script import ScriptDirectory
    from mlflow import __file__ as mlflow_file
    from mlflow.version import VERSION

    scripts = ScriptDirectory(str(Path(mlflow_file).parent / "store" / "db_migrations"))
    expected_version = scripts.get_current_head()
    try:
        versions = [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")]
    except sqlite3.OperationalError:  # no such table: the file is not MLflow's, or is empty
        versions = []
    if versions == [expected_version]:
        return
    problem = f"MLflow ({database}): found tables of schema version {', '.join(versions) or 'none'}"
    if versions and set(versions) <= {script.revision for script in scripts.walk_revisions()}:
        path, url = shlex.quote(str(database)), shlex.quote(f"sqlite:///{database}")
        raise TrackingSchemaError(
            f"{problem}, older than {expected_version} of the installed MLflow ({VERSION}). While no process uses it, "
            f"make a copy and migrate: `cp {path} {path}.backup && mlflow db upgrade {url}`. Nothing was changed"
        )
    raise TrackingSchemaError(
        f"{problem}, unknown to the installed MLflow ({VERSION}, schema {expected_version}): a newer MLflow wrote "
        "it. Use that version (`pip freeze` on the machine that created it shows it), or restore a backup from before. "
        "Nothing was changed"
    )


def _load_client_class() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # the data is private
    from mlflow import MlflowClient

    return MlflowClient


def _connect_to_server(server: str) -> Any:
    """Connect to a server that answers. User and password come from the environment, as MLflow documents them."""
    import httpx2  # imported late, because most commands ask no server

    try:  # with a status other than 200 the server answers; MLflow's own error will explain it
        httpx2.get(f"{server.rstrip('/')}/health", timeout=SERVER_TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise ConnectionError(describe_error(error)) from None
    for name, value in HTTP_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return _load_client_class()(server, server)


def _update_artifact_addresses(connection: sqlite3.Connection, layout: ProjectLayout) -> None:
    """Correct the addresses in a database that was moved or copied.

    MLflow stores absolute addresses, so a copied project would write into the original.
    """
    current = f"{layout.mlruns.as_uri()}/"
    updated = 0
    for table, column in ADDRESSES:
        # The part after the last `/mlruns/` does not depend on the location of the project.
        rows = connection.execute(
            f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE 'file://%/mlruns/%'"  # noqa: S608 (our names)
        ).fetchall()
        for row, address in rows:
            if not address.startswith(current):
                new = current + address.rpartition("/mlruns/")[2]
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))  # noqa: S608
                updated += 1
    connection.commit()
    if updated:
        print(f"ratchet: {layout.mlruns} was moved or copied; updated {updated} addresses in it", file=sys.stderr)


class Experiment:
    """An experiment in the project's own MLflow store or on a server. It is opened, or created, at the first use.

    Every method raises TrackingError if MLflow cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, name: str, server: str | None = None) -> None:
        self.layout = layout
        self.name = name
        roles = f"to read experiment {name}, a user needs role viewer, and to log runs there, role trainer"
        self.store = MlflowStore(layout, server, "; it sends what a run lacks from its journal", roles)
        self._id = ""

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield MLflow's client after the experiment exists. Failures are raised as TrackingErrors."""
        with self.store.connected() as client:
            if not self._id:
                with self.store.locked():
                    found = client.get_experiment_by_name(self.name)
                    uri = None if self.store.server else self.layout.artifacts.as_uri()  # a server sets its own
                    self._id = str(found.experiment_id if found else client.create_experiment(self.name, uri))
            yield client

    @property
    def id(self) -> str:
        """MLflow's id of the experiment. It is read at the first use."""
        if not self._id:
            with self.connected():
                pass
        return self._id

    def search(self, query: str) -> Iterator[Any]:
        """Yield all matching runs, oldest first. MLflow returns at most 1,000 per page."""
        token = None
        with self.connected() as client:
            while True:
                page = client.search_runs([self._id], query, order_by=["attributes.start_time ASC"], page_token=token)
                yield from page
                token = page.token
                if not token:
                    return

    def find(self, run_id: str) -> Any:
        """Return MLflow's run of Ratchet's run id, or None. Of several runs, all machines find the same one
        (_precedence)."""
        return min(self.search(f"tags.`{RUN_TAG}` = '{run_id}'"), key=_precedence, default=None)

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """Return MLflow's run of this run id. One process creates it, once.

        MLflow has no unique key for run ids. Machines that query at the same time all create a run, wait for each other
        (`MlflowStore.settle`), and keep the first run by `_precedence`. If creating a run takes a machine longer than
        the other machines wait, it marks its run as late, because the other machines may have decided without this run.
        """
        with self.connected() as client, self.store.locked():
            queried_s = time.monotonic()
            if (found := self.find(run_id)) is not None:
                return found
            tags = {RUN_TAG: run_id, "mlflow.source.name": "ratchet", "mlflow.source.type": "LOCAL"}
            with suppress(KeyError, OSError):  # a container's user may have no name
                tags["mlflow.user"] = getpass.getuser()
            created = client.create_run(self._id, start_ms, tags, run_id)
            if self.store.server is not None and time.monotonic() - queried_s > SETTLE_S:
                client.set_tag(created.info.run_id, LATE_TAG, "true")
            self.store.settle()
            extra = created.info.run_id
            if (first := self.find(run_id)).info.run_id == extra:
                return first
            if not delete_if_allowed(partial(client.delete_run, extra)):
                client.delete_tag(extra, RUN_TAG)
                client.set_terminated(extra, "KILLED")
            return first

    def call_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make these calls of a client, in parallel on a server. Return their results in order.

        If calls fail, raise one of their errors: on a server, after all calls have ended.
        """
        if self.store.server is None or len(calls) < 2:  # a database file takes one writer at a time
            return [call() for call in calls]
        results: list[Any] = [None] * len(calls)
        failures: list[Exception] = []
        remaining = iter(enumerate(calls))

        def work() -> None:
            for number, call in remaining:
                try:
                    results[number] = call()
                except Exception as error:
                    failures.append(error)

        # Not a thread pool: at exit, Python would wait for its threads, and a server may be slow.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(MAX_PARALLEL_CALLS, len(calls)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results


def open_experiment(client: Any, name: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException as error:  # another person may have created it meanwhile
        found = client.get_experiment_by_name(name)
        if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
            raise
        return str(found.experiment_id)


def log_batch(client: Any, mlflow_id: str, **batch: Any) -> None:
    """Call MLflow's `log_batch`. Repeat the call while another process stores some of the same points.

    If some points of a batch are stored already, MLflow 3.17 first reads which points are missing, and then inserts the
    missing points in another transaction. If another process inserts one of these points in between, the whole batch
    fails with a violated UNIQUE constraint. MLflow never stores a point twice, so the call can be repeated.

    Raises:
        MlflowException: any other error, or a collision at every one of MAX_COLLISIONS attempts.
    """
    repeat_on_collision(partial(client.log_batch, mlflow_id, **batch))


def repeat_on_collision(call: Callable[[], Any]) -> None:
    """Make a call that may be repeated, again and again while another process inserts the same row of the database.

    Raises:
        MlflowException: any other error, or a collision at every one of MAX_COLLISIONS attempts.
    """
    from mlflow.exceptions import MlflowException

    for attempt in range(1, MAX_COLLISIONS + 1):
        try:
            call()
            return
        except MlflowException as error:
            # SQLite, PostgreSQL or MySQL refused a row that another process just inserted.
            is_collision = any(word in str(error) for word in ("IntegrityError", "UniqueViolation"))
            if attempt == MAX_COLLISIONS or not is_collision:
                raise


def delete_if_allowed(call: Callable[[], Any]) -> bool:
    """Delete an extra object. Return False if the server refuses that, because role trainer does not include it."""
    from mlflow.exceptions import MlflowException

    try:
        call()
    except MlflowException as error:
        if find_http_status(error) != FORBIDDEN:
            raise
        return False
    return True


def _precedence(run: Any) -> tuple[bool, int, str]:
    """Return the key that sorts several runs of one run id, of which the first is kept."""
    return LATE_TAG in run.data.tags, run.info.start_time, run.info.run_id


def run_tags(tags: Mapping[str, str]) -> list[Any]:
    """Convert tags to the objects that MLflow's calls take."""
    from mlflow.entities import RunTag

    return [RunTag(key, value) for key, value in tags.items()]


# Saved views of the runs table, and a description of the metric keys.
#
# MLflow (3.17) stores a shared view as a tag of the experiment, `mlflow.sharedViewState.KEY`: a JSON object with a
# name, two times, and the state of the page as deflated JSON. The menu "Saved views" lists the views.

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
    """Columns in MLflow's notation: `metrics.`KEY``."""
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
    """Store views and description. Views and a description that a user has edited are kept.

    Raises:
        TrackingError: MLflow cannot be read or written.
    """
    with experiment.connected() as client:
        stored = client.get_experiment(experiment.id)
        texts = {VIEW_TAG + view.key: _envelope(view, int(stored.creation_time or 0)) for view in VIEWS}
        for tag, text in texts.items():
            if _is_unedited(stored.tags.get(tag)) and stored.tags.get(tag) != text:
                client.set_experiment_tag(experiment.id, tag, text)
        note = stored.tags.get(NOTE_TAG, "")
        if note != NOTE and (not note or note.startswith(NOTE_BEGINS)):
            client.set_experiment_tag(experiment.id, NOTE_TAG, NOTE)


def _is_unedited(text: str | None) -> bool:
    """Return whether a view is missing, unreadable, or unchanged since Ratchet wrote it.

    An edit in the UI changes `updatedAt`.
    """
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
