"""Proves row R25: if several machines claim a run, at most one is sure of its lease at any time, however long each
machine pauses."""

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lease_cases import (
    LONG_S,
    NAMES,
    held,  # noqa: F401 (a fixture)
    lease,
    never,
    quiet,
)
from ratchet.errors import InterruptedRunError, LockHeldError, ReplicaError
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.object_storage import StoredObject
from ratchet.runs.replication.store import ReplicaStore, TransferLimits

if TYPE_CHECKING:
    from obstore import UpdateVersion

PACKAGES = ("runs",)
SEED = int(os.environ.get("RATCHET_TEST_SEED", "3"))


def patient(one: ReplicaLease) -> ReplicaLease:
    """Repeat the claim while another process holds the run."""
    while True:
        with suppress(LockHeldError):
            one.acquire(never, quiet)
            return one
        time.sleep(0.01)


def test_of_many_that_want_a_run_one_at_a_time_has_it(tmp_path: Path) -> None:
    inside: list[str] = []
    seen: list[tuple[int, list[str]]] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(3):
                one = patient(lease(tmp_path, f"node-{number}-{turn}", LONG_S))
                inside.append(f"{number}")
                time.sleep(0.005)
                seen.append((one.token, list(inside)))
                inside.remove(f"{number}")
                one.release()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(seen) == 24
    assert all(len(there) == 1 for _, there in seen), seen
    tokens = [token for token, _ in seen]
    assert tokens == sorted(set(tokens)), "each holder has a higher token than the one before"


class Halting(ReplicaStore):
    """A store that pauses its caller at random for longer than the lease timeout, before or after a call."""

    draw: random.Random
    lease_timeout_s: float

    def _halt(self) -> None:
        if self.draw.random() < 0.04:
            time.sleep(self.draw.uniform(0.5, 2.5) * self.lease_timeout_s)

    def swap(self, name: str, data: bytes, version: "UpdateVersion | None") -> "UpdateVersion":
        self._halt()
        written = super().swap(name, data, version)
        self._halt()
        return written

    def read_version(self, name: str) -> StoredObject | None:
        self._halt()
        return super().read_version(name)

    def list(self, folder: str, strict: bool = False) -> dict[str, int]:
        self._halt()
        found = super().list(folder, strict)
        self._halt()
        return found


def test_at_most_one_process_holds_a_run_however_they_pause(tmp_path: Path) -> None:
    lease_timeout_s, until = 0.3, time.monotonic() + 60
    now: dict[int, ReplicaLease] = {}
    held: list[int] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(SEED + number)
        own = Halting(str(tmp_path / "replica"), TransferLimits(retry_timeout_s=5), lambda: False)
        own.draw, own.lease_timeout_s = draw, lease_timeout_s
        try:
            for turn in range(10**6):
                if time.monotonic() > until:
                    return
                one = now[number] = ReplicaLease(own, NAMES, f"node-{number}-{turn}", lease_timeout_s)
                with suppress(LockHeldError, ReplicaError):
                    one.acquire(lambda: len(held) >= 8 or time.monotonic() > until, quiet)
                    held.append(one.token)
                    while one.lost_reason() is None and draw.random() > 0.05:
                        time.sleep(0.01)
                if len(held) >= 8 or time.monotonic() > until:
                    one._ended.set()
                    return
                if draw.random() < 0.5:
                    one.release()
                else:
                    one._ended.set()  # simulates a machine that disappears
        except InterruptedRunError:
            return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    both = []
    while any(thread.is_alive() for thread in threads):
        there = list(now.values())
        for a in there:
            for b in there:
                # The first holder is sure before and after the check of the second one, so both were sure at the same
                # time.
                if a.token != b.token and a.is_sure() and b.is_sure() and a.is_sure():
                    both.append((a.token, b.token))
        time.sleep(0.001)
    assert failed == []
    assert both == []
    assert len(held) >= 2, "the run has changed hands"
    assert len(set(held)) == len(held)
