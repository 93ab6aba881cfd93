"""A store behind a bad network: nothing is called sent that has not arrived, nothing is lost, and it catches up."""

import hashlib
import random
import threading
from collections.abc import Iterator

import pytest

from behind_proxy import FAULTS, LARGE, ONCE, TRICKLE, Mirror
from faulty_proxy import Fault
from ratchet.errors import DamagedError, MirrorError

PART_FAULTS = {
    "503",
    "answer-lost",
    "expired",
    "truncated",
    *(fault for fault in FAULTS if "part" in fault or "wrong" in fault),
}
"""Those that mean something else where there are parts."""
SAME = {"skewed", "bucket-gone-for-a-while"}
"""Those that are as `expired` to small objects."""


@pytest.mark.parametrize(
    ("fault", "size"), [*((fault, 60_000) for fault in FAULTS), *((fault, LARGE) for fault in sorted(PART_FAULTS))]
)
def test_what_was_sent_has_arrived_and_comes_back(mirror: Mirror, fault: str, size: int) -> None:
    name, path, entry = mirror.file(size)
    mirror.proxy.inject(FAULTS[fault]())
    store = mirror.store()
    assert store.send(name, path, entry) >= size
    assert mirror.holds(name) == entry[0]
    mirror.proxy.heal()
    mirror.proxy.inject(FAULTS[fault]())
    store.fetch(name, path.with_suffix(".back"), entry)
    assert path.with_suffix(".back").read_bytes() == path.read_bytes()
    assert mirror.proxy.struck > 0


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


class Storm:
    """Something goes wrong with every third request, for as long as it lasts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def faults(self) -> Iterator[Fault]:
        for kind in ("status", "reset", "lost", "flip-sent", "flip-read", "truncate", "stall"):
            yield Fault(kind, None, lambda _: self._random.random() < 0.055, bytes=3000)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_lets_nothing_false_through(mirror: Mirror, seed: int) -> None:
    files = [mirror.file(size, seed) for size in (0, 1, 999, 50_000, 300_000, LARGE)]
    mirror.proxy.inject(*Storm(seed).faults())
    store = mirror.store()
    for name, path, entry in files:
        store.send(name, path, entry)
        assert mirror.holds(name) == entry[0]
    for number in range(20):
        store.write(f"claims/{number}", b"x" * number)
        assert mirror.holds(f"claims/{number}") == hashlib.sha256(b"x" * number).hexdigest()
    assert store.list("claims") == {f"claims/{number}": number for number in range(20)}
    for name, path, entry in files:
        store.fetch(name, path.with_suffix(".back"), entry)
        assert path.with_suffix(".back").read_bytes() == path.read_bytes()
    assert mirror.proxy.struck > 10


@pytest.mark.parametrize("size", [60_000, LARGE], ids=["small", "parts"])
def test_an_outage_is_waited_for(mirror: Mirror, size: int) -> None:
    name, path, entry = mirror.file(size)
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


def test_an_outage_that_outlasts_patience_is_told_and_nothing_is_lost(mirror: Mirror) -> None:
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


def test_a_trickle_is_no_stall(mirror: Mirror) -> None:
    """Although what lies in buffers takes longer than a time-out."""
    name, path, entry = mirror.file(150_000)
    mirror.proxy.inject(Fault("slow", None, bytes_s=60_000.0))
    store = mirror.store(TRICKLE)
    assert store.send(name, path, entry) == 150_000
    assert mirror.holds(name) == entry[0]
    store.fetch(name, path.with_suffix(".back"), entry)
    assert mirror.proxy.struck == len(mirror.proxy.seen)


def test_damage_in_the_bucket_is_told_from_damage_on_the_way(mirror: Mirror) -> None:
    name, path, entry = mirror.file(60_000)
    store = mirror.store()
    store.send(name, path, entry)
    mirror.server.client.put_object(Bucket=mirror.bucket, Key=f"mirror/{name}", Body=b"y" * 60_000)
    with pytest.raises(DamagedError, match="content differs"):
        store.fetch(name, path.with_suffix(".back"), entry)
    assert not path.with_suffix(".back").exists()
