"""The project's own MLflow store: a SQLite file, created once and opened under a lock. Used by tracking and registry.

Runs may be logged to a server instead (`machine.tracking_uri`); the registry stays in the project.

Only MlflowClient is used, with an absolute address: MLflow's fluent functions keep global state and resolve a database
path relative to the working directory.
"""

import logging
import os
import shlex
import sqlite3
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ratchet.errors import LockHeldError, TrackingError, TrackingSchemaError
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock

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
