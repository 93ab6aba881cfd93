"""Connections to the databases that machines or processes share: PostgreSQL, or an SQLite file of the project."""

import re
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from ratchet.config.machine import find_study_storage_problem
from ratchet.errors import SettingsError, StorageError
from ratchet.storage import files

SQLITE_WAIT_S = 20.0
"""Maximum number of seconds to wait for another process that writes into the SQLite file, which takes milliseconds."""

_SESSION = {
    "tcp_keepalives_idle": "20",  # the server detects a lost machine after 50 s, and releases its locks
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "60s",  # a process that is stopped in a transaction would block others
    "statement_timeout": "120s",  # above the wait for the advisory lock
}

Connect = Callable[[], Any]
"""Opens a connection."""


def prepare_sqlite(path: Path) -> Connect:
    """Create the folder of an SQLite file, and return a function that opens the file. Raises StorageError."""
    try:
        files.make_directory(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; fix the disk, then run the same command again") from error
    # A transaction that read first and wrote later would fail at once if another process wrote in between.
    return partial(sqlite3.connect, path, timeout=SQLITE_WAIT_S, isolation_level="IMMEDIATE", check_same_thread=False)


def prepare_postgres(url: str, process: str) -> tuple[Connect, str]:
    """Return a function that connects to `machine.study_storage`, and the address without a password.

    Args:
        url: the address.
        process: name of this process, which the server shows.

    Raises:
        SettingsError: the address is not valid, or contains a password.
    """
    if problem := find_study_storage_problem(url):
        raise SettingsError(f"params.yaml: machine.study_storage: {problem}")
    import psycopg  # a project without this database does not need it

    address = make_url(re.sub(r"^[^:]*", "postgresql+psycopg", url))
    own = address.query.get("options", "")
    options = [own if isinstance(own, str) else " ".join(own), *(f"-c {k}={v}" for k, v in _SESSION.items())]
    connect = partial(
        psycopg.connect,
        address.set(drivername="postgresql").render_as_string(hide_password=False),
        connect_timeout=10,  # seconds
        keepalives_idle=20,  # client and server detect the loss of the other side within a minute
        keepalives_interval=10,
        keepalives_count=3,
        tcp_user_timeout=30_000,  # milliseconds
        application_name=f"ratchet {process}"[:63],  # the server cuts longer names, with a warning
        options=" ".join(filter(None, options)),
    )
    return connect, address.set(drivername="postgresql").render_as_string()
