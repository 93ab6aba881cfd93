"""A run that several machines train together and that one of them uploads."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machines import NAMES, Node, store, together, wait_until
from ratchet.runs.replication.lease import LeaseRecord, read_lease

Members = Callable[..., Node]
PLACE = "one.example:29400"


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Members]:
    """Return a function that creates machines which have acquired the run. The machines end with the test."""
    made: list[Node] = []

    def make(name: str, **more: object) -> Node:
        made.append(Node(tmp_path, name, together(tmp_path, **more)).acquire())
        return made[-1]

    yield make
    for one in made:
        one.close()


def train(*nodes: Node) -> None:
    """Record that the ranks of the machines have joined and train."""
    names = sorted(one.replicator._context.node for one in nodes)
    for one in nodes:
        one.run.journal.append("worker_ready", start_step=0, planned_steps=9, replicators=names)


def save(step: int, *nodes: Node, best: int = 0) -> None:
    """Seal a checkpoint on each machine."""
    for one in nodes:
        one.save(step, best)


def copies(one: Node) -> bool:
    return one.replicator._held is not None


def state(root: Path) -> str:
    claim = read_lease(store(root), NAMES)
    return claim.state if claim else "never held"


def stranger(root: Path, rendezvous: str | None, sign: int = 1) -> None:
    """Write a renewed lease claim of a machine outside the rendezvous."""
    claim = LeaseRecord(4, "far-away-1", "holding", sign, "2026-01-01T00:00:00+00:00", rendezvous=rendezvous)
    store(root).write(NAMES.lease, claim.as_bytes())


def pair(member: Members) -> tuple[Node, Node]:
    """Return the machine that uploads the run and the other machine."""
    first, second = member("first"), member("second")
    train(first)
    wait_until(lambda: copies(first))
    train(first, second)
    return first, second


def signs_until(root: Path, rendezvous: str | None, there: Callable[[], object]) -> None:
    sign = 0
    while not there():
        stranger(root, rendezvous, sign := sign + 1)
        assert sign < 300, "it did not come about"
        time.sleep(0.1)
