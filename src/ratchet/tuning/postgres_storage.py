"""Stores studies in a Postgres database: Optuna's tables, and an advisory lock (Postgres 17 docs, 13.3.5).

The lock belongs to a session: the server releases the lock when the connection ends, also if the client's process or
machine dies. So the address must be that of the server itself, or of a pool that keeps sessions (PgBouncer's `session`
mode).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage, get_storage
from sqlalchemy import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from ratchet.config.machine import find_study_storage_problem
from ratchet.errors import DamagedFileError, LockHeldError, SettingsError, StorageError
from ratchet.tuning.leases import SweepWorker

_KEY = (0x52617463, 0x68657401)
"""Key of the advisory lock: the text `Ratchet` and the number 1. The lock is valid within one database."""
_SESSION = {
    "tcp_keepalives_idle": "20",  # the server detects a lost machine after 50 s, and releases its locks
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "60s",  # a process that is stopped in a transaction would block others
    "statement_timeout": "120s",  # above the wait for the advisory lock
}
FAILURES = (StorageInternalError, SQLAlchemyError, psycopg.Error)
"""Exceptions that Optuna's storage raises if the server does not answer."""


def parse_address(url: str) -> URL:
    """Parse `machine.study_storage`. Raises SettingsError if it is invalid; messages do not contain the password."""
    if problem := find_study_storage_problem(url):
        raise SettingsError(f"params.yaml: machine.study_storage: {problem}")
    return make_url(re.sub(r"^[^:]*", "postgresql+psycopg", url))


def format_address(address: URL) -> str:
    """Return the address without password, for messages."""
    return address.set(drivername="postgresql").render_as_string(hide_password=True)


def make_connector(address: URL) -> "Callable[[], psycopg.Connection[Any]]":
    """Return a function that opens connections. Client and server detect the loss of the other side within a minute."""
    own = address.query.get("options", "")
    options = [own if isinstance(own, str) else " ".join(own), *(f"-c {k}={v}" for k, v in _SESSION.items())]
    return partial(
        psycopg.connect,
        address.set(drivername="postgresql").render_as_string(hide_password=False),
        connect_timeout=10,  # seconds
        keepalives_idle=20,
        keepalives_interval=10,
        keepalives_count=3,
        tcp_user_timeout=30_000,  # milliseconds
        application_name=f"ratchet {SweepWorker.current().name}"[:63],  # the server cuts longer names, with a warning
        options=" ".join(filter(None, options)),
    )


class AdvisoryLock:
    """Lock that all processes of the database share. It has a session of its own, and the server releases it when this
    session ends.

    Args:
        connect: opens a connection to the database.
        where: address of the database, for messages.
    """

    def __init__(self, connect: "Callable[[], psycopg.Connection[Any]]", where: str) -> None:
        self.where = where
        self._connect = connect
        self._session: psycopg.Connection[Any] | None = None

    def acquire(self, wait_s: float) -> None:
        """Acquire the lock. Raises LockHeldError that names the holder; StorageError if the server does not answer."""
        with self._convert_errors():
            self._close_dead_session()
            session = self._open_session()
            session.execute("SELECT set_config('lock_timeout', %s, false)", (f"{max(1, round(wait_s * 1000))}ms",))
            try:
                session.execute("SELECT pg_advisory_lock(%s, %s)", _KEY)
            except psycopg.errors.LockNotAvailable:
                raise LockHeldError(
                    f"{self.where}: the studies have been locked by {self._holder()} for more than {wait_s:g} s; if "
                    "that process hangs or was stopped, kill it; then run the same command again"
                ) from None

    def release(self) -> None:
        """Release the lock. Raises StorageError if the session has ended: another process may have taken the lock."""
        try:
            row = (
                None
                if self._session is None
                else self._session.execute("SELECT pg_advisory_unlock(%s, %s)", _KEY).fetchone()
            )
        except psycopg.Error:
            row = None
        if row != (True,):
            self.close()
            raise StorageError(
                f"{self.where}: the connection was lost while the studies were locked; run the same command again, "
                "which reads the database again"
            )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query in the session of the lock. Raises StorageError if the server does not answer."""
        with self._convert_errors():
            return self._open_session().execute(query.encode()).fetchall()

    def close(self) -> None:
        """End the session, which releases the lock."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open_session(self) -> "psycopg.Connection[Any]":
        if self._session is None:
            self._session = self._connect()
            self._session.autocommit = True
        return self._session

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()  # an interrupted wait may have acquired the lock
            if not isinstance(error, psycopg.Error):
                raise
            raise StorageError(
                f"{self.where}: Postgres does not answer: {' '.join(str(error).split())[:300]}; check that the server "
                "runs, and that user, database and password (PGPASSWORD, ~/.pgpass) are correct; then run the same "
                "command again"
            ) from error

    def _close_dead_session(self) -> None:
        """Close an idle session that has ended, for example because the server was restarted."""
        if self._session is not None:
            try:
                self._session.execute("SELECT 1")
            except psycopg.Error:
                self.close()

    def _holder(self) -> str:
        rows = (
            self._open_session()
            .execute(
                "SELECT application_name, client_addr FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE locktype = 'advisory' AND granted AND (classid, objid, objsubid) = (%s, %s, 2) "
                "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                _KEY,
            )
            .fetchall()
        )
        return " and ".join(f"{name} ({client or 'on the server'})" for name, client in rows) or "an unknown session"


