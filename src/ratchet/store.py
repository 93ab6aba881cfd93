"""The project's own MLflow store: a SQLite file, made once, opened under a lock; below tracking and registry.

Only MlflowClient is used, with an absolute address: MLflow's fluent functions keep global state and take a database
relative to the working directory.
"""

import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ratchet import files
from ratchet.errors import BusyError, TrackingError
from ratchet.layout import Layout
from ratchet.lock import Lock

ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("model_version_tags", "value"),
)
"""Where MLflow's tables (3.17) hold addresses of files."""

LOCK_WAIT_S = 120.0  # making the database takes 6 s, on a busy machine 40


class Store:
    """Opens the database, and makes it, at the first use."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._client: Any = None

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """MLflow's client; raises TrackingError for everything that goes wrong with its files."""
        if self._client is None:
            try:
                with self.locked():
                    self._client = _open(self.layout)
            except Exception as error:  # MLflow lets through whatever SQLite, SQLAlchemy or Alembic raise at opening
                raise self._error(error) from error
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except (MlflowException, OSError, BusyError) as error:
            raise self._error(error) from error

    def locked(self) -> Lock:
        """Waits for, and takes, the lock of whoever creates something that must exist once."""
        return Lock(self.layout.mlruns / "mlflow.lock", "the MLflow database").acquire(wait_s=LOCK_WAIT_S)

    def _error(self, error: Exception) -> TrackingError:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        cure = "mend the cause, then repeat the command; what a run has missed is sent again from its journal"
        return TrackingError(f"MLflow ({self.layout.mlflow_database}): {cause}; {cure}")


def _open(layout: Layout) -> Any:
    """MLflow's client on the project's SQLite file. The caller holds the lock."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a tool beside private data calls nobody unasked
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints a traceback beside our error
    database = layout.mlflow_database
    if not database.exists():  # migrated aside (6 s): a half-migrated database would be there for good
        files.remove_partials(layout.mlruns)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=layout.mlruns) as scratch:
            aside = Path(scratch) / "mlflow.db"
            MlflowClient(f"sqlite:///{aside}", f"sqlite:///{aside}")
            files.write_atomic(database, aside.read_bytes())
    # MLflow tries a database that does not open again for 100 s; SQLite itself says at once what is wrong.
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        _follow(connection, layout)
    return MlflowClient(f"sqlite:///{database}", f"sqlite:///{database}")


def _follow(connection: sqlite3.Connection, layout: Layout) -> None:
    """Let addresses of a store that was moved or copied point to where it lies now.

    MLflow keeps them absolute, so that a copied project would write into the one that it was copied from.
    """
    here = f"{layout.mlruns.as_uri()}/"
    moved = 0
    for table, column in ADDRESSES:
        # What follows the last `/mlruns/` is the same wherever the project lies.
        found = connection.execute(
            f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE 'file://%/mlruns/%'"  # noqa: S608 (our names)
        ).fetchall()
        for row, address in found:
            if not address.startswith(here):
                new = here + address.rpartition("/mlruns/")[2]
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))  # noqa: S608
                moved += 1
    connection.commit()
    if moved:
        print(f"ratchet: {layout.mlruns} was made elsewhere; {moved} addresses in it point here now", file=sys.stderr)


def serve_ui(layout: Layout, port: int) -> NoReturn:
    """Become MLflow's UI on this project's store, on loopback only, making the store if it is not there."""
    store = [f"sqlite:///{layout.mlflow_database}", "--default-artifact-root", layout.artifacts.as_uri()]
    command = [sys.executable, "-m", "mlflow", "ui", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    with Store(layout).connected():
        os.execv(sys.executable, [*command, "--backend-store-uri", *store])  # noqa: S606 (no shell is wanted)
