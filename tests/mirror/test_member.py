"""A run that several machines train together, of which one copies it to the mirror."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, never, settings, store, together, wait_until
from ratchet.errors import BusyError, InterruptedRunError
from ratchet.mirror import claims, documents, segments
from ratchet.mirror.claims import Claim
from ratchet.run import mirrored
from ratchet.run.journal import Reader
from snapshots import contents

Members = Callable[..., Node]
PLACE = "one.example:29400"


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Members]:
    """Makes machines that have taken the run, and end with the test."""
    made: list[Node] = []

    def make(name: str, **more: object) -> Node:
        made.append(Node(tmp_path, name, together(tmp_path, **more)).take())
        return made[-1]

    yield make
    for one in made:
        one.leave()


def train(*nodes: Node) -> None:
    """Their ranks have met, and train."""
    names = sorted(one.keeper._here.node for one in nodes)
    for one in nodes:
        one.run.journal.append("ready", start_step=0, planned_steps=9, machines=names)


def save(step: int, *nodes: Node, best: int = 0) -> None:
    """Every machine seals every checkpoint."""
    for one in nodes:
        one.save(step, best)


def copies(one: Node) -> bool:
    return one.keeper._holds is not None


def state(root: Path) -> list[str]:
    found = (store(root).read(NAMES.claim(*key)) for key in claims.keys(store(root), NAMES))
    return [claim.state for data in found if (claim := Claim.from_bytes(data or b""))]


def steps_there(root: Path) -> list[int]:
    """Steps that the mirror's journal tells."""
    path = root / "journal there"
    path.write_bytes(segments.recover(store(root), NAMES).content)
    return [event.data["step"] for event in Reader(path).read() if event.kind == "step"]


def stranger(root: Path, meeting: str | None, sign: int = 1) -> None:
    """Somebody else's sign of life."""
    claim = Claim(4, "far-away-1", "holding", sign, "2026-01-01T00:00:00+00:00", meeting=meeting)
    store(root).write(NAMES.claim(4, "far-away-1"), claim.as_bytes())


# ------------------------------------------------------------------------------------------------------ one copies


def test_nobody_takes_the_run_before_it_trains_and_then_one_does(tmp_path: Path, member: Members) -> None:
    first, second = member("first"), member("second")
    save(2, first, second)
    time.sleep(1.2)
    assert claims.keys(store(tmp_path), NAMES) == []
    assert "no machine copies it at the moment" in (first.keeper.settle(0.1) or "")
    train(first, second)
    wait_until(lambda: copies(first) or copies(second))
    for one in (first, second):
        one.settled()
    assert [copies(one) for one in (first, second)].count(True) == 1
    assert documents.read(store(tmp_path), NAMES.checkpoint(1, 2)).step == 2
    assert state(tmp_path) == ["holding"]


def pair(member: Members) -> tuple[Node, Node]:
    """The one that copies, and the other."""
    first, second = member("first"), member("second")
    train(first)
    wait_until(lambda: copies(first))
    train(first, second)
    return first, second


