"""Cases for leases: claims of threads, of stopped or killed processes, and of holders without a heartbeat."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits

NAMES = RunObjectNames("abcdef012345")
LONG_S = 600.0


def store(root: Path) -> ReplicaStore:
    return ReplicaStore(str(root / "replica"), TransferLimits(retry_timeout_s=5), lambda: False)


def lease(root: Path, node: str, lease_timeout_s: float) -> ReplicaLease:
    return ReplicaLease(store(root), NAMES, node, lease_timeout_s)


def never() -> bool:
    return False


def quiet(text: str) -> None:
    """Ignore the name of the holder for which the process waits."""


@pytest.fixture
def held() -> Iterator[list[ReplicaLease]]:
    """Return a list of leases that are released after the test."""
    leases: list[ReplicaLease] = []
    yield leases
    for one in leases:
        one.release()
