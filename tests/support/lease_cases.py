"""Who may write a run: claims of threads, of processes that are stopped or killed, and of some that stand still."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.runs.replication.lease import Lease
from ratchet.runs.replication.object_names import RunNames
from ratchet.runs.replication.store import Store, Terms

NAMES = RunNames("abcdef012345")
LONG_S = 600.0


def store(root: Path) -> Store:
    return Store(str(root / "mirror"), Terms(patience_s=5), lambda: False)


def lease(root: Path, node: str, lease_s: float) -> Lease:
    return Lease(store(root), NAMES, node, lease_s)


def never() -> bool:
    return False


def quiet(text: str) -> None:
    """Ignores the holder that is waited for."""


@pytest.fixture
def held() -> Iterator[list[Lease]]:
    """Leases that are released at the end."""
    leases: list[Lease] = []
    yield leases
    for one in leases:
        one.release()
