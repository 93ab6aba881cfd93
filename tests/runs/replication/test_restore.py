"""Tests of restoring a run directory from its replica: progress, stop requests and no leftovers."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import snapshots
from machines import NAMES, Node, settings, store, wait_until
from progress_recorder import ProgressRecorder
from ratchet.errors import InterruptedRunError, ReplicaError
from ratchet.runs.directory import RunPaths
from ratchet.runs.replication import restore
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.runs.replication_protocol import ReplicationSession
from ratchet.stages.reset import reset, reset_replica
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import use_reporter


def trained(root: Path, name: str, *steps: int) -> Node:
    """Train and upload these steps on a machine, then close it."""
    one = Node(root, name, settings(root)).acquire()
    for step in steps:
        one.save(step)
        one.wait_until_replicated()
    one.close()
    return one


def aside(node: Node) -> set[str]:
    """Return the names of the files that restoring set aside."""
    return {path.name for path in node.paths.root.rglob("superseded-*")}


# -------------------------------------------------------------------------------------------------- during the transfer


def test_progress_of_a_fetch_is_reported_in_bytes(tmp_path: Path) -> None:
    trained(tmp_path, "first", 2)
    recorder = ProgressRecorder()
    with use_reporter(recorder):
        second = trained(tmp_path, "second")
    total = sum(path.stat().st_size for path in second.paths.checkpoint(2).iterdir() if path.name != "manifest.json")
    states = [state for state in recorder.states if state[0] == "checkpoint of step 2 from the replica"]
    assert states[-1] == ("checkpoint of step 2 from the replica", total, total, "bytes")
    assert [done for _, done, _, _ in states] == sorted(done for _, done, _, _ in states)


def test_a_request_to_stop_ends_the_fetch_and_the_next_start_repeats_it(tmp_path: Path) -> None:
    trained(tmp_path, "first", 2, 4)
    second = Node(tmp_path, "second", settings(tmp_path))
    asked: list[bool] = []
    with pytest.raises(InterruptedRunError, match="stopped while fetching"):
        second.replicator.acquire(
            lambda: bool(asked.append(True)) or bool(list(second.paths.checkpoints.glob(".partial-*")))
        )
    assert [path.name for path in second.paths.checkpoints.iterdir()] == []
    second.close()
    again = trained(tmp_path, "second")
    assert snapshots.newest(again.paths) == (4, [])


def test_a_hanging_call_ends_on_a_request_to_stop(tmp_path: Path) -> None:
    """A pipe without a writer stands for a disk that does not answer."""
    stop = threading.Event()
    (tmp_path / "replica").mkdir()
    os.mkfifo(tmp_path / "replica" / "hangs")
    hanging = ReplicaStore(str(tmp_path / "replica"), TransferLimits(timeout_s=600.0), stop.is_set)
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(ReplicaError, match=r"cannot read hangs: no time left for the transfer \(1 try"):
        hanging.read("hangs")
    quick = ReplicaStore(str(tmp_path / "replica"), TransferLimits(retry_timeout_s=0.0, timeout_s=0.3), lambda: False)
    with pytest.raises(ReplicaError, match=r"cannot read hangs: no data transferred for"):
        quick.read("hangs")
    os.close(os.open(tmp_path / "replica" / "hangs", os.O_WRONLY))  # ends the calls


# ------------------------------------------------------------------------------------------------------ set aside


def test_one_set_of_what_was_here_is_kept(tmp_path: Path) -> None:
    trained(tmp_path, "first", 2)
    first = Node(tmp_path, "first", settings(tmp_path)).acquire()
    first.save(4)  # is not uploaded
    first.vanish()
    trained(tmp_path, "second", 6)
    back = trained(tmp_path, "first")
    assert aside(back) >= {"superseded-step-00000002", "superseded-journal.jsonl"}
    assert any("superseded-*" in text for text in back.texts("notice"))
    trained(tmp_path, "second", 8)
    back = trained(tmp_path, "first")
    assert "superseded-step-00000002" not in aside(back)
    assert aside(back) == {"superseded-step-00000006", "superseded-journal.jsonl"}
    assert snapshots.newest(back.paths) == (8, [])


def test_it_is_removed_when_the_result_is_in_the_replica(tmp_path: Path) -> None:
    trained(tmp_path, "first", 2)
    trained(tmp_path, "second", 4)
    back = Node(tmp_path, "first", settings(tmp_path)).acquire()
    assert aside(back)
    back.finish()
    back.wait_until_replicated()
    wait_until(lambda: not aside(back))
    back.close()
    assert snapshots.newest(back.paths) == (4, [])


def test_reset_removes_it_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, "first", 2)
    trained(tmp_path, "second", 4)
    back = trained(tmp_path, "first")
    assert aside(back)
    monkeypatch.setenv("RATCHET_RUNS", str(back.paths.root.parent))
    assert reset(ProjectLayout(tmp_path / "project"), NAMES.run_id).was_removed
    assert list(back.paths.root.parent.iterdir()) == []


def test_local_state_stays_when_a_fetch_is_stopped(tmp_path: Path) -> None:
    trained(tmp_path, "first", 2)
    trained(tmp_path, "second", 4)
    back = Node(tmp_path, "first", settings(tmp_path))
    journal = back.paths.journal.read_bytes()
    with pytest.raises(InterruptedRunError, match="stopped while fetching"):
        back.replicator.acquire(lambda: bool(list(back.paths.checkpoints.glob(".partial-*"))))
    assert (snapshots.newest(back.paths), aside(back)) == ((2, []), set())
    assert back.paths.journal.read_bytes() == journal
    back.close()
    assert snapshots.newest(trained(tmp_path, "first").paths) == (4, [])


def test_local_state_that_a_killed_fetch_has_moved_aside_is_used_again(tmp_path: Path) -> None:
    first = trained(tmp_path, "first", 2)
    trained(tmp_path, "second", 4)
    killed = Node(tmp_path, "first", settings(tmp_path))
    assert restore.set_aside(killed.run)
    killed.close()
    for name in store(tmp_path).list(NAMES.folder("objects")):
        store(tmp_path).remove([name])
    back = Node(tmp_path, "first", settings(tmp_path)).acquire()
    assert snapshots.newest(back.paths) == (2, [])
    assert back.paths.journal.stat().st_size > 0
    assert aside(back) == set()
    back.close()
    assert first.paths.root == back.paths.root


def test_a_request_to_stop_while_local_checkpoints_are_read_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, original = trained(tmp_path, "first", 2), restore.find_valid_step

    def find(paths: RunPaths) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(paths)

    monkeypatch.setattr(restore, "find_valid_step", find)
    again = Node(tmp_path, "first", settings(tmp_path))
    session = ReplicationSession(again.replicator, again.run, settings(tmp_path))
    with pytest.raises(InterruptedRunError, match="stopped while its replica was read"), session.hold_lease():
        pytest.fail("the run would start")
    again.close()
    assert snapshots.newest(first.paths) == (2, [])


def test_a_run_that_is_removed_from_the_replica_while_a_machine_waits_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, "first", 2)
    original = ReplicaLease.acquire

    def acquire(self: ReplicaLease, *arguments: Any) -> None:
        monkeypatch.setattr(ReplicaLease, "acquire", original)
        assert reset_replica(settings(tmp_path), str(tmp_path / "replica"), NAMES.run_id).was_removed
        assert not store(tmp_path).list(NAMES.root)
        self.acquire(*arguments)

    monkeypatch.setattr(ReplicaLease, "acquire", acquire)
    back = Node(tmp_path, "first", settings(tmp_path)).acquire()
    back.wait_until_replicated()
    back.close()
    assert snapshots.newest(trained(tmp_path, "third").paths) == (2, [])


def test_local_state_is_used_where_the_replica_has_no_whole_checkpoint(tmp_path: Path) -> None:
    first = trained(tmp_path, "first", 2)
    trained(tmp_path, "second", 4)
    for name in store(tmp_path).list(NAMES.folder("objects")):
        store(tmp_path).remove([name])
    journal = first.paths.journal.read_bytes()
    back = Node(tmp_path, "first", settings(tmp_path)).acquire()
    assert snapshots.newest(back.paths) == (2, [])
    assert back.paths.journal.read_bytes().startswith(journal)
    assert aside(back) == set()
    assert any("is skipped" in text for text in back.texts("notice"))
    assert "no complete checkpoint" in back.texts("notice")[-1]
    back.wait_until_replicated()
    back.close()
    assert snapshots.newest(trained(tmp_path, "third").paths) == (2, [])
