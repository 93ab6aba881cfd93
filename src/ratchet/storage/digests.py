"""SHA-256 digests of bytes, canonical JSON and directory trees."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHORT = 12
"""Hex digits in messages and directory names (48 bits)."""


def hash_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Format a value as JSON in exactly one way: sorted keys, no spaces, shortest floats that round-trip, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hash_bytes(canonical_json(value).encode())


def hash_files(files: Mapping[str, str]) -> str:
    """Return the digest of a directory from the relative POSIX name and SHA-256 of each file."""
    return hash_json(sorted(files.items()))


def hash_tree(root: Path, names: Iterable[str]) -> str:
    """Return the digest of the named files below `root` (names and contents, not times or modes)."""
    return hash_files({name: hash_file(root / name) for name in names})
