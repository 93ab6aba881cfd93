"""SHA-256 digests of bytes, canonical JSON and directory trees; and versions of the running code and of the project.

Records identify inputs and outputs by these digests. The versions are those of the package, the git commit and the DVC
lock.
"""

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ratchet.config.extras import DISTRIBUTION

SHORT = 12
"""Number of hex digits of a digest in messages and directory names (48 bits)."""

# MD5 of a stage's first output. DVC always indents dvc.lock in the same way.
_FIRST_OUTPUT = r"(?m)^  %s:\n(?:    .*\n)*?    outs:\n(?:    [ -].*\n)*?    [ -] md5: (\S+)$"


def hash_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes as 64 hex digits."""
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


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return a version such as `0.1.0+3f2a91c0`. Equal strings mean equal code, committed or not."""
    root = Path(__file__).parents[1]
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return f"{version(DISTRIBUTION)}+{hash_tree(root, names)[:8]}"


def revision_tags(root: Path) -> dict[str, str]:
    """Return tags for the project's git commit and branch and the hashes in dvc.lock; empty without git and DVC."""
    tags = {}
    with suppress(OSError):  # git is not installed
        described = _git(root, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
        revision, _, dirty = described.partition("-")
        if revision:
            tags = dict.fromkeys(("git.revision", "mlflow.source.git.commit"), revision)
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
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
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
