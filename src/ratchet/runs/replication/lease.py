"""Lease of a run, which decides which machine may write the run: Lamport's bakery algorithm on an object store.

A machine that wants the run announces that it is choosing a token (`entering/`), takes a token above all existing ones
(`claims/`), and waits until no machine is choosing and every earlier claim was released or has expired. A claim expires
when it has not changed for `machine.lease_timeout_s` by the clock of the machine that waits; clocks of two machines are
never compared. (L. Lamport, "A New Solution of Dijkstra's Concurrent Programming Problem", CACM 17(8), 1974. The store
must show a write to every later list and read: S3, GCS, Azure and POSIX do.)

The algorithm assumes that no process is suspended for long. A process that was suspended must not act on old reads:

- A process that took too long to choose a token withdraws it.
- A new holder writes its claim first and then reads the other claims again. If two processes each treat the other as
  gone, at least one of them sees the other's claim.
- A holder checks for later claims after each renewal.
- A holder that is no longer sure of its lease starts no further upload (`RunUploader`). An upload in progress may still
  end, under the holder's own token. If there is a later holder, readers prefer the objects of the later holder, because
  its token is higher.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal, Self

from ratchet.errors import InterruptedRunError, LeaseHeldError, ReplicaError
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, parse_numbers
from ratchet.storage import digests

Key = tuple[int, str]
"""Token and machine of a claim; claims are served in ascending order."""
Origin = tuple[int, int]
"""Token of an earlier holder, and a number of bytes. A later holder's journal continues these first bytes of the
earlier holder's journal."""
State = Literal["waiting", "holding", "released"]

WRITTEN = ("checkpoints", "result", "journal")
"""Kinds of objects that a holder writes under its token."""
RENEWALS_PER_LEASE = 4
"""Number of renewals within one `machine.lease_timeout_s`."""
FIRST_POLL_S = 0.05
POLL_S = 1.0
"""First and longest interval at which a waiting machine reads the claims."""
MAX_ATTEMPTS = 10
"""Maximum number of attempts to become the holder. An attempt fails if one of its steps takes more than half of
`lease_timeout_s`, if an earlier holder comes back, or if another claim with the same or a later token gets the run."""

_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def read_clock_s() -> float:
    """Return the seconds of a clock that is never set, and that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class LeaseRecord:
    """Claim of one machine on a run. It contains no time that another machine would compare with its own clock."""

    token: int
    node: str
    state: State
    renewals: int
    """Increases with each renewal."""
    since: str
    """Time at which the claim was created, by the clock of the claiming machine; it is only displayed."""
    journal_origin: Origin | None = None
    """Bytes of an earlier holder's journal that this holder's journal continues; None: the journal continues no other
    journal."""
    rendezvous: str | None = None
    """Rendezvous of the machines that train the run together; None: this machine trains alone."""

    @property
    def key(self) -> Key:
        return self.token, self.node

    def as_bytes(self) -> bytes:
        return (digests.canonical_json(asdict(self)) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Parse a claim; return None if the data is not a claim."""
        try:
            raw = json.loads(data)
            token, origin = int(raw.pop("token")), raw.pop("journal_origin")
            if raw["state"] not in ("waiting", "holding", "released") or not isinstance(raw["node"], str):
                return None
            return cls(**raw, token=token, journal_origin=(int(origin[0]), int(origin[1])) if origin else None)
        except _PARSE_ERRORS:
            return None


def parse_key(name: str) -> Key | None:
    """Return token and machine from the name of a claim in a replica; None for other names."""
    token, _, node = name.rsplit("/", 1)[-1].removesuffix(".json").partition("-")
    return (int(token), node) if token.isdigit() and node else None


def list_keys(store: ReplicaStore, names: RunObjectNames) -> list[Key]:
    """Return the keys of all claims on a run, ascending."""
    return sorted(key for name in store.list(names.folder("claims")) if (key := parse_key(name)))


def find_highest_token(store: ReplicaStore, names: RunObjectNames, kinds: tuple[str, ...]) -> int:
    """Return the highest token of objects of these kinds in the replica; 0 if it has none."""
    all_numbers = [parse_numbers(name) for kind in kinds for name in store.list(names.folder(kind))]
    return max((numbers[0] for numbers in all_numbers if numbers), default=0)


