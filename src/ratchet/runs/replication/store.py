"""Object store of a replica: S3, a directory, or any URL that fsspec supports.

Objects appear atomically, and their content is verified. Calls are retried.

Layout of a replica. All names are relative to `machine.replica`, with `/` between their parts.

    runs/RUN/spec.json                       the run's spec; never changes
    runs/RUN/objects/SHA256                  content of files, each once
    runs/RUN/checkpoints/TOKEN-STEP.json     a sealed checkpoint: files by name, with digest and size; written last
    runs/RUN/journal/TOKEN-START-END.jsonl   bytes START to END of the journal as holder TOKEN had it
    runs/RUN/result/TOKEN.json               the sealed result, like a checkpoint
    runs/RUN/claims/TOKEN-NODE.json          claims; the holder with the highest token renews its claim
    runs/RUN/entering/NODE                   exists while a machine is choosing a token
    runs/RUN/nodes/NODE.json                 report of a machine: steps, uploads, interruptions
    speed/MACHINE-RANDOM                     test data, while a machine measures its network
    checks/RANDOM                            test data, while a machine checks that it can write and read

TOKEN counts holders of a run from 1, with eight digits. It is a fencing token: a holder that was treated as dead and
comes back writes under its old token, and readers prefer the highest token. A holder overwrites only its own claim and
report, so two writers cannot damage each other's data.
"""

import errno
import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from ratchet.config.machine import S3_SCHEMES, parse_local_folder
from ratchet.errors import DamagedFileError, ReplicaError, SettingsError
from ratchet.runs.replication.backend import (
    BandwidthThrottle,
    ContentMismatchError,
    FsspecBackend,
    LocalBackend,
    StorageBackend,
    TransferWatchdog,
    read_pieces,
)
from ratchet.runs.replication.retry import ADVICE, RetryPolicy, strip_credentials
from ratchet.runs.replication.s3_backend import S3Backend
from ratchet.storage import files
from ratchet.storage.files import Entry

NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Pattern of a machine's name in a replica."""
MAX_READS = 8
"""Maximum number of reads of an object whose content differs in each read."""


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
        """Return the folder of a kind: objects, checkpoints, journal, result, claims, entering or nodes."""
        return f"{self.root}/{kind}"

    def object(self, digest: str) -> str:
        return f"{self.folder('objects')}/{digest}"

    def checkpoint(self, token: int, step: int) -> str:
        return f"{self.folder('checkpoints')}/{token:08d}-{step:08d}.json"

    def journal(self, token: int, start: int, end: int) -> str:
        return f"{self.folder('journal')}/{token:08d}-{start:012d}-{end:012d}.jsonl"

    def result(self, token: int) -> str:
        return f"{self.folder('result')}/{token:08d}.json"

    def claim(self, token: int, node: str) -> str:
        return f"{self.folder('claims')}/{token:08d}-{node}.json"

    def entering(self, node: str) -> str:
        return f"{self.folder('entering')}/{node}"

    def node(self, node: str) -> str:
        return f"{self.folder('nodes')}/{node}.json"


