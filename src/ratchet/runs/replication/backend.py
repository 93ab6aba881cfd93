"""Storage backends of a replica: the common interface, the backend for directories, and the backend for fsspec URLs
(SFTP, SMB, object stores of Google and Microsoft). The module also has the bandwidth limit and the detection of stalled
transfers, which all backends share."""

import asyncio
import hashlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs.replication.retry import scrub_text, strip_credentials
from ratchet.storage import digests, files
from ratchet.storage.files import PARTIAL, Entry

T = TypeVar("T")

AT_ONCE_S = 0.25
"""Maximum time for the transfer of one piece under a bandwidth limit."""
AT_ONCE_BYTES = 1 << 18
"""Size of one piece in bytes, without a bandwidth limit."""
BODY_BYTES = 1 << 16
"""Maximum number of bytes of a request body that are passed to an HTTP client in one call."""
BUFFERED_BYTES = 1 << 17
"""Maximum number of bytes of a request body in the buffers of this machine: 64 KiB in asyncio, the rest in sockets. The
transfer of buffered bytes cannot be observed."""
UNSENT_BYTES = 1 << 14
"""Maximum number of unsent bytes that a socket accepts; see `create_shallow_socket`."""
POLL_S = 0.2
"""Interval at which a long call checks whether it should stop."""
PIECE_BYTES = 4 << 20
"""Maximum number of bytes that are read from an object in one call."""

DURABLE_BYTES = 32 << 20
"""Number of bytes that `LocalBackend` writes between two fsyncs. It limits the duration of each fsync."""
STALE_AGE_S = 86_400.0
"""Age after which a partial file counts as left behind by a process that was killed."""

ATOMIC = {"memory", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "hf"}
"""fsspec schemes whose objects appear atomically. With other schemes, an object is written to a temporary name and
renamed."""
SLOWEST_BYTES_S = 16_384.0
"""Slowest accepted speed, in bytes/s, of an upload whose library reports no progress."""


class TransferStalledError(OSError):
    """No byte was transferred for `TransferLimits.timeout_s`."""


class TransferStoppedError(OSError):
    """The caller stopped a transfer."""


class BandwidthThrottle:
    """Bandwidth limit of all threads together: sending n bytes takes at least n / bytes_s seconds."""

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
        """Largest number of bytes to request at once."""
        if self._bytes_s is None:
            return AT_ONCE_BYTES
        return max(1, min(AT_ONCE_BYTES, int(self._bytes_s * AT_ONCE_S)))

    def seconds(self, count: int) -> float:
        """Return the minimum time in seconds for `count` bytes."""
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
        """Record that bytes were transferred now."""
        self.at = time.monotonic()


class ThrottledBody(io.RawIOBase):
    """Request body that an HTTP client reads at the speed of a throttle; each piece counts as progress.

    HTTP clients read a body twice: on the thread of their event loop to sign it, and on another thread to send it. Only
    the second read may block.
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
    """Create a socket that accepts at most UNSENT_BYTES unsent bytes, so that progress is observed when it happens.

    The socket uses TCP_NOTSENT_LOWAT (Linux 3.12). Bytes in flight are not limited, so the speed is not reduced.
    """
    family, kind, protocol = address[:3]
    shallow_socket = socket.socket(family, kind, protocol)
    if option := getattr(socket, "TCP_NOTSENT_LOWAT", None):
        shallow_socket.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
    return shallow_socket


class TransferWatchdog:
    """Time limit for calls without progress.

    A call that stalls raises TransferStalledError; a call that is stopped raises TransferStoppedError.

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
        """Return the longest time in which the transfer of buffered bytes of a body cannot be observed."""
        return min(body_bytes, BUFFERED_BYTES) / self._slowest_bytes_s

    def coroutine(
        self,
        make: Callable[[TransferProgress], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
        slack_s: float = 0.0,
    ) -> T:
        """Run a coroutine on the event loop of another thread, and cancel it if it stalls."""
        progress = TransferProgress()
        return self._wait(asyncio.run_coroutine_threadsafe(make(progress), loop), progress, slack_s)

    def call(self, function: Callable[[TransferProgress], T], slack_s: float = 0.0) -> T:
        """Run a function in a thread of its own. A thread that stalls is abandoned, because a system call cannot be
        ended."""
        progress, future = TransferProgress(), Future[T]()
        future.set_running_or_notify_cancel()  # so that an abandoned call can still set its result

        def run() -> None:
            try:
                future.set_result(function(progress))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="replica-call", daemon=True).start()
        return self._wait(future, progress, slack_s)

    def _wait(self, future: "Future[T]", progress: TransferProgress, slack_s: float) -> T:
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


