"""Proves rows R25 and R27 for several machines with one replica: one machine at a time uploads, and another takes
over."""

import time
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, never, settings, store, together, wait_until
from multi_node_cases import (
    PLACE,
    Members,
    copies,
    member,  # noqa: F401 (a fixture)
    pair,
    save,
    signs_until,
    state,
    stranger,
    train,
)
from ratchet.errors import InterruptedRunError
from ratchet.runs.journal import JournalReader
from ratchet.runs.replication import manifests
from snapshots import contents

PACKAGES = ("runs",)


def steps_there(root: Path) -> list[int]:
    """Return the steps in the replica's journal."""
    path = root / "journal there"
    path.write_bytes(manifests.recover_journal(store(root), NAMES).content)
    return [event.data["step"] for event in JournalReader(path).read() if event.kind == "step"]


@pytest.mark.parametrize("in_order", [True, False])
def test_another_one_goes_on_when_the_one_that_copies_has_gone(tmp_path: Path, member: Members, in_order: bool) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.wait_until_replicated()
    first.close() if in_order else first.vanish()
    second.save(4, best=2)
    wait_until(lambda: copies(second))
    second.wait_until_replicated()
    assert any("this machine now uploads the run" in text for text in second.texts("notice"))
    assert steps_there(tmp_path) == [1, 2, 3, 4], "both have told of steps 1 and 2"
    second.close()
    third = Node(tmp_path, "third", settings(tmp_path)).acquire()
    assert snapshots.newest(third.paths) == (4, [])
    assert contents(third.paths.checkpoint(4)) == contents(second.paths.checkpoint(4))
    third.close()


def test_what_was_told_while_nobody_copied_is_not_lost(tmp_path: Path, member: Members) -> None:
    """A machine that joined late lacks the first steps in its journal, and the earlier machine lacks the last steps."""
    first = member("first")
    train(first)
    save(2, first)
    first.wait_until_replicated()
    second = member("second")
    train(first, second)
    assert [event.data["step"] for event in second.events("step")] == [1, 2], "taken from the replica"
    save(4, first, second)
    first.wait_until_replicated()
    first.vanish()
    train(second)
    second.save(6)
    second.wait_until_replicated()
    assert steps_there(tmp_path) == [1, 2, 3, 4, 5, 6]
    second.vanish()
    again = Node(tmp_path, "second", together(tmp_path)).acquire()
    train(again)
    again.save(8)
    again.wait_until_replicated()
    assert steps_there(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    again.close()


def test_a_holder_that_does_not_train_gives_the_run_back(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    first.wait_until_replicated()
    first.run.journal.append("worker_exited", exit_code=-9, decision="Retry", text="", failure_class="killed")
    wait_until(lambda: not copies(first))
    wait_until(lambda: copies(second))
    assert state(tmp_path) == "holding"
    assert first.replicator.lost_reason() is None
    train(first, second)
    save(4, first, second)
    for one in (first, second):
        one.wait_until_replicated()
    assert not copies(first)


def test_who_copied_and_was_stopped_for_too_long_goes_on_without_copying(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    lease = first.replicator._held[0]
    lease._mutex.acquire()  # blocks the heartbeat of the lease
    wait_until(lambda: copies(second))
    lease._mutex.release()
    wait_until(lambda: not copies(first))
    save(2, first, second)
    for one in (first, second):
        one.wait_until_replicated()
        assert one.replicator.lost_reason() is None
    assert store(tmp_path).read(NAMES.checkpoint(2, 2)) is not None


def test_all_are_done_when_one_has_sent_the_result(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.finish()
    assert "the result" in (second.replicator.wait_until_replicated(0.3) or "")
    first.finish()
    second.wait_until_replicated()
    first.close()
    time.sleep(1.2)
    assert not copies(second), "nothing is left to copy"
    assert store(tmp_path).read(NAMES.result(1)) is not None
    late = Node(tmp_path, "late", together(tmp_path)).acquire()
    assert late.paths.is_finished()
    assert late.replicator.wait_until_replicated(0.0) is None
    late.close()


def test_a_machine_that_is_further_than_the_replica_keeps_what_it_has(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    first.wait_until_replicated()
    second.wait_until_replicated()
    second.save(4)  # both machines fail before the first one uploads this step
    for one in (first, second):
        one.vanish()
    back = member("second")
    assert snapshots.newest(back.paths) == (4, [])
    assert not list(back.paths.checkpoints.glob("superseded-*"))
    train(back)
    back.wait_until_replicated()
    assert steps_there(tmp_path) == [1, 2, 3, 4]
    back.close()
    alone = Node(tmp_path, "second", settings(tmp_path)).acquire()
    assert snapshots.newest(alone.paths) == (4, [])
    alone.close()


def test_a_follower_that_trains_alone_afterwards_keeps_what_it_has(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.wait_until_replicated()
    second.save(4)
    for one in (first, second):
        one.vanish()
    alone = Node(tmp_path, "second", settings(tmp_path)).acquire()
    assert snapshots.newest(alone.paths) == (4, [])
    alone.wait_until_replicated()
    assert steps_there(tmp_path) == [1, 2, 3, 4]
    alone.close()


def test_a_stranger_that_has_gone_is_waited_for(tmp_path: Path) -> None:
    stranger(tmp_path, None)
    asked: list[int] = []
    waits = Node(tmp_path, "waits", together(tmp_path))
    with pytest.raises(InterruptedRunError):
        waits.replicator.acquire(lambda: bool(asked.append(1)) or len(asked) > 2)
    waits.replicator.acquire(never)  # the stranger's lease expires two seconds later
    waits.close()


def test_who_says_to_meet_where_we_do_and_never_comes_is_a_stranger(tmp_path: Path, member: Members) -> None:
    """Two groups of machines in two networks use the same name for their rendezvous."""
    first = member("first", rendezvous_timeout_s=0.5)
    signs_until(tmp_path, PLACE, lambda: first.replicator._status.state == "alive")
    time.sleep(1.0)
    assert first.replicator.lost_reason() is None, "nobody has met yet"
    train(first)
    signs_until(tmp_path, PLACE, first.replicator.lost_reason)
    assert f"does not belong to the machines at {PLACE}" in first.replicator.lost_reason()
