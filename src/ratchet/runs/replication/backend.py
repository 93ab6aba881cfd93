"""Bytes on their way: no more than so many a second, and whether they move at all."""

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
"""What is handed over at once takes no longer than this at the cap."""
AT_ONCE_BYTES = 1 << 18
BODY_BYTES = 1 << 16
"""Of a body, handed to a client in one go."""
BUFFERED_BYTES = 1 << 17
"""Most of a body that may lie in buffers of this machine, moving unseen (64 KiB of asyncio's, and these of sockets)."""
UNSENT_BYTES = 1 << 14
POLL_S = 0.2
"""How often a call that takes long is asked whether anybody still waits for it."""


class TransferStalledError(OSError):
    """Nothing moved for `TransferLimits.timeout_s`."""


class TransferStoppedError(OSError):
    """Whoever waits for a call has no more time."""


class BandwidthThrottle:
    """A line of `bytes_s`, shared by all threads: who sends n bytes keeps it busy for n / bytes_s seconds."""

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
        """Most that should be asked for in one go."""
        if self._bytes_s is None:
            return AT_ONCE_BYTES
        return max(1, min(AT_ONCE_BYTES, int(self._bytes_s * AT_ONCE_S)))

    def seconds(self, count: int) -> float:
        """How long `count` bytes take at least."""
        return 0.0 if self._bytes_s is None else count / self._bytes_s

    def take(self, count: int) -> None:
        """Wait until the line is free for `count` bytes, and take it."""
        if self._bytes_s is None:
            return
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + count / self._bytes_s
        if start > now:
            self._sleep(start - now)


class TransferProgress:
    """When something last moved."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def moved(self) -> None:
        self.at = time.monotonic()


class ThrottledBody(io.RawIOBase):
    """Bytes that a client sends, handed over at the pace of a throttle; each piece is progress.

    HTTP clients read a body on the thread of their event loop to sign it, and on another, which may wait, to send it.
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
                self._throttle.take(wanted)
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
    """A socket in which no more than UNSENT_BYTES wait for the network, so that progress is seen when it is made
    (TCP_NOTSENT_LOWAT, Linux 3.12; what is under way is not limited, and so neither is speed)."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    if option := getattr(socket, "TCP_NOTSENT_LOWAT", None):
        made.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
    return made


class TransferWatchdog:
    """Lets a call run as long as it makes progress.

    Raises TransferStalledError or TransferStoppedError otherwise, and the errors of the call.

    Args:
        timeout_s: without progress, after which it has stalled.
        slowest_bytes_s: of a connection that does not count as stalled.
        stopping: asked while a call takes long, whether anybody still waits for it.
    """

    def __init__(self, timeout_s: float, slowest_bytes_s: float, stopping: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._slowest_bytes_s = slowest_bytes_s
        self._stopping = stopping

    def buffered_s(self, body_bytes: int) -> float:
        """How long what is in buffers of a body may take, unseen."""
        return min(body_bytes, BUFFERED_BYTES) / self._slowest_bytes_s

    def coroutine(
        self,
        make: Callable[[TransferProgress], Coroutine[Any, Any, ResultT]],
        loop: asyncio.AbstractEventLoop,
        slack_s: float = 0.0,
    ) -> ResultT:
        """Run on a loop of another thread; cancelled when it stalls."""
        progress = TransferProgress()
        return self._wait(asyncio.run_coroutine_threadsafe(make(progress), loop), progress, slack_s)

    def call(self, function: Callable[[TransferProgress], ResultT], slack_s: float = 0.0) -> ResultT:
        """Run in a thread of its own, which is left to itself when it stalls: nobody can end a system call."""
        progress, future = TransferProgress(), Future[ResultT]()
        future.set_running_or_notify_cancel()  # so that one which is given up can still end, unheard

        def run() -> None:
            try:
                future.set_result(function(progress))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="mirror-call", daemon=True).start()
        return self._wait(future, progress, slack_s)

    def _wait(self, future: "Future[ResultT]", progress: TransferProgress, slack_s: float) -> ResultT:
        while True:
            left_s = progress.at + self._timeout_s + slack_s - time.monotonic()
            if left_s <= 0 and not future.done():
                future.cancel()
                raise TransferStalledError(f"nothing moved for {self._timeout_s + slack_s:g} s")
            try:
                return future.result(min(max(left_s, 0.001), POLL_S))
            except TimeoutError:
                if future.done():
                    raise
            if self._stopping():
                future.cancel()
                raise TransferStoppedError("there is no more time for it")


# What a store asks of a place, one try at a time; and reading from it piece by piece.

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Most of an object that is read at once."""


class RetryCallable(Protocol):
    """Calls until it works, as patience has it (`RetryPolicy.run`)."""

    def __call__(self, what: str, once: Callable[[], T]) -> T:
        """Raises MirrorError, and FileNotFoundError for what is not there."""


class ContentMismatchError(OSError):
    """What arrived is not what was sent."""


class StorageBackend(Protocol):
    """A place by way of one library. Names are relative to the mirror. Every call is one try and raises as its library
    does; FileNotFoundError is that there is nothing of that name."""

    def reopen(self) -> None:
        """The next call opens a new connection, with credentials read anew."""

    def list(self, folder: str) -> dict[str, int]:
        """Names below a folder, and sizes in bytes. A folder that is not there is empty."""

    def size(self, name: str) -> int:
        """Of an object, in bytes."""

    def read(self, name: str) -> bytes:
        """A small object."""

    def piece(self, name: str, start: int) -> bytes:
        """Some bytes of an object from `start` on: at least one, at most PIECE_BYTES."""

    def write(self, name: str, data: bytes) -> None:
        """A small object, at once; whoever reads sees the old one or the new one."""

    def send(self, name: str, path: Path, entry: Entry, trying: RetryCallable) -> int:
        """A file, unless it is there; returns the bytes that were sent, tries that failed apart. Verified when it
        returns. Calls `trying` itself, for each step. Raises DamagedFileError if the file is not what `entry` says."""

    def remove(self, name: str) -> None:
        """An object."""


def build_damaged_error(path: Path, found: Entry) -> DamagedFileError:
    """Of a file here whose content is not what it is sent as."""
    return DamagedFileError(f"{path}: content differs from its manifest ({found[1]:,} bytes); it is not mirrored")


def read_pieces(engine: StorageBackend, name: str, size: int, trying: RetryCallable) -> Iterator[bytes]:
    """An object of `size` bytes; what has arrived is not asked for again."""
    start = 0
    while start < size:
        at = start
        piece = trying(f"read {name}", lambda: _read_some(engine, name, at))  # noqa: B023 (called before `at` changes)
        start += len(piece)
        yield piece


def _read_some(engine: StorageBackend, name: str, start: int) -> bytes:
    found = engine.piece(name, start)
    if not found:
        raise ContentMismatchError(f"it ends after {start:,} bytes")
    return found


def compute_remote_digest(engine: StorageBackend, name: str, size: int, trying: RetryCallable) -> str:
    """SHA-256 of an object, read back."""
    found = hashlib.sha256()
    for piece in read_pieces(engine, name, size, trying):
        found.update(piece)
    return found.hexdigest()
