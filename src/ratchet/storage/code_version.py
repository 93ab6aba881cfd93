"""Versions of the running code and of the project: package, git commit, DVC lock."""

import re
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from ratchet.storage import digests

DISTRIBUTION = "ratchet-llm"

# MD5 of a stage's first output. DVC always indents dvc.lock in the same way.
_FIRST_OUTPUT = r"(?m)^  %s:\n(?:    .*\n)*?    outs:\n(?:    [ -].*\n)*?    [ -] md5: (\S+)$"


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return a version such as `0.1.0+3f2a91c0`. Equal strings mean equal code, committed or not."""
    root = Path(__file__).parents[1]
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return f"{version(DISTRIBUTION)}+{digests.hash_tree(root, names)[:8]}"


def revision_tags(root: Path) -> dict[str, str]:
    """Return tags with the project's git commit and branch, and the hashes in dvc.lock; empty without git and DVC."""
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
        tags["dvc.lock"] = digests.hash_bytes(text.encode())
        outputs = {stage: re.search(_FIRST_OUTPUT % stage, text) for stage in ("base", "prepare")}
        tags |= {f"dvc.{stage}": output[1] for stage, output in outputs.items() if output}
    return tags


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; empty if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
