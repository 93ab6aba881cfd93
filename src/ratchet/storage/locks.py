"""Locks that die with their holders: two writers of one directory cannot exist, and a stale file locks nothing."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from ratchet.errors import LockHeldError

LOCK_POLL_S = 0.05


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileLock:
    """An exclusive advisory lock (flock) that dies with its holders: a stale lock file locks nothing.

    The descriptor may be inherited by a child, which then holds the lock too until it ends.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The open descriptor, to pass to a child process."""
        if self._fd is None:
            raise RuntimeError(f"lock {self.path} is not held")
        return self._fd

    def acquire(self, wait_s: float = 0.0) -> "FileLock":
        """Take the lock, trying for `wait_s` seconds. Raises LockHeldError naming the holder's process id."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise LockHeldError(
                    f"{self.what} is in use by process {holder}; wait for it, or stop it (kill {holder}) and repeat"
                )
            time.sleep(LOCK_POLL_S)
        self._fd = fd
        with contextlib.suppress(OSError):  # a hint for people; a full disk does not keep anybody from locking
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def held_elsewhere(self) -> bool:
        """Whether some process holds the lock now (asked without taking it)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give the lock back (children that inherited it keep it)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
