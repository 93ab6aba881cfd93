"""Objects of a replica: named, verified and retried.

Objects appear atomically. Content counts as stored when the service has returned its MD5 as ETag, or when it was read
back. The ETag of an object that was sent in n parts is the MD5 of the MD5s of its parts, followed by `-n` (Amazon S3
User Guide, "Checking object integrity in Amazon S3").

Waits between attempts use exponential back-off with full jitter: each wait is drawn between 0 and a bound that doubles
(M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

Layout of a replica. All names are relative to `machine.replica`, with `/` between their parts.

    runs/RUN/spec.json                       the run's spec; never changes
    runs/RUN/objects/SHA256                  content of files, each once
    runs/RUN/checkpoints/TOKEN-STEP.json     a sealed checkpoint: files by name, with digest and size; written last
    runs/RUN/journal/TOKEN-START.jsonl       a segment of the journal as holder TOKEN had it, from byte START
    runs/RUN/result/TOKEN.json               the sealed result, like a checkpoint
    runs/RUN/lease.json                      the holder of the run, and which journal each holder continued
    runs/RUN/nodes/NODE.json                 report of a machine: steps, uploads, interruptions
    speed/MACHINE-RANDOM                     test data, while a machine measures its network
    checks/RANDOM                            test data, while a machine checks that it can write and read

TOKEN counts holders of a run from 1, with eight digits. It is a fencing token: a holder that was treated as dead and
comes back writes under its old token, and readers prefer the highest token. Objects that a holder writes more than once
are replaced on the condition that they are unchanged, so a late request overwrites nothing newer.
"""

import hashlib
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from uuid import uuid4

from ratchet.errors import DamagedFileError, RatchetError, ReplicaError, SettingsError
from ratchet.runs.replication.object_storage import (
    ADVICE,
    PART_BYTES,
    ConflictError,
    ContentMismatchError,
    ObjectStorage,
    StoredObject,
    classify_error,
    compute_part_bytes,
    describe_error,
    is_tag_of,
    is_timeout,
    strip_credentials,
)
from ratchet.storage import files
from ratchet.storage.files import Entry

if TYPE_CHECKING:
    from obstore import UpdateVersion

T = TypeVar("T")
FetchObject = Callable[[str, Path, Entry, Callable[[int], None]], None]
"""Downloads an object to a file of this digest and size (`ReplicaStore.fetch`)."""

MAX_READS = 8
"""Maximum number of reads of an object whose content differs in each read."""
BLOCK_BYTES = 1 << 18
READ_BYTES = 4 << 20
"""Size in bytes of the blocks of an upload, and of the ranges of a download."""
POLL_S = 0.2
"""Interval at which a long call checks whether it should stop."""
LONG_S = 2.0
"""Duration after which a call without an answer is reported by `ReplicaStore.trouble`."""


@dataclass(frozen=True)
class RunObjectNames:
    """Object names of one run."""

    run_id: str

    @property
    def root(self) -> str:
        return f"runs/{self.run_id}"

    @property
    def spec(self) -> str:
        return f"{self.root}/spec.json"

    def folder(self, kind: str) -> str:
        """Return the folder of a kind: objects, checkpoints, journal, result or nodes."""
        return f"{self.root}/{kind}"

    def object(self, digest: str) -> str:
        return f"{self.folder('objects')}/{digest}"

    def checkpoint(self, token: int, step: int) -> str:
        return f"{self.folder('checkpoints')}/{token:08d}-{step:08d}.json"

    def journal(self, token: int, start: int) -> str:
        return f"{self.folder('journal')}/{token:08d}-{start:012d}.jsonl"

    def result(self, token: int) -> str:
        return f"{self.folder('result')}/{token:08d}.json"

    @property
    def lease(self) -> str:
        return f"{self.root}/lease.json"

    def node(self, node: str) -> str:
        return f"{self.folder('nodes')}/{node}.json"


