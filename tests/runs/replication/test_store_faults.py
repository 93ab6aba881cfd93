"""A store behind a faulty network confirms only objects that arrived, loses nothing, and catches up."""

import hashlib
import threading

import pytest

from behind_proxy import FAULTS, ONCE, Replica
from ratchet.errors import ReplicaError

SAME = {"skewed", "bucket-gone-for-a-while"}
"""Faults that are equal to `expired` for small objects."""


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - SAME))
def test_small_objects_too(replica: Replica, fault: str) -> None:
    store, data = replica.store(), b"a claim, or a piece of journal\n" * 2000
    replica.proxy.inject(FAULTS[fault]())
    store.write("claims/one", data)
    assert replica.holds("claims/one") == hashlib.sha256(data).hexdigest()
    replica.proxy.heal()
    replica.proxy.inject(FAULTS[fault]())
    assert store.read("claims/one") == data
    replica.proxy.heal()
    replica.proxy.inject(FAULTS[fault]())
    assert store.list("claims") == {"claims/one": len(data)}
    replica.proxy.heal()
    replica.proxy.inject(FAULTS[fault]())
    store.remove(["claims/one"])
    assert replica.holds("claims/one") is None
    assert replica.proxy.struck > 0


def test_an_outage_is_waited_for(replica: Replica) -> None:
    name, path, entry = replica.file(60_000)
    store = replica.store()
    replica.proxy.down = True
    sending = threading.Thread(target=store.send, args=(name, path, entry))
    sending.start()
    while replica.proxy.refused < 30 and sending.is_alive():
        sending.join(0.01)
    assert replica.holds(name) is None
    replica.proxy.heal()
    sending.join(60)
    assert replica.holds(name) == entry[0]


def test_an_outage_longer_than_patience_is_reported_and_nothing_is_lost(replica: Replica) -> None:
    name, path, entry = replica.file(60_000)
    store = replica.store(ONCE)
    replica.proxy.down = True
    with pytest.raises(ReplicaError, match=rf"s3://{replica.bucket}/replica: cannot .*\(1 try"):
        store.send(name, path, entry)
    with pytest.raises(ReplicaError):
        store.list("objects")
    with pytest.raises(ReplicaError):
        store.read(name)
    replica.proxy.heal()
    assert store.send(name, path, entry) == 60_000
    assert replica.holds(name) == entry[0]
