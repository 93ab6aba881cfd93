"""What a store asks of a place, one try at a time; and reading from it piece by piece."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from ratchet.errors import DamagedError
from ratchet.storage.files import Entry

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Most of an object that is read at once."""


class Trying(Protocol):
    """Calls until it works, as patience has it (`Patience.run`)."""

    def __call__(self, what: str, once: Callable[[], T]) -> T:
        """Raises MirrorError, and FileNotFoundError for what is not there."""


class WrongBytesError(OSError):
    """What arrived is not what was sent."""


class Engine(Protocol):
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

    def send(self, name: str, path: Path, entry: Entry, trying: Trying) -> int:
        """A file, unless it is there; returns the bytes that were sent, tries that failed apart. Verified when it
        returns. Calls `trying` itself, for each step. Raises DamagedError if the file is not what `entry` says."""

    def remove(self, name: str) -> None:
        """An object."""


def damaged(path: Path, found: Entry) -> DamagedError:
    """Of a file here whose content is not what it is sent as."""
    return DamagedError(f"{path}: content differs from its manifest ({found[1]:,} bytes); it is not mirrored")


def pieces(engine: Engine, name: str, size: int, trying: Trying) -> Iterator[bytes]:
    """An object of `size` bytes; what has arrived is not asked for again."""
    start = 0
    while start < size:
        at = start
        piece = trying(f"read {name}", lambda: _some(engine, name, at))  # noqa: B023 (called before `at` changes)
        start += len(piece)
        yield piece


def _some(engine: Engine, name: str, start: int) -> bytes:
    found = engine.piece(name, start)
    if not found:
        raise WrongBytesError(f"it ends after {start:,} bytes")
    return found


def digest_there(engine: Engine, name: str, size: int, trying: Trying) -> str:
    """SHA-256 of an object, read back."""
    found = hashlib.sha256()
    for piece in pieces(engine, name, size, trying):
        found.update(piece)
    return found.hexdigest()
