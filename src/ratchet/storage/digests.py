"""SHA-256 digests of bytes, canonical JSON and directory trees; and versions of the running code and of the project.

Records identify inputs and outputs by these digests. The versions are those of the package, the git commit and the DVC
lock.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratchet.config.extras import DISTRIBUTION

BLOCK_BYTES = 1 << 18
"""Size of the blocks in which a file is read."""
SHORT = 12
"""Number of hex digits of a digest in messages and directory names (48 bits)."""

# MD5 of a stage's first output. DVC always indents dvc.lock in the same way.
_FIRST_OUTPUT = r"(?m)^  %s:\n(?:    .*\n)*?    outs:\n(?:    [ -].*\n)*?    [ -] md5: (\S+)$"


def hash_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file, read in blocks. `on_bytes` is called with the size of each block."""
    digest, buffer = hashlib.sha256(), bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            if on_bytes is not None:
                on_bytes(count)
    return digest.hexdigest()


def hash_unchanged_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files by their names. A file is hashed once per process while its size, time and inode are
    unchanged, because a sweep needs the digests for every trial. Raises OSError if a file is missing."""
    stats = [(name, (directory / name).stat()) for name in names]
    return dict(_hash_files(directory, tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats)))


@lru_cache(maxsize=16)
def _hash_files(directory: Path, stamps: tuple[tuple[str, int, int, int], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, hash_file(directory / name)) for name, *_ in stamps)


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


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return a version such as `0.1.0+3f2a91c0`. Equal strings mean equal code, committed or not."""
    from importlib.metadata import version  # takes 15 ms, and most commands need no version

    root = Path(__file__).parents[1]
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return f"{version(DISTRIBUTION)}+{hash_tree(root, names)[:8]}"


def revision_tags(root: Path) -> dict[str, str]:
    """Return tags for the project's git commit and branch, the hashes in dvc.lock, and the experiment of DVC that this
    process belongs to; empty without git and DVC."""
    tags = {}
    if experiment := os.environ.get("DVC_EXP_NAME"):  # DVC sets it for the commands of an experiment
        tags["dvc.experiment"] = experiment
    with suppress(OSError):  # git is not installed
        described = _git(root, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
        revision, _, dirty = described.partition("-")
        if revision:
            tags |= dict.fromkeys(("git.revision", "mlflow.source.git.commit"), revision)
            tags["git.dirty"] = str(bool(dirty)).lower()
            if branch := _git(root, "symbolic-ref", "--short", "-q", "HEAD"):  # empty if HEAD is detached
                tags |= dict.fromkeys(("git.branch", "mlflow.source.git.branch"), branch)
    if (lock := root / "dvc.lock").exists():
        text = lock.read_text(encoding="utf-8")
        tags["dvc.lock"] = hash_bytes(text.encode())
        outputs = {stage: re.search(_FIRST_OUTPUT % stage, text) for stage in ("base", "prepare")}
        tags |= {f"dvc.{stage}": output[1] for stage, output in outputs.items() if output}
    return tags


def _git(root: Path, *arguments: str) -> str:
    """Return the output of git; empty if git fails."""
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    return result.stdout.strip()


def find_first_difference(expected: Mapping[str, str], actual: Mapping[str, str]) -> tuple[str, str] | None:
    """Compare digests of files by name, and return the first file that differs.

    Returns:
        Its name and `missing`, `new` or `changed`; None if all files are equal.
    """
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            return name, "missing" if name not in actual else "new" if name not in expected else "changed"
    return None