def parse_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers at the start of the last part of a name: token and step, or token and start."""
    last = name.rsplit("/", 1)[-1]
    found = re.match(r"[0-9]+(?:-[0-9]+)*(?=[-.])", last)
    return tuple(map(int, found[0].split("-"))) if found else ()


def _ignore_progress(*_: object) -> None:
    """Do nothing, because the caller does not need the progress."""


@dataclass(frozen=True)
class TransferLimits:
    """Limits and timeouts of a store."""

    bytes_s: float | None = None
    """Bandwidth limit in bytes/s. None: no limit."""
    retry_timeout_s: float = 600.0
    """How long one call is retried. 0: one attempt."""
    timeout_s: float = 30.0
    """Time without an answer after which an attempt ends."""
    slowest_bytes_s: float = 1024.0
    """Speed in bytes/s of the slowest connection that does not count as stalled."""
    first_wait_s: float = 0.5
    """Bound of the wait before the first retry. It doubles with each retry."""
    longest_wait_s: float = 30.0
    """Bound of all waits."""


class _Progress:
    """Time of the last progress of a call."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def record(self) -> None:
        """Record progress."""
        self.at_s = time.monotonic()


@dataclass(frozen=True)
class _FileDigests:
    """Digests of a file: its digest and size, and the ETag of its object if the service uses MD5 sums."""

    entry: Entry
    etag: str

    @classmethod
    def compute(cls, path: Path) -> "_FileDigests":
        """Compute the digests in one pass over a file."""
        part_bytes, digest, parts, size = compute_part_bytes(path.stat().st_size), hashlib.sha256(), [], 0
        with path.open("rb") as stream:
            while data := stream.read(part_bytes):
                digest.update(data)
                size += len(data)
                parts.append(hashlib.md5(data, usedforsecurity=False).digest())
        if size <= PART_BYTES:
            etag = parts[0].hex() if parts else hashlib.md5(b"", usedforsecurity=False).hexdigest()
        else:
            etag = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
        return cls((digest.hexdigest(), size), etag)