def test_checkpoints_stay_on_all_machines_until_the_mirror_has_them(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.settled()
    noted = mirrored.read(second.paths)
    assert noted is not None
    assert (noted.token, noted.durable_steps) == (0, (2,))
    second.save(4)
    assert "the checkpoint of step 4 (the newest there is of step 2); machine" in (second.keeper.settle(1.0) or "")
    assert not copies(second)


@pytest.mark.parametrize("in_order", [True, False])
def test_another_one_goes_on_when_the_one_that_copies_has_gone(tmp_path: Path, member: Members, in_order: bool) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.settled()
    first.leave() if in_order else first.vanish()
    second.save(4, best=2)
    wait_until(lambda: copies(second))
    second.settled()
    assert any("this machine copies the run" in text for text in second.texts("notice"))
    assert steps_there(tmp_path) == [1, 2, 3, 4], "both have told of steps 1 and 2"
    second.leave()
    third = Node(tmp_path, "third", settings(tmp_path)).take()
    assert snapshots.newest(third.paths) == (4, [])
    assert contents(third.paths.checkpoint(4)) == contents(second.paths.checkpoint(4))
    third.leave()


def test_what_was_told_while_nobody_copied_is_not_lost(tmp_path: Path, member: Members) -> None:
    """A machine that came late knows nothing of the first steps, the one before it nothing of the last."""
    first = member("first")
    train(first)
    save(2, first)
    first.settled()
    second = member("second")
    train(first, second)
    assert [event.data["step"] for event in second.events("step")] == [1, 2], "taken from the mirror"
    save(4, first, second)
    first.settled()
    first.vanish()
    train(second)
    second.save(6)
    second.settled()
    assert steps_there(tmp_path) == [1, 2, 3, 4, 5, 6]
    second.vanish()
    again = Node(tmp_path, "second", together(tmp_path)).take()
    train(again)
    again.save(8)
    again.settled()
    assert steps_there(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    again.leave()


def test_a_holder_that_does_not_train_gives_the_run_back(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    first.settled()
    first.run.journal.append("died", exit_code=-9, decision="Retry", text="", **{"class": "killed"})
    wait_until(lambda: not copies(first))
    wait_until(lambda: copies(second))
    assert state(tmp_path) == ["released", "holding"]
    assert first.keeper.lost() is None
    train(first, second)
    save(4, first, second)
    for one in (first, second):
        one.settled()
    assert not copies(first)


def test_who_copied_and_was_stopped_for_too_long_goes_on_without_copying(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    lease = first.keeper._holds[0]
    lease._mutex.acquire()  # its signs of life stand still
    wait_until(lambda: copies(second))
    lease._mutex.release()
    wait_until(lambda: not copies(first))
    save(2, first, second)
    for one in (first, second):
        one.settled()
        assert one.keeper.lost() is None
    assert store(tmp_path).read(NAMES.checkpoint(2, 2)) is not None


# -------------------------------------------------------------------------------------------------------- the end


def test_all_are_done_when_one_has_sent_the_result(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.finish()
    assert "the result" in (second.keeper.settle(0.3) or "")
    first.finish()
    second.settled()
    first.leave()
    time.sleep(1.2)
    assert not copies(second), "nothing is left to copy"
    assert store(tmp_path).read(NAMES.result(1)) is not None
    late = Node(tmp_path, "late", together(tmp_path)).take()
    assert late.paths.is_finished()
    assert late.keeper.settle(0.0) is None
    late.leave()


def test_a_result_that_nobody_sent_is_sent_by_whoever_starts_again(tmp_path: Path, member: Members) -> None:
    first = member("first")
    save(2, first)
    first.finish()
    first.vanish()
    again = Node(tmp_path, "first", together(tmp_path)).take()
    again.settled()
    assert store(tmp_path).read(NAMES.result(1)) is not None
    again.leave()


# --------------------------------------------------------------------------------------------------- coming and going


def test_machines_that_come_after_all_were_lost_do_not_wait_for_the_lease(tmp_path: Path, member: Members) -> None:
    long_s = 600.0
    lost = member("lost", lease_s=long_s, mirror_every_s=0.1)
    lost.keeper._errand.hurry()
    train(lost)
    lost.save(2)
    lost.settled()
    lost.vanish()
    asked: list[int] = []
    new = Node(tmp_path, "new", together(tmp_path, lease_s=long_s))
    new.keeper.take(lambda: bool(asked.append(1)) or len(asked) > 40)
    assert snapshots.newest(new.paths) == (2, [])
    new.leave()


def test_a_machine_that_is_further_than_the_mirror_keeps_what_it_has(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    first.settled()
    second.settled()
    second.save(4)  # and the first has not sent it when both are lost
    for one in (first, second):
        one.vanish()
    back = member("second")
    assert snapshots.newest(back.paths) == (4, [])
    assert not list(back.paths.checkpoints.glob("superseded-*"))
    train(back)
    back.settled()
    assert steps_there(tmp_path) == [1, 2, 3, 4]
    back.leave()
    alone = Node(tmp_path, "second", settings(tmp_path)).take()
    assert snapshots.newest(alone.paths) == (4, [])
    alone.leave()


def test_a_follower_that_trains_alone_afterwards_keeps_what_it_has(tmp_path: Path, member: Members) -> None:
    first, second = pair(member)
    save(2, first, second)
    second.settled()
    second.save(4)
    for one in (first, second):
        one.vanish()
    alone = Node(tmp_path, "second", settings(tmp_path)).take()
    assert snapshots.newest(alone.paths) == (4, [])
    alone.settled()
    assert steps_there(tmp_path) == [1, 2, 3, 4]
    alone.leave()


# ------------------------------------------------------------------------------------------------------- strangers


def test_a_run_that_a_stranger_trains_is_refused(tmp_path: Path) -> None:
    alone = Node(tmp_path, "alone", settings(tmp_path)).take()
    refused = Node(tmp_path, "refused", together(tmp_path))
    with pytest.raises(BusyError, match=f"is none of those that meet at {PLACE}"):
        refused.take()
    for one in (alone, refused):
        one.leave()


def test_a_stranger_that_has_gone_is_waited_for(tmp_path: Path) -> None:
    stranger(tmp_path, None)
    asked: list[int] = []
    waits = Node(tmp_path, "waits", together(tmp_path))
    with pytest.raises(InterruptedRunError):
        waits.keeper.take(lambda: bool(asked.append(1)) or len(asked) > 2)
    waits.keeper.take(never)  # two seconds later it has run out
    waits.leave()


def signs_until(root: Path, meeting: str | None, there: Callable[[], object]) -> None:
    sign = 0
    while not there():
        stranger(root, meeting, sign := sign + 1)
        assert sign < 300, "it did not come about"
        time.sleep(0.1)


def test_a_stranger_that_has_taken_the_run_ends_the_training(tmp_path: Path, member: Members) -> None:
    first = member("first")
    train(first)
    wait_until(lambda: copies(first))
    signs_until(tmp_path, "other.example:29400", first.keeper.lost)
    assert "machine far-away-1 trains it" in first.keeper.lost()
    assert not copies(first)


def test_who_says_to_meet_where_we_do_and_never_comes_is_a_stranger(tmp_path: Path, member: Members) -> None:
    """Two groups in two networks, whose places to meet have one name."""
    first = member("first", rendezvous_wait_s=0.5)
    signs_until(tmp_path, PLACE, lambda: first.keeper._seen.state == "alive")
    time.sleep(1.0)
    assert first.keeper.lost() is None, "nobody has met yet"
    train(first)
    signs_until(tmp_path, PLACE, first.keeper.lost)
    assert f"none of those that meet at {PLACE}" in first.keeper.lost()