@dataclass(frozen=True)
class PostgresDatabase:
    """A database with Optuna's tables."""

    optuna: BaseStorage
    where: str
    """Address without password, for messages."""
    lock: AdvisoryLock
    close: Callable[[], None]


def open_database(url: str, wait_s: float) -> PostgresDatabase:
    """Connect, and create Optuna's tables if they are missing. One process creates them; other processes wait.

    Raises:
        SettingsError: see `parse_address`.
        StorageError: the server does not answer, or this user has no right to create tables.
        DamagedFileError: another version of Optuna created the tables.
        LockHeldError: another process has held the lock for `wait_s` seconds.
    """
    address = parse_address(url)
    creator: Any = make_connector(address)  # SQLAlchemy accepts connections of psycopg, but its types do not
    lock = AdvisoryLock(creator, format_address(address))
    pool = QueuePool(creator, pre_ping=True, timeout=30)

    def close() -> None:
        pool.dispose()
        lock.close()

    try:
        if _has_tables(lock):  # opening existing tables needs no lock
            tables = _open_tables(lock.where, pool)
        else:
            lock.acquire(wait_s)
            tables = _open_tables(lock.where, pool)
            lock.release()
        _check_version(tables, lock)
    except BaseException:
        close()
        raise
    return PostgresDatabase(get_storage(tables), lock.where, lock, close)


def _has_tables(lock: AdvisoryLock) -> bool:
    """Return whether Optuna's tables exist. Optuna creates them first, and then stores the version of the schema."""
    version_table = lock.rows("SELECT 1 WHERE to_regclass('alembic_version') IS NOT NULL")
    return bool(version_table and lock.rows("SELECT version_num FROM alembic_version"))


def _open_tables(where: str, pool: QueuePool) -> RDBStorage:
    """Return Optuna's storage; missing tables are created."""
    try:
        return RDBStorage("postgresql+psycopg://", engine_kwargs={"pool": pool}, skip_compatibility_check=True)
    except FAILURES as error:
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        raise StorageError(
            f"{where}: Optuna's tables cannot be created or read: {cause}; the user needs the right to create tables "
            "in this database"
        ) from error


def _check_version(tables: RDBStorage, lock: AdvisoryLock) -> None:
    """Raise DamagedFileError unless the tables have the schema of the installed Optuna."""
    schema, installed = tables.get_current_version(), tables.get_head_version()
    if schema == installed:
        return
    writers = lock.rows("SELECT library_version FROM version_info")
    writer = " and ".join(str(version) for (version,) in writers) or "an unknown version"
    cure = (
        f"update them with `optuna storage upgrade --storage {lock.where.replace(':', '+psycopg:', 1)}`"
        if schema in tables.get_all_versions()
        else "install that version of Optuna here, or use another database"
    )
    raise DamagedFileError(
        f"{lock.where}: the tables were created by Optuna {writer} (schema {schema}); the Optuna installed here writes "
        f"schema {installed}; {cure}"
    )