class ReplicaStore:
    """Objects by name below a URL. All calls are thread-safe.

    Every call raises ReplicaError if it failed for as long as the limits allow, or if `stopping` returned True.
    """

    def __init__(self, url: str, limits: TransferLimits, stopping: Callable[[], bool], is_mirror: bool = False) -> None:
        """Create the store. Nothing is sent yet.

        Args:
            url: `machine.replica`, or a value of `--replica`; both were checked when they were read.
            limits: bandwidth limit and timeouts.
            stopping: called during long calls and between attempts; returns whether to stop.
            is_mirror: whether this is `machine.replica_mirror`, which may be in another region.
        """
        self.display_url = strip_credentials(url)
        """The URL without credentials, for messages."""
        self._limits, self._stopping = limits, stopping
        retries = limits.retry_timeout_s > 0
        self._storage = ObjectStorage(url, limits.timeout_s, limits.slowest_bytes_s, retries, is_mirror)
        self._free_at_s, self._pace_mutex = 0.0, threading.Lock()
        self._verified: dict[str, Entry] = {}
        """Objects that this process has verified."""
        self._calls: dict[object, tuple[str, float, str]] = {}
        """Calls in progress: description, start time, and message of the last error."""

    @property
    def trouble(self) -> str:
        """Last error of a call in progress, or a message about a call without an answer for LONG_S; otherwise empty."""
        calls = sorted(self._calls.values(), key=lambda call: call[1])
        for _, _, message in calls:
            if message:
                return message
        for what, began_s, _ in calls:
            if (spent_s := time.monotonic() - began_s) > LONG_S:
                return f"{self.display_url}: no answer for {spent_s:.0f} s ({what})"
        return ""

    def check(self) -> None:
        """Write, list, read back and remove a small object, and check that conditions of writes are respected.

        Raises:
            SettingsError: bucket, credentials or clock are wrong, the directory cannot be written, or the service
                ignores conditions.
        """
        name, data = f"checks/{uuid4().hex}", b"Ratchet checks whether it can write and read.\n"

        def check() -> None:
            if self._storage.folder is None:
                self._write_conditionally(name, data)
            else:
                self._storage.write(name, data)
            if self._storage.list("checks").get(name) != len(data) or self._storage.read(name).content != data:
                raise ContentMismatchError("the content read back differs from what was written")
            self._storage.remove(name)
            self._storage.remove_stale_partials()

        try:
            self._run("write, list, read and remove", check, strict=True)
        except FileNotFoundError as error:  # for example, for a folder below /proc
            raise SettingsError(
                f"machine.replica {self.display_url}: cannot write: {error}; {ADVICE['place']}"
            ) from None

    def _write_conditionally(self, name: str, data: bytes) -> None:
        """Write a small object with conditions. Raises SettingsError if the service ignores them."""
        self._storage.remove(name)  # an attempt without an answer may have written it
        first = self._storage.swap(name, b"", None)
        self._storage.swap(name, data, first)
        for version in (None, first):
            try:
                self._storage.swap(name, b"not to be written", version)
            except ConflictError:
                continue
            raise SettingsError(
                f"machine.replica {self.display_url}: the service ignores the conditions of writes (If-None-Match, "
                "If-Match), so two machines could train one run; use another service or a shared folder"
            )

    def list(self, folder: str, strict: bool = False) -> dict[str, int]:
        """Return the names below a folder with their sizes in bytes, never from a cache.

        With `strict`, raises SettingsError at once if bucket, directory, credentials or clock are wrong.
        """
        root = self._storage.folder
        if strict and root is not None and not self._run("open the directory", root.is_dir, strict):
            raise SettingsError(
                f"machine.replica {self.display_url}: directory not found: no run was replicated there yet, or "
                "the disk is not mounted"
            )
        try:
            return self._run(f"list {folder}", lambda: self._storage.list(folder), strict)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes | None:
        """Read a small object; return None if it does not exist."""
        found = self.read_version(name)
        return None if found is None else found.content

    def read_version(self, name: str) -> StoredObject | None:
        """Read a small object and the version that `swap` expects; return None if it does not exist."""
        try:
            return self._run(f"read {name}", lambda: self._storage.read(name))
        except FileNotFoundError:
            return None

    def read_from(self, name: str, start: int, end: int) -> bytes | None:
        """Read the bytes `start` to `end` (not included) of an object that may have grown; None if it does not
        exist."""
        try:
            return self._run(f"read {name}", lambda: self._storage.read_range(name, start, end))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small object and verify it. Only one writer may write a name at a time."""

        def write(progress: _Progress) -> None:
            self._pace(len(data), progress)
            if not is_tag_of(self._storage.write(name, data), data):
                self._require_content(name, data)

        self._run_with_progress(f"write {name}", write)

    def swap(self, name: str, data: bytes, version: "UpdateVersion | None") -> "UpdateVersion":
        """Write and verify a small object if it is still of this version. None: if it does not exist. Return the new
        version.

        Raises:
            ConflictError: another writer has written the object.
        """
        expected = version

        def swap(progress: _Progress) -> "UpdateVersion":
            nonlocal expected
            self._pace(len(data), progress)
            try:
                written = self._storage.swap(name, data, expected)
            except ConflictError:
                found = self._find(name)
                if found is None or found.content != data:
                    raise
                return found.version  # an earlier attempt has written it, but its answer was lost
            if not is_tag_of(written.get("e_tag"), data):
                found = self._find(name)
                if found is not None and found.version.get("e_tag") == written.get("e_tag") and found.content != data:
                    expected = written
                    raise ContentMismatchError("the content read back differs from what was written")
            return written

        return self._run_with_progress(f"write {name}", swap)

    def publish(self, name: str, data: bytes, version: "UpdateVersion | None" = None) -> "UpdateVersion":
        """Write and verify a small object that only this process writes. Return its version.

        The write is conditional, so that a late request of an earlier call cannot overwrite it.

        Args:
            name: the object.
            data: its content.
            version: version of the last write of this process, if it is known.
        """
        try:
            return self.swap(name, data, version)
        except ConflictError:
            found = self.read_version(name)
            return self.swap(name, data, None if found is None else found.version)

    def _find(self, name: str) -> StoredObject | None:
        try:
            return self._storage.read(name)
        except FileNotFoundError:
            return None

    def _require_content(self, name: str, data: bytes) -> None:
        if (found := self._find(name)) is None or found.content != data:
            raise ContentMismatchError("the content read back differs from what was written")

    def send(self, name: str, path: Path, entry: Entry) -> int:
        """Upload a file of this digest and size, unless the object exists. Return the bytes sent.

        Raises:
            DamagedFileError: the file does not match `entry`; nothing is sent.
            FileNotFoundError: the file does not exist.
        """
        if self._verified.get(name) == entry and self._inspect(name)[0] == entry[1]:
            return 0
        found = _FileDigests.compute(path)
        if found.entry != entry:
            raise DamagedFileError(
                f"{path}: content differs from its manifest ({found.entry[1]:,} bytes); it is not replicated"
            )
        sent = 0
        if not self._has_content(name, found):
            with path.open("rb") as stream:  # stays readable if the file is removed meanwhile

                def send(progress: _Progress) -> None:
                    nonlocal sent
                    if entry[1] <= PART_BYTES:
                        tag = self._storage.write(name, b"".join(self._blocks(stream, progress)))
                    else:
                        tag = self._storage.write_blocks(name, self._blocks(stream, progress), entry[1])
                    sent += entry[1]
                    if tag != found.etag and self._compute_digest(name, entry[1], progress) != entry[0]:
                        self._storage.remove(name)
                        raise ContentMismatchError("the content read back differs from what was sent")

                self._run_with_progress(f"write {name}", send)
        self._verified[name] = entry
        return sent

    def _blocks(self, stream: BinaryIO, progress: _Progress) -> Iterator[bytes]:
        at = 0
        while block := os.pread(stream.fileno(), BLOCK_BYTES, at):  # an abandoned attempt may still read, too
            at += len(block)
            self._pace(len(block), progress)
            if self._stopping():
                raise InterruptedError("no time left for the transfer")
            yield block

    def _pace(self, count: int, progress: _Progress) -> None:
        """Wait until `count` bytes may be sent: all threads together send n bytes in at least n / bytes_s seconds.

        Raises InterruptedError if `stopping` returns True.
        """
        progress.record()
        if self._limits.bytes_s is None:
            return
        with self._pace_mutex:
            start_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s = start_s + count / self._limits.bytes_s
        while (left_s := start_s - time.monotonic()) > 0:
            time.sleep(min(left_s, POLL_S))
            progress.record()
            if self._stopping():
                raise InterruptedError("no time left for the transfer")

    def _has_content(self, name: str, file: _FileDigests) -> bool:
        """Return whether the object exists with exactly this content."""
        size, tag = self._inspect(name)
        if size != file.entry[1]:
            return False
        what = f"read {name}"
        return tag == file.etag or file.entry[0] == self._run_with_progress(
            what, lambda progress: self._compute_digest(name, file.entry[1], progress)
        )

    def _compute_digest(self, name: str, size: int, progress: _Progress) -> str:
        """Read an object back and compute its SHA-256."""
        digest = hashlib.sha256()
        for start in range(0, size, READ_BYTES):
            digest.update(self._storage.read_range(name, start, min(size, start + READ_BYTES)))
            progress.record()
        return digest.hexdigest()

    def fetch(self, name: str, path: Path, entry: Entry, on_bytes: Callable[[int], None] = _ignore_progress) -> None:
        """Download an object to a new file, durably.

        Args:
            name: the object.
            path: the file.
            entry: its expected digest and size.
            on_bytes: called with the size of each received piece. If it raises, no file is left.

        Raises:
            DamagedFileError: the object does not exist, or differs from `entry` twice in the same way. No file is left.
        """
        partial = path.parent / f"{files.PARTIAL}{path.name}-{uuid4().hex}"
        try:
            wrong_digest = ""
            for _ in range(MAX_READS):
                if (digest := self._copy(name, partial, entry, on_bytes)) == entry[0]:
                    partial.rename(path)
                    files.fsync_directory(path.parent)
                    return
                if digest == wrong_digest:  # a network that alters bytes does not do it in the same way twice
                    break
                wrong_digest = digest
        finally:
            partial.unlink(missing_ok=True)
        raise DamagedFileError(f"{self.display_url}/{name}: content differs from its digest")

    def _copy(self, name: str, partial: Path, entry: Entry, on_bytes: Callable[[int], None]) -> str:
        """Download an object to a partial file. Return the digest of the content."""
        if (size := self._inspect(name)[0]) != entry[1]:
            found = "missing" if size is None else f"{size:,} bytes"
            raise DamagedFileError(f"{self.display_url}/{name}: {found}, its manifest says {entry[1]:,} bytes")
        digest = hashlib.sha256()

        def blocks() -> Iterator[list[bytes]]:
            for piece in self._read_pieces(name, entry[1]):
                digest.update(piece)
                yield [piece]
                on_bytes(len(piece))

        try:
            files.write_blocks(partial, blocks())
        except FileNotFoundError:
            raise DamagedFileError(f"{self.display_url}/{name}: was removed while it was read") from None
        return digest.hexdigest()

    def _read_pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Read an object of `size` bytes in pieces; a retry repeats one piece."""
        for start in range(0, size, READ_BYTES):
            end = min(size, start + READ_BYTES)
            yield self._run(f"read {name}", lambda: self._read_range(name, start, end))  # noqa: B023 (called at once)

    def _read_range(self, name: str, start: int, end: int) -> bytes:
        piece = self._storage.read_range(name, start, end)
        if len(piece) != end - start:
            raise ContentMismatchError(f"the object ends after {start + len(piece):,} bytes")
        return piece

    def blocks(self, name: str) -> Iterator[bytes]:
        """Read an object in pieces, unverified. Raises DamagedFileError if it does not exist."""
        size = self._inspect(name)[0]
        if size is None:
            raise DamagedFileError(f"{self.display_url}/{name}: missing")
        yield from self._read_pieces(name, size)

    def remove(self, names: Collection[str], require: Callable[[], None] = _ignore_progress) -> None:
        """Remove these objects; names without an object are skipped.

        Args:
            names: the objects.
            require: called right before each attempt. An exception from it ends the removal.
        """
        for name in names:

            def remove() -> None:
                require()
                self._storage.remove(name)  # noqa: B023 (called at once)

            try:
                self._run(f"remove {name}", remove)
            except FileNotFoundError:
                continue

    def _inspect(self, name: str) -> tuple[int | None, str]:
        """Return size in bytes and ETag of an object; None as size if it does not exist."""
        try:
            return self._run(f"look for {name}", lambda: self._storage.inspect(name))
        except FileNotFoundError:
            return None, ""

    def _run(self, what: str, attempt: Callable[[], T], strict: bool = False) -> T:
        return self._run_with_progress(what, lambda _: attempt(), strict)

    def _run_with_progress(self, what: str, attempt: Callable[[_Progress], T], strict: bool = False) -> T:
        """Call `attempt` until it returns.

        Args:
            what: description of the call, as an infinitive.
            attempt: makes one attempt of the call, and records its progress.
            strict: raise SettingsError at once for an error that the user must fix, and do not retry.

        Raises:
            ConflictError: `attempt` raised it.
            FileNotFoundError: the object does not exist.
            ReplicaError: the call failed for `retry_timeout_s` after its first failure, or `stopping` returned True.
        """
        call, began_s, failing_since_s, tries = object(), time.monotonic(), math.inf, 0
        self._calls[call] = (what, began_s, "")
        try:
            while True:
                tries += 1
                try:
                    return self._call(attempt)
                except (RatchetError, ConflictError):
                    raise
                except Exception as error:
                    kind = classify_error(error)
                    if kind == "absent":
                        raise FileNotFoundError(describe_error(error)) from None
                    message = f"{self.display_url}: cannot {what}: {describe_error(error)}"
                    message += f"; {ADVICE[kind]}" if ADVICE[kind] else ""
                    self._calls[call] = (what, began_s, message)
                    if strict and kind != "network":
                        raise SettingsError(f"machine.replica {message}") from None
                    failing_since_s = min(failing_since_s, now_s := time.monotonic())
                    left_s = self._limits.retry_timeout_s - (now_s - failing_since_s)
                    if left_s <= 0 or not self._wait(tries, left_s):
                        tried = f"{tries} {'try' if tries == 1 else 'tries'} in {now_s - began_s:.0f} s"
                        raise ReplicaError(f"machine.replica {message} ({tried})") from None
                    if is_timeout(error):
                        self._storage.slow_down()
                    if kind != "network":
                        self._storage.reopen()
        finally:
            del self._calls[call]

    def _call(self, attempt: Callable[[_Progress], T]) -> T:
        """Make one attempt in a thread of its own, because a system call on a disk that does not answer cannot be
        ended. A thread that stalls is abandoned."""
        progress, future = _Progress(), Future[T]()

        def run() -> None:
            try:
                future.set_result(attempt(progress))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="replica-call", daemon=True).start()
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
            if self._stopping():
                raise InterruptedError("no time left for the transfer")
            idle_s = time.monotonic() - progress.at_s
            if self._storage.folder is not None and idle_s > self._limits.timeout_s:  # obstore limits all other calls
                raise TimeoutError(f"no data transferred for {idle_s:.0f} s")

    def _wait(self, tries: int, left_s: float) -> bool:
        """Wait before a retry. Returns False if `stopping` returned True."""
        bound_s = min(self._limits.longest_wait_s, self._limits.first_wait_s * 2.0 ** min(tries - 1, 60), left_s)
        until_s = time.monotonic() + random.uniform(0, bound_s)
        while not self._stopping():
            rest_s = until_s - time.monotonic()
            if rest_s <= 0:
                return True
            time.sleep(min(rest_s, POLL_S))
        return False
