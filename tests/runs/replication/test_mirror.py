"""A replica with a mirror in another region: two S3 servers, and a copy between them as a storage service makes it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import s3_server
from machines import NAMES, Node, settings
from ratchet.config.machine import Machine
from ratchet.storage import digests
from s3_server import S3Server


@pytest.fixture(scope="module")
def near() -> Iterator[S3Server]:
    with s3_server.serve() as server:
        yield server


UNUSED_BY_DVC = {"AWS_ENDPOINT_URL", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"}
"""Variables that the test of DVC leaves out: each remote names its endpoint, and DVC refuses /dev/null as a file."""


class Regions:
    """A bucket in the home region, and its copy in the near region."""

    def __init__(self, root: Path, home: S3Server, near: S3Server) -> None:
        self.root, self.home, self.near = root, home, near
        self.bucket, self.mirror = home.bucket(), near.bucket()

    def machine(self, **more: object) -> Machine:
        urls = {"replica": f"s3://{self.bucket}/runs", "replica_mirror": f"s3://{self.mirror}/runs"}
        return Machine.model_validate(settings(self.root).model_dump() | {"replica_timeout_s": 20.0} | urls | more)

    def copy(self) -> None:
        """Copy all objects, as the replication of a storage service does some time later."""
        for key, content in self.home.files(self.bucket).items():
            self.near.client.put_object(Bucket=self.mirror, Key=key, Body=content)

    def objects(self) -> list[str]:
        """Return the contents of files in the home region."""
        return [key for key in self.home.files(self.bucket) if f"/{NAMES.folder('objects')}/" in f"/{key}"]


@pytest.fixture
def regions(tmp_path: Path, s3_environment: S3Server, near: S3Server, monkeypatch: pytest.MonkeyPatch) -> Regions:
    """Create a run of one machine with two checkpoints in the home region, of which the near region has a copy."""
    monkeypatch.setenv("RATCHET_MIRROR_ENDPOINT_URL", near.endpoint)
    monkeypatch.setenv("RATCHET_MIRROR_REGION", "eu-west-1")
    made = Regions(tmp_path, s3_environment, near)
    first = Node(tmp_path, "first", made.machine()).acquire()
    first.save(2)
    first.save(4)
    first.wait_until_replicated()
    first.close()
    made.copy()
    return made


def restored(regions: Regions, name: str, machine: Machine) -> tuple[dict[str, str], list[str]]:
    """Restore the run on a machine with an empty disk. Return the digests of the newest checkpoint, and the notices."""
    node = Node(regions.root, name, machine)
    try:
        node.acquire()
        return checkpoint(node), node.texts("notice")
    finally:
        node.close()


def checkpoint(node: Node, step: int = 4) -> dict[str, str]:
    folder = node.paths.checkpoint(step)
    return {path.name: digests.hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def expected(regions: Regions) -> dict[str, str]:
    folder = regions.root / "first" / "runs" / NAMES.run_id / "checkpoints"
    newest = max(path for path in folder.iterdir() if path.is_dir())
    return {path.name: digests.hash_file(path) for path in sorted(newest.rglob("*")) if path.is_file()}


def test_files_are_read_from_the_mirror_and_everything_is_written_to_the_home_region(
    regions: Regions, expected: dict[str, str]
) -> None:
    for key in regions.objects():  # only the mirror has the contents, so it must have been read
        regions.home.client.delete_object(Bucket=regions.bucket, Key=key)
    before = regions.near.files(regions.mirror)
    found, notices = restored(regions, "second", regions.machine())
    assert found == expected
    assert any("read from the mirror s3://" in text for text in notices)
    assert regions.near.files(regions.mirror) == before
    assert regions.home.files(regions.bucket)[f"runs/{NAMES.lease}"] != before[f"runs/{NAMES.lease}"]


def test_what_the_mirror_lacks_or_has_damaged_comes_from_the_home_region(
    regions: Regions, expected: dict[str, str]
) -> None:
    missing, damaged, *_ = regions.objects()
    regions.near.client.delete_object(Bucket=regions.mirror, Key=missing)
    content = regions.near.files(regions.mirror)[damaged]
    regions.near.client.put_object(Bucket=regions.mirror, Key=damaged, Body=bytes(len(content)))
    assert restored(regions, "second", regions.machine())[0] == expected


def test_a_mirror_that_does_not_answer_is_reported_once(
    regions: Regions, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.runs.replication.replicator.MIRROR_TIMEOUT_S", 0.3)
    monkeypatch.setenv("RATCHET_MIRROR_ENDPOINT_URL", "http://127.0.0.1:9")
    found, notices = restored(regions, "second", regions.machine())
    assert found == expected
    assert len([text for text in notices if text.startswith("the mirror is not used: ")]) == 1


def test_after_the_loss_of_the_home_region_the_mirror_becomes_the_replica_by_hand(
    regions: Regions, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", regions.near.endpoint)  # the home region is gone
    machine = regions.machine(replica=f"s3://{regions.mirror}/runs", replica_mirror=None)
    node = Node(regions.root, "second", machine)
    try:
        node.acquire()
        assert checkpoint(node) == expected
        node.save(6)
        node.wait_until_replicated()
    finally:
        node.close()
    assert any("-00000006.json" in key for key in regions.near.files(regions.mirror))


@pytest.mark.long
def test_data_come_from_the_nearest_remote_of_dvc(tmp_path: Path, s3: S3Server, near: S3Server) -> None:
    home_bucket, near_bucket = s3.bucket(), near.bucket()
    project, clone = tmp_path / "project", tmp_path / "clone"
    environment = {name: value for name, value in (os.environ | s3.environment()).items() if name not in UNUSED_BY_DVC}

    def dvc(root: Path, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments], cwd=root, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    project.mkdir()
    dvc(project, "init", "-q", "--no-scm")
    for name, bucket, server in (("home", home_bucket, s3), ("near", near_bucket, near)):
        dvc(project, "remote", "add", name, f"s3://{bucket}/dvc")
        dvc(project, "remote", "modify", name, "endpointurl", server.endpoint)
    dvc(project, "config", "core.remote", "home")
    (project / "rows.csv").write_text("a,b\n", encoding="utf-8")
    dvc(project, "add", "-q", "rows.csv")
    dvc(project, "push", "-q")
    assert regions_keys(s3, home_bucket) and not regions_keys(near, near_bucket)
    for key, content in s3.files(home_bucket).items():
        near.client.put_object(Bucket=near_bucket, Key=key, Body=content)
        s3.client.delete_object(Bucket=home_bucket, Key=key)

    (clone / ".dvc").mkdir(parents=True)
    for name in ("rows.csv.dvc", ".dvc/config"):
        (clone / name).write_bytes((project / name).read_bytes())
    dvc(clone, "config", "--local", "core.remote", "near")
    dvc(clone, "pull", "-q")
    assert (clone / "rows.csv").read_text(encoding="utf-8") == "a,b\n"


def regions_keys(server: S3Server, bucket: str) -> list[str]:
    return sorted(server.files(bucket))
