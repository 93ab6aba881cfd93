"""Lease of a run, which decides which machine may write the run: one object that is replaced conditionally.

`lease.json` names the holder and its fencing token, which increases with each holder. A holder renews the lease: it
replaces the object on the condition that it is still the version that the holder has written. A machine that wants the
run replaces the object in the same way, with the next token, when the holder has released the lease, or when the object
has not changed for `machine.lease_timeout_s` by the clock of the machine that waits. Clocks of two machines are never
compared. (C. Gray, D. Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency",
SOSP 1989; the conditions are `If-None-Match` and `If-Match` of RFC 9110.)

A process may be suspended at any time. A holder is sure of its lease only for `machine.lease_timeout_s` after the start
of its last renewal, and starts no upload when it is not sure (`RunUploader`). It renews the lease right before it
writes a manifest. So a holder that was succeeded finds out before it writes one. A manifest that is already on its way
may still arrive, under the holder's own token; readers prefer the objects of the later holder, because its token is
higher.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from ratchet.config.units import utc_timestamp
from ratchet.errors import InterruptedRunError, LeaseHeldError, ReplicaError
from ratchet.runs.replication.object_storage import ConflictError
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, parse_numbers
from ratchet.storage import files

if TYPE_CHECKING:
    from obstore import UpdateVersion

Key = tuple[int, str]
"""Token and machine of a holder."""
Origin = tuple[int, int]
"""Token of an earlier holder, and a number of bytes. A later holder's journal continues these first bytes of the
earlier holder's journal."""
State = Literal["holding", "released"]

WRITTEN = ("checkpoints", "result", "journal")
"""Kinds of objects that a holder writes under its token."""
RENEWALS_PER_LEASE = 4
"""Number of renewals within one `machine.lease_timeout_s`."""
FIRST_POLL_S = 0.05
POLL_S = 1.0
"""First and longest interval at which a waiting machine reads the lease."""

_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def read_clock_s() -> float:
    """Return the seconds of a clock that is never set, and that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class LeaseRecord:
    """Content of the lease. It contains no time that another machine would compare with its own clock."""

    token: int
    node: str
    state: State
    renewals: int
    """Increases with each renewal."""
    since: str
    """Time at which the holder took the lease, by its own clock; it is only displayed."""
    rendezvous: str | None = None
    """Rendezvous of the machines that train the run together; None: the holder trains alone."""
    holders: int = 1
    """Number of holders so far."""
    origins: dict[int, Origin] = field(default_factory=dict)
    """By token of a holder: bytes of an earlier holder's journal that this holder's journal continues."""

    @property
    def key(self) -> Key:
        return self.token, self.node

    def as_bytes(self) -> bytes:
        return files.json_bytes(
            {
                "token": self.token, "node": self.node, "state": self.state, "renewals": self.renewals,
                "since": self.since, "rendezvous": self.rendezvous, "holders": self.holders,
                "journal_origins": {str(token): list(origin) for token, origin in self.origins.items()},
            }
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Self | None:
        """Parse a lease; return None if the data is not a lease."""
        try:
            raw = json.loads(data or b"")
            if raw["state"] not in ("holding", "released"):
                return None
            origins = {int(token): (int(origin[0]), int(origin[1])) for token, origin in raw["journal_origins"].items()}
            rendezvous = None if raw["rendezvous"] is None else str(raw["rendezvous"])
            return cls(
                int(raw["token"]), str(raw["node"]), raw["state"], int(raw["renewals"]), str(raw["since"]), rendezvous,
                int(raw["holders"]), origins,
            )  # fmt: skip
        except _PARSE_ERRORS:
            return None


def read_lease(store: ReplicaStore, names: RunObjectNames) -> LeaseRecord | None:
    """Read the lease of a run; None if there is none, or if it is damaged."""
    return LeaseRecord.from_bytes(store.read(names.lease))


def find_highest_token(store: ReplicaStore, names: RunObjectNames) -> int:
    """Return the highest token of a holder that has written to the replica; 0 if there is none."""
    all_numbers = [parse_numbers(name) for kind in WRITTEN for name in store.list(names.folder(kind))]
    return max((numbers[0] for numbers in all_numbers if numbers), default=0)


@dataclass(frozen=True)
class LeaseStatus:
    """Holder of a run, as seen by a machine that does not hold it."""

    claim: LeaseRecord | None
    """The lease; None: no machine has held it, or it is damaged."""
    state: Literal["free", "unsure", "alive"]
    """free: never held, released, or not renewed for a whole `lease_timeout_s`. alive: renewed while this machine
    observed the lease. unsure: not observed for long enough to decide."""


class LeaseObserver:
    """Reader of the lease of a run, without a claim of its own.

    Args:
        store: the replica.
        names: object names of the run.
        lease_timeout_s: time without a change after which the lease expires.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, lease_timeout_s: float) -> None:
        self._store, self._names, self._lease_s = store, names, lease_timeout_s
        self._contents: list[bytes] = []
        """The first content and the last content that was read."""
        self._changed_s = 0.0
        self.version: UpdateVersion | None = None
        """Version of the lease that was read last; None if it does not exist."""

    def read_status(self) -> LeaseStatus:
        """Read the lease and return the holder. Raises ReplicaError."""
        found = self._store.read_version(self._names.lease)
        self.version = None if found is None else found.version
        if found is None:
            return LeaseStatus(None, "free")
        if not self._contents or self._contents[-1] != found.content:
            self._contents = [*self._contents[:1], found.content]
            self._changed_s = read_clock_s()
        claim = LeaseRecord.from_bytes(found.content)
        if (claim and claim.state == "released") or read_clock_s() - self._changed_s >= self._lease_s:
            return LeaseStatus(claim, "free")
        return LeaseStatus(claim, "alive" if len(self._contents) > 1 else "unsure")


