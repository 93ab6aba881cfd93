"""Tests of a run that moves from machine to machine through its replica."""

import json
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, settings, store, wait_until
from ratchet.errors import InterruptedRunError, LockHeldError, ReplicaError, SettingsError
from ratchet.runs import replication_protocol, status
from ratchet.runs.replication import manifests, replicator
from ratchet.runs.replication.lease import LeaseRecord, read_lease
from ratchet.stages.status import read_run_status
from ratchet.storage import files
from replicator_cases import (
    Nodes,
    node,  # noqa: F401 (a fixture)
)
from snapshots import contents


def objects(root: Path) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in store(root).list(NAMES.folder("objects"))}


def test_the_run_moves_from_machine_to_machine_and_only_new_content_is_sent(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.save(4)
    first.save(6, best=2, good=4)
    first.wait_until_replicated()
    made = {step: contents(first.paths.checkpoint(step)) for step in (2, 4, 6)}
    journal = first.paths.journal.read_bytes()
    first.close()
    second = node("second").acquire()
    assert second.paths.checkpoint_steps() == [2, 4, 6]
    assert {step: contents(second.paths.checkpoint(step)) for step in (2, 4, 6)} == made
    assert second.paths.journal.read_bytes().startswith(journal)
    assert "restored from the replica: the checkpoint of step 6" in second.texts("notice")[-1]
    assert snapshots.newest(second.paths) == (6, [])
    second.wait_until_replicated()
    again = second.events("replicated")[-1].data
    assert (again["step"], again["bytes_sent"]) == (6, 0)
    sizes = [files.read_manifest(second.paths.checkpoint(step)).size_bytes for step in (2, 4, 6)]
    assert again["bytes_skipped"] == sum(sizes), "step 6 refers to steps 2 and 4"
    second.save(8)
    second.wait_until_replicated()
    more = second.events("replicated")[-1].data
    assert more["bytes_skipped"] > 0, "constants and identity are those of step 6"
    assert more["bytes_sent"] + more["bytes_skipped"] == files.read_manifest(second.paths.checkpoint(8)).size_bytes
    second.close()
    third = node("third").acquire()
    assert [event.data["step"] for event in third.events("step")] == list(range(1, 9))
    assert [event.data["step"] for event in third.events("checkpoint_saved")] == [2, 4, 6, 8]


def test_a_document_that_names_files_elsewhere_is_damage() -> None:
    entry = {"sha256": "0" * 64, "bytes": 1}
    good = {"format": 1, "kind": "checkpoint", "step": 2, "refers_to": [], "files": {"a/b": entry}}
    assert manifests.ReplicaManifest.from_bytes(json.dumps(good).encode(), "x").files == {"a/b": ("0" * 64, 1)}
    for bad in ({"files": {"../a": entry}}, {"files": {"/a": entry}}, {"files": {"a": {"sha256": "../x", "bytes": 1}}}):
        with pytest.raises(files.DamagedFileError):
            manifests.ReplicaManifest.from_bytes(json.dumps(good | bad).encode(), "x")


def test_the_same_machine_resumes_at_once_from_its_own_disk_when_that_is_further(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.vanish()
    again = Node(tmp_path, "first")
    again.save(4)  # sealed but not uploaded before the process died
    told: list[bool] = []

    def stopping() -> bool:
        told.append(True)
        return len(told) > 2

    again.replicator.acquire(stopping)  # the process that held the lock of the directory is gone, so there is no wait
    assert again.paths.checkpoint_steps() == [2, 4]
    again.wait_until_replicated()
    assert store(tmp_path).read(NAMES.checkpoint(2, 4)) is not None
    assert again.replicator._lease.token == 2
    again.close()
    other = node("other").acquire()
    assert [event.data["step"] for event in other.events("checkpoint_saved")] == [2, 4]


def test_a_run_that_was_begun_without_a_replica_keeps_its_state_and_is_copied(tmp_path: Path, node: Nodes) -> None:
    first = Node(tmp_path, "first")
    first.save(2)
    first.save(4)
    first.acquire()
    first.wait_until_replicated()
    first.close()
    second = node("second").acquire()
    assert snapshots.newest(second.paths) == (4, [])
    assert [event.data["step"] for event in second.events("checkpoint_saved")] == [2, 4]


def test_notes_about_another_replica_are_not_used(tmp_path: Path, node: Nodes) -> None:
    first = Node(tmp_path, "first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.close()
    moved = settings(tmp_path).model_copy(update={"replica": str(tmp_path / "another")})
    again = Node(tmp_path, "first", moved).acquire()
    again.save(4)
    again.wait_until_replicated()
    again.close()
    (tmp_path / "replica").rename(tmp_path / "gone")
    (tmp_path / "another").rename(tmp_path / "replica")
    second = node("second").acquire()
    assert snapshots.newest(second.paths) == (4, [])
    assert [event.data["step"] for event in second.events("checkpoint_saved")] == [2, 4]


def test_damage_and_an_interrupted_fetch_are_made_good_from_the_replica(
    tmp_path: Path, node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node("first").acquire()
    first.save(2)
    first.save(4, best=2)
    first.wait_until_replicated()
    first.close()
    (first.paths.checkpoint(4) / "state.json").write_text("{")
    again = Node(tmp_path, "first").acquire()
    assert snapshots.newest(again.paths) == (4, [])
    again.close()
    broken = Node(tmp_path, "second")
    count = [0]

    def fail(operation: files.Operation, path: Path) -> None:
        count[0] += 1
        if count[0] == 40:
            raise OSError("the disk is gone")

    monkeypatch.setattr(files, "before", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        broken.acquire()
    monkeypatch.undo()
    broken.close()
    second = node("second").acquire()
    assert snapshots.newest(second.paths) == (4, [])
    assert [event.data["step"] for event in second.events("checkpoint_saved")] == [2, 4]


def test_a_machine_that_is_not_sure_of_the_run_claims_nothing_to_be_durable(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.replicator._lease._renewed_s = 0.0
    first.replicator._lease._ended.set()
    first.save(2)
    assert "step 2" in (first.replicator.wait_until_replicated(0.5) or "")
    assert first.events("replicated") == []


def test_a_run_that_another_machine_trains_is_refused_until_it_has_a_result(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    with pytest.raises(LockHeldError, match="only one machine may"):
        node("second").acquire()
    first.finish()
    first.wait_until_replicated()
    made = contents(first.paths.result)
    third = node("third").acquire()
    assert contents(third.paths.result) == made
    assert third.paths.is_finished()
    assert third.replicator.wait_until_replicated(0.0) is None
    assert third.replicator.lost_reason() is None
    claim = read_lease(store(tmp_path), NAMES)
    assert claim is not None and claim.token == 1, "a finished run needs no lease"


def test_a_result_that_is_not_in_the_replica_yet_is_sent_by_the_same_command(tmp_path: Path, node: Nodes) -> None:
    first = Node(tmp_path, "first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.vanish()
    again = Node(tmp_path, "first")
    again.finish()
    again.acquire()
    again.wait_until_replicated()
    assert store(tmp_path).read(NAMES.result(2)) is not None
    assert again.events("replicated")[-1].data["artifact"] == "result"
    again.close()


def test_a_damaged_result_is_passed_over_and_the_run_resumes_from_its_checkpoint(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.finish()
    first.wait_until_replicated()
    digest = files.read_manifest(first.paths.result).files["train.json"][0]
    (tmp_path / "replica" / NAMES.object(digest)).write_text("{}")
    first.close()
    second = node("second").acquire()
    assert not second.paths.is_finished()
    assert snapshots.newest(second.paths) == (2, [])
    assert any("the result in the replica is skipped" in text for text in second.texts("notice"))


def test_an_outage_is_reported_at_its_beginning_and_end_and_everything_arrives(
    tmp_path: Path, node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "RETRY_TIMEOUT_S", 0.1)
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    away = tmp_path / "away"
    (tmp_path / "replica").rename(away)
    (tmp_path / "replica").write_text("a file in the place of the folder: nothing can be listed or written")
    first.save(4)
    first.save(6)
    missing = first.replicator.wait_until_replicated(1.0) or ""
    assert "the checkpoint of step 6 (the replica has step 2)" in missing
    assert replication_protocol.find_unsent_steps(first.paths) == set(), "no launch file says that there is a replica"
    (tmp_path / "replica").unlink()
    away.rename(tmp_path / "replica")
    first.wait_until_replicated()
    wait_until(lambda: len(first.texts("alert")) >= 2)
    begins, ends = first.texts("alert")[:2]
    assert "the replica cannot be updated" in begins
    assert "the replica is reached again" in ends
    assert store(tmp_path).read(NAMES.checkpoint(1, 6)) is not None
    assert store(tmp_path).read(NAMES.checkpoint(1, 4)) is None, "superseded before it could be sent"
    first.wait_until_replicated()
    first.close()
    second = node("second").acquire()
    assert snapshots.newest(second.paths) == (6, [])
    assert [event.data["step"] for event in second.events("checkpoint_saved")] == [2, 4, 6]


def test_a_replica_out_of_reach_at_the_start_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    (tmp_path / "replica").write_text("no folder")
    one = Node(tmp_path, "one")
    with pytest.raises((ReplicaError, SettingsError), match=r"machine\.replica"):
        one.acquire()
    with pytest.raises((InterruptedRunError, SettingsError)):
        one.replicator.acquire(lambda: True)
    one.close()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            NAMES.spec,
            files.json_bytes(snapshots.SPEC.model_dump(mode="json") | {"data_digest": "e" * 64}),
            "differs in data_digest",
        ),
        (NAMES.object("0" * 64), b"?", "not a replica of a run"),
    ],
    ids=["another spec", "objects without a spec"],
)
def test_a_place_of_something_else_is_refused(
    tmp_path: Path, node: Nodes, name: str, content: bytes, says: str
) -> None:
    store(tmp_path).write(name, content)
    with pytest.raises(SettingsError, match=says):
        node("first").acquire()


def test_old_checkpoints_and_what_only_they_had_are_removed_and_what_newer_ones_refer_to_is_not(
    tmp_path: Path, node: Nodes
) -> None:
    first = node("first").acquire()
    for step in (2, 4, 6, 8):
        first.save(step, best=2)
        first.wait_until_replicated()
    wait_until(lambda: store(tmp_path).read(NAMES.checkpoint(1, 4)) is None)
    left = {name.rsplit("/", 1)[-1] for name in store(tmp_path).list(NAMES.folder("checkpoints"))}
    assert left == {f"00000001-{step:08d}.json" for step in (2, 6, 8)}
    wanted = {
        entry[0] for step in (2, 6, 8) for entry in files.read_manifest(first.paths.checkpoint(step)).files.values()
    }
    wait_until(lambda: objects(tmp_path) == wanted)


def test_a_machine_that_has_lost_the_run_removes_nothing(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    for step in (2, 4):
        first.save(step)
        first.wait_until_replicated()
    first.replicator._lease._ended.set()
    later = LeaseRecord(5, "later-1", "holding", 1, "2026-01-01T00:00:00+00:00")
    store(tmp_path).write(NAMES.lease, later.as_bytes())
    upload = first.replicator._upload
    assert upload is not None
    before = objects(tmp_path)
    upload._garbage_collector._keep = 1
    with pytest.raises(LockHeldError):
        upload._garbage_collector.collect()
    assert objects(tmp_path) == before


def test_status_and_report_say_how_far_the_replica_is(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.wait_until_replicated()
    first.save(4)
    first.wait_until_replicated()
    assert "replica     step 4 durable, 0 steps behind" in read_run_status(first.paths).description
    assert status.read_progress(first.paths).replicated_step == 4
    found = replication_protocol.read_replication_state(first.paths)
    assert found is not None
    assert found.describe(9) == "step 4 durable, 5 steps behind"
    away = found.model_copy(update={"failed_since": 100.0}).describe(4, 160.0)
    assert away.endswith("unreachable for 60 s, retrying")

    def reports() -> list[dict[str, object]]:
        names = store(tmp_path).list(NAMES.folder("nodes"))
        return [json.loads(store(tmp_path).read(name) or b"{}") for name in names]

    wait_until(lambda: [one["step"] for one in reports()] == [4])
    (one,) = reports()
    assert {"node", "token", "started", "last", "step", "bytes_sent", "bytes_skipped", "send_s", "outages"} == set(one)
    assert one["token"] == 1
    assert int(str(one["bytes_sent"])) > 0


def test_nothing_is_waited_for_without_a_claim(tmp_path: Path) -> None:
    one = Node(tmp_path, "one", settings(tmp_path))
    assert one.replicator.wait_until_replicated(0.0) is None
    assert one.replicator.lost_reason() is None
    one.replicator.release()
    one.replicator.release()
    one.close()


def test_a_checkpoint_that_is_sealed_again_is_copied_again(tmp_path: Path, node: Nodes) -> None:
    first = node("first").acquire()
    first.save(2)
    first.save(4)
    first.wait_until_replicated()
    first.save(4, best=2)  # stopped before its validation, and sealed again after it
    first.wait_until_replicated()
    assert manifests.read_replica_manifest(store(tmp_path), NAMES.checkpoint(1, 4)).refers_to == (2,)
    first.save(6)  # the objects of the second seal are not removed as unused
    first.wait_until_replicated()
    made = contents(first.paths.checkpoint(4))
    first.close()
    (tmp_path / "replica" / NAMES.checkpoint(1, 6)).unlink()
    second = node("second").acquire()
    assert snapshots.newest(second.paths) == (4, [])
    assert contents(second.paths.checkpoint(4)) == made
