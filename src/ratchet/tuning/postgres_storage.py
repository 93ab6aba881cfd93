"""Studies in a Postgres database: Optuna's tables, and an advisory lock of the session (Postgres 17 docs, 13.3.5).

The server releases the lock when the connection ends with its process or machine. So the address must be that of the
server itself, or of a pool that keeps sessions (PgBouncer's `session` mode).
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
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from ratchet.errors import DamagedFileError, LockHeldError, SettingsError, StorageError
from ratchet.tuning.leases import SweepWorker

_KEY = (0x52617463, 0x68657401)
"""Of the advisory lock: `Ratchet`, 1. Locks belong to one database."""
_SESSION = {
    "tcp_keepalives_idle": "20",  # the server notices after 50 s that a machine is gone, and frees its locks
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "60s",  # a process that was stopped in a transaction blocks the others
    "statement_timeout": "120s",  # above the wait for the advisory lock
}
FAILURES = (StorageInternalError, SQLAlchemyError, psycopg.Error)
"""What Optuna's storage raises where the server does not answer."""
_OTHERS = {
    "sqlite": "SQLite locks the whole file for each writer; of 8 workers on one, 5 died of it",
    "mysql": "only Postgres is tested",
    "redis": "only Postgres is tested, and Redis may lose what it was told",
}


def parse_address(url: str) -> URL:
    """Check `machine.study_storage`. Raises SettingsError; no message repeats a password."""
    scheme = url.partition(":")[0].lower()
    if not re.fullmatch(r"postgres(ql)?(\+psycopg)?", scheme):
        reason = _OTHERS.get(scheme.partition("+")[0], "no such storage is known")
        raise SettingsError(
            f"params.yaml: machine.study_storage: {scheme}: {reason}; expected postgresql://USER@HOST/DATABASE, or "
            "null for a journal in experiments/sweeps, which needs no server and serves all workers of one machine"
        )
    try:
        address = make_url(re.sub(r"^[^:]*", "postgresql+psycopg", url))
    except (ArgumentError, ValueError):
        raise SettingsError(
            "params.yaml: machine.study_storage: this is no address; it has the form postgresql://USER@HOST:PORT/DATABASE"
        ) from None
    if address.password is not None or "password" in address.query:
        raise SettingsError(
            "params.yaml: machine.study_storage: found a password in the address, but params.yaml is committed to git; "
            "remove it (and change it), and set it in the environment variable PGPASSWORD or in ~/.pgpass"
        )
    if not address.database:
        raise SettingsError(
            "params.yaml: machine.study_storage: no database is named; write postgresql://USER@HOST/DATABASE"
        )
    return address


def format_address(address: URL) -> str:
    """The address, for messages."""
    return address.set(drivername="postgresql").render_as_string(hide_password=True)


def make_connector(address: URL) -> "Callable[[], psycopg.Connection[Any]]":
    """Opens connections that notice within a minute that the server is gone, as the server does with us."""
    given = address.query.get("options", "")
    options = [given if isinstance(given, str) else " ".join(given), *(f"-c {k}={v}" for k, v in _SESSION.items())]
    return partial(
        psycopg.connect,
        address.set(drivername="postgresql").render_as_string(hide_password=False),
        connect_timeout=10,  # seconds
        keepalives_idle=20,
        keepalives_interval=10,
        keepalives_count=3,
        tcp_user_timeout=30_000,  # milliseconds
        application_name=f"ratchet {SweepWorker.current().name}"[:63],  # the server cuts longer ones, and says so
        options=" ".join(filter(None, options)),
    )


