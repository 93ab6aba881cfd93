"""A place of a mirror, anything that fsspec can open: complete or absent, verified, and patient with a bad network."""

import errno
import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from ratchet.config.machine import explain_scheme_fault
from ratchet.errors import DamagedFileError, MirrorError, SettingsError
from ratchet.runs.replication import file_backends
from ratchet.runs.replication.backend import (
    BandwidthThrottle,
    ContentMismatchError,
    StorageBackend,
    TransferWatchdog,
    read_pieces,
)
from ratchet.runs.replication.file_backends import LocalBackend
from ratchet.runs.replication.retry import ADVICE, RetryPolicy, refuse_secrets, strip_credentials
from ratchet.runs.replication.s3_backend import S3Backend
from ratchet.storage import files
from ratchet.storage.files import Entry

S3 = ("s3", "s3a")
READINGS = 8
"""Of an object that is another each time."""
FOLDER = ("", "file", "local")


def _ignore_progress(*about: object) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class TransferLimits:
    """How a store deals with its network."""

    bytes_s: float | None = None
    """Most that is sent in a second; None: no cap."""
    patience_s: float = 600.0
    """How long one call tries again before it gives up; 0: once. Each part of a large object is a call of its own."""
    timeout_s: float = 30.0
    """Without a byte or an answer, after which a try is over."""
    slowest_bytes_s: float = 1024.0
    """Of a connection that does not count as stalled: what lies in buffers may take so long beyond a time-out."""
    first_wait_s: float = 0.5
    """Bound of the wait before the second try; it doubles with each."""
    longest_wait_s: float = 30.0
    """Bound of all waits."""


