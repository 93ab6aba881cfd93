"""What a machine writes into a mirror to say that a run is its own, and how long others have seen it stand still."""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal, Self

from ratchet.errors import InterruptedRunError, LeaseHeldError, MirrorError
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore
from ratchet.storage import digests

Key = tuple[int, str]
"""Token and machine: claims are served in this order."""
Origin = tuple[int, int]
"""A token, and how many bytes of the journal that its holder had: what another holder went on from."""
State = Literal["waiting", "holding", "released"]

_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def read_clock_s() -> float:
    """A clock of this machine that nobody sets, and that goes on while the machine sleeps, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class LeaseRecord:
    """One machine's claim on a run. It holds no clock reading that another machine would compare with its own."""

    token: int
    node: str
    state: State
    sign: int
    """Grows with each sign of life."""
    since: str
    """When it was made, by its machine's clock, for people."""
    goes_on: Origin | None = None
    """Of a holder: where its journal begins."""
    meeting: str | None = None
    """Where the machines meet that train the run together with this one; None: it trains alone."""

    @property
    def key(self) -> Key:
        return self.token, self.node

    def as_bytes(self) -> bytes:
        return (digests.canonical_json(asdict(self)) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """None when it is no claim."""
        try:
            raw = json.loads(data)
            token, origin = int(raw.pop("token")), raw.pop("goes_on")
            if raw["state"] not in ("waiting", "holding", "released") or not isinstance(raw["node"], str):
                return None
            return cls(**raw, token=token, goes_on=(int(origin[0]), int(origin[1])) if origin else None)
        except _GARBAGE:
            return None


def parse_key(name: str) -> Key | None:
    """Token and machine, from the name of a claim in a mirror; None for a name that is of no claim."""
    token, _, node = name.rsplit("/", 1)[-1].removesuffix(".json").partition("-")
    return (int(token), node) if token.isdigit() and node else None


def list_keys(store: ReplicaStore, names: RunObjectNames) -> list[Key]:
    """Of all claims on a run, ascending."""
    return sorted(key for name in store.list(names.folder("claims")) if (key := parse_key(name)))


def find_highest_token(store: ReplicaStore, names: RunObjectNames, kinds: tuple[str, ...]) -> int:
    """The highest token under which something of these kinds lies in the mirror; 0: nothing."""
    found = [parse_numbers(name) for kind in kinds for name in store.list(names.folder(kind))]
    return max((numbers[0] for numbers in found if numbers), default=0)


WRITTEN = ("checkpoints", "result", "journal")
"""Kinds of what a holder leaves."""


class StalenessTracker:
    """Remembers since when, by our own clock, contents have been the same."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}
        self._last: dict[str, tuple[bytes, float]] = {}

    def still_for(self, name: str, content: bytes) -> float:
        """Seconds for which it has been the same, as far as we have looked."""
        now = read_clock_s()
        self._first.setdefault(name, content)
        known = self._last.get(name)
        if known is None or known[0] != content:
            known = self._last[name] = (content, now)
        return now - known[1]

    def moved(self, name: str) -> bool:
        """Whether it has changed since we first looked."""
        return name in self._last and self._last[name][0] != self._first[name]

    def last(self, name: str) -> bytes | None:
        """As it was when we looked last."""
        return self._last[name][0] if name in self._last else None


@dataclass(frozen=True)
class LeaseStatus:
    """Who has a run, as far as somebody sees who has no claim on it."""

    claim: LeaseRecord | None
    """The newest that holds, or held."""
    state: Literal["free", "unsure", "alive"]
    """Free: released, or without a sign of life for a whole lease. Unsure: not looked at for long enough."""


class LeaseObserver:
    """Looks at the claims on a run, without one of its own.

    Args:
        store: where they are.
        names: of the run.
        lease_s: a claim that stood still for so long has run out.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, lease_s: float) -> None:
        self._store, self._names, self._lease_s = store, names, lease_s
        self._watch = StalenessTracker()

    def look(self) -> LeaseStatus:
        """Raises MirrorError."""
        for key in reversed(list_keys(self._store, self._names)):
            name = self._names.claim(*key)
            content = self._store.read(name) or b""
            claim = LeaseRecord.from_bytes(content)
            if claim is None or claim.state == "waiting":
                continue
            still_s = self._watch.still_for(name, content)
            if claim.state == "released" or still_s >= self._lease_s:
                return LeaseStatus(claim, "free")
            return LeaseStatus(claim, "alive" if self._watch.moved(name) else "unsure")
        return LeaseStatus(None, "free")


# Which machine may write a run: Lamport's bakery, on a store that lists what was written.
#
# A machine that wants the run says that it is choosing (`entering/`), takes a token above all that there are
# (`claims/`),
# and waits until nobody is choosing any more and every earlier claim was released or has run out: it has stood still
# for
# `machine.lease_s` by the clock of whoever waits. No two clocks are compared. (L. Lamport, "A New Solution of
# Dijkstra's
# Concurrent Programming Problem", CACM 17(8), 1974; the store must show a write to every later list and read: S3, GCS,
# Azure and POSIX do.)
#
# The bakery assumes that nobody stands still for long. Whoever did must not act on what it saw before: one that took
# long
# to choose withdraws; a new holder says so first and then looks again, so of two who thought each other gone at least
# one
# sees the other; a holder looks for later ones after each sign of life. What a holder that is not sure any more had
# under
# way goes under its old token, which readers put last.