class StalenessTracker:
    """Measures, by the clock of this machine, for how long contents have not changed."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}
        self._last: dict[str, tuple[bytes, float]] = {}

    def seconds_unchanged(self, name: str, content: bytes) -> float:
        """Return the seconds for which this object has had this content, and remember the content."""
        now = read_clock_s()
        self._first.setdefault(name, content)
        known = self._last.get(name)
        if known is None or known[0] != content:
            known = self._last[name] = (content, now)
        return now - known[1]

    def has_changed(self, name: str) -> bool:
        """Return whether the content has changed since the first call of `seconds_unchanged` for this object."""
        return name in self._last and self._last[name][0] != self._first[name]

    def last(self, name: str) -> bytes | None:
        """Return the content in the last call of `seconds_unchanged` for this object; None before the first call."""
        return self._last[name][0] if name in self._last else None


@dataclass(frozen=True)
class LeaseStatus:
    """Holder of a run, as seen by a machine without a claim on it."""

    claim: LeaseRecord | None
    """Newest claim that holds or held the lease; None: no machine has held it."""
    state: Literal["free", "unsure", "alive"]
    """free: never held, released, or not renewed for a whole `lease_timeout_s`. alive: renewed while this machine
    observed the claim. unsure: not observed for long enough to decide."""


class LeaseObserver:
    """Reader of the claims on a run, without a claim of its own.

    Args:
        store: the replica.
        names: object names of the run.
        lease_timeout_s: time without a change after which a claim expires.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, lease_timeout_s: float) -> None:
        self._store, self._names, self._lease_s = store, names, lease_timeout_s
        self._tracker = StalenessTracker()

    def read_status(self) -> LeaseStatus:
        """Read the claims and return the holder. Raises ReplicaError."""
        for key in reversed(list_keys(self._store, self._names)):
            name = self._names.claim(*key)
            content = self._store.read(name) or b""
            claim = LeaseRecord.from_bytes(content)
            if claim is None or claim.state == "waiting":
                continue
            unchanged_s = self._tracker.seconds_unchanged(name, content)
            if claim.state == "released" or unchanged_s >= self._lease_s:
                return LeaseStatus(claim, "free")
            return LeaseStatus(claim, "alive" if self._tracker.has_changed(name) else "unsure")
        return LeaseStatus(None, "free")


class _InterruptedClaimError(Exception):
    """This process or another one was suspended for too long, so this process must claim the run again."""


