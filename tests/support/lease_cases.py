"""Leases: claims of threads, of stopped or killed processes, and of silent holders."""

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
    """Ignores the holder that is waited for."""


@pytest.fixture
def held() -> Iterator[list[ReplicaLease]]:
    """Leases that are released at the end."""
    leases: list[ReplicaLease] = []
    yield leases
    for one in leases:
        one.release()
