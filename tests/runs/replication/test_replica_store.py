"""Contract tests of the replica store on a directory and on S3."""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError, ReplicaError, SettingsError
from ratchet.runs.replication.object_storage import ConflictError
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.storage.files import Entry
from s3_server import S3Server

TERMS = TransferLimits(retry_timeout_s=30.0, timeout_s=10.0, first_wait_s=0.001, longest_wait_s=0.05)
SIZES = (0, 1, 70_000, 8 << 20, (16 << 20) + 3)


@dataclass
class Place:
    """Address of a replica, with functions that access its files without the store."""

    url: str
    files: Callable[[], dict[str, bytes]]
    put: Callable[[str, bytes], None]

    def store(self, limits: TransferLimits = TERMS) -> ReplicaStore:
        return ReplicaStore(self.url, limits, lambda: False)


def folder(root: Path, url: str) -> Place:
    def files() -> dict[str, bytes]:
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    return Place(url, files, lambda name, data: (root / name).write_bytes(data) and None)


def in_bucket(server: S3Server, prefix: str) -> Place:
    bucket = server.bucket()
    start = f"{prefix}/" if prefix else ""

    def files() -> dict[str, bytes]:
        return {key.removeprefix(start): data for key, data in server.files(bucket).items()}

    def put(name: str, data: bytes) -> None:
        server.client.put_object(Bucket=bucket, Key=f"{start}{name}", Body=data)

    return Place(f"s3://{bucket}/{prefix}", files, put)


