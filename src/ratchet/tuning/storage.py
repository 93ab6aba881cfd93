"""Opens the storage of a project's studies: Optuna's tables in an SQLite file, or in a Postgres database for machines.

Processes that create Optuna's tables at the same time fail, so one process creates them under a lock. SQLite ends a
transaction that has read before another process wrote, so a transaction that writes begins with the write lock, and the
file has a write-ahead log. Optuna's alternative, a journal file, was measured too: one torn line makes it unreadable,
and the lock of a killed process stays for 30 s.

`retry_storage` repeats an operation while the storage does not answer, so that a short outage does not end a sweep.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage, get_storage
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from ratchet.errors import DamagedFileError, LockHeldError, StorageError, first_line
from ratchet.runs.log import print_message
from ratchet.storage.databases import prepare_postgres, prepare_sqlite
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.leases import SweepWorker

LOCK_WAIT_S = 60.0
"""Maximum number of seconds to wait for the lock. No proposal takes this long, so a process that holds the lock longer
hangs or is stopped."""

RETRY_DELAY_S = 1.0
"""Seconds between two attempts."""

_LOCK_KEY = {"high": 0x52617463, "low": 0x68657401}
"""Key of the advisory lock in Postgres: the text `Ratchet` and the number 1. The lock is valid within one database."""

Answer = TypeVar("Answer")


class StudyStorage:
    """Optuna's storage, with a lock that makes several operations atomic: a file for SQLite, the server for Postgres.

    Raises:
        StorageError: the disk is full or failing, or the server does not answer or refuses this user.
        DamagedFileError: the file is damaged, or another version of Optuna created the tables.
        LockHeldError: another process has held the lock for LOCK_WAIT_S.
    """

    def __init__(
        self,
        kind: Literal["sqlite", "postgres"],
        where: str,
        connect: Callable[[], Any],
        file_lock: FileLock | None = None,
    ) -> None:
        self.kind = kind
        self.where = where
        self._file_lock = file_lock
        self._mutex = threading.RLock()
        self._is_locked = False
        self._dialect = "sqlite://" if kind == "sqlite" else "postgresql+psycopg://"
        self._engine = create_engine(self._dialect, creator=connect, poolclass=NullPool)
        self._pool = QueuePool(connect, pre_ping=True)
        try:
            with self.connected():
                self.optuna = get_storage(self._open_tables())
                """Optuna's storage."""
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close files and connections."""
        self._pool.dispose()

    def _open_tables(self) -> RDBStorage:
        """Return Optuna's storage. One process creates missing tables; others wait. Existing tables need no lock."""
        with nullcontext() if self._has_tables() else self.locked():
            if self.kind == "sqlite":
                with self._engine.connect() as connection:
                    connection.execute(text("PRAGMA journal_mode = WAL"))  # the mode is stored in the file
            tables = RDBStorage(self._dialect, {"pool": self._pool}, skip_compatibility_check=True)
        schema, installed = tables.get_current_version(), tables.get_head_version()
        if schema == installed:
            return tables
        if schema in tables.get_all_versions():
            url = self.where.replace(":", "+psycopg:", 1) if self.kind == "postgres" else f"sqlite:///{self.where}"
            cure = f"update them with `optuna storage upgrade --storage {url}`"
        else:
            cure = "install that version of Optuna here, or use another database"
        raise DamagedFileError(
            f"{self.where}: the tables were created by another version of Optuna (schema {schema}); the Optuna "
            f"installed here writes schema {installed}; {cure}"
        )

    def _has_tables(self) -> bool:
        """Return whether Optuna's tables exist. Optuna creates them first, and then stores their version."""
        with self._engine.connect() as connection:
            if not self._engine.dialect.has_table(connection, "alembic_version"):
                return False
            return bool(connection.execute(text("SELECT version_num FROM alembic_version")).all())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other threads, processes and machines that use this storage; reentrant in a thread.

        Raises:
            LockHeldError: another thread or process has held the lock for LOCK_WAIT_S.
            StorageError: the storage does not answer, or the lock was lost before the end.
        """
        if not self._mutex.acquire(timeout=LOCK_WAIT_S):
            raise LockHeldError(f"{self.where}: another thread of this process holds the lock; run the command again")
        try:
            if self._is_locked:
                yield
                return
            with self._acquire_file_lock(self._file_lock) if self._file_lock else self._lock_database():
                self._is_locked = True
                try:
                    yield
                finally:
                    self._is_locked = False
        finally:
            self._mutex.release()

    def _acquire_file_lock(self, lock: FileLock) -> FileLock:
        try:
            return lock.acquire(LOCK_WAIT_S)
        except OSError as error:
            cause = error.strerror or error
            raise StorageError(
                f"{self.where}: cannot be locked: {cause}; fix the disk, then run the same command again"
            ) from error

    @contextmanager
    def _lock_database(self) -> Iterator[None]:
        """Hold an advisory lock in a transaction (Postgres 17 docs, 13.3.5).

        The server releases the lock when the transaction or its connection ends, also if the process or machine dies.
        """
        with self.connected():
            connection = self._engine.connect()
        try:
            with self.connected():
                self._acquire_advisory_lock(connection)
            yield
            try:
                connection.commit()
            except SQLAlchemyError as error:
                raise StorageError(
                    f"{self.where}: the connection was lost while the studies were locked; run the same command again, "
                    "which reads the database again"
                ) from error
        except BaseException:
            connection.invalidate()  # closes it without a rollback, which would fail if the server has gone
            raise
        finally:
            connection.close()

    def _acquire_advisory_lock(self, connection: Connection) -> None:
        # The lock of a process that is stopped stays, because the process would not notice that it has lost the lock.
        connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        connection.execute(text(f"SET LOCAL lock_timeout = {max(1, round(LOCK_WAIT_S * 1000))}"))
        try:
            connection.execute(text("SELECT pg_advisory_xact_lock(:high, :low)"), _LOCK_KEY)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "55P03":  # lock_not_available
                raise
            raise LockHeldError(
                f"{self.where}: the studies have been locked by {self._find_lock_holder()} for more than "
                f"{LOCK_WAIT_S:g} s; if that process hangs or was stopped, kill it; then run the same command again"
            ) from None

    def _find_lock_holder(self) -> str:
        query = (
            "SELECT application_name, client_addr FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE granted "
            "AND locktype = 'advisory' AND (classid, objid, objsubid) = (:high, :low, 2) "
            "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with self._engine.connect() as connection:
            rows = connection.execute(text(query), _LOCK_KEY).all()
        return " and ".join(f"{name} ({client or 'on the server'})" for name, client in rows) or "an unknown session"

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Convert exceptions of the storage to StorageError, or to DamagedFileError if the SQLite file is damaged."""
        try:
            yield
        except (StorageInternalError, SQLAlchemyError) as error:
            cause = error if isinstance(error, SQLAlchemyError) else error.__cause__  # Optuna's own message is general
            reason: BaseException = getattr(cause, "orig", None) or cause or error
            if self.kind == "sqlite":
                if re.search("malformed|not a database", str(reason)):
                    raise DamagedFileError(
                        f"{self.where}: {first_line(reason)}. Stop all workers, move the file away and run the same "
                        "command again: trials are proposed again, and completed runs are reused, so that nothing is "
                        "trained twice"
                    ) from error
                cure = "free space or fix the disk, then run the same command again"
            elif "permission denied" in str(reason):
                cure = "the user needs the right to create tables in this database"
            else:
                cure = "check that the server is running, then run the same command again"
            raise StorageError(f"{self.where}: {first_line(reason)}; {cure}") from error


