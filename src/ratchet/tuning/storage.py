"""Opens the storage of a project's studies: a journal in the project, or a Postgres database shared by machines.

`retry_storage` repeats an operation while the storage does not answer, so that a short outage does not end a sweep.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import optuna
from optuna.storages import BaseStorage, JournalStorage

from ratchet.errors import LockHeldError, StorageError, first_line
from ratchet.runs.log import print_message
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.journal_storage import StudyJournalBackend, make_study_lock

LOCK_WAIT_S = 60.0
"""Maximum number of seconds to wait for the lock. No proposal takes this long, so a process that holds the lock longer
hangs or is stopped."""

RETRY_DELAY_S = 1.0
"""Seconds between two attempts."""

Answer = TypeVar("Answer")


class StudyLock(Protocol):
    """Lock that all processes of a storage share; it is released when the process that holds it dies."""

    def acquire(self, wait_s: float) -> object:
        """Acquire the lock. Raises LockHeldError that names the holder."""

    def release(self) -> None:
        """Release the lock. Raises StorageError if the lock was lost before."""


class StudyStorage:
    """Optuna's storage, with a lock that makes several operations atomic.

    Args:
        backend: Optuna's storage.
        kind: kind of the storage.
        where: path or address without password, for messages.
        exclusive: the lock that `locked` holds.
        close: closes files and connections.
        failures: exceptions that the backend raises if it does not answer.
    """

    def __init__(
        self,
        backend: BaseStorage,
        kind: Literal["journal", "postgres"],
        where: str,
        exclusive: StudyLock,
        close: Callable[[], None],
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        self.optuna = backend
        self.kind = kind
        self.where = where
        self.close = close
        self._exclusive = exclusive
        self._failures = failures
        self._mutex = threading.RLock()
        self._depth = 0

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
            if self._depth == 0:
                self._enter()
            self._depth += 1
            try:
                yield
            except BaseException as error:
                self._leave(error)
                raise
            self._leave(None)
        finally:
            self._mutex.release()

    def _enter(self) -> None:
        try:
            self._exclusive.acquire(LOCK_WAIT_S)
        except OSError as error:
            cause = error.strerror or error
            raise StorageError(
                f"{self.where}: cannot be locked: {cause}; fix the disk, then run the same command again"
            ) from error

    def _leave(self, error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            self._exclusive.release()
        except StorageError as second:
            if error is None:
                raise
            error.add_note(str(second))

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Convert exceptions of the storage to StorageError."""
        try:
            yield
        except self._failures as error:
            cause = error.__cause__ or error  # Optuna's own message is only "an exception is raised"
            raise StorageError(
                f"{self.where}: {first_line(cause)}; check that the server is running, then run the same command again"
            ) from error


def open_storage(layout: ProjectLayout, url: str | None) -> StudyStorage:
    """Open the storage of a project's studies; create it if it does not exist.

    Args:
        layout: the project.
        url: `machine.study_storage`; None: a journal in the project.

    Raises:
        SettingsError: the address is not valid for Postgres, or contains a password.
        StorageError: the disk is full or failing, or the server does not answer.
        DamagedFileError: the journal is damaged, or another version of Optuna or Ratchet created the storage.
        LockHeldError: another process has held the storage for LOCK_WAIT_S.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise Optuna logs every study and trial
    if url is not None:
        from ratchet.tuning import postgres_storage

        database = postgres_storage.open_database(url, LOCK_WAIT_S)
        return StudyStorage(
            database.optuna, "postgres", database.where, database.lock, database.close, postgres_storage.FAILURES
        )
    file = StudyJournalBackend(layout.study_journal)
    try:
        backend = JournalStorage(file)
    except BaseException:
        file.close()
        raise
    return StudyStorage(
        backend, "journal", str(layout.study_journal), make_study_lock(layout.study_journal), file.close
    )


def retry_storage(operation: Callable[[], Answer], wait_s: float, check_stop: Callable[[], None]) -> Answer:
    """Run an operation; repeat it while the storage does not answer.

    Args:
        operation: the operation; it must be safe to repeat.
        wait_s: seconds without an answer after which the last failure is raised.
        check_stop: called between two attempts; it may raise to stop them.

    Raises:
        StorageError, LockHeldError: the storage did not answer for `wait_s`.
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
