"""File locks. The kernel releases a lock when its holder ends, so a leftover lock file has no effect."""

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
    """An exclusive advisory lock (flock).

    A child process that inherits the descriptor holds the lock too, until it ends.

    Args:
        path: the lock file.
        subject: what the lock protects, for messages.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self.subject = subject
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The descriptor, to pass to a child process."""
        if self._fd is None:
            raise RuntimeError(f"lock {self.path} is not held")
        return self._fd

    def acquire(self, wait_s: float = 0.0) -> "FileLock":
        """Acquire the lock, waiting up to `wait_s` seconds. Raises LockHeldError with the holder's process id."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise LockHeldError(
                    f"{self.subject} is in use by process {holder}; wait for it, or stop it (kill {holder}) and repeat"
                )
            time.sleep(LOCK_POLL_S)
        self._fd = fd
        with contextlib.suppress(OSError):  # only for the message above; a full disk must not prevent locking
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def is_held(self) -> bool:
        """Whether a process holds the lock; does not acquire it."""
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
        """Release the lock. Child processes that inherited it keep it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