SIGNS = 4
"""Signs of life within the time after which a claim has run out."""
FIRST_POLL_S = 0.05
POLL_S = 1.0
TRIES = 10
"""Of taking a token, each spoilt by standing still for half of the lease, or by somebody who came back."""


class _InterruptedClaimError(Exception):
    """We stood still for too long, or others did: begin again."""


class ReplicaLease:
    """A claim on a run.

    Args:
        store: its calls must give up within a quarter of the lease.
        names: of the run.
        node: this process, by a name that no other process has or had.
        lease_s: a claim that stood still for so long has run out.
        meeting: where this machine meets others that train the run with it; None: it trains alone.
    """

    def __init__(
        self, store: ReplicaStore, names: RunObjectNames, node: str, lease_s: float, meeting: str | None = None
    ) -> None:
        self._store, self._names, self._node, self._lease_s = store, names, node, lease_s
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._claim = LeaseRecord(0, node, "waiting", 0, since, meeting=meeting)
        self._signed_s = self._confirmed_s = 0.0
        """When our last sign of life was given; the last after which no later holder was to be seen."""
        self._lost: str | None = None
        self._removed = False
        self._trouble = ""
        self._mutex = threading.RLock()
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._give_signs, name="mirror-lease", daemon=True)

    @property
    def token(self) -> int:
        """What everything that we write bears."""
        return self._claim.token

    @property
    def trouble(self) -> str:
        """Why we are not sure that the run is ours, or are about not to be; empty when all is well."""
        return self._trouble

    def lost(self) -> str | None:
        """Which machine has the run now; None: nobody else, as far as we know."""
        return self._lost

    def is_sure(self) -> bool:
        """Whether nobody else can have the run: our last confirmed sign of life is younger than the lease."""
        return (
            self._lost is None and self._claim.state == "holding" and read_clock_s() - self._confirmed_s < self._lease_s
        )

    def take(self, stopping: Callable[[], bool], tell: Callable[[str], None], earlier: Key | None = None) -> None:
        """Become the holder, and give signs of life from then on.

        Args:
            stopping: asked while we wait.
            tell: told for whom we wait.
            earlier: a claim whose process is known to be gone: it is not waited for.

        Raises:
            LeaseHeldError: the run is another machine's, which gives signs of life.
            InterruptedRunError: asked to stop.
            MirrorError: the mirror does not answer, or too slowly.
        """
        for _ in range(TRIES):
            try:
                self._choose()
                self._await_turn(stopping, tell, earlier)
            except _InterruptedClaimError:
                self._withdraw()
                time.sleep(random.uniform(0, min(POLL_S, self._lease_s / SIGNS)))
            except BaseException:
                self._withdraw()
                raise
            else:
                self._pulse.start()
                return
        raise MirrorError(
            f"run {self._names.run_id}: its mirror answers too slowly to agree on who may write it "
            f"({TRIES} tries, each longer than half of machine.lease_s: {self._lease_s:g} s); raise machine.lease_s"
        )

    def go_on_from(self, origin: Origin | None) -> None:
        """Write down where our journal begins. Raises MirrorError; LeaseHeldError when the run is another's by now."""
        with self._mutex:
            self._claim = replace(self._claim, goes_on=origin)
        self.confirm()

    def confirm(self) -> None:
        """Give a sign of life now, and look for later holders.

        Raises:
            LeaseHeldError: there is one.
            MirrorError: the mirror does not answer.
        """
        with self._mutex:
            self._sign()
            self._look_for_later()
        if self._lost:
            raise LeaseHeldError(self._lost)

    def release(self) -> None:
        """Give the run back, so that nobody has to wait for us. May be called twice, and before `take`."""
        self._ended.set()
        with self._mutex:
            if self._claim.state != "holding" or self._removed:
                return
            try:
                self._sign("released")
            except MirrorError:  # then others wait until it has run out
                self._claim = replace(self._claim, state="released")

    def _choose(self) -> None:
        """Take a token above all others."""
        began_s = read_clock_s()
        marker = self._names.entering(self._node)
        self._store.write(marker, f"{self._claim.sign}\n".encode())
        try:
            highest = find_highest_token(self._store, self._names, ("claims", *WRITTEN))
            self._claim = replace(self._claim, token=highest + 1)
            self._sign("waiting")
        finally:
            self._store.remove([marker])
        if (
            read_clock_s() - began_s > self._lease_s / 2
        ):  # somebody may have thought that we had gone, and not seen our token
            raise _InterruptedClaimError

    def _await_turn(self, stopping: Callable[[], bool], tell: Callable[[str], None], earlier: Key | None) -> None:
        watch, told, poll_s = StalenessTracker(), "", FIRST_POLL_S
        while True:
            if stopping():
                raise InterruptedRunError(f"run {self._names.run_id}: stopped on request while it waited; repeat")
            if read_clock_s() - self._signed_s > self._lease_s / SIGNS:
                self._sign()
            waiting_for = self._before_us(watch, earlier)
            # Looked for twice: a folder may not list a file that is renamed over another one at that moment.
            if waiting_for is None and self._before_us(watch, earlier) is None:
                self._hold(watch)
                return
            if waiting_for and waiting_for != told:
                told = waiting_for
                tell(f"{waiting_for}; its claim on the run has run out when it stood still for {self._lease_s:g} s")
            time.sleep(min(poll_s, self._lease_s / SIGNS / 2))
            poll_s = min(POLL_S, 1.5 * poll_s)

    def _before_us(self, watch: StalenessTracker, earlier: Key | None) -> str | None:
        """For whom we must wait; empty: for somebody who is only choosing; None: for nobody.

        A claim that holds, or held, has waited for all before it: what is earlier still need not be asked.
        """
        for name in self._store.list(self._names.folder("entering")):
            other = name.rsplit("/", 1)[-1]
            content = self._store.read(self._names.entering(other))
            if other == self._node or content is None:
                continue
            if watch.still_for(f"entering/{other}", content) < self._lease_s:
                return ""
        for key in reversed(list_keys(self._store, self._names)):
            name = self._names.claim(*key)
            content = None if key == self._claim.key else self._store.read(name)
            if content is None:
                continue
            claim = LeaseRecord.from_bytes(content) or LeaseRecord(*key, "waiting", 0, "?")
            if claim.state != "waiting" and (key > self._claim.key or key[0] == self.token):
                # It thought that we had gone; or it has held with our token, and no two may.
                raise _InterruptedClaimError
            if key > self._claim.key:
                continue
            still_s = watch.still_for(name, content)
            if claim.state == "released":
                return None
            if watch.moved(name):
                raise LeaseHeldError(self._words(claim))
            if still_s < self._lease_s and key != earlier:
                return f"machine {claim.node}, since {claim.since}, may still train run {self._names.run_id}"
            if claim.state == "holding":
                return None
        return None

    def _hold(self, watch: StalenessTracker) -> None:
        """Say that we hold the run; then see whether anybody has come back, or thinks the same."""
        if read_clock_s() - self._signed_s > self._lease_s / 2:
            raise _InterruptedClaimError
        self._sign("holding")
        for key in list_keys(self._store, self._names):
            name = self._names.claim(*key)
            before = watch.last(name)
            if key == self._claim.key or (key < self._claim.key and before is None):
                continue  # those that were too old to be asked see our claim before they do anything
            content = self._store.read(name)
            claim = LeaseRecord.from_bytes(content or b"")
            if key < self._claim.key:
                spoilt = content not in (None, before) and (claim is None or claim.state != "released")
            else:
                spoilt = claim is not None and claim.state != "waiting"
            if spoilt:
                raise _InterruptedClaimError
        self._confirmed_s = self._signed_s

    def _sign(self, state: State | None = None) -> None:
        """Write our claim anew."""
        with self._mutex:
            claim = replace(self._claim, sign=self._claim.sign + 1, state=state or self._claim.state)
            began_s = read_clock_s()
            self._store.write(self._names.claim(*claim.key), claim.as_bytes())
            self._claim, self._signed_s = claim, began_s

    def _withdraw(self) -> None:
        """Leave no trace of a claim under which nothing was written."""
        with self._mutex:
            name, self._claim = self._names.claim(*self._claim.key), replace(self._claim, state="waiting")
            self._signed_s = self._confirmed_s = 0.0
            try:
                self._store.remove([name, self._names.entering(self._node)])
            except MirrorError as error:  # it runs out
                self._trouble = str(error)

    def _give_signs(self) -> None:
        while not self._ended.wait(self._lease_s / SIGNS) and self._lost is None:
            try:
                self._renew()
                self._trouble = ""
            except Exception as error:  # the network is away: we hold on until somebody else is seen to have the run
                self._trouble = f"the claim on the run cannot be renewed: {error}"

    def _renew(self) -> None:
        with self._mutex:
            if self._ended.is_set():
                return
            if self._store.read(self._names.claim(*self._claim.key)) is None:
                self._removed = True
                self._lost = f"run {self._names.run_id}: our claim on it was removed from its mirror"
                return
            self._sign()
            self._look_for_later()

    def _look_for_later(self) -> None:
        for key in reversed(list_keys(self._store, self._names)):
            if key > self._claim.key:
                claim = LeaseRecord.from_bytes(self._store.read(self._names.claim(*key)) or b"")
                if claim is not None and claim.state != "waiting":
                    self._lost = self._words(claim)
                    return
        self._confirmed_s = self._signed_s

    def _words(self, claim: LeaseRecord) -> str:
        what = {"waiting": "is about to train", "holding": "trains", "released": "has trained"}[claim.state]
        return (
            f"run {self._names.run_id}: machine {claim.node} {what} it, since {claim.since}; one machine at a time "
            "may: stop it there, or wait until it has ended, and repeat"
        )