class AdvisoryLock:
    """Held by a session of its own; the server lets go of it when the session ends."""

    def __init__(self, connect: "Callable[[], psycopg.Connection[Any]]", where: str) -> None:
        """Args:
        connect: opens a connection to the database.
        where: it is, for messages.
        """
        self.where = where
        self._connect = connect
        self._session: psycopg.Connection[Any] | None = None

    def acquire(self, wait_s: float) -> None:
        """Raises LockHeldError naming the holder, StorageError when the server does not answer."""
        with self._answering():
            self._see_that_it_lives()
            session = self._connected()
            session.execute("SELECT set_config('lock_timeout', %s, false)", (f"{max(1, round(wait_s * 1000))}ms",))
            try:
                session.execute("SELECT pg_advisory_lock(%s, %s)", _KEY)
            except psycopg.errors.LockNotAvailable:
                raise LockHeldError(
                    f"{self.where}: the studies are locked by {self._holder()} for more than {wait_s:g} s; "
                    "see whether that process hangs or was stopped, end it (kill), and repeat"
                ) from None

    def release(self) -> None:
        """Raises StorageError when the session ended earlier: another process may have had the lock as well."""
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
                f"{self.where}: the connection was lost while the studies were locked; run the command again, "
                "which reads the database again"
            )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Answers to a query, in the session of the lock. Raises StorageError when the server does not answer."""
        with self._answering():
            return self._connected().execute(query.encode()).fetchall()

    def close(self) -> None:
        """End the session, and with it the lock."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _connected(self) -> "psycopg.Connection[Any]":
        if self._session is None:
            self._session = self._connect()
            self._session.autocommit = True
        return self._session

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()  # interrupted while it waited, it may hold the lock and not know
            if not isinstance(error, psycopg.Error):
                raise
            raise StorageError(
                f"{self.where}: Postgres does not answer: {' '.join(str(error).split())[:300]}; see that the server "
                "runs, and that user, database and password (PGPASSWORD, ~/.pgpass) are right, then repeat the command"
            ) from error

    def _see_that_it_lives(self) -> None:
        """A session that was idle may be gone: the server was started again."""
        if self._session is not None:
            try:
                self._session.execute("SELECT 1")
            except psycopg.Error:
                self.close()

    def _holder(self) -> str:
        rows = (
            self._connected()
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
    """A database with Optuna's tables in it."""

    optuna: BaseStorage
    where: str
    """Its address, for messages; no password in it."""
    lock: AdvisoryLock
    close: Callable[[], None]


def open_database(url: str, wait_s: float) -> PostgresDatabase:
    """Connect, and create Optuna's tables if they are missing: one process creates them while the others wait.

    Raises:
        SettingsError: see `parse_address`.
        StorageError: the server does not answer, or this user may not make tables.
        DamagedFileError: the tables are those of another version of Optuna.
        LockHeldError: another process has held the lock for `wait_s` seconds.
    """
    address = parse_address(url)
    creator: Any = make_connector(address)  # a connection of psycopg is one of SQLAlchemy's, their types say otherwise
    lock = AdvisoryLock(creator, format_address(address))
    pool = QueuePool(creator, pre_ping=True, timeout=30)

    def close() -> None:
        pool.dispose()
        lock.close()

    try:
        if _has_tables(lock):  # who only opens does not wait for who holds the lock
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
    """Whether Optuna's tables are there; noting the version of the schema is the last thing that making them does."""
    there = lock.rows("SELECT 1 WHERE to_regclass('alembic_version') IS NOT NULL")
    return bool(there and lock.rows("SELECT version_num FROM alembic_version"))


def _open_tables(where: str, pool: QueuePool) -> RDBStorage:
    """Optuna's storage, its tables made where they are missing."""
    try:
        return RDBStorage("postgresql+psycopg://", engine_kwargs={"pool": pool}, skip_compatibility_check=True)
    except FAILURES as error:
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        raise StorageError(
            f"{where}: Optuna's tables cannot be created or read: {cause}; the user needs the right to create tables "
            "in this database"
        ) from error


def _check_version(tables: RDBStorage, lock: AdvisoryLock) -> None:
    """Raises DamagedFileError unless the tables are as the installed Optuna makes them."""
    there, ours = tables.get_current_version(), tables.get_head_version()
    if there == ours:
        return
    writers = lock.rows("SELECT library_version FROM version_info")
    writer = " and ".join(str(version) for (version,) in writers) or "an unknown version"
    cure = (
        f"bring them up to date with `optuna storage upgrade --storage {lock.where.replace(':', '+psycopg:', 1)}`"
        if there in tables.get_all_versions()
        else "install that version of Optuna here, or take another database"
    )
    raise DamagedFileError(
        f"{lock.where}: the tables were created by Optuna {writer} (schema {there}); the Optuna installed here writes "
        f"schema {ours}; {cure}"
    )
