"""Tests of leases: claims by threads, by stopped or killed processes, and by holders that do not report."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import behind_proxy
from behind_proxy import Replica
from faulty_proxy import Fault
from lease_cases import (
    LONG_S,
    NAMES,
    held,  # noqa: F401 (a fixture)
    lease,
    never,
    quiet,
    store,
)
from ratchet.errors import InterruptedRunError, LeaseHeldError, LockHeldError, ReplicaError
from ratchet.runs.replication.lease import LeaseObserver, LeaseRecord, ReplicaLease, read_lease

SHORT_S = 1.0
RENEWED_S = 6.0
"""A lease that a busy machine renews in time: each quarter of it."""
HOLDER = """
import sys, time
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.store import RunObjectNames
from ratchet.runs.replication.store import ReplicaStore
from ratchet.runs.replication.store import TransferLimits
store = ReplicaStore(sys.argv[1], TransferLimits(retry_timeout_s=5), lambda: False)
lease = ReplicaLease(store, RunObjectNames(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
lease.acquire(lambda: False, lambda text: None)
print("holds", lease.token, flush=True)
while lease.lost_reason() is None:
    time.sleep(0.02)
print("lost", lease.lost_reason(), flush=True)
"""


def after(polls: int) -> Callable[[], bool]:
    """Return a function that requests a stop from its call number `polls` + 1 on. A lease that is not acquired by
    then waits for its holder."""
    left = iter(range(polls))
    return lambda: next(left, None) is None


def process(root: Path, node: str, lease_timeout_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root / "replica"), NAMES.run_id, node, str(lease_timeout_s)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def line(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline()


def test_a_run_that_is_held_is_refused_at_once_with_who_holds_it(tmp_path: Path, held: list[ReplicaLease]) -> None:
    first = lease(tmp_path, "first-1", RENEWED_S)
    held.append(first)
    first.acquire(never, quiet)
    with pytest.raises(LockHeldError, match=r"machine first-1 trains it, since 20\d\d"):
        lease(tmp_path, "second-2", RENEWED_S).acquire(never, quiet)
    first.confirm()
    held_by = read_lease(store(tmp_path), NAMES)
    assert held_by is not None and held_by.key == (1, "first-1")


def test_a_run_that_was_released_is_free_at_once_and_its_token_is_not_given_again(
    tmp_path: Path, held: list[ReplicaLease]
) -> None:
    first = lease(tmp_path, "first-1", LONG_S)
    first.acquire(never, quiet)
    first.release()
    first.release()
    assert not first.is_sure()
    second = lease(tmp_path, "second-2", LONG_S)
    held.append(second)
    second.acquire(after(2), quiet)
    assert (first.token, second.token) == (1, 2)


def test_a_token_is_above_all_written_ones_and_its_claim_says_where_its_journal_begins(
    tmp_path: Path, held: list[ReplicaLease]
) -> None:
    store(tmp_path).write(NAMES.checkpoint(7, 40), b"{}")
    one = lease(tmp_path, "one-1", LONG_S)
    held.append(one)
    one.acquire(after(2), quiet)
    assert one.token == 8
    one.record_origin((3, 1234))
    claim = read_lease(store(tmp_path), NAMES)
    assert claim is not None
    assert claim.origins == {8: (3, 1234)}


def test_a_silent_holder_is_waited_for_unless_its_process_is_known_to_be_gone(
    tmp_path: Path, held: list[ReplicaLease]
) -> None:
    silent = LeaseRecord(1, "gone-1", "holding", 3, "2026-01-01T00:00:00+00:00")
    store(tmp_path).write(NAMES.lease, silent.as_bytes())
    told: list[str] = []
    with pytest.raises(InterruptedRunError):
        lease(tmp_path, "second-2", LONG_S).acquire(after(2), told.append)
    assert "gone-1" in told[0]
    assert "600 s" in told[0]
    assert read_lease(store(tmp_path), NAMES) == silent
    third = lease(tmp_path, "third-3", LONG_S)
    held.append(third)
    third.acquire(after(2), quiet, previous=(1, "gone-1"))
    assert third.is_sure()


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"state": "holding"}', b"\xff\xfe"])
def test_a_claim_that_cannot_be_read_counts_until_it_has_run_out(
    tmp_path: Path, held: list[ReplicaLease], garbage: bytes
) -> None:
    assert LeaseRecord.from_bytes(garbage) is None
    store(tmp_path).write(NAMES.lease, garbage)
    second = lease(tmp_path, "second-2", LONG_S)
    with pytest.raises(InterruptedRunError):
        second.acquire(after(2), quiet)
    third = lease(tmp_path, "third-3", 0.2)
    held.append(third)
    third.acquire(never, quiet)
    third.confirm()


def test_a_holder_without_its_claim_has_lost_the_run_and_does_not_write_it_again(tmp_path: Path) -> None:
    one = lease(tmp_path, "one-1", 0.4)
    one.acquire(never, quiet)
    store(tmp_path).remove([NAMES.lease])
    while one.lost_reason() is None:
        time.sleep(0.01)
    assert "removed" in str(one.lost_reason())
    one.release()
    assert read_lease(store(tmp_path), NAMES) is None


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_killed_or_stopped_is_succeeded_when_its_claim_has_run_out(
    tmp_path: Path, held: list[ReplicaLease], sent: signal.Signals
) -> None:
    holder = process(tmp_path, "holder-1", SHORT_S)
    try:
        assert line(holder) == "holds 1\n"
        holder.send_signal(sent)
        second = lease(tmp_path, "second-2", SHORT_S)
        held.append(second)
        second.acquire(never, quiet)
        assert second.token == 2
        if sent == signal.SIGSTOP:
            holder.send_signal(signal.SIGCONT)
            assert line(holder).startswith(f"lost run {NAMES.run_id}: machine second-2 trains it")
            second.confirm()
    finally:
        holder.kill()
        holder.communicate()


def test_an_observer_measures_by_its_own_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("ratchet.runs.replication.lease.read_clock_s", lambda: now_s)
    observer = LeaseObserver(store(tmp_path), NAMES, 60.0)
    assert observer.read_status().state == "free"
    for renewals, state in ((1, "unsure"), (1, "unsure"), (2, "alive")):
        record = LeaseRecord(1, "one-1", "holding", renewals, "2026-01-01T00:00:00+00:00")
        store(tmp_path).write(NAMES.lease, record.as_bytes())
        status = observer.read_status()
        assert (status.claim, status.state) == (record, state)
    now_s += 59.0
    assert observer.read_status().state == "alive"
    now_s += 1.0
    assert observer.read_status().state == "free"


def test_a_renewal_whose_answer_was_lost_is_no_loss_and_another_holder_is(
    tmp_path: Path, held: list[ReplicaLease]
) -> None:
    one = lease(tmp_path, "one-1", LONG_S)
    held.append(one)
    one.acquire(never, quiet)
    record = read_lease(store(tmp_path), NAMES)
    assert record is not None
    store(tmp_path).write(NAMES.lease, replace(record, renewals=record.renewals + 5).as_bytes())
    one.confirm()
    assert one.is_sure()
    store(tmp_path).write(NAMES.lease, replace(record, token=2, node="two-2").as_bytes())
    with pytest.raises(LeaseHeldError, match="machine two-2 trains it"):
        one.confirm()
    assert not one.is_sure()
    one.release()
    taken = read_lease(store(tmp_path), NAMES)
    assert taken is not None and taken.key == (2, "two-2"), "a holder that was succeeded writes nothing"


def test_a_failed_acquisition_names_its_cause(replica: Replica) -> None:
    replica.proxy.inject(Fault("status", None, status=403, code="AccessDenied"))
    refused = ReplicaLease(replica.store(behind_proxy.ONCE), NAMES, "one-1", LONG_S)
    with pytest.raises(ReplicaError, match=r"AccessDenied.*lack permission"):
        refused.acquire(never, quiet)