def open_storage(layout: ProjectLayout, url: str | None) -> StudyStorage:
    """Open the storage of a project's studies at `machine.study_storage`; create it if it does not exist.

    Without a URL, it is an SQLite file in the project.

    Raises:
        SettingsError: the address is not valid for Postgres, or contains a password.
        StorageError, DamagedFileError, LockHeldError: see StudyStorage.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise Optuna logs every study and trial
    if url is not None:
        connect, where = prepare_postgres(url, SweepWorker.current().name)
        return StudyStorage("postgres", where, connect)
    path = layout.studies
    connect = prepare_sqlite(path)
    lock = FileLock(path.with_name(f"{path.name}.lock"), f"the studies of {path}")
    return StudyStorage("sqlite", str(path), connect, lock)


def retry_storage(operation: Callable[[], Answer], wait_s: float, check_stop: Callable[[], None]) -> Answer:
    """Run an operation, and repeat it while the storage does not answer, for at most `wait_s` seconds.

    The operation must be safe to repeat. `check_stop` is called between two attempts; it may raise to stop them.
    """
    since_s: float | None = None
    while True:
        try:
            return operation()
        except (StorageError, LockHeldError) as error:
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
                print_message(f"{error} (trying again for {wait_s:g} s)")
            if now_s - since_s >= wait_s:
                raise
        check_stop()
        time.sleep(RETRY_DELAY_S)
