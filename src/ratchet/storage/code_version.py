"""Which code is running, and which state of the project is checked out."""

import re
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from ratchet.storage import digests

DISTRIBUTION = "ratchet-llm"

# MD5 of a stage's first out. DVC writes dvc.lock by machine, always indented alike.
_FIRST_OUT = r"(?m)^  %s:\n(?:    .*\n)*?    outs:\n(?:    [ -].*\n)*?    [ -] md5: (\S+)$"


@lru_cache(maxsize=1)
def code_version() -> str:
    """For example `0.1.0+3f2a91c0`: equal strings mean equal code, committed or not."""
    root = Path(__file__).parents[1]
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return f"{version(DISTRIBUTION)}+{digests.hash_tree(root, names)[:8]}"


def revision_tags(root: Path) -> dict[str, str]:
    """What is checked out in the project: commit of git, state of DVC; nothing where there is none."""
    tags = {}
    with suppress(OSError):  # git is not installed: then there is nothing to record
        described = _git(root, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
        revision, _, dirty = described.partition("-")
        if revision:
            tags = dict.fromkeys(("git.revision", "mlflow.source.git.commit"), revision)
            tags["git.dirty"] = str(bool(dirty)).lower()
            if branch := _git(root, "symbolic-ref", "--short", "-q", "HEAD"):  # none where a commit is checked out
                tags |= dict.fromkeys(("git.branch", "mlflow.source.git.branch"), branch)
    if (lock := root / "dvc.lock").exists():
        text = lock.read_text(encoding="utf-8")
        tags["dvc.lock"] = digests.hash_bytes(text.encode())
        outs = {stage: re.search(_FIRST_OUT % stage, text) for stage in ("base", "prepare")}
        tags |= {f"dvc.{stage}": out[1] for stage, out in outs.items() if out}
    return tags


def _git(root: Path, *arguments: str) -> str:
    """What git says; nothing where it refuses."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