class ReplicaLease:
    """The lease of a run for this process, renewed by a thread while it is held.

    Args:
        store: the replica; its calls must give up within a quarter of `lease_timeout_s`.
        names: object names of the run.
        node: name of this process, unique for all time.
        lease_timeout_s: time without a change after which the lease expires.
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
        self._store, self._names, self._lease_s = store, names, lease_timeout_s
        since = utc_timestamp()
        self._record = LeaseRecord(0, node, "released", 0, since, rendezvous)
        self._version: UpdateVersion | None = None
        self._renewed_s = 0.0
        """Time (`read_clock_s`) at which the last successful renewal began."""
        self._lost_reason: str | None = None
        self._trouble = ""
        self._mutex = threading.RLock()
        self._ended = threading.Event()
        self._renewal_thread = threading.Thread(target=self._renew_periodically, name="replica-lease", daemon=True)

    @property
    def token(self) -> int:
        """Fencing token of this holder. It is part of the names of all objects that the holder writes."""
        return self._record.token

    @property
    def trouble(self) -> str:
        """Error of the last renewal; empty if the lease was renewed."""
        return self._trouble

    def lost_reason(self) -> str | None:
        """Describe the machine that has taken the run over; None if no other machine is known to hold it."""
        return self._lost_reason

    def is_sure(self) -> bool:
        """Return whether no other machine can hold the run: the last renewal is less than `lease_timeout_s` ago."""
        return (
            self._lost_reason is None
            and self._record.state == "holding"
            and read_clock_s() - self._renewed_s < self._lease_s
        )

    def acquire(
        self, stopping: Callable[[], bool], on_progress: Callable[[str], None], previous: Key | None = None
    ) -> None:
        """Become the holder, and start to renew the lease.

        Args:
            stopping: called while waiting; returns whether to stop.
            on_progress: called with a message about the machine that holds the run.
            previous: a holder that has certainly ended. Its lease is treated as expired.

        Raises:
            LeaseHeldError: another machine holds the run and renews its lease, or has just taken it.
            InterruptedRunError: `stopping` returned True.
            ReplicaError: the replica does not answer.
        """
        observer, is_announced, poll_s = LeaseObserver(self._store, self._names, self._lease_s), False, FIRST_POLL_S
        while True:
            if stopping():
                raise InterruptedRunError(
                    f"run {self._names.run_id}: stopped while waiting for its lease; run it again to resume"
                )
            status = observer.read_status()
            claim = status.claim
            if status.state == "alive" and claim:
                raise LeaseHeldError(self._describe_holder(claim))
            if status.state == "free" or (claim and claim.key == previous):
                try:
                    self._take(claim, observer.version)
                except ConflictError:  # the next reading finds the machine that was faster
                    continue
                self._renewal_thread.start()
                return
            if not is_announced:
                is_announced = True
                holder = f"machine {claim.node}, since {claim.since}," if claim else "an unknown machine"
                on_progress(
                    f"{holder} may still train run {self._names.run_id}; its claim expires if it is not renewed for "
                    f"{self._lease_s:g} s"
                )
            time.sleep(min(poll_s, self._lease_s / RENEWALS_PER_LEASE / 2))
            poll_s = min(POLL_S, 1.5 * poll_s)

    def record_origin(self, origin: Origin) -> None:
        """Record which journal this holder continues. Raises the errors of `confirm`."""
        with self._mutex:
            self._record = replace(self._record, origins={**self._record.origins, self.token: origin})
        self.confirm()

    def confirm(self) -> None:
        """Renew the lease now.

        Raises:
            LeaseHeldError: another machine has taken the run over.
            ReplicaError: the replica does not answer.
        """
        self._renew()
        if self._lost_reason:
            raise LeaseHeldError(self._lost_reason)

    def release(self) -> None:
        """Release the lease, so that no machine has to wait until it expires.

        This method may be called twice, and before `acquire`.
        """
        self._ended.set()
        with self._mutex:
            if self._record.state != "holding":
                return
            self._record = replace(self._record, state="released")
            try:
                self._renew()
            except ReplicaError as error:  # other machines wait until the lease expires
                self._trouble = str(error)

    def remove(self) -> None:
        """Remove the lease if this machine still holds it. A lease of another machine stays. Raises ReplicaError."""
        self._ended.set()
        with self._mutex:
            if self._record.state == "holding" and self._lost_reason is None:
                self._store.remove([self._names.lease])
                self._record = replace(self._record, state="released")

    def _take(self, earlier: LeaseRecord | None, version: "UpdateVersion | None") -> None:
        """Write the lease as its next holder. Raises ConflictError if another machine was faster."""
        highest = max(earlier.token if earlier else 0, find_highest_token(self._store, self._names))
        taken = replace(
            self._record, token=highest + 1, state="holding", holders=earlier.holders + 1 if earlier else 1,
            origins=dict(earlier.origins) if earlier else {},
        )  # fmt: skip
        began_s = read_clock_s()
        self._version = self._store.swap(self._names.lease, taken.as_bytes(), version)
        self._record, self._renewed_s = taken, began_s

    def _renew(self) -> None:
        """Replace the lease by one with a higher number of renewals, or find out who has taken it over."""
        with self._mutex:
            while self._lost_reason is None:
                self._record = replace(self._record, renewals=self._record.renewals + 1)
                began_s = read_clock_s()
                try:
                    self._version = self._store.swap(self._names.lease, self._record.as_bytes(), self._version)
                except ConflictError:
                    self._resolve_conflict()
                else:
                    self._renewed_s = began_s
                    return

    def _resolve_conflict(self) -> None:
        """Continue from the version in the replica if an earlier renewal wrote it; otherwise the lease is lost."""
        found = self._store.read_version(self._names.lease)
        claim = None if found is None else LeaseRecord.from_bytes(found.content)
        if found is not None and claim is not None and claim.key == self._record.key:
            self._version = found.version  # a renewal arrived, but its answer was lost
        elif claim is not None:
            self._lost_reason = self._describe_holder(claim)
        else:
            self._lost_reason = f"run {self._names.run_id}: the lease of this machine was removed from its replica"

    def _renew_periodically(self) -> None:
        while not self._ended.wait(self._lease_s / RENEWALS_PER_LEASE) and self._lost_reason is None:
            try:
                with self._mutex:
                    if not self._ended.is_set():
                        self._renew()
                self._trouble = ""
            except Exception as error:  # network outage: keep the lease until a later holder is seen
                self._trouble = f"the lease of the run cannot be renewed: {error}"

    def _describe_holder(self, claim: LeaseRecord) -> str:
        action = "trains" if claim.state == "holding" else "has trained"
        return (
            f"run {self._names.run_id}: machine {claim.node} {action} it, since {claim.since}, and only "
            "one machine may: stop it there or wait until it has ended, then run the command again"
        )