@pytest.fixture(params=["path", "file", "s3", "s3-root"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root = tmp_path / "a replica"
    match request.param:
        case "path":
            yield folder(root, str(root))
        case "file":
            yield folder(root, f"file://{root}")
        case kind:
            server = request.getfixturevalue("s3_environment")
            yield in_bucket(server, "deep/prefix" if kind == "s3" else "")


def made(path: Path, size: int, seed: int = 0) -> Entry:
    path.write_bytes(random.Random(f"{seed} {size}").randbytes(size))
    return hashlib.sha256(path.read_bytes()).hexdigest(), size


def test_small_objects_are_written_over_listed_and_removed(place: Place) -> None:
    store = place.store()
    store.check()
    assert place.files() == {}, "the check leaves nothing"
    assert store.read("runs/r/spec.json") is None
    assert store.list("runs/r") == {}
    store.write("runs/r/spec.json", b"one")
    store.write("runs/r/claims/00000001-a.json", b"two")
    store.write("runs/rest/spec.json", b"another run")
    store.write("runs/r/spec.json", b"three")
    assert store.read("runs/r/spec.json") == b"three"
    assert store.list("runs/r") == {"runs/r/spec.json": 5, "runs/r/claims/00000001-a.json": 3}
    assert set(store.list("runs")) == {*store.list("runs/r"), "runs/rest/spec.json"}
    store.remove(["runs/r/spec.json", "runs/r/never/there"])
    assert list(store.list("runs/r")) == ["runs/r/claims/00000001-a.json"]
    assert place.files() == {"runs/r/claims/00000001-a.json": b"two", "runs/rest/spec.json": b"another run"}


@pytest.mark.parametrize("size", SIZES)
def test_a_file_arrives_whole_and_only_once(place: Place, tmp_path: Path, size: int) -> None:
    source, store = tmp_path / "source", place.store()
    entry = made(source, size)
    name = f"runs/r/objects/{entry[0]}"
    assert store.send(name, source, entry) == size
    assert place.files() == {name: source.read_bytes()}
    assert store.send(name, source, entry) == 0
    assert place.store().send(name, source, entry) == 0, "nor by another process"
    store.fetch(name, tmp_path / "back", entry)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert b"".join(store.blocks(name)) == source.read_bytes()


def test_an_altered_file_is_not_sent_and_an_object_of_another_size_is_replaced(place: Place, tmp_path: Path) -> None:
    source, store = tmp_path / "source", place.store()
    entry = made(source, 1000)
    content = source.read_bytes()
    source.write_bytes(b"x" * 1000)
    with pytest.raises(DamagedFileError, match="content differs from its manifest"):
        store.send("objects/x", source, entry)
    assert place.files() == {}
    source.write_bytes(content)
    store.write("objects/x", b"half of it")
    assert store.send("objects/x", source, entry) == 1000
    assert place.files() == {"objects/x": content}


def test_a_damaged_or_missing_object_is_never_fetched(place: Place, tmp_path: Path) -> None:
    source, store, target = tmp_path / "source", place.store(), tmp_path / "back" / "file"
    entry = made(source, 1000)
    store.send("objects/x", source, entry)
    target.parent.mkdir()
    for damage in (b"", b"y" * 1000, b"y" * 2000):
        place.put("objects/x", damage)
        with pytest.raises(DamagedFileError, match="objects/x"):
            store.fetch("objects/x", target, entry)
    with pytest.raises(DamagedFileError, match="missing"):
        store.fetch("objects/missing", target, entry)
    with pytest.raises(DamagedFileError, match="missing"):
        list(store.blocks("objects/missing"))
    assert list(target.parent.iterdir()) == []


def test_many_threads_share_a_store(place: Place, tmp_path: Path) -> None:
    store = place.store()
    entries = {tmp_path / f"source-{n}": made(tmp_path / f"source-{n}", 5000 + n, n) for n in range(8)}

    def work(path: Path) -> bytes | None:
        store.send(f"objects/{entries[path][0]}", path, entries[path])
        store.write(f"claims/{path.name}", path.name.encode())
        store.fetch(f"objects/{entries[path][0]}", path.with_suffix(".back"), entries[path])
        return store.read(f"claims/{path.name}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, entries)) == [path.name.encode() for path in entries]
    assert all(path.with_suffix(".back").read_bytes() == path.read_bytes() for path in entries)
    assert len(store.list("objects")) == 8


def test_a_partial_file_of_a_dead_writer_is_removed_after_a_day(tmp_path: Path) -> None:
    store = ReplicaStore(str(tmp_path), TERMS, lambda: False)
    for name, age_s in (("old", 2 * 86_400), ("new", 60)):
        path = tmp_path / "objects" / f".partial-{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    assert store.list("objects") == {}
    store.check()
    assert [path.name for path in (tmp_path / "objects").iterdir()] == [".partial-new"]


@pytest.mark.parametrize("folder", ["{here}/file/replica", "/proc/replica"])
def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    url = folder.format(here=tmp_path)
    with pytest.raises(
        SettingsError, match=rf"machine\.replica {url}: cannot .*the bucket, region or directory does not exist"
    ):
        ReplicaStore(url, TERMS, lambda: False).check()


def test_a_host_that_cannot_be_resolved_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nobody.invalid")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(ReplicaError, match=r"machine\.replica s3://bucket/x: cannot .*\(1 try"):
        ReplicaStore("s3://bucket/x", TransferLimits(retry_timeout_s=0.0), lambda: False).check()


def test_of_many_writers_of_a_version_one_succeeds(place: Place) -> None:
    store, succeeded = place.store(), []
    first = store.swap("lease", b"first", None)

    def swap(number: int) -> None:
        with suppress(ConflictError):
            store.swap("lease", b"%d" % number, first)
            succeeded.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(swap, range(8)))
    (number,) = succeeded
    assert store.read("lease") == b"%d" % number
    with pytest.raises(ConflictError):
        store.swap("lease", b"created", None)
    with pytest.raises(ConflictError):
        store.swap("never there", b"replaced", first)
    store.publish("lease", b"published")
    assert store.read("lease") == b"published"


def test_a_stopping_process_tries_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = ReplicaStore(
        str(tmp_path / "file"), TransferLimits(retry_timeout_s=1e9, first_wait_s=1e9, longest_wait_s=1e9), lambda: True
    )
    with pytest.raises(ReplicaError, match=r"cannot write a/b.*\(1 try"):
        store.write("a/b", b"x")


def test_a_limited_store_does_not_exceed_its_bandwidth_and_does_not_count_as_stalled(
    place: Place, tmp_path: Path
) -> None:
    limits = TransferLimits(bytes_s=5_000, retry_timeout_s=0.0, timeout_s=1.5)  # an object waits for 2 s
    store, began_s = place.store(limits), time.monotonic()
    for seed in range(3):
        entry = made(tmp_path / f"source-{seed}", 10_000, seed)
        assert store.send(f"objects/{entry[0]}", tmp_path / f"source-{seed}", entry) == 10_000
    assert time.monotonic() - began_s >= 4.0, "the first object waits for nobody"
