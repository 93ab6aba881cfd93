"""Interface of storage backends, with a bandwidth limit and detection of stalled transfers."""

import asyncio
import hashlib
import io
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ratchet.errors import DamagedFileError
from ratchet.storage.files import Entry

ResultT = TypeVar("ResultT")

AT_ONCE_S = 0.25
"""Time that one piece takes at most under a bandwidth limit."""
AT_ONCE_BYTES = 1 << 18
"""Size of one piece without a bandwidth limit."""
BODY_BYTES = 1 << 16
"""Most bytes of a request body that are passed to an HTTP client in one call."""
BUFFERED_BYTES = 1 << 17
"""Most bytes of a body in the buffers of this machine, whose transfer cannot be observed: 64 KiB in asyncio, the rest
in sockets."""
UNSENT_BYTES = 1 << 14
"""Unsent bytes that a socket accepts; see `create_shallow_socket`."""
POLL_S = 0.2
"""Interval at which a long call checks whether it should stop."""


class TransferStalledError(OSError):
    """No byte was transferred for `TransferLimits.timeout_s`."""


class TransferStoppedError(OSError):
    """The caller stopped a transfer."""


class BandwidthThrottle:
    """Limits the total bandwidth of all threads: sending n bytes takes at least n / bytes_s seconds."""

    def __init__(
        self,
        bytes_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    @property
    def at_once_bytes(self) -> int:
        """Largest amount to request at once."""
        if self._bytes_s is None:
            return AT_ONCE_BYTES
        return max(1, min(AT_ONCE_BYTES, int(self._bytes_s * AT_ONCE_S)))

    def seconds(self, count: int) -> float:
        """Minimum time for `count` bytes."""
        return 0.0 if self._bytes_s is None else count / self._bytes_s

    def acquire(self, count: int) -> None:
        """Wait until `count` bytes may be transferred."""
        if self._bytes_s is None:
            return
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + count / self._bytes_s
        if start > now:
            self._sleep(start - now)


class TransferProgress:
    """Time of the last transferred byte."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def moved(self) -> None:
        self.at = time.monotonic()


class ThrottledBody(io.RawIOBase):
    """Request body that an HTTP client reads at the speed of a throttle; each piece counts as progress.

    HTTP clients read a body twice: on the thread of their event loop to sign it, and on another thread to send it. Only
    the second one may block.
    """

    def __init__(self, data: bytes, throttle: BandwidthThrottle, progress: TransferProgress) -> None:
        self._data = data
        self._at = 0
        self._throttle, self._progress = throttle, progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, len(self._data) - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        if not _is_on_event_loop():
            wanted = min(wanted, BODY_BYTES, self._throttle.at_once_bytes)
            if wanted:
                self._throttle.acquire(wanted)
            self._progress.moved()
        piece = self._data[self._at : self._at + wanted]
        self._at += wanted
        return piece


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def create_shallow_socket(address: Any) -> socket.socket:
    """Create a socket that accepts at most UNSENT_BYTES unsent bytes, so that progress is observed when it is made.

    It uses TCP_NOTSENT_LOWAT (Linux 3.12). Bytes in flight are not limited, so the speed is not reduced.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    if option := getattr(socket, "TCP_NOTSENT_LOWAT", None):
        made.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
    return made


class TransferWatchdog:
    """Runs a call as long as it makes progress.

    Raises TransferStalledError or TransferStoppedError otherwise, and the errors of the call.

    Args:
        timeout_s: time without progress after which a call has stalled.
        slowest_bytes_s: speed of the slowest connection that does not count as stalled.
        stopping: called during long calls; returns whether to stop.
    """

    def __init__(self, timeout_s: float, slowest_bytes_s: float, stopping: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._slowest_bytes_s = slowest_bytes_s
        self._stopping = stopping

    def buffered_s(self, body_bytes: int) -> float:
        """Longest time for which a transfer of buffered bytes of a body cannot be observed."""
        return min(body_bytes, BUFFERED_BYTES) / self._slowest_bytes_s

    def coroutine(
        self,
        make: Callable[[TransferProgress], Coroutine[Any, Any, ResultT]],
        loop: asyncio.AbstractEventLoop,
        slack_s: float = 0.0,
    ) -> ResultT:
        """Run a coroutine on the event loop of another thread; cancel it when it stalls."""
        progress = TransferProgress()
        return self._wait(asyncio.run_coroutine_threadsafe(make(progress), loop), progress, slack_s)

    def call(self, function: Callable[[TransferProgress], ResultT], slack_s: float = 0.0) -> ResultT:
        """Run a function in a thread of its own. If it stalls, the thread is abandoned, because a system call cannot be
        ended."""
        progress, future = TransferProgress(), Future[ResultT]()
        future.set_running_or_notify_cancel()  # so that an abandoned call can still set its result

        def run() -> None:
            try:
                future.set_result(function(progress))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="replica-call", daemon=True).start()
        return self._wait(future, progress, slack_s)

    def _wait(self, future: "Future[ResultT]", progress: TransferProgress, slack_s: float) -> ResultT:
        while True:
            left_s = progress.at + self._timeout_s + slack_s - time.monotonic()
            if left_s <= 0 and not future.done():
                future.cancel()
                raise TransferStalledError(f"no data transferred for {self._timeout_s + slack_s:g} s")
            try:
                return future.result(min(max(left_s, 0.001), POLL_S))
            except TimeoutError:
                if future.done():
                    raise
            if self._stopping():
                future.cancel()
                raise TransferStoppedError("no time left for the transfer")


T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Most bytes that are read from an object in one call."""


class RetryCallable(Protocol):
    """Repeats a call until it succeeds (`RetryPolicy.run`)."""

    def __call__(self, what: str, attempt: Callable[[], T]) -> T:
        """Raises ReplicaError, and FileNotFoundError for a missing object."""


class ContentMismatchError(OSError):
    """The stored content differs from what was sent."""


class StorageBackend(Protocol):
    """Storage accessed through one library. Names are relative to the replica.

    Every call is one attempt and raises the errors of its library. FileNotFoundError means that the object does not
    exist.
    """

    def reopen(self) -> None:
        """Let the next call open a new connection and read the credentials again."""

    def list(self, folder: str) -> dict[str, int]:
        """Names below a directory with sizes in bytes. A missing directory is empty."""

    def size(self, name: str) -> int:
        """Size of an object in bytes."""

    def read(self, name: str) -> bytes:
        """Read a small object."""

    def piece(self, name: str, start: int) -> bytes:
        """Read bytes of an object from offset `start`: at least one, at most PIECE_BYTES."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small object atomically: readers see the old or the new content."""

    def send(self, name: str, path: Path, entry: Entry, retry: RetryCallable) -> int:
        """Upload and verify a file unless the object exists.

        Args:
            name: the object.
            path: the file.
            entry: its expected digest and size.
            retry: runs each step.

        Returns:
            The bytes sent, without failed attempts.

        Raises:
            DamagedFileError: the file does not match `entry`.
        """

    def remove(self, name: str) -> None:
        """Remove an object."""


def build_damaged_error(path: Path, found: Entry) -> DamagedFileError:
    """Create the error for a local file whose content does not match its manifest."""
    return DamagedFileError(f"{path}: content differs from its manifest ({found[1]:,} bytes); it is not replicated")


def read_pieces(backend: StorageBackend, name: str, size: int, retry: RetryCallable) -> Iterator[bytes]:
    """Read an object of `size` bytes in pieces; a retry continues after the last piece."""
    start = 0
    while start < size:
        at = start
        piece = retry(f"read {name}", lambda: _read_some(backend, name, at))  # noqa: B023 (called before `at` changes)
        start += len(piece)
        yield piece


def _read_some(backend: StorageBackend, name: str, start: int) -> bytes:
    found = backend.piece(name, start)
    if not found:
        raise ContentMismatchError(f"the object ends after {start:,} bytes")
    return found


def compute_remote_digest(backend: StorageBackend, name: str, size: int, retry: RetryCallable) -> str:
    """Read an object back and compute its SHA-256."""
    found = hashlib.sha256()
    for piece in read_pieces(backend, name, size, retry):
        found.update(piece)
    return found.hexdigest()