class ReplicaStore:
    """Objects by name below a URL. Every call may be made from any thread.

    Every call raises MirrorError when it did not work for as long as the terms say, or when there is no more time.
    """

    def __init__(self, url: str, terms: TransferLimits, stopping: Callable[[], bool]) -> None:
        """Open; nothing is sent yet.

        Args:
            url: `machine.mirror`.
            terms: of the network.
            stopping: asked between tries: whoever waits for us has no more time.

        Raises:
            SettingsError: a URL that fsspec does not know, or whose library is not installed (said how to install
                it), or where no other machine can read, or that carries a secret.
        """
        refuse_secrets(url)
        self.shown = strip_credentials(url)
        """The URL, as messages may name it."""
        self._engine = _create_backend(
            url,
            BandwidthThrottle(terms.bytes_s),
            TransferWatchdog(terms.timeout_s, terms.slowest_bytes_s, stopping),
            terms.timeout_s,
        )
        waits_s = (terms.patience_s, terms.first_wait_s, terms.longest_wait_s)
        self._trying = RetryPolicy(self.shown, waits_s, stopping, self._engine.reopen)

    @property
    def trouble(self) -> str:
        """Why a call under way has not worked so far, in words; empty when there is nothing to tell."""
        return self._trying.trouble

    def check(self) -> None:
        """Write, list, read back and remove a small object.

        Raises:
            SettingsError: bucket, credentials or clock are wrong, or the folder cannot be written.
        """
        name, data = f"checks/{uuid4().hex}", b"may Ratchet write here, and read?\n"

        def check() -> None:
            self._engine.write(name, data)
            if self._engine.list("checks").get(name) != len(data) or self._engine.read(name) != data:
                raise ContentMismatchError("what was written is not what is there")
            self._engine.remove(name)

        try:
            self._trying.run("write, list, read and remove", check, strict=True)
        except FileNotFoundError as error:  # such as below /proc
            raise SettingsError(
                f"machine.mirror {self.shown}: cannot write there: {error}; {ADVICE['place']}"
            ) from None
        if isinstance(self._engine, LocalBackend):
            self._trying.run("tidy up", self._engine.tidy)

    def list(self, folder: str, strict: bool = False) -> dict[str, int]:
        """Names below a folder and their sizes in bytes; never from a cache.

        Strict: raises SettingsError, at once, where bucket, folder, credentials or clock are wrong.
        """
        try:
            if (
                strict
                and isinstance(self._engine, LocalBackend)
                and not self._trying.run("look", self._engine.is_there, strict)
            ):
                raise SettingsError(
                    f"machine.mirror {self.shown}: there is no such folder: no run was mirrored there yet, its disk is "
                    "not mounted here, or it is another one"
                )
            return self._trying.run(f"list {folder}", lambda: self._engine.list(folder), strict)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes | None:
        """A small object, whole; None if there is none."""
        try:
            return self._trying.run(f"read {name}", lambda: self._engine.read(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """A small object, read back. Only one writer may write a name at a time."""

        def write() -> None:
            self._engine.write(name, data)
            try:
                there = self._engine.read(name)
            except FileNotFoundError as error:
                raise ContentMismatchError("it was written, and is not there") from error
            if there != data:
                raise ContentMismatchError("read back, it is not what was written")

        self._trying.run(f"write {name}", write)

    def send(self, name: str, path: Path, entry: Entry) -> int:
        """Copy a file of this digest and size there, unless it is there; returns the bytes that were sent.

        Parts that have arrived are not sent again. It is there only when what arrived has been verified.

        Raises:
            DamagedFileError: the file is not what `entry` says; nothing is sent.
            FileNotFoundError: there is no such file, or no longer.
        """
        try:
            return self._engine.send(name, path, entry, self._trying.run)
        except ContentMismatchError as error:
            raise MirrorError(f"machine.mirror {self.shown}: {error}") from None
        except DamagedFileError:
            if path.exists():
                raise
            raise FileNotFoundError(errno.ENOENT, "was removed while it was sent", str(path)) from None

    def fetch(self, name: str, path: Path, entry: Entry, beat: Callable[[int], None] = _ignore_progress) -> None:
        """Copy an object to a file that is not there yet, durably.

        Args:
            name: of the object.
            path: of the file.
            entry: what it is to hold.
            beat: told of the bytes of each piece that came; may raise, and then nothing is left.

        Raises:
            DamagedFileError: it is not there, or not what `entry` says, the same twice; there is no file then.
        """
        partial = path.parent / f"{files.PARTIAL}{path.name}-{uuid4().hex}"
        try:
            wrong = ""
            for _ in range(READINGS):
                if (found := self._copy(name, partial, entry, beat)) == entry[0]:
                    partial.rename(path)
                    files.fsync_directory(path.parent)
                    return
                if found == wrong:  # a network that alters bytes does not do it in the same way twice
                    break
                wrong = found
        finally:
            partial.unlink(missing_ok=True)
        raise DamagedFileError(f"{self.shown}/{name}: content differs from its digest; this copy is of no use")

    def _copy(self, name: str, partial: Path, entry: Entry, beat: Callable[[int], None]) -> str:
        """Returns the digest of what came."""
        if (size := self._size(name)) != entry[1]:
            found = "missing" if size is None else f"{size:,} bytes"
            raise DamagedFileError(f"{self.shown}/{name}: {found}, its manifest says {entry[1]:,} bytes")
        found_digest = hashlib.sha256()

        def blocks() -> Iterator[list[bytes]]:
            for piece in read_pieces(self._engine, name, entry[1], self._trying.run):
                found_digest.update(piece)
                yield [piece]
                beat(len(piece))

        try:
            files.write_blocks(partial, blocks())
        except FileNotFoundError:
            raise DamagedFileError(f"{self.shown}/{name}: was removed while it was read") from None
        return found_digest.hexdigest()

    def blocks(self, name: str) -> Iterator[bytes]:
        """An object, piece by piece; unverified. Raises DamagedFileError if there is none."""
        size = self._size(name)
        if size is None:
            raise DamagedFileError(f"{self.shown}/{name}: missing")
        yield from read_pieces(self._engine, name, size, self._trying.run)

    def remove(self, names: Collection[str], require: Callable[[], None] = _ignore_progress) -> None:
        """Remove those that are there.

        Args:
            names: of objects.
            require: called right before each try; what it raises ends it.
        """
        for name in names:

            def remove() -> None:
                require()
                self._engine.remove(name)  # noqa: B023 (called at once)

            try:
                self._trying.run(f"remove {name}", remove)
            except FileNotFoundError:
                continue

    def _size(self, name: str) -> int | None:
        try:
            return self._trying.run(f"look for {name}", lambda: self._engine.size(name))
        except FileNotFoundError:
            return None


def _create_backend(url: str, throttle: BandwidthThrottle, watch: TransferWatchdog, timeout_s: float) -> StorageBackend:
    """Whoever knows the scheme of a URL best."""
    parts = urlsplit(url) if "://" in url else None
    scheme = "" if parts is None else parts.scheme
    if scheme in S3:
        return S3Backend(url, throttle, watch, timeout_s)
    if scheme in FOLDER:
        path = Path(url if parts is None else unquote(parts.netloc + parts.path))
        return LocalBackend(path.expanduser().absolute(), throttle, watch)
    if fault := explain_scheme_fault(url):
        raise SettingsError(f"machine.mirror {strip_credentials(url)}: {fault}")
    file_backends.require_known_scheme(url)
    return file_backends.FsspecBackend(url, throttle, watch)