class ReplicaLease:
    """A claim of this process on a run, renewed by a thread while it is held.

    Args:
        store: the replica; its calls must give up within a quarter of `lease_timeout_s`.
        names: object names of the run.
        node: name of this process, unique for all time.
        lease_timeout_s: time without a change after which a claim expires.
        rendezvous: rendezvous of the machines that train the run together; None: this machine trains alone.
    """

    def __init__(
        self,
        store: ReplicaStore,
        names: RunObjectNames,
        node: str,
        lease_timeout_s: float,
        rendezvous: str | None = None,
    ) -> None:
        self._store, self._names, self._node, self._lease_s = store, names, node, lease_timeout_s
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._claim = LeaseRecord(0, node, "waiting", 0, since, rendezvous=rendezvous)
        self._renewed_s = self._confirmed_s = 0.0
        """Times (`read_clock_s`) of the last renewal, and of the last renewal after which no later holder was found."""
        self._lost_reason: str | None = None
        self._removed = False
        self._trouble = ""
        self._mutex = threading.RLock()
        self._ended = threading.Event()
        self._renewal_thread = threading.Thread(target=self._renew_periodically, name="replica-lease", daemon=True)

    @property
    def token(self) -> int:
        """Fencing token of this claim. It is part of the names of all objects that the holder writes."""
        return self._claim.token

    @property
    def trouble(self) -> str:
        """Error of the last renewal; empty if the claim was renewed."""
        return self._trouble

    def lost_reason(self) -> str | None:
        """Describe the machine that has taken the run over; None if no other machine is known to hold it."""
        return self._lost_reason

    def is_sure(self) -> bool:
        """Return whether no other machine can hold the run: the last confirmed renewal is less than `lease_timeout_s`
        ago."""
        return (
            self._lost_reason is None
            and self._claim.state == "holding"
            and read_clock_s() - self._confirmed_s < self._lease_s
        )

    def acquire(
        self, stopping: Callable[[], bool], on_progress: Callable[[str], None], previous: Key | None = None
    ) -> None:
        """Become the holder, and start to renew the claim.

        Args:
            stopping: called while waiting; returns whether to stop.
            on_progress: called with a message about the machine that holds the run.
            previous: a claim whose process has certainly ended. It is treated as expired.

        Raises:
            LeaseHeldError: another machine holds the run and renews its claim.
            InterruptedRunError: `stopping` returned True.
            ReplicaError: the replica does not answer, or too slowly.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                self._choose_token()
                self._await_turn(stopping, on_progress, previous)
            except _InterruptedClaimError:
                self._withdraw()
                time.sleep(random.uniform(0, min(POLL_S, self._lease_s / RENEWALS_PER_LEASE)))
            except BaseException:
                self._withdraw()
                raise
            else:
                self._renewal_thread.start()
                return
        raise ReplicaError(
            f"run {self._names.run_id}: its replica is too slow for acquiring "
            f"the lease ({MAX_ATTEMPTS} attempts took longer "
            f"than half of machine.lease_timeout_s, which is {self._lease_s:g} s); increase machine.lease_timeout_s"
        )

    def record_origin(self, origin: Origin | None) -> None:
        """Record which journal this holder continues. Raises ReplicaError, and LeaseHeldError if another machine holds
        the run."""
        with self._mutex:
            self._claim = replace(self._claim, journal_origin=origin)
        self.confirm()

    def confirm(self) -> None:
        """Renew the claim now, and check for later holders.

        Raises:
            LeaseHeldError: there is a later holder.
            ReplicaError: the replica does not answer.
        """
        with self._mutex:
            self._write_claim()
            self._check_later_claims()
        if self._lost_reason:
            raise LeaseHeldError(self._lost_reason)

    def release(self) -> None:
        """Release the lease, so that no machine has to wait until it expires.

        This method may be called twice, and before `acquire`.
        """
        self._ended.set()
        with self._mutex:
            if self._claim.state != "holding" or self._removed:
                return
            try:
                self._write_claim("released")
            except ReplicaError:  # other machines wait until the claim expires
                self._claim = replace(self._claim, state="released")

    def _choose_token(self) -> None:
        """Take a token above all existing ones."""
        began_s = read_clock_s()
        marker = self._names.entering(self._node)
        self._store.write(marker, f"{self._claim.renewals}\n".encode())
        try:
            highest = find_highest_token(self._store, self._names, ("claims", *WRITTEN))
            self._claim = replace(self._claim, token=highest + 1)
            self._write_claim("waiting")
        finally:
            self._store.remove([marker])
        # If the choice took this long, another process may have treated this process as gone, and may have chosen a
        # token without seeing the token of this process.
        if read_clock_s() - began_s > self._lease_s / 2:
            raise _InterruptedClaimError

    def _await_turn(
        self, stopping: Callable[[], bool], on_progress: Callable[[str], None], previous: Key | None
    ) -> None:
        tracker, announced, poll_s = StalenessTracker(), "", FIRST_POLL_S
        while True:
            if stopping():
                raise InterruptedRunError(
                    f"run {self._names.run_id}: stopped while waiting for its lease; run it again to resume"
                )
            if read_clock_s() - self._renewed_s > self._lease_s / RENEWALS_PER_LEASE:
                self._write_claim()
            waiting_for = self._find_blocking_claim(tracker, previous)
            # Checked twice: a listing of a directory can miss a file while another file is renamed over it.
            if waiting_for is None and self._find_blocking_claim(tracker, previous) is None:
                self._start_holding(tracker)
                return
            if waiting_for and waiting_for != announced:
                announced = waiting_for
                on_progress(f"{waiting_for}; its claim expires if it is not renewed for {self._lease_s:g} s")
            time.sleep(min(poll_s, self._lease_s / RENEWALS_PER_LEASE / 2))
            poll_s = min(POLL_S, 1.5 * poll_s)

    def _find_blocking_claim(self, tracker: StalenessTracker, previous: Key | None) -> str | None:
        """Describe the machine that this one must wait for.

        Returns None if there is none, and an empty text if the machine is still choosing a token. A claim that holds or
        held the run has waited for all earlier claims, so those are not checked.
        """
        for name in self._store.list(self._names.folder("entering")):
            node = name.rsplit("/", 1)[-1]
            content = self._store.read(self._names.entering(node))
            if node == self._node or content is None:
                continue
            if tracker.seconds_unchanged(f"entering/{node}", content) < self._lease_s:
                return ""
        for key in reversed(list_keys(self._store, self._names)):
            name = self._names.claim(*key)
            content = None if key == self._claim.key else self._store.read(name)
            if content is None:
                continue
            claim = LeaseRecord.from_bytes(content) or LeaseRecord(*key, "waiting", 0, "?")
            if claim.state != "waiting" and (key > self._claim.key or key[0] == self.token):
                # Either a later claim got the run, so its process treated this process as gone. Or a claim with the
                # same token got the run, and a token must not have two holders.
                raise _InterruptedClaimError
            if key > self._claim.key:
                continue
            unchanged_s = tracker.seconds_unchanged(name, content)
            if claim.state == "released":
                return None
            if tracker.has_changed(name):
                raise LeaseHeldError(self._describe_holder(claim))
            if unchanged_s < self._lease_s and key != previous:
                return f"machine {claim.node}, since {claim.since}, may still train run {self._names.run_id}"
            if claim.state == "holding":
                return None
        return None

    def _start_holding(self, tracker: StalenessTracker) -> None:
        """Write the claim as holding. Then check that no earlier holder came back and no later claim holds it."""
        if read_clock_s() - self._renewed_s > self._lease_s / 2:
            raise _InterruptedClaimError
        self._write_claim("holding")
        for key in list_keys(self._store, self._names):
            name = self._names.claim(*key)
            before = tracker.last(name)
            if key == self._claim.key or (key < self._claim.key and before is None):
                continue  # an earlier claim, not seen before: its process sees this claim before it writes
            content = self._store.read(name)
            claim = LeaseRecord.from_bytes(content or b"")
            if key < self._claim.key:
                is_contested = content not in (None, before) and (claim is None or claim.state != "released")
            else:
                is_contested = claim is not None and claim.state != "waiting"
            if is_contested:
                raise _InterruptedClaimError
        self._confirmed_s = self._renewed_s

    def _write_claim(self, state: State | None = None) -> None:
        """Write the claim, with the number of renewals increased by one."""
        with self._mutex:
            claim = replace(self._claim, renewals=self._claim.renewals + 1, state=state or self._claim.state)
            began_s = read_clock_s()
            self._store.write(self._names.claim(*claim.key), claim.as_bytes())
            self._claim, self._renewed_s = claim, began_s

    def _withdraw(self) -> None:
        """Remove the claim. Nothing was written under its token."""
        with self._mutex:
            name, self._claim = self._names.claim(*self._claim.key), replace(self._claim, state="waiting")
            self._renewed_s = self._confirmed_s = 0.0
            try:
                self._store.remove([name, self._names.entering(self._node)])
            except ReplicaError as error:  # the claim expires
                self._trouble = str(error)

    def _renew_periodically(self) -> None:
        while not self._ended.wait(self._lease_s / RENEWALS_PER_LEASE) and self._lost_reason is None:
            try:
                self._renew()
                self._trouble = ""
            except Exception as error:  # network outage: keep the lease until a later holder is seen
                self._trouble = f"the claim on the run cannot be renewed: {error}"

    def _renew(self) -> None:
        with self._mutex:
            if self._ended.is_set():
                return
            if self._store.read(self._names.claim(*self._claim.key)) is None:
                self._removed = True
                self._lost_reason = f"run {self._names.run_id}: the claim of this machine was removed from its replica"
                return
            self._write_claim()
            self._check_later_claims()

    def _check_later_claims(self) -> None:
        for key in reversed(list_keys(self._store, self._names)):
            if key > self._claim.key:
                claim = LeaseRecord.from_bytes(self._store.read(self._names.claim(*key)) or b"")
                if claim is not None and claim.state != "waiting":
                    self._lost_reason = self._describe_holder(claim)
                    return
        self._confirmed_s = self._renewed_s

    def _describe_holder(self, claim: LeaseRecord) -> str:
        actions = {"waiting": "is about to train", "holding": "trains", "released": "has trained"}
        return (
            f"run {self._names.run_id}: machine {claim.node} {actions[claim.state]} it, since {claim.since}, and only "
            "one machine may: stop it there or wait until it has ended, then run the command again"
        )
