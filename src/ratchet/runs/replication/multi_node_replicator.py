"""The mirror of a run that several machines train together: one of them holds the lease and copies, the others watch.

Every machine has the whole run on its disk, so it does not matter which one copies. Each brings its disk to where the
mirror stands before it trains, which needs no lease: the mirror is only read. From then on it looks at the claims now
and then, and takes the lease when it trains and nobody holds it: nobody has yet, the holder has given it back, or it
gave no sign of life for `machine.lease_s`. A holder whose ranks have not trained for that long gives it back.

Who holds the lease and is not one of us must not be trained against for long. Members know each other by the event
`ready`, in which the ranks of all machines tell their names. A holder that is alive and meets elsewhere, or nowhere, is
a stranger at once; one that says that it meets where we do is one when it did not come for `machine.rendezvous_wait_s`:
by then a member has given up, and given the run back. All of us end then. So two groups never both write, and never
both train for long.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from ratchet.config.schema import Machine
from ratchet.errors import InterruptedRunError, LeaseHeldError
from ratchet.runs.directory import CHECKPOINT, RESULT, Run
from ratchet.runs.journal import JournalReader
from ratchet.runs.replication import manifests, restore
from ratchet.runs.replication.lease import (
    SIGNS,
    Key,
    LeaseObserver,
    LeaseRecord,
    LeaseStatus,
    ReplicaLease,
    read_clock_s,
)
from ratchet.runs.replication.periodic_task import OutageTracker, PeriodicTask
from ratchet.runs.replication.replicator import ReplicationContext, print_notice, wait_until_settled
from ratchet.runs.replication.restore import RestoreSource
from ratchet.runs.replication.upload import JOIN_S, RunUploader, find_manifest
from ratchet.runs.replication_protocol import ReplicationState

STRANGER_POLL_S = 1.0


class MultiNodeReplicator:
    """Implements `run.custody.Custody` on one of several machines.

    Args:
        run: opened; its lock is held.
        machine: with `mirror` and `rendezvous` set.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self._here = ReplicationContext(run, machine)
        self._store = self._here.quick_store()
        self._onlooker = LeaseObserver(self._store, self._here.names, machine.lease_s)
        self._ranks = _RankActivity(run)
        self._holds: tuple[ReplicaLease, RunUploader] | None = None
        self._earlier: Key | None = None
        """Our own claim of before, whose process is gone."""
        self._seen = LeaseStatus(None, "unsure")
        self._apart_s: float | None = None
        """Since when the holder is alive and not with us, though it says so."""
        self._noted: ReplicationState | None = None
        """What was noted here last while somebody else copied."""
        self._damaged: set[str] = set()
        """Objects that were not what they are called: only a holder may remove them."""
        self._stranger = ""
        self._ended = False
        self._outage = OutageTracker(lambda text: None)  # the holder tells its own, in the journal that is copied
        self._errand: PeriodicTask | None = None

    # --------------------------------------------------------------------------------------------------- as Custody

    def take(self, stopping: Callable[[], bool]) -> None:
        """See Custody: here it is only made sure that no stranger has the run."""
        here = self._here
        if here.is_done(stopping):
            return
        self._earlier = here.earlier(here.noted())
        with here.opened(stopping) as source:
            known = restore.require_same_spec(source.store, here.names, here.run.spec)
            if known and here.is_finished_there(source):
                here.tell(source.notices)
                return
            self._await_strangers(source, stopping)
            _, step = restore.find_newest_step(source.store, here.names)
            if step > restore.find_valid_step(here.run.paths):
                here.fetch(source, "several machines train this run")
                _, step = restore.find_newest_step(source.store, here.names)
            self._damaged = source.damaged
            self._noted = here.note(0, (step,) if step else ())
            here.tell(source.notices)
        self._ranks.follow()
        self._errand = PeriodicTask("mirror-member", self._look, here.machine.lease_s / SIGNS, self._outage)
        self._errand.start()

    def lost(self) -> str | None:
        """See Custody: only a stranger takes the run from us."""
        return self._stranger or None

    def settle(self, wait_s: float) -> str | None:
        """See Custody: whoever copies it."""
        if self._errand is None:
            return None
        self._errand.hurry()
        return wait_until_settled(self._missing, self.lost, wait_s)

    def release(self) -> None:
        """See Custody."""
        self._ended = True
        self._here.leave()
        if self._errand is not None:
            self._errand.end()
            self._errand.join(JOIN_S)
        self._give_back()

    # -------------------------------------------------------------------------------------------------- the holder

    def _look(self) -> None:
        """Once every so often, in a thread of its own."""
        self._ranks.follow()
        if self._holds is not None:
            self._go_on_holding(*self._holds)
        if self._holds is None and not self._ended:
            self._look_at_holder()

    def _go_on_holding(self, lease: ReplicaLease, upload: RunUploader) -> None:
        idle = self._ranks.idle_s() > self._here.machine.lease_s and upload.missing() is None
        if lease.lost() or (idle and not self._has_result()):
            self._give_back()

    def _look_at_holder(self) -> None:
        here = self._here
        self._seen = self._onlooker.look()
        self._note_what_is_there()
        self._stranger = self._stranger or self._is_strange(self._seen)
        gone = self._seen.claim.key if self._seen.claim else None
        free = self._seen.state == "free" or gone == self._earlier
        if self._stranger or self._is_over() or not free or not (self._ranks.train or self._has_result()):
            return
        lease = here.lease()
        try:
            lease.take(lambda: self._ended, lambda text: None, gone)
        except (LeaseHeldError, InterruptedRunError):  # somebody was quicker, and is seen the next time
            return
        try:
            self._note_what_is_there()
            if self._is_over():  # while we waited for whoever was quicker
                lease.release()
                return
            note = self._took_over(lease)
            self._holds, self._noted = (lease, here.upload(lease, note)), None
        except BaseException:
            lease.release()
            raise
        if self._ended:  # meanwhile
            self._give_back()

    def _took_over(self, lease: ReplicaLease) -> ReplicationState:
        """Begin to copy where the mirror stands."""
        here = self._here
        if not restore.require_same_spec(self._store, here.names, here.run.spec):
            self._store.write(here.names.spec, here.run.paths.spec.read_bytes())
        _, step = restore.find_newest_step(self._store, here.names)
        begins = manifests.join_journal(here.run.paths.journal, self._store, here.names)
        if begins.origin is not None:
            lease.go_on_from(begins.origin)
        self._store.remove([here.names.object(digest) for digest in self._damaged])
        self._damaged = set()
        note = here.note(lease.token, (step,) if step else (), begins)
        here.tell([f"this machine copies the run to its mirror from now on (holder {lease.token})"])
        return note

    def _give_back(self) -> None:
        if self._holds is not None:
            lease, upload = self._holds
            self._holds = None
            upload.end()
            lease.release()

    # ---------------------------------------------------------------------------------------------------- strangers

    def _await_strangers(self, source: RestoreSource, stopping: Callable[[], bool]) -> None:
        """Return when no stranger has the run. Raises LeaseHeldError when one does, and InterruptedRunError."""
        here, told = self._here, False
        onlooker = LeaseObserver(source.store, here.names, here.machine.lease_s)
        while True:
            seen = onlooker.look()
            claim = seen.claim
            if claim is None or seen.state == "free" or self._is_of_us(claim) or claim.key == self._earlier:
                return
            if seen.state == "alive":
                raise LeaseHeldError(self._words(claim))
            if stopping():
                raise InterruptedRunError(f"run {here.names.run_id}: stopped on request while it waited; repeat")
            if not told:
                told = True
                print_notice(
                    f"machine {claim.node}, since {claim.since}, may still train run {here.names.run_id}; its claim on "
                    f"the run has run out when it stood still for {here.machine.lease_s:g} s"
                )
            time.sleep(min(STRANGER_POLL_S, here.machine.lease_s / SIGNS / 2))

    def _is_of_us(self, claim: LeaseRecord) -> bool:
        """As far as the claim says."""
        return claim.meeting == self._here.machine.meeting_place

    def _is_strange(self, seen: LeaseStatus) -> str:
        """Why whoever has the run is a stranger; empty: there is none, or not for certain yet."""
        machine = self._here.machine
        if seen.claim is None or seen.state != "alive":
            self._apart_s = None
            return ""
        if seen.claim.node not in self._ranks.machines and not self._is_of_us(seen.claim):
            return self._words(seen.claim)
        if not self._ranks.machines or seen.claim.node in self._ranks.machines:
            self._apart_s = None
            return ""
        self._apart_s = read_clock_s() if self._apart_s is None else self._apart_s
        return (
            self._words(seen.claim)
            if read_clock_s() - self._apart_s > machine.rendezvous_wait_s + machine.lease_s
            else ""
        )

    def _words(self, claim: LeaseRecord) -> str:
        return (
            f"run {self._here.names.run_id}: machine {claim.node} trains it, since {claim.since}, and is none of those "
            f"that meet at {self._here.machine.meeting_place}: stop it there, or wait until it has ended, and repeat"
        )

    # -------------------------------------------------------------------------------------------- what has arrived

    def _note_what_is_there(self) -> None:
        """Note it for whoever removes checkpoints here: what the mirror lacks has to stay."""
        here = self._here
        _, step = restore.find_newest_step(self._store, here.names)
        result = bool(self._store.list(here.names.folder("result")))
        steps = (step,) if step else ()
        noted = self._noted
        if noted is None or (noted.token, noted.durable_steps, noted.result) != (0, steps, result):
            self._noted = here.note(0, steps, result=result)
            with suppress(OSError):
                if result:
                    restore.remove_superseded(here.run.paths)

    def _is_over(self) -> bool:
        """Whether nothing is left to copy."""
        return self._noted is not None and self._noted.result

    def _has_result(self) -> bool:
        return find_manifest(self._here.run.paths.result, RESULT) is not None

    def _missing(self) -> str | None:
        """What is not in the mirror yet, and why, in words; None: all that is here."""
        holds, noted = self._holds, self._noted
        if holds is not None:
            holds[1].hurry()
            return holds[1].missing()
        paths = self._here.run.paths
        newest = max((s for s in paths.checkpoint_steps() if find_manifest(paths.checkpoint(s), CHECKPOINT)), default=0)
        there = max(noted.durable_steps, default=0) if noted else 0
        if self._has_result():
            what = "" if noted and noted.result else "the result"
        else:
            what = f"the checkpoint of step {newest} (the newest there is of step {there})" if newest > there else ""
        if not what:
            return None
        why = self._outage.text or self._store.trouble
        if not why:
            claim = self._seen.claim if self._seen.state == "alive" else None
            why = f"machine {claim.node} copies it" if claim else "no machine copies it at the moment"
        return f"{what}; {why}"


class _RankActivity:
    """Whether the ranks of this machine train, and with which machines: read from the journal."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reader: JournalReader | None = None
        self._since_s = read_clock_s()
        self.machines: frozenset[str] = frozenset()
        """Names, as in claims, of all that train in this attempt; empty before it is ready."""
        self.train = False

    def idle_s(self) -> float:
        """For how long they have not trained."""
        return 0.0 if self.train else read_clock_s() - self._since_s

    def follow(self) -> None:
        """Read on; the first time, from the end: what is there is of before."""
        journal = self._run.paths.journal
        if self._reader is None:
            self._reader = JournalReader(journal, journal.stat().st_size)
        for event in self._reader.read():
            if event.kind == "ready":
                self.train, self.machines = True, frozenset(map(str, event.data.get("machines", ())))
            elif event.kind in ("attempt", "died"):
                if self.train:
                    self._since_s = read_clock_s()
                self.train, self.machines = False, frozenset()