def parse_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers at the start of the last part of a name: token and step, or token, start and end."""
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
    """How long one call is retried. 0: one attempt. Each part of a large object is a separate call."""
    timeout_s: float = 30.0
    """Time without a byte or an answer after which an attempt ends."""
    slowest_bytes_s: float = 1024.0
    """Speed in bytes/s of the slowest connection that does not count as stalled. The time for the buffered bytes at
    this speed is added to `timeout_s`."""
    first_wait_s: float = 0.5
    """Bound of the wait before the first retry. It doubles with each retry."""
    longest_wait_s: float = 30.0
    """Bound of all waits."""


class ReplicaStore:
    """Objects by name below a URL. All calls are thread-safe.

    Every call raises ReplicaError if it failed for as long as the limits allow, or if `stopping` returned True.
    """

    def __init__(self, url: str, limits: TransferLimits, stopping: Callable[[], bool]) -> None:
        """Create the store. Nothing is sent yet.

        Args:
            url: `machine.replica`, or a value of `--replica`; both were checked when they were read.
            limits: bandwidth limit and timeouts.
            stopping: called between attempts; returns whether to stop.
        """
        self.display_url = strip_credentials(url)
        """The URL without credentials, for messages."""
        self._backend = _create_backend(
            url,
            BandwidthThrottle(limits.bytes_s),
            TransferWatchdog(limits.timeout_s, limits.slowest_bytes_s, stopping),
            limits.timeout_s,
        )
        waits_s = (limits.retry_timeout_s, limits.first_wait_s, limits.longest_wait_s)
        self._retry_policy = RetryPolicy(self.display_url, waits_s, stopping, self._backend.reopen)

    @property
    def trouble(self) -> str:
        """Last error of a call in progress; empty if there is none."""
        return self._retry_policy.trouble

    def check(self) -> None:
        """Write, list, read back and remove a small object.

        Raises:
            SettingsError: bucket, credentials or clock are wrong, or the directory cannot be written.
        """
        name, data = f"checks/{uuid4().hex}", b"Ratchet checks whether it can write and read.\n"

        def check() -> None:
            self._backend.write(name, data)
            if self._backend.list("checks").get(name) != len(data) or self._backend.read(name) != data:
                raise ContentMismatchError("the content read back differs from what was written")
            self._backend.remove(name)

        try:
            self._retry_policy.run("write, list, read and remove", check, strict=True)
        except FileNotFoundError as error:  # for example, for a folder below /proc
            raise SettingsError(
                f"machine.replica {self.display_url}: cannot write: {error}; {ADVICE['place']}"
            ) from None
        if isinstance(self._backend, LocalBackend):
            self._retry_policy.run("remove stale files", self._backend.remove_stale_partials)

    def list(self, folder: str, strict: bool = False) -> dict[str, int]:
        """Return the names below a folder with their sizes in bytes, never from a cache.

        With `strict`, raises SettingsError at once if bucket, directory, credentials or clock are wrong.
        """
        try:
            if (
                strict
                and isinstance(self._backend, LocalBackend)
                and not self._retry_policy.run("open the directory", self._backend.exists, strict)
            ):
                raise SettingsError(
                    f"machine.replica {self.display_url}: directory not found: no run was replicated there yet, or "
                    "the disk is not mounted"
                )
            return self._retry_policy.run(f"list {folder}", lambda: self._backend.list(folder), strict)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes | None:
        """Read a small object; return None if it does not exist."""
        try:
            return self._retry_policy.run(f"read {name}", lambda: self._backend.read(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small object and read it back. Only one writer may write a name at a time."""

        def write() -> None:
            self._backend.write(name, data)
            try:
                stored = self._backend.read(name)
            except FileNotFoundError as error:
                raise ContentMismatchError("the object is missing after it was written") from error
            if stored != data:
                raise ContentMismatchError("the content read back differs from what was written")

        self._retry_policy.run(f"write {name}", write)

    def send(self, name: str, path: Path, entry: Entry) -> int:
        """Upload a file of this digest and size, unless the object exists. Return the bytes sent.

        Parts that have arrived are not sent again. The object appears only after its content has been verified.

        Raises:
            DamagedFileError: the file does not match `entry`; nothing is sent.
            FileNotFoundError: the file does not exist, or was removed during the upload.
        """
        try:
            return self._backend.send(name, path, entry, self._retry_policy.run)
        except ContentMismatchError as error:
            raise ReplicaError(f"machine.replica {self.display_url}: {error}") from None
        except DamagedFileError:
            if path.exists():
                raise
            raise FileNotFoundError(errno.ENOENT, "was removed while it was sent", str(path)) from None

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
        if (size := self._size(name)) != entry[1]:
            found = "missing" if size is None else f"{size:,} bytes"
            raise DamagedFileError(f"{self.display_url}/{name}: {found}, its manifest says {entry[1]:,} bytes")
        digest = hashlib.sha256()

        def blocks() -> Iterator[list[bytes]]:
            for piece in read_pieces(self._backend, name, entry[1], self._retry_policy.run):
                digest.update(piece)
                yield [piece]
                on_bytes(len(piece))

        try:
            files.write_blocks(partial, blocks())
        except FileNotFoundError:
            raise DamagedFileError(f"{self.display_url}/{name}: was removed while it was read") from None
        return digest.hexdigest()

    def blocks(self, name: str) -> Iterator[bytes]:
        """Read an object in pieces, unverified. Raises DamagedFileError if it does not exist."""
        size = self._size(name)
        if size is None:
            raise DamagedFileError(f"{self.display_url}/{name}: missing")
        yield from read_pieces(self._backend, name, size, self._retry_policy.run)

    def remove(self, names: Collection[str], require: Callable[[], None] = _ignore_progress) -> None:
        """Remove these objects; names without an object are skipped.

        Args:
            names: the objects.
            require: called right before each attempt. An exception from it ends the removal.
        """
        for name in names:

            def remove() -> None:
                require()
                self._backend.remove(name)  # noqa: B023 (called at once)

            try:
                self._retry_policy.run(f"remove {name}", remove)
            except FileNotFoundError:
                continue

    def _size(self, name: str) -> int | None:
        try:
            return self._retry_policy.run(f"look for {name}", lambda: self._backend.size(name))
        except FileNotFoundError:
            return None


def _create_backend(url: str, throttle: BandwidthThrottle, watch: TransferWatchdog, timeout_s: float) -> StorageBackend:
    """Create the backend for the scheme of a URL."""
    if (folder := parse_local_folder(url)) is not None:
        return LocalBackend(folder, throttle, watch)
    if urlsplit(url).scheme in S3_SCHEMES:
        return S3Backend(url, throttle, watch, timeout_s)
    return FsspecBackend(url, throttle, watch)
