"""Which code is running: the package's version and a fingerprint of its source files."""

from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from ratchet import digest

DISTRIBUTION = "ratchet-llm"


@lru_cache(maxsize=1)
def code_version() -> str:
    """For example `0.1.0+3f2a91c0`: equal strings mean equal code, committed or not."""
    root = Path(__file__).parent
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return f"{version(DISTRIBUTION)}+{digest.of_tree(root, names)[:8]}"
