"""Proves row R13: under any fault of the network or the object store, an object counts as uploaded only if it has
arrived."""

import hashlib
import random
from collections.abc import Iterator

import pytest

from behind_proxy import FAULTS, LARGE, TRICKLE, Replica
from faulty_proxy import Fault

PACKAGES = ("runs",)
PART_FAULTS = {
    "503",
    "answer-lost",
    "expired",
    "truncated",
    *(fault for fault in FAULTS if "part" in fault or "wrong" in fault),
}
"""Faults that have a different effect on multipart uploads."""


@pytest.mark.parametrize(
    ("fault", "size"), [*((fault, 60_000) for fault in FAULTS), *((fault, LARGE) for fault in sorted(PART_FAULTS))]
)
def test_what_was_sent_has_arrived_and_comes_back(replica: Replica, fault: str, size: int) -> None:
    name, path, entry = replica.file(size)
    replica.proxy.inject(FAULTS[fault]())
    store = replica.store()
    assert store.send(name, path, entry) >= size
    assert replica.holds(name) == entry[0]
    replica.proxy.heal()
    replica.proxy.inject(FAULTS[fault]())
    store.fetch(name, path.with_suffix(".back"), entry)
    assert path.with_suffix(".back").read_bytes() == path.read_bytes()
    assert replica.proxy.struck > 0


class Storm:
    """Faults in about a third of all requests, until they are removed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def faults(self) -> Iterator[Fault]:
        for kind in ("status", "reset", "lost", "flip-sent", "flip-read", "truncate", "stall"):
            yield Fault(kind, None, lambda _: self._random.random() < 0.055, bytes=3000)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_lets_nothing_false_through(replica: Replica, seed: int) -> None:
    files = [replica.file(size, seed) for size in (0, 1, 999, 50_000, 300_000, LARGE)]
    replica.proxy.inject(*Storm(seed).faults())
    store = replica.store()
    for name, path, entry in files:
        store.send(name, path, entry)
        assert replica.holds(name) == entry[0]
    for number in range(20):
        store.write(f"claims/{number}", b"x" * number)
        assert replica.holds(f"claims/{number}") == hashlib.sha256(b"x" * number).hexdigest()
    assert store.list("claims") == {f"claims/{number}": number for number in range(20)}
    for name, path, entry in files:
        store.fetch(name, path.with_suffix(".back"), entry)
        assert path.with_suffix(".back").read_bytes() == path.read_bytes()
    assert replica.proxy.struck > 10


def test_a_trickle_is_no_stall(replica: Replica) -> None:
    """Buffered data takes longer to arrive than the timeout, but the transfer is not a stall."""
    name, path, entry = replica.file(150_000)
    replica.proxy.inject(Fault("slow", None, bytes_s=60_000.0))
    store = replica.store(TRICKLE)
    assert store.send(name, path, entry) == 150_000
    assert replica.holds(name) == entry[0]
    store.fetch(name, path.with_suffix(".back"), entry)
    assert replica.proxy.struck == len(replica.proxy.seen)
