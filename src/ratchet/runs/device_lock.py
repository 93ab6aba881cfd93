"""A readers-writer lock for the device of a sweep worker: the runs of its training group share it, and a run that is
trained alone, or scored, holds it exclusively.

A run that cannot be trained in the group (training/group.py), or must not be, needs the memory that the group uses. A
run that waits for the exclusive lock is not overtaken by runs that would share it. The lock consists of two locks of
files (flock), which the kernel releases when a process ends.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

POLL_S = 0.2


class DeviceLock:
    """The lock with files in `folder`; None: no lock, so that each training may run at any time. Methods raise OSError
    if a file cannot be opened."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, is_exclusive: bool, check_stop: Callable[[], None]) -> Iterator[None]:
        """Hold the lock inside the context. `check_stop` is called while waiting; it may raise an exception."""
        if self._folder is None:
            yield
            return
        with ExitStack() as stack:
            queue = stack.enter_context((self._folder / "queue").open("wb"))
            _lock(queue, fcntl.LOCK_EX, check_stop)
            lock = stack.enter_context((self._folder / "lock").open("wb"))
            _lock(lock, fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH, check_stop)
            if not is_exclusive:
                queue.close()
            yield

    @contextmanager
    def hold_shared(self) -> Iterator[None]:
        """Share the lock inside the context, even if a run waits for the exclusive lock. Wait while one holds it."""
        if self._folder is None:
            yield
            return
        with (self._folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield

    def has_queue(self) -> bool:
        """Return whether a run waits for the exclusive lock or holds it, or is just getting the lock."""
        if self._folder is None:
            return False
        with (self._folder / "queue").open("wb") as queue:
            try:
                fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def _lock(file: IO[bytes], kind: int, check_stop: Callable[[], None]) -> None:
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            check_stop()
            time.sleep(POLL_S)