class RetryCallable(Protocol):
    """A function that repeats a call until it succeeds (`RetryPolicy.run`)."""

    def __call__(self, what: str, attempt: Callable[[], T]) -> T:
        """Repeat `attempt`. Raises ReplicaError, and FileNotFoundError for a missing object."""


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
        """Return the names below a directory with their sizes in bytes. A missing directory is empty."""

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""

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
        piece = retry(f"read {name}", lambda: _read_piece(backend, name, at))  # noqa: B023 (called before `at` changes)
        start += len(piece)
        yield piece


def _read_piece(backend: StorageBackend, name: str, start: int) -> bytes:
    piece = backend.piece(name, start)
    if not piece:
        raise ContentMismatchError(f"the object ends after {start:,} bytes")
    return piece


def compute_remote_digest(backend: StorageBackend, name: str, size: int, retry: RetryCallable) -> str:
    """Read an object back and compute its SHA-256."""
    digest = hashlib.sha256()
    for piece in read_pieces(backend, name, size, retry):
        digest.update(piece)
    return digest.hexdigest()


class LocalBackend:
    """A directory. Each file is written to a temporary name, fsynced, read back and renamed, so it appears complete."""

    def __init__(self, root: Path, throttle: BandwidthThrottle, watch: TransferWatchdog) -> None:
        self._root = root
        self._throttle, self._watch = throttle, watch

    def reopen(self) -> None:
        """Do nothing, because nothing is open between calls."""

    def list(self, folder: str) -> dict[str, int]:
        return self._watch.call(lambda progress: dict(self._walk(self._root / folder, progress)))

    def _walk(self, folder: Path, progress: TransferProgress) -> Iterator[tuple[str, int]]:
        for parent, _, names in os.walk(folder, onerror=_reraise_unless_absent):
            progress.moved()
            for name in names:
                path = Path(parent, name)
                if not name.startswith(PARTIAL):
                    try:
                        yield path.relative_to(self._root).as_posix(), path.stat().st_size
                    except FileNotFoundError:  # removed since it was listed
                        continue

    def exists(self) -> bool:
        """Return whether the directory exists. Writing creates it."""
        return self._watch.call(lambda _: self._root.is_dir())

    def size(self, name: str) -> int:
        return self._watch.call(lambda _: (self._root / name).stat().st_size)

    def read(self, name: str) -> bytes:
        return self._watch.call(lambda _: (self._root / name).read_bytes())

    def piece(self, name: str, start: int) -> bytes:
        def read(_: TransferProgress) -> bytes:
            with (self._root / name).open("rb") as stream:
                stream.seek(start)
                return stream.read(PIECE_BYTES)

        return self._watch.call(read)

    def write(self, name: str, data: bytes) -> None:
        def write(_: TransferProgress) -> None:
            self._throttle.acquire(len(data))
            self._publish(self._root / name, lambda partial: files.write_blocks(partial, [[data]]))

        self._watch.call(write, slack_s=self._throttle.seconds(len(data)))

    def send(self, name: str, path: Path, entry: Entry, retry: RetryCallable) -> int:
        def send(progress: TransferProgress) -> int:
            target = self._root / name
            try:
                if target.stat().st_size == entry[1]:  # only verified content gets this name
                    return 0
            except FileNotFoundError:
                pass
            self._publish(target, lambda partial: self._copy(path, partial, entry, progress))
            return entry[1]

        return retry(f"write {name}", lambda: self._watch.call(send))

    def remove(self, name: str) -> None:
        self._watch.call(lambda _: (self._root / name).unlink())

    def remove_stale_partials(self) -> None:
        """Remove partial files that killed processes left behind more than a day ago, by the clock of the disk."""

        def remove_stale_partials(progress: TransferProgress) -> None:
            paths = [Path(parent, name) for parent, _, names in os.walk(self._root) for name in names]
            for path in (path for path in paths if path.name.startswith(PARTIAL)):
                progress.moved()
                if path.stat().st_mtime < time.time() - STALE_AGE_S:
                    path.unlink(missing_ok=True)

        self._watch.call(remove_stale_partials)

    def _publish(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Let `fill` write to a temporary file, then rename it to `target`."""
        files.make_directory(target.parent)
        partial = target.parent / f"{PARTIAL}{uuid4().hex}"
        try:
            fill(partial)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        files.fsync_directory(target.parent)

    def _copy(self, source: Path, partial: Path, entry: Entry, progress: TransferProgress) -> None:
        unsynced_bytes = 0

        def on_block() -> None:
            nonlocal unsynced_bytes
            progress.moved()
            unsynced_bytes += self._throttle.at_once_bytes
            if unsynced_bytes >= DURABLE_BYTES:
                files.fsync(partial)
                unsynced_bytes = 0
                progress.moved()

        source_digest = hashlib.sha256()
        files.write_blocks(partial, self._blocks(source, progress, source_digest), on_block)
        if source_digest.hexdigest() != entry[0]:
            raise build_damaged_error(source, (source_digest.hexdigest(), partial.stat().st_size))
        partial_digest = hashlib.sha256()
        with partial.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                partial_digest.update(block)
                progress.moved()
        if partial_digest.hexdigest() != entry[0]:
            raise ContentMismatchError("the content read back differs from what was written")

    def _blocks(self, source: Path, progress: TransferProgress, digest: "hashlib._Hash") -> Iterator[files.Block]:
        with source.open("rb") as stream:
            while block := stream.read(self._throttle.at_once_bytes):
                self._throttle.acquire(len(block))
                digest.update(block)
                progress.moved()
                yield [block]


def _reraise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def open_filesystem(url: str) -> tuple[Any, str]:
    """Open fsspec's file system for a URL, without caches, and return it with the path in it.

    Some libraries contact their server for this.

    Raises:
        SettingsError: the library of the scheme cannot be imported, or refuses the URL.
    """
    import fsspec

    try:
        system, path = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise SettingsError(
            f"machine.replica {strip_credentials(url)}: {scrub_text(str(error))} "
            "(install it with pip into Ratchet's environment)"
        ) from None
    except ValueError as error:
        raise SettingsError(
            f"machine.replica {strip_credentials(url)}: {scrub_text(str(error))}; "
            "expected a path or a URL that fsspec supports, such as file://, s3://, gs://, abfs://, sftp://"
        ) from None
    return system, str(path).rstrip("/")


class FsspecBackend:
    """Storage that fsspec opens. Each call runs in a thread that is abandoned if it stalls."""

    def __init__(self, url: str, throttle: BandwidthThrottle, watch: TransferWatchdog) -> None:
        self._url = url
        self._throttle, self._watch = throttle, watch
        self._atomic = url.split(":", 1)[0] in ATOMIC
        self._lock = threading.Lock()
        self._open: tuple[Any, str] | None = None
        self._verified: dict[str, Entry] = {}

    def reopen(self) -> None:
        with self._lock:
            self._open = None

    def _system(self) -> tuple[Any, str]:
        with self._lock:
            if self._open is None:
                self._open = open_filesystem(self._url)
            return self._open

    def list(self, folder: str) -> dict[str, int]:
        def find(_: TransferProgress) -> dict[str, int]:
            system, root = self._system()
            found = system.find(f"{root}/{folder}" if folder else root, detail=True)
            names = {str(path): int(details["size"] or 0) for path, details in found.items()}
            return {
                path.removeprefix(root).lstrip("/"): size
                for path, size in names.items()
                if not path.rsplit("/", 1)[-1].startswith(PARTIAL)
            }

        try:
            return self._watch.call(find)
        except FileNotFoundError:
            return {}

    def size(self, name: str) -> int:
        def size(_: TransferProgress) -> int:
            system, root = self._system()
            return int(system.info(f"{root}/{name}")["size"])

        return self._watch.call(size)

    def read(self, name: str) -> bytes:
        def read(_: TransferProgress) -> bytes:
            system, root = self._system()
            return bytes(system.cat_file(f"{root}/{name}"))

        return self._watch.call(read)

    def piece(self, name: str, start: int) -> bytes:
        def read(_: TransferProgress) -> bytes:
            system, root = self._system()
            return bytes(system.cat_file(f"{root}/{name}", start=start, end=start + PIECE_BYTES))

        return self._watch.call(read)

    def write(self, name: str, data: bytes) -> None:
        def write(_: TransferProgress) -> None:
            self._throttle.acquire(len(data))
            system, root = self._system()
            path = f"{root}/{name}"
            if self._atomic:
                system.pipe_file(path, data)
                return
            system.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            partial = f"{path.rsplit('/', 1)[0]}/{PARTIAL}{uuid4().hex}"
            with system.open(partial, "wb") as stream:
                stream.write(data)
            system.mv(partial, path)

        self._watch.call(write, slack_s=self._throttle.seconds(len(data)))

    def send(self, name: str, path: Path, entry: Entry, retry: RetryCallable) -> int:
        if retry(f"look for {name}", lambda: self._has_size(name, entry)):
            if not self._atomic or self._verified.get(name) == entry:
                return 0
            if compute_remote_digest(self, name, entry[1], retry) == entry[0]:
                self._verified[name] = entry
                return 0
        if (found := (digests.hash_file(path), path.stat().st_size)) != entry:
            raise build_damaged_error(path, found)
        partial = name if self._atomic else f"{name.rpartition('/')[0]}/{PARTIAL}{uuid4().hex}"
        slack_s = entry[1] / SLOWEST_BYTES_S + self._throttle.seconds(entry[1])
        call = self._put if self._atomic else self._copy

        def attempt() -> None:
            self._watch.call(lambda progress: call(partial, path, progress), slack_s)
            if compute_remote_digest(self, partial, entry[1], lambda _, read: read()) != entry[0]:
                self.remove(partial)
                raise ContentMismatchError("the content read back differs from what was sent")

        retry(f"write {name}", attempt)
        if partial != name:
            retry(f"write {name}", lambda: self._rename(partial, name, entry))
        self._verified[name] = entry
        return entry[1]

    def remove(self, name: str) -> None:
        def remove(_: TransferProgress) -> None:
            system, root = self._system()
            system.rm_file(f"{root}/{name}")

        self._watch.call(remove)

    def _has_size(self, name: str, entry: Entry) -> bool:
        try:
            return self.size(name) == entry[1]
        except FileNotFoundError:
            return False

    def _put(self, name: str, path: Path, progress: TransferProgress) -> None:
        """Upload with the library's own call. The call completes an object only with its last byte, and reports no
        progress."""
        system, root = self._system()
        self._throttle.acquire(path.stat().st_size)
        progress.moved()
        system.put_file(str(path), f"{root}/{name}")

    def _copy(self, name: str, path: Path, progress: TransferProgress) -> None:
        system, root = self._system()
        system.makedirs(f"{root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        with path.open("rb") as source, system.open(f"{root}/{name}", "wb") as target:
            while block := source.read(self._throttle.at_once_bytes):
                self._throttle.acquire(len(block))
                target.write(block)
                progress.moved()

    def _rename(self, partial: str, name: str, entry: Entry) -> None:
        def rename(_: TransferProgress) -> None:
            system, root = self._system()
            system.mv(f"{root}/{partial}", f"{root}/{name}")

        try:
            self._watch.call(rename)
        except FileNotFoundError:
            if not self._has_size(name, entry):  # otherwise an earlier attempt renamed it, but its answer was lost
                raise
