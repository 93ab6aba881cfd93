"""worker.log stays bounded: its workers have it open, C code among them, so it is copied and cut, not renamed."""

import contextlib
import os
import threading
from pathlib import Path

from ratchet import files

ASK_EVERY_S = 0.25
BLOCK_BYTES = 1 << 20


class Trimmer(threading.Thread):
    """Keeps a file below a size while others append to it; a thread of its own, for its disk may hang.

    Args:
        path: the file; writers have it open with O_APPEND. It need not be there.
        limit_bytes: it is cut when it is larger. The end of what was there becomes PATH.1.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(name="trimmer", daemon=True)
        self._path, self._limit_bytes = path, limit_bytes
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(ASK_EVERY_S):
            trim(self._path, self._limit_bytes)

    def end(self) -> None:
        """Cut it for the last time."""
        self._over.set()
        self.join(1.0)
        if not self.is_alive():
            trim(self._path, self._limit_bytes)


def trim(path: Path, limit_bytes: int) -> bool:
    """Cut the file if it is larger; returns whether it was. Never raises: a disk that does not let us loses nothing.

    Lines that are written between the copy and the cut are lost, and where there is no room for a copy, all are: being
    bounded goes first.
    """
    try:
        size = path.stat().st_size
        if size <= limit_bytes:
            return False
        with contextlib.suppress(OSError):
            _keep_end(path, limit_bytes)
        os.truncate(path, 0)  # the next write of whoever appends begins at 0
    except OSError:
        return False
    return True


def _keep_end(path: Path, limit_bytes: int) -> None:
    """Copy the last bytes, from the beginning of a line on, beside the file."""
    target, aside = path.with_name(f"{path.name}.1"), path.with_name(f"{files.PARTIAL}{path.name}")
    try:
        with path.open("rb") as source, aside.open("wb") as copy:
            source.seek(-limit_bytes, os.SEEK_END)
            left = limit_bytes - len(source.readline(limit_bytes))
            while left > 0 and (block := source.read(min(BLOCK_BYTES, left))):
                copy.write(block)
                left -= len(block)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
