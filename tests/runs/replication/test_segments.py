"""Tests of a journal in segments of several holders: few segments, joined without gaps."""

import random
import re
import time
from pathlib import Path

import pytest

from ratchet.runs.replication import manifests
from ratchet.runs.replication.lease import LeaseRecord, read_lease
from ratchet.runs.replication.manifests import JournalStart, JournalUploader
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits

NAMES = RunObjectNames("abcdef012345")


@pytest.fixture
def store(tmp_path: Path) -> ReplicaStore:
    return ReplicaStore(str(tmp_path / "replica"), TransferLimits(retry_timeout_s=2), lambda: False)


def lines(count: int, seed: int = 1) -> bytes:
    draw = random.Random(seed)
    return b"".join(b'{"n": %d, "x": "%s"}\n' % (n, b"y" * draw.randrange(30)) for n in range(count))


def copy_of(path: Path, store: ReplicaStore, token: int, start: int = 0) -> JournalUploader:
    return JournalUploader(path, store, NAMES, token, JournalStart(start=start))


def holds(store: ReplicaStore, token: int, journal_origin: tuple[int, int] | None) -> None:
    earlier = read_lease(store, NAMES)
    origins = (earlier.origins if earlier else {}) | ({token: journal_origin} if journal_origin else {})
    claim = LeaseRecord(token, f"node-{token}", "holding", 1, "now", origins=origins)
    store.write(NAMES.lease, claim.as_bytes())


def test_appended_lines_are_copied_once_and_up_to_the_last_whole_line(tmp_path: Path, store: ReplicaStore) -> None:
    path, whole = tmp_path / "journal", lines(200)
    path.write_bytes(b"")
    copy = copy_of(path, store, 1)
    draw, written = random.Random(3), 0
    while written < len(whole):
        step = draw.randrange(1, 90)
        with path.open("ab") as stream:
            stream.write(whole[written : written + step])
        written += step
        copy.copy()
        last = path.read_bytes().rfind(b"\n") + 1
        assert copy.end == last
        assert copy.behind() == 0
        assert manifests.recover_journal(store, NAMES).content == path.read_bytes()[:last]
    found = manifests.recover_journal(store, NAMES)
    assert (found.content, found.origin) == (whole, (1, len(whole)))


def test_a_long_run_has_few_segments_and_sends_each_byte_a_few_times(
    tmp_path: Path, store: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "SEGMENT_BYTES", 60)
    path = tmp_path / "journal"
    path.write_bytes(b"")
    copy, flushes, sent = copy_of(path, store, 1), 100, 0
    for n in range(flushes):
        with path.open("ab") as stream:
            stream.write(b'{"n": %04d}\n' % n)
        sent += copy.copy()
    assert len(store.list(NAMES.folder("journal"))) == flushes / 5
    assert sent == 3 * path.stat().st_size
    assert manifests.recover_journal(store, NAMES).content == path.read_bytes()


def test_each_holder_continues_the_journal_of_the_one_before(tmp_path: Path, store: ReplicaStore) -> None:
    path = tmp_path / "journal"
    path.write_bytes(lines(10, 1))
    copy_of(path, store, 1).copy()
    first = path.stat().st_size
    holds(store, 1, None)
    holds(store, 3, (1, first))
    path.write_bytes(path.read_bytes() + lines(5, 2))
    copy_of(path, store, 3, first).copy()
    whole = path.read_bytes()
    assert manifests.recover_journal(store, NAMES).content == whole
    # The first machine returns and writes a segment that no longer belongs to the run.
    store.write(NAMES.journal(1, first), b"odd\n")
    assert manifests.recover_journal(store, NAMES).content == whole
    assert manifests.recover_journal(store, NAMES).origin == (3, len(whole))


@pytest.mark.parametrize("damage", ["gone", "short", "gap"])
def test_a_damaged_piece_ends_the_journal_there(tmp_path: Path, store: ReplicaStore, damage: str) -> None:
    for start, content in ((0, b"aaaaa\n"), (6, b"bbbbb\n"), (12, b"ccccc\n")):
        store.write(NAMES.journal(1, start), content)
    second = NAMES.journal(1, 6)
    if damage == "short":
        store.write(second, b"bb\n")
    else:
        store.remove([second])
    if damage == "gap":
        store.write(NAMES.journal(1, 7), b"bbbb\n")
    found, kept = manifests.recover_journal(store, NAMES), b"aaaaa\nbb\n" if damage == "short" else b"aaaaa\n"
    assert (found.content, found.origin) == (kept, (1, len(kept)))


def test_overlapping_segments_are_read_once(store: ReplicaStore) -> None:
    store.write(NAMES.journal(1, 0), b"aaaaa\nbbbbb\n")
    store.write(NAMES.journal(1, 6), b"bbbbb\nccccc\n")
    assert manifests.recover_journal(store, NAMES).content == b"aaaaa\nbbbbb\nccccc\n"


def steps(*told: tuple[int, float]) -> bytes:
    line = '{"event":"step","t":%s,"attempt":1,"step":%d,"loss":%s}\n'
    return "".join(line % (time.time(), step, loss) for step, loss in told).encode()


def continued(tmp_path: Path, store: ReplicaStore, here: bytes) -> bytes:
    """Return the replica's journal after a machine with another journal became the holder and wrote one more step."""
    path = tmp_path / "journal"
    path.write_bytes(here)
    begins = manifests.join_journal(path, store, NAMES)
    holds(store, 2, begins.origin)
    copy = JournalUploader(path, store, NAMES, 2, begins)
    path.write_bytes(here + b"last\n")
    copy.copy()
    return manifests.recover_journal(store, NAMES).content


ATTEMPT = b'{"event":"attempt_started","t":1,"attempt":1}\n'


@pytest.mark.parametrize(
    ("there", "here", "added"),
    [
        (steps((1, 0.9), (2, 0.8)), ATTEMPT + steps((2, 0.8), (3, 0.7)), steps((3, 0.7))),
        (steps((1, 0.9), (2, 0.8)), steps((1, 0.9)), b""),
        (steps((1, 0.9), (2, 0.8)), steps((1, 0.9)) + ATTEMPT + steps((2, 0.85)), ATTEMPT + steps((2, 0.85))),
        (steps((1, 0.9)), ATTEMPT + steps((2, 0.8)), ATTEMPT + steps((2, 0.8))),
        (steps((1, 0.9)), b"", b""),
        (b"", ATTEMPT + steps((1, 0.9)), ATTEMPT + steps((1, 0.9))),
    ],
    ids=["behind", "ahead", "done otherwise", "from its end", "nothing here", "nothing there"],
)
def test_another_machines_journal_is_continued(
    tmp_path: Path, store: ReplicaStore, there: bytes, here: bytes, added: bytes
) -> None:
    if there:
        store.write(NAMES.journal(1, 0), there)
    found = continued(tmp_path, store, here).decode()
    expected = (there + added + b"last\n").decode()
    assert re.sub(r'"t":[0-9.]+', "", found) == re.sub(r'"t":[0-9.]+', "", expected)


def test_the_same_journal_is_continued_where_it_ends(tmp_path: Path, store: ReplicaStore) -> None:
    assert manifests.recover_journal(store, NAMES) == manifests.RecoveredJournal(b"", None)
    told = steps((1, 0.9), (2, 0.8))
    store.write(NAMES.journal(1, 0), told)
    assert continued(tmp_path, store, told + ATTEMPT) == told + ATTEMPT + b"last\n"
