"""A file as S3 takes it in parts, with the sums by which the service says what has arrived.

ETags that are MD5 sums (of an object sent at once: its MD5; of one sent in n parts: the MD5 of the parts' MD5s, and
`-n`), and composite SHA-256 checksums: Amazon S3 User Guide, "Checking object integrity in Amazon S3".
"""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import DamagedError
from ratchet.files import Entry

PART_BYTES = 8 << 20
"""Of all parts but the last; S3 takes none below 5 MiB."""
MOST_PARTS = 10_000


def part_bytes(size: int) -> int:
    """Size of the parts of a file: equal ones, as some services insist."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


def base64_of(digest: bytes) -> str:
    """As the service writes checksums."""
    return base64.b64encode(digest).decode()


@dataclass(frozen=True)
class Parts:
    """Sums of a file, by part of `each` bytes."""

    path: Path
    each: int
    entry: Entry
    md5s: tuple[bytes, ...]
    sha256s: tuple[bytes, ...]

    @classmethod
    def of(cls, path: Path) -> "Parts":
        """Read a file once."""
        each, whole = part_bytes(path.stat().st_size), hashlib.sha256()
        md5s, sha256s, size = [], [], 0
        for data in _read(path, each):
            whole.update(data)
            size += len(data)
            md5s.append(hashlib.md5(data, usedforsecurity=False).digest())
            sha256s.append(hashlib.sha256(data).digest())
        return cls(path, each, (whole.hexdigest(), size), tuple(md5s), tuple(sha256s))

    @property
    def whole(self) -> bool:
        """Sent at once."""
        return len(self.md5s) == 1

    @property
    def etag(self) -> str:
        """Where ETags are MD5 sums."""
        if self.whole:
            return self.md5s[0].hex()
        return f"{hashlib.md5(b''.join(self.md5s), usedforsecurity=False).hexdigest()}-{len(self.md5s)}"

    @property
    def checksum(self) -> str:
        """SHA-256, as the service writes it."""
        if self.whole:
            return base64_of(self.sha256s[0])
        return f"{base64_of(hashlib.sha256(b''.join(self.sha256s)).digest())}-{len(self.sha256s)}"

    def data(self, number: int) -> bytes:
        """A part, counted from 1. Raises DamagedError when the file has gone."""
        try:
            with self.path.open("rb") as stream:
                stream.seek((number - 1) * self.each)
                return stream.read(self.each)
        except FileNotFoundError:  # which would be taken for an answer of the service
            raise DamagedError(f"{self.path}: was removed while it was sent; it is not mirrored") from None


def _read(path: Path, each: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield stream.read(each)  # of an empty file: one empty part
        while data := stream.read(each):
            yield data
