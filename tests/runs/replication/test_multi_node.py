"""Tests of a run that several machines train together; one of them uploads it."""

import time
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, settings, store, together, wait_until
from multi_node_cases import (
    PLACE,
    Members,
    copies,
    member,  # noqa: F401 (a fixture)
    pair,
    save,
    signs_until,
    state,
    train,
)
from ratchet.errors import LockHeldError
from ratchet.runs import replication_protocol
from ratchet.runs.replication import manifests


def test_no_machine_takes_the_run_before_it_trains_and_then_one_does(tmp_path: Path, member: Members) -> None:
    first, second = member("first"), member("second")
    save(2, first, second)
    time.sleep(1.2)
    assert state(tmp_path) == "never held"
    assert "no machine uploads it at the moment" in (first.replicator.wait_until_replicated(0.1) or "")
    train(first, second)
    wait_until(lambda: copies(first) or copies(second))
    for one in (first, second):
        one.wait_until_replicated()
    assert [copies(one) for one in (first, second)].count(True) == 1
    assert manifests.read_replica_manifest(store(tmp_path), NAMES.checkpoint(1, 2)).step == 2
    assert state(tmp_path) == "holding"


def test_checkpoints_stay_on_all_machines_until_the_replica_has_them(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.wait_until_replicated()
    noted = replication_protocol.read_replication_state(second.paths)
    assert noted is not None
    assert (noted.token, noted.durable_steps) == (0, (2,))
    second.save(4)
    assert "the checkpoint of step 4 (the replica has step 2); machine" in (
        second.replicator.wait_until_replicated(1.0) or ""
    )
    assert not copies(second)


def test_a_result_that_was_not_sent_is_sent_by_the_next_start(tmp_path: Path, member: Members) -> None:
    first = member("first")
    save(2, first)
    first.finish()
    first.vanish()
    again = Node(tmp_path, "first", together(tmp_path)).acquire()
    again.wait_until_replicated()
    assert store(tmp_path).read(NAMES.result(1)) is not None
    again.close()


def test_machines_that_come_after_all_were_lost_do_not_wait_for_the_lease(tmp_path: Path, member: Members) -> None:
    long_s = 600.0
    lost = member("lost", lease_timeout_s=long_s, replica_interval_s=0.1)
    lost.replicator._task.hurry()
    train(lost)
    lost.save(2)
    lost.wait_until_replicated()
    lost.vanish()
    asked: list[int] = []
    new = Node(tmp_path, "new", together(tmp_path, lease_timeout_s=long_s))
    new.replicator.acquire(lambda: bool(asked.append(1)) or len(asked) > 40)
    assert snapshots.newest(new.paths) == (2, [])
    new.close()


def test_a_run_that_a_stranger_trains_is_refused(tmp_path: Path) -> None:
    alone = Node(tmp_path, "alone", settings(tmp_path)).acquire()
    refused = Node(tmp_path, "refused", together(tmp_path))
    with pytest.raises(LockHeldError, match=f"does not belong to the machines at {PLACE}"):
        refused.acquire()
    for one in (alone, refused):
        one.close()


def test_a_stranger_that_has_taken_the_run_ends_the_training(tmp_path: Path, member: Members) -> None:
    first = member("first")
    train(first)
    wait_until(lambda: copies(first))
    signs_until(tmp_path, "other.example:29400", first.replicator.lost_reason)
    assert "machine far-away-1 trains it" in first.replicator.lost_reason()
    assert not copies(first)
