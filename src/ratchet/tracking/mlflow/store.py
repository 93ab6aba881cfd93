"""The project's own MLflow store: a SQLite file, made once, opened under a lock; below tracking and registry.

Runs may be shown on a server instead (`machine.tracking`); the registry stays with the project, beside its models.

Only MlflowClient is used, with an absolute address: MLflow's fluent functions keep global state and take a database
relative to the working directory.
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
"""Where MLflow's tables (3.17) hold addresses of files."""

SERVER_S = 10.0
"""A server that says nothing for so long is not asked at all: MLflow would try for minutes."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Instead of 7 and 120 s, unless the environment says otherwise: observers send again what was not taken."""
SETTLE_S = 2.0
"""More than passes between a look at a server and what is made there because nothing was found."""
LOCK_WAIT_S = 120.0  # making the database takes 6 s, on a busy machine 40


class MlflowStore:
    """Opens the database, and makes it, at the first use; or a server, if one is given."""

    def __init__(self, layout: ProjectLayout, server: str | None = None) -> None:
        self.layout = layout
        self.server = server
        self._client: Any = None

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """MLflow's client; raises TrackingError for everything that goes wrong with its files."""
        if self._client is None:
            try:
                with self.locked():
                    self._client = (
                        _open_database(self.layout) if self.server is None else _connect_to_server(self.server)
                    )
            except TrackingSchemaError:
                raise
            except Exception as error:  # MLflow lets through whatever SQLite, SQLAlchemy or Alembic raise at opening
                raise self._error(error) from error
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except (MlflowException, OSError, LockHeldError) as error:
            raise self._error(error) from error

    def locked(self) -> FileLock:
        """Waits for, and takes, the lock of whoever creates something that must exist once."""
        return FileLock(self.layout.mlruns / "mlflow.lock", "the MLflow database").acquire(wait_s=LOCK_WAIT_S)

    def settle(self) -> None:
        """Let machines that looked at the same moment as we, and found nothing, make what they are about to make.

        Our lock does not exclude them. After this, whoever looks sees the same.
        """
        if self.server is not None:
            time.sleep(SETTLE_S)

    def _error(self, error: Exception) -> TrackingError:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        cure = "mend the cause, then repeat the command; what a run has missed is sent again from its journal"
        return TrackingError(f"MLflow ({self.where}): {cause}; {cure}")

    @property
    def where(self) -> str:
        """The server, or the file."""
        return self.server or str(self.layout.mlflow_database)


def _open_database(layout: ProjectLayout) -> Any:
    """MLflow's client on the project's SQLite file. The caller holds the lock."""
    client = _load_client_class()
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints a traceback beside our error
    database = layout.mlflow_database
    # Migrated aside (6 s): a half-migrated database would be there for good. An empty file is what sqlite3 leaves
    # behind that looked for one.
    if not database.exists() or not database.stat().st_size:
        files.remove_partials(layout.mlruns)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=layout.mlruns) as scratch:
            aside = Path(scratch) / "mlflow.db"
            client(f"sqlite:///{aside}", f"sqlite:///{aside}")
            files.write_atomic(database, aside.read_bytes())
    # MLflow tries a database that does not open again for 100 s; SQLite itself says at once what is wrong.
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        _require_schema(connection, database)
        _update_artifact_addresses(connection, layout)
    return client(f"sqlite:///{database}", f"sqlite:///{database}")


def _require_schema(connection: sqlite3.Connection, database: Path) -> None:
    """Refuse tables of another version: MLflow would change some of them unasked, and fail on others.

    Raises:
        TrackingSchemaError: what was found, and the command that migrates it.
    """
    from alembic.script import ScriptDirectory
    from mlflow import __file__ as mlflow_file
    from mlflow.version import VERSION

    scripts = ScriptDirectory(str(Path(mlflow_file).parent / "store" / "db_migrations"))
    wanted = scripts.get_current_head()
    try:
        found = [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")]
    except sqlite3.OperationalError:  # no such table: other tables than MLflow's, or none
        found = []
    if found == [wanted]:
        return
    shown = f"MLflow ({database}): its tables are of schema version {', '.join(found) or 'none'}"
    if found and set(found) <= {script.revision for script in scripts.walk_revisions()}:
        path, url = shlex.quote(str(database)), shlex.quote(f"sqlite:///{database}")
        raise TrackingSchemaError(
            f"{shown}, older than {wanted} of the MLflow that is installed ({VERSION}). While nothing uses it, keep a "
            f"copy and migrate: `cp {path} {path}.backup && mlflow db upgrade {url}`. Nothing was changed"
        )
    raise TrackingSchemaError(
        f"{shown}, which the MLflow that is installed ({VERSION}, schema {wanted}) does not know: a newer one wrote "
        "it. Open it with that one (`pip freeze` where it was made names it), or put a backup from before in its "
        "place. Nothing was changed"
    )


def _load_client_class() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a tool beside private data calls nobody unasked
    from mlflow import MlflowClient

    return MlflowClient


def _connect_to_server(server: str) -> Any:
    """MLflow's client of a server that answers. User and password are the environment's, as MLflow documents them."""
    with suppress(urllib.error.HTTPError):  # an answer, too: what it means MLflow will say
        urllib.request.urlopen(f"{server.rstrip('/')}/health", timeout=SERVER_S).close()  # noqa: S310 (settings: http)
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    return _load_client_class()(server, server)


def _update_artifact_addresses(connection: sqlite3.Connection, layout: ProjectLayout) -> None:
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
