"""Storage of a project's studies: a journal in the project, or a Postgres database shared by machines.

Repeats operations on a study while its storage does not answer, so that a short outage does not end a sweep.
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
"""Longer than any proposal takes; a process that holds the lock longer is stopped or hangs."""


class StudyLock(Protocol):
    """A lock among all processes that use a storage; it is released when its process dies."""

    def acquire(self, wait_s: float) -> object:
        """Acquire the lock. Raises LockHeldError that names the holder."""

    def release(self) -> None:
        """Release the lock. Raises StorageError if it was lost meanwhile."""


class StudyStorage:
    """Optuna's storage, with a lock that makes several operations atomic."""

    def __init__(
        self,
        backend: BaseStorage,
        kind: Literal["journal", "postgres"],
        where: str,
        exclusive: StudyLock,
        close: Callable[[], None],
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        """Args:
        backend: Optuna's storage.
        kind: of storage.
        where: for messages; no password in it.
        exclusive: held by `locked`.
        close: lets go of files and connections.
        failures: what the backend raises where it does not answer.
        """
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
        """Exclude all other threads, processes and machines of this storage; reentrant in a thread.

        Raises:
            LockHeldError: another one has held the lock for LOCK_WAIT_S.
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
        """Turn failures of the storage into StorageError."""
        try:
            yield
        except self._failures as error:
            cause = error.__cause__ or error  # Optuna says "an exception is raised", its cause says which
            raise StorageError(
                f"{self.where}: {first_line(cause)}; check that the server is running, then run the same command again"
            ) from error


def open_storage(layout: ProjectLayout, url: str | None) -> StudyStorage:
    """Open the storage of a project's studies; create it if there is none.

    Args:
        layout: the project.
        url: `machine.study_storage`; None: a journal in the project.

    Raises:
        SettingsError: the address is not one of Postgres, or contains a password.
        StorageError: the disk is full or failing, or the server does not answer.
        DamagedFileError: the journal is damaged, or the storage was made by another version of Optuna or Ratchet.
        LockHeldError: another process has held the storage for LOCK_WAIT_S.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it logs every study and trial
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


Answer = TypeVar("Answer")

AGAIN_S = 1.0


def retry_storage(act: Callable[[], Answer], wait_s: float, look: Callable[[], None]) -> Answer:
    """Run an operation; repeat it while the storage does not answer.

    Args:
        act: the operation; it must be safe to repeat.
        wait_s: seconds without an answer after which the last failure is raised.
        look: called between two tries; may raise to end it.

    Raises:
        StorageError, LockHeldError: it did not answer for so long.
    """
    since_s: float | None = None
    while True:
        try:
            return act()
        except (StorageError, LockHeldError) as error:
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
                print_message(f"{error} (tried again for {wait_s:g} s)")
            if now_s - since_s >= wait_s:
                raise
        look()
        time.sleep(AGAIN_S)
