"""Tests that replicas of two tenants in one bucket are apart: each has credentials for its own prefix only."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import s3_server
from ratchet.errors import ReplicaError, SettingsError
from ratchet.runs.replication.remote_status import list_remote_runs
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.storage import digests

DOCUMENTED = Path(__file__).parents[3] / "docs" / "teams.md"


@pytest.fixture(scope="module")
def tenants() -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yield a bucket, and the environment of each of two tenants, with the policy of the documentation."""
    [text] = re.findall(r'(?ms)^    (\{"Version.*?^    \]\})$', DOCUMENTED.read_text(encoding="utf-8"))
    with s3_server.serve() as server:
        bucket = server.bucket()
        environments = {
            name: server.create_user(name, json.loads(text.replace("BUCKET", bucket).replace("acme", name)))
            for name in ("acme", "zenith")
        }
        server.enforce_policies()
        yield bucket, environments


@pytest.fixture
def stores(
    tenants: tuple[str, dict[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, ReplicaStore]]:
    """Yield the replica of each tenant, for this process as tenant acme."""
    bucket, environments = tenants
    for name, value in environments["acme"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    limits = TransferLimits(retry_timeout_s=0.0)
    yield {name: ReplicaStore(f"s3://{bucket}/{name}", limits, lambda: False) for name in ("acme", "zenith")}


def test_a_replica_works_with_credentials_for_its_prefix(stores: dict[str, ReplicaStore], tmp_path: Path) -> None:
    store, path = stores["acme"], tmp_path / "weights"
    path.write_bytes(b"w" * 9_000_000)  # two parts
    store.check()
    entry = (digests.hash_file(path), path.stat().st_size)
    store.send("runs/r1/objects/a", path, entry)
    version = store.publish("runs/r1/lease.json", b"{}")
    store.publish("runs/r1/lease.json", b"[]", version)
    store.fetch("runs/r1/objects/a", tmp_path / "again", entry)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert list_remote_runs(store) == ["r1"]
    store.remove(["runs/r1/objects/a", "runs/r1/lease.json"])
    assert store.list("runs") == {}


@pytest.mark.parametrize("call", ["check", "list", "read", "write", "remove"])
def test_a_tenant_reaches_nothing_of_another(stores: dict[str, ReplicaStore], call: str) -> None:
    other = stores["zenith"]
    calls = {
        "check": other.check, "list": lambda: other.list("runs", strict=True), "read": lambda: other.read("runs/r/x"),
        "write": lambda: other.write("runs/r/x", b"x"), "remove": lambda: other.remove(["runs/r/x"]),
    }  # fmt: skip
    with pytest.raises((SettingsError, ReplicaError)) as refused:
        calls[call]()
    text = str(refused.value)
    assert "AccessDenied" in text
    assert "lack permission" in text
    assert "acme" not in text
