"""A store behind a bad network: nothing is called sent that has not arrived, nothing is lost, and it catches up."""

import hashlib
import threading

import pytest

from behind_proxy import FAULTS, ONCE, Mirror
from ratchet.errors import MirrorError

SAME = {"skewed", "bucket-gone-for-a-while"}
"""Those that are as `expired` to small objects."""


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - SAME))
def test_small_objects_too(mirror: Mirror, fault: str) -> None:
    store, data = mirror.store(), b"a claim, or a piece of journal\n" * 2000
    mirror.proxy.inject(FAULTS[fault]())
    store.write("claims/one", data)
    assert mirror.holds("claims/one") == hashlib.sha256(data).hexdigest()
    mirror.proxy.heal()
    mirror.proxy.inject(FAULTS[fault]())
    assert store.read("claims/one") == data
    mirror.proxy.heal()
    mirror.proxy.inject(FAULTS[fault]())
    assert store.list("claims") == {"claims/one": len(data)}
    mirror.proxy.heal()
    mirror.proxy.inject(FAULTS[fault]())
    store.remove(["claims/one"])
    assert mirror.holds("claims/one") is None
    assert mirror.proxy.struck > 0


def test_an_outage_is_waited_for(mirror: Mirror) -> None:
    name, path, entry = mirror.file(60_000)
    store = mirror.store()
    mirror.proxy.down = True
    sending = threading.Thread(target=store.send, args=(name, path, entry))
    sending.start()
    while mirror.proxy.refused < 30 and sending.is_alive():
        sending.join(0.01)
    assert mirror.holds(name) is None
    mirror.proxy.heal()
    sending.join(60)
    assert mirror.holds(name) == entry[0]


def test_an_outage_longer_than_patience_is_reported_and_nothing_is_lost(mirror: Mirror) -> None:
    name, path, entry = mirror.file(60_000)
    store = mirror.store(ONCE)
    mirror.proxy.down = True
    with pytest.raises(MirrorError, match=rf"s3://{mirror.bucket}/mirror: cannot .*\(1 try"):
        store.send(name, path, entry)
    with pytest.raises(MirrorError):
        store.list("objects")
    with pytest.raises(MirrorError):
        store.read(name)
    mirror.proxy.heal()
    assert store.send(name, path, entry) == 60_000
    assert mirror.holds(name) == entry[0]
