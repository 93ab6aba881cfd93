"""Proves rows R4 and R25 for replicas: damaged checkpoints, lost results and writers that were declared dead cause no
damage."""

import json
import shutil
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, store
from ratchet.errors import LockHeldError
from ratchet.runs.replication import manifests
from ratchet.runs.replication.lease import read_lease
from ratchet.storage import files
from replicator_cases import (
    Nodes,
    node,  # noqa: F401 (a fixture)
)
from snapshots import contents

PACKAGES = ("runs",)


def object_of(root: Path, one: Node, step: int, file: str) -> Path:
    digest = files.read_manifest(one.paths.checkpoint(step)).files[file][0]
    return root / "replica" / NAMES.object(digest)


@pytest.mark.parametrize("damage", ["flipped", "missing", "document", "refers"])
def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, node: Nodes, damage: str) -> None:
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.save(4)
    first.wait_until_replicated()
    first.close()  # closing first, because the garbage collector of an open node would remove a damaged document
    whole = contents(first.paths.checkpoint(2))
    weights = object_of(tmp_path, first, 4, "trainable.safetensors")
    document = tmp_path / "replica" / NAMES.checkpoint(1, 4)
    if damage == "flipped":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "missing":
        weights.unlink()
    elif damage == "document":
        document.write_bytes(document.read_bytes()[:-20])
    else:
        document.write_text(json.dumps(json.loads(document.read_text()) | {"refers_to": [3]}))
    second = node("second").acquire()
    assert second.paths.checkpoint_steps() == [2]
    assert contents(second.paths.checkpoint(2)) == whole
    assert any("step 4 in the replica is skipped" in text for text in second.texts("notice"))
    second.save(4)
    second.wait_until_replicated()
    third = Node(tmp_path, "third")
    second.close()
    third.acquire()
    assert third.paths.checkpoint_steps()[-1] == 4
    third.close()


def test_what_a_machine_that_was_thought_dead_still_writes_does_not_count(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    lease = first.replicator._lease
    lease._ended.set()  # simulates a suspended machine without a heartbeat
    second = node("second").acquire()
    second.wait_until_replicated()
    # The first machine resumes during an upload. It may not write the document, but a document that was already on its
    # way arrives under its old token.
    upload = first.replicator._upload
    assert upload is not None
    first.save(40)
    sealed = manifests.build_checkpoint_manifest(first.paths.checkpoint(40))
    name = NAMES.checkpoint(lease.token, 40)
    with pytest.raises(LockHeldError, match=second.replicator._context.node):
        upload._sender.send(first.paths.checkpoint(40), sealed, name)
    assert store(tmp_path).read(name) is None
    store(tmp_path).write(name, sealed.as_bytes())
    upload._journal.copy()
    assert not lease.is_sure()
    with pytest.raises(LockHeldError, match=second.replicator._context.node):
        lease.confirm()
    assert first.replicator.lost_reason() is not None
    assert (first.replicator.wait_until_replicated(0.1) or "").endswith("then run the command again")
    second.save(4)
    second.wait_until_replicated()
    second.close()
    third = node("third").acquire()
    assert snapshots.newest(third.paths) == (4, [])
    assert [event.data["step"] for event in third.events("checkpoint_saved")] == [2, 4]


@pytest.mark.parametrize("lost", ["all", "an object", "the document"])
def test_a_result_that_the_replica_has_lost_is_sent_again(tmp_path: Path, node: Nodes, lost: str) -> None:
    first = Node(tmp_path, "first").acquire()
    first.save(2)
    first.finish()
    first.wait_until_replicated()
    first.close()
    quiet = Node(tmp_path, "first").acquire()
    claim = read_lease(store(tmp_path), NAMES)
    assert claim is not None and claim.token == 1, "what is here and there is not taken up again"
    quiet.close()
    digest = files.read_manifest(first.paths.result).files["train.json"][0]
    if lost == "all":
        shutil.rmtree(tmp_path / "replica")
    else:
        (tmp_path / "replica" / (NAMES.object(digest) if lost == "an object" else NAMES.result(1))).unlink()
    again = node("first").acquire()
    assert again.replicator.wait_until_replicated(30.0) is None
    assert any("no longer has the complete result" in text for text in again.texts("notice"))
    again.close()
    other = node("other").acquire()
    assert contents(other.paths.result) == contents(first.paths.result)
    assert [event.data["step"] for event in other.events("checkpoint_saved")] == [2]


def test_why_nothing_arrives_is_told_while_it_is_tried(tmp_path: Path, node: Nodes) -> None:
    """A wait reports the reason even if it is shorter than the retry timeout of one call."""
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    (tmp_path / "replica").rename(tmp_path / "away")
    (tmp_path / "replica").write_text("no folder")
    first.save(4)
    text = first.replicator.wait_until_replicated(2.0) or ""
    assert "the checkpoint of step 4" in text
    assert "cannot" in text
    assert first.texts("alert") == [], "which is too early to be told of"
    (tmp_path / "replica").unlink()
    (tmp_path / "away").rename(tmp_path / "replica")
    first.wait_until_replicated()
