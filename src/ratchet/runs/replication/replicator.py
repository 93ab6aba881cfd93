"""Replicators: they restore a run from its replica before training, and upload it during training.

`RunReplicator` is for a run that one machine trains. It acquires the lease of the run, restores, and uploads.

`MultiNodeReplicator` is for a run that several machines train together. One of them holds the lease and uploads; the
others observe the lease. Every machine has the whole run on its disk, so any of them may upload. Before it trains, each
machine restores from the replica if the replica has a newer checkpoint; a restore needs no lease. Then it reads the
claims at an interval. It acquires the lease when the lease is free and its ranks train or have sealed the result. The
lease is free if no machine has held it, if the holder has released it, or if the holder has not renewed it for
`machine.lease_timeout_s`. A holder releases the lease when its ranks have not trained for `machine.lease_timeout_s`,
the replica lacks nothing, and this machine has no result.

Two groups of machines must not train the same run for long. The event `worker_ready` lists the machines of a group. A
stranger is a live holder that does not belong to the group. A holder with another rendezvous, or without one, is a
stranger at once. A holder with the same rendezvous is a stranger if it has not joined this group for
`machine.rendezvous_timeout_s` plus `machine.lease_timeout_s`. By then, a member would have given up the rendezvous and
released the lease. All machines of this group stop when they find a stranger. So two groups never both write, and never
both train for long.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from uuid import uuid4

from ratchet.config.machine import Machine
from ratchet.errors import InterruptedRunError, LeaseHeldError, ReplicaError
from ratchet.runs import log, replication_protocol
from ratchet.runs.directory import CHECKPOINT, RESULT, RunDirectory
from ratchet.runs.journal import JournalReader
from ratchet.runs.replication import lease, manifests, restore
from ratchet.runs.replication.lease import (
    RENEWALS_PER_LEASE,
    Key,
    LeaseObserver,
    LeaseRecord,
    LeaseStatus,
    ReplicaLease,
    read_clock_s,
)
from ratchet.runs.replication.manifests import JournalStart
from ratchet.runs.replication.object_storage import strip_credentials
from ratchet.runs.replication.restore import DownloadProgress, RestoreSource
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits
from ratchet.runs.replication.upload import (
    JOIN_S,
    OutageTracker,
    PeriodicTask,
    ReplicationJob,
    RunUploader,
    find_manifest,
)
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage.progress import report_step

RETRY_TIMEOUT_S = 20.0
"""How long one call is retried during training. Afterwards, the caller repeats the call later."""
TIMEOUT_S = 30.0
"""Time without a byte or an answer after which an attempt ends."""
MIRROR_TIMEOUT_S = 5.0
"""How long one call of a mirror is retried before the replica is asked."""
CHECK_TIMEOUT_S = 10.0
"""Time limit for checking that the replica still has a result."""
POLL_S = 0.05
RELEASE_TIMEOUT_S = 5.0
"""Time limit for releasing the lease at the end of the process."""
STRANGER_POLL_S = 1.0
"""Interval at which a machine that waits for a stranger reads the claims."""


def create_node_name() -> str:
    """Create a unique name of this process: the machine's name and eight random digits."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:50] or "machine"
    return f"{host}-{uuid4().hex[:8]}"


class ReplicationContext:
    """A run on this machine, and access to its replica.

    Args:
        run: the run; its lock is held.
        machine: settings with `replica`.
    """

    def __init__(self, run: RunDirectory, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.node, self._place = create_node_name(), strip_credentials(machine.replica or "")
        self.names = RunObjectNames(run.paths.root.name)
        self._release_deadline_s: float | None = None

    @contextmanager
    def open_replica(self, stopping: Callable[[], bool]) -> Iterator[RestoreSource]:
        """Open the replica, and wait for it at most `machine.replica_timeout_s`.

        Raises:
            InterruptedRunError: `stopping` returned True.
            ReplicaError, SettingsError: the replica cannot be reached, or cannot be used.
        """
        store = self._store(
            TransferLimits(retry_timeout_s=self.machine.replica_timeout_s, timeout_s=TIMEOUT_S), stopping
        )
        try:
            store.check()
            mirror = self._open_mirror(stopping)
            yield RestoreSource(store, self.names, DownloadProgress(self.names.run_id, stopping), mirror=mirror)
        except ReplicaError:
            if stopping():
                raise InterruptedRunError(f"run {self.names.run_id}: stopped while waiting for its replica") from None
            raise

    def quick_store(self) -> ReplicaStore:
        """Open a store whose calls succeed or fail within a quarter of the lease."""
        quarter_s = self.machine.lease_timeout_s / RENEWALS_PER_LEASE
        return self._store(
            TransferLimits(retry_timeout_s=quarter_s, timeout_s=min(TIMEOUT_S, quarter_s)), self._is_past_deadline
        )

    def lease(self) -> ReplicaLease:
        """Create a lease of the run without acquiring it."""
        return ReplicaLease(
            self.quick_store(), self.names, self.node, self.machine.lease_timeout_s, self.machine.active_rendezvous
        )

    def upload(self, lease: ReplicaLease, state: ReplicationState) -> RunUploader:
        """Start uploading under a lease that is held."""
        ended = threading.Event()
        store = self._store(TransferLimits(self.machine.replica_bytes_per_s, RETRY_TIMEOUT_S, TIMEOUT_S), ended.is_set)
        upload = RunUploader(ReplicationJob(self.run, self.names, store, lease, self.node, self.machine), state, ended)
        upload.start()
        return upload

    def _store(self, limits: TransferLimits, stopping: Callable[[], bool]) -> ReplicaStore:
        return ReplicaStore(self.machine.replica or "", limits, stopping)

    def _open_mirror(self, stopping: Callable[[], bool]) -> ReplicaStore | None:
        """Open `machine.replica_mirror` for a restore. Its calls fail soon, because the replica has the same files."""
        if self.machine.replica_mirror is None:
            return None
        limits = TransferLimits(retry_timeout_s=MIRROR_TIMEOUT_S, timeout_s=MIRROR_TIMEOUT_S)
        return ReplicaStore(self.machine.replica_mirror, limits, stopping, is_mirror=True)

    def shorten_timeouts(self) -> None:
        """Shorten the timeouts of all further calls, because the process is about to end."""
        if self._release_deadline_s is None:
            self._release_deadline_s = time.monotonic() + RELEASE_TIMEOUT_S

    def _is_past_deadline(self) -> bool:
        return self._release_deadline_s is not None and time.monotonic() > self._release_deadline_s

    def read_state(self) -> ReplicationState | None:
        """Read the replication state; None if there is none, or if it belongs to another replica."""
        state = replication_protocol.read_replication_state(self.run.paths)
        return state if state is not None and state.place == self._place else None

    def is_done(self, stopping: Callable[[], bool]) -> bool:
        """Return whether the result is on this machine and in the replica.

        If replication.json says that the replica has the result, the replica is checked. If the replica no longer has
        the result, replication.json is changed: it then says that the whole run is missing, so the run is uploaded
        again.
        """
        state = self.read_state()
        if state is None or not state.result or not self.run.paths.is_finished():
            return False
        store = self._store(
            TransferLimits(
                retry_timeout_s=min(CHECK_TIMEOUT_S, self.machine.replica_timeout_s), timeout_s=CHECK_TIMEOUT_S
            ),
            stopping,
        )
        try:
            if restore.has_result(store, self.names):
                return True
        except ReplicaError as error:
            print_notice(f"the result was uploaded earlier; cannot check that the replica still has it: {error}")
            return True
        state = state.model_copy(update={"result": False, "durable_steps": (), "journal_bytes": 0, "journal_shift": 0})
        state.save(self.run.paths.replication_state)
        self.log_notices(["the replica no longer has the complete result: uploading it again"])
        return False

    def find_previous_claim(self, state: ReplicationState | None) -> Key | None:
        """Return the claim of the supervisor that used this directory before. This process holds the directory's lock,
        so that supervisor has ended."""
        if state is None or state.lock != replication_protocol.get_lock_identity(self.run.lock):
            return None
        return state.token, state.node

    def save_state(
        self,
        token: int,
        durable_steps: tuple[int, ...] = (),
        journal_start: JournalStart | None = None,
        result: bool = False,
    ) -> ReplicationState:
        """Write replication.json: how much of the run is in the replica."""
        journal_start = journal_start or JournalStart()
        with self.run.paths.journal.open("rb") as stream:
            known_sha256 = sha256(stream.read(journal_start.start)).hexdigest()
        state = ReplicationState(
            place=self._place, token=token, node=self.node, lock=replication_protocol.get_lock_identity(self.run.lock),
            durable_steps=durable_steps, result=result, journal_bytes=journal_start.start, journal_sha256=known_sha256,
            journal_shift=journal_start.shift,
        )  # fmt: skip
        state.save(self.run.paths.replication_state)
        return state

    def log_notices(self, notices: list[str]) -> None:
        """Append notices to the journal, which may have been restored from the replica, and print them."""
        for text in notices:
            self.run.journal.append("notice", text=text)
            print_notice(text)

    def fetch_result(self, source: RestoreSource) -> bool:
        """Fetch the result if the replica has it. Return whether it was fetched. Fetching needs no lease."""
        if self.run.paths.is_finished():
            return False
        token = restore.restore_result(self.run, source)
        if token is None:
            return False
        self.save_state(token, result=True)
        with suppress(OSError):
            restore.remove_superseded(self.run.paths)
        source.notices.append(f"the result of run {self.names.run_id} was restored from its replica")
        return True

    def fetch(self, source: RestoreSource, reason: str) -> restore.RestoreResult:
        """Replace the local state by that of the replica.

        Args:
            source: the replica.
            reason: why the state is replaced, for the notice.
        """
        had_checkpoints = bool(self.run.paths.checkpoint_steps())
        restored_run = restore.restore_all(self.run, source)
        if restored_run.has_kept_local:
            source.notices.append(f"the replica has no complete checkpoint ({reason}): resuming from the local state")
        else:
            kept = f"; the local state is kept as {restore.SUPERSEDED}*" if had_checkpoints else ""
            restored = f"the checkpoint of step {restored_run.step}" if restored_run.step else "no checkpoint"
            source.notices.append(f"restored from the replica: {restored} ({reason}){kept}")
        return restored_run


def wait_until_settled(
    describe_missing: Callable[[], str | None], lost: Callable[[], str | None], wait_s: float
) -> str | None:
    """Wait until the replica is complete or the lease is lost, at most `wait_s`. Return what the replica lacks."""
    deadline = time.monotonic() + wait_s
    with report_step("upload to the replica"):
        while missing := describe_missing():
            if reason := lost():
                return f"{missing}; {reason}"
            if time.monotonic() >= deadline:
                return missing
            time.sleep(POLL_S)
    return None


def print_notice(text: str) -> None:
    """Print a notice on the terminal."""
    log.print_message(text)


class RunReplicator:
    """Replicator of a run that one machine trains (`ReplicatorProtocol`).

    Args:
        run: the run; its lock is held.
        machine: settings with `replica`.
    """

    def __init__(self, run: RunDirectory, machine: Machine) -> None:
        self._context = ReplicationContext(run, machine)
        self._lease = self._context.lease()
        self._upload: RunUploader | None = None

    def acquire(self, stopping: Callable[[], bool]) -> None:
        """See ReplicatorProtocol."""
        context = self._context
        if context.is_done(stopping):
            return
        state = context.read_state()
        with context.open_replica(stopping) as source:
            is_in_replica = restore.require_same_spec(source.store, context.names, context.run.spec)
            if is_in_replica and context.fetch_result(source):
                context.log_notices(source.notices)
                return
            self._lease.acquire(stopping, print_notice, context.find_previous_claim(state))
            # `ratchet reset --replica` may have removed the run meanwhile.
            if not restore.require_same_spec(source.store, context.names, context.run.spec):
                source.store.write(context.names.spec, context.run.paths.spec.read_bytes())
            state = self._synchronize(source, state)
            source.store.remove([context.names.object(digest) for digest in source.damaged])
            context.log_notices(source.notices)
        self._upload = context.upload(self._lease, state)

    def lost_reason(self) -> str | None:
        """See ReplicatorProtocol."""
        return self._lease.lost_reason()

    def wait_until_replicated(self, wait_s: float) -> str | None:
        """See ReplicatorProtocol."""
        if self._upload is None:
            return None
        self._upload.hurry()
        return wait_until_settled(self._upload.missing, self.lost_reason, wait_s)

    def release(self) -> None:
        """See ReplicatorProtocol."""
        self._context.shorten_timeouts()
        if self._upload is not None:
            self._upload.end()
        self._lease.release()

    def _synchronize(self, source: RestoreSource, state: ReplicationState | None) -> ReplicationState:
        """Restore from the replica if the replica is further. Return what the replica has."""
        context, token = self._context, self._lease.token
        newest_token = lease.find_highest_token(source.store, context.names)
        journal_start = JournalStart()
        steps: tuple[int, ...] = ()
        if newest_token == 0:
            pass
        elif self._is_local_newer(source.store, state, newest_token):
            journal_start = self._find_journal_start(source.store, state)
            steps = state.durable_steps if state else ()
        else:
            restored = context.fetch(source, f"holder {newest_token} of this run; this machine is holder {token}")
            steps = restored.steps
            journal_start = JournalStart(restored.origin, restored.origin[1]) if restored.origin else journal_start
        if journal_start.origin is not None:
            self._lease.record_origin(journal_start.origin)
        return context.save_state(token, steps, journal_start)

    def _is_local_newer(self, store: ReplicaStore, state: ReplicationState | None, newest_token: int) -> bool:
        """Return whether this directory is as far as the replica, or has a checkpoint and the replica has none.

        The directory is as far as the replica under two conditions. Its newest valid step is not below that of the
        replica. And no other holder has written the run since this machine held the lease, or that holder was a machine
        of the same training.
        """
        token, step = restore.find_newest_step(store, self._context.names)
        local_step = restore.find_valid_step(self._context.run.paths)
        if token == 0 and local_step:
            return True
        return state is not None and (state.token >= newest_token or state.token == 0) and local_step >= step

    def _find_journal_start(self, store: ReplicaStore, state: ReplicationState | None) -> JournalStart:
        """Find the part of the local journal that is in the replica. If this part has changed, the whole journal is
        uploaded again."""
        context = self._context
        if state is not None and state.token == 0:
            return manifests.join_journal(context.run.paths.journal, store, context.names)
        if state is None or not state.journal_bytes:
            return JournalStart()
        with context.run.paths.journal.open("rb") as stream:
            known_sha256 = sha256(stream.read(state.journal_bytes)).hexdigest()
        if known_sha256 != state.journal_sha256:
            return JournalStart()
        remote_bytes = state.journal_bytes + state.journal_shift
        return JournalStart((state.token, remote_bytes), state.journal_bytes, state.journal_shift)


class MultiNodeReplicator:
    """Replicator on one of several machines that train a run together (`ReplicatorProtocol`).

    Args:
        run: the run; its lock is held.
        machine: settings with `replica` and `rendezvous`.
    """

    def __init__(self, run: RunDirectory, machine: Machine) -> None:
        self._context = ReplicationContext(run, machine)
        self._store = self._context.quick_store()
        self._observer = LeaseObserver(self._store, self._context.names, machine.lease_timeout_s)
        self._ranks = _RankActivity(run)
        self._held: tuple[ReplicaLease, RunUploader] | None = None
        self._previous_claim: Key | None = None
        """Claim of the process that used this directory before. That process has ended."""
        self._status = LeaseStatus(None, "unsure")
        self._separate_since_s: float | None = None
        """Time since which a holder with the same rendezvous is alive but has not joined this group."""
        self._saved_state: ReplicationState | None = None
        """Last saved state while another machine uploads; None while this machine uploads."""
        self._damaged: set[str] = set()
        """Damaged objects. Only a holder may remove them."""
        self._stranger = ""
        self._ended = False
        # Outages are not reported here: the holder reports them in the journal that it uploads.
        self._outage = OutageTracker(lambda text: None)
        self._task: PeriodicTask | None = None

    # -------------------------------------------------------------------------------------------------------- protocol

    def acquire(self, stopping: Callable[[], bool]) -> None:
        """See ReplicatorProtocol. This method acquires no lease: it makes sure that no stranger holds the run, and
        restores."""
        context = self._context
        if context.is_done(stopping):
            return
        self._previous_claim = context.find_previous_claim(context.read_state())
        with context.open_replica(stopping) as source:
            is_in_replica = restore.require_same_spec(source.store, context.names, context.run.spec)
            if is_in_replica and context.fetch_result(source):
                context.log_notices(source.notices)
                return
            self._await_strangers(source, stopping)
            _, step = restore.find_newest_step(source.store, context.names)
            if step > restore.find_valid_step(context.run.paths):
                context.fetch(source, "several machines train this run")
                _, step = restore.find_newest_step(source.store, context.names)
            self._damaged = source.damaged
            self._saved_state = context.save_state(0, (step,) if step else ())
            context.log_notices(source.notices)
        self._ranks.read_new_events()
        self._task = PeriodicTask(
            "replica-member", self._run_once, context.machine.lease_timeout_s / RENEWALS_PER_LEASE, self._outage
        )
        self._task.start()

    def lost_reason(self) -> str | None:
        """See ReplicatorProtocol. Only a stranger can take the run over."""
        return self._stranger or None

    def wait_until_replicated(self, wait_s: float) -> str | None:
        """See ReplicatorProtocol. Any machine of the group may upload."""
        if self._task is None:
            return None
        self._task.hurry()
        return wait_until_settled(self._describe_missing, self.lost_reason, wait_s)

    def release(self) -> None:
        """See ReplicatorProtocol."""
        self._ended = True
        self._context.shorten_timeouts()
        if self._task is not None:
            self._task.end()
            self._task.join(JOIN_S)
        self._release_lease()

    # -------------------------------------------------------------------------------------------------- the holder

    def _run_once(self) -> None:
        """Check the lease. `_task` calls this at an interval."""
        self._ranks.read_new_events()
        if self._held is not None:
            self._keep_or_release_lease(*self._held)
        if self._held is None and not self._ended:
            self._check_holder()

    def _keep_or_release_lease(self, lease: ReplicaLease, upload: RunUploader) -> None:
        is_idle = self._ranks.idle_s() > self._context.machine.lease_timeout_s and upload.missing() is None
        if lease.lost_reason() or (is_idle and not self._has_result()):
            self._release_lease()

    def _check_holder(self) -> None:
        context = self._context
        self._status = self._observer.read_status()
        self._save_replica_state()
        self._stranger = self._stranger or self._find_stranger(self._status)
        holder_key = self._status.claim.key if self._status.claim else None
        is_free = self._status.state == "free" or holder_key == self._previous_claim
        if self._stranger or self._is_complete() or not is_free or not (self._ranks.is_training or self._has_result()):
            return
        lease = context.lease()
        try:
            lease.acquire(lambda: self._ended, lambda text: None, holder_key)
        except (LeaseHeldError, InterruptedRunError):  # another machine was faster: the next check finds its claim
            return
        try:
            self._save_replica_state()
            if self._is_complete():  # another machine has finished the upload meanwhile
                lease.release()
                return
            state = self._take_over(lease)
            self._held, self._saved_state = (lease, context.upload(lease, state)), None
        except BaseException:
            lease.release()
            raise
        if self._ended:  # `release` was called meanwhile
            self._release_lease()

    def _take_over(self, lease: ReplicaLease) -> ReplicationState:
        """Prepare to continue the upload from the current state of the replica."""
        context = self._context
        if not restore.require_same_spec(self._store, context.names, context.run.spec):
            self._store.write(context.names.spec, context.run.paths.spec.read_bytes())
        _, step = restore.find_newest_step(self._store, context.names)
        journal_start = manifests.join_journal(context.run.paths.journal, self._store, context.names)
        if journal_start.origin is not None:
            lease.record_origin(journal_start.origin)
        self._store.remove([context.names.object(digest) for digest in self._damaged])
        self._damaged = set()
        state = context.save_state(lease.token, (step,) if step else (), journal_start)
        context.log_notices([f"this machine now uploads the run to its replica (holder {lease.token})"])
        return state

    def _release_lease(self) -> None:
        if self._held is not None:
            lease, upload = self._held
            self._held = None
            upload.end()
            lease.release()

    # ---------------------------------------------------------------------------------------------------- strangers

    def _await_strangers(self, source: RestoreSource, stopping: Callable[[], bool]) -> None:
        """Return when no stranger holds the run. Raises LeaseHeldError if one is alive, and InterruptedRunError."""
        context, announced = self._context, False
        observer = LeaseObserver(source.store, context.names, context.machine.lease_timeout_s)
        while True:
            status = observer.read_status()
            claim = status.claim
            if (
                claim is None
                or status.state == "free"
                or self._is_same_rendezvous(claim)
                or claim.key == self._previous_claim
            ):
                return
            if status.state == "alive":
                raise LeaseHeldError(self._describe_holder(claim))
            if stopping():
                raise InterruptedRunError(f"run {context.names.run_id}: stopped while waiting; run it again to resume")
            if not announced:
                announced = True
                print_notice(
                    f"machine {claim.node}, since {claim.since}, may still train run {context.names.run_id}; its claim "
                    f"expires if it is not renewed for {context.machine.lease_timeout_s:g} s"
                )
            time.sleep(min(STRANGER_POLL_S, context.machine.lease_timeout_s / RENEWALS_PER_LEASE / 2))

    def _is_same_rendezvous(self, claim: LeaseRecord) -> bool:
        """Return whether the machine of a claim uses the same rendezvous, according to the claim."""
        return claim.rendezvous == self._context.machine.active_rendezvous

    def _find_stranger(self, status: LeaseStatus) -> str:
        """Describe the holder if it is a stranger; empty if it is not, or if that is not certain yet."""
        machine = self._context.machine
        if status.claim is None or status.state != "alive":
            self._separate_since_s = None
            return ""
        if status.claim.node not in self._ranks.machines and not self._is_same_rendezvous(status.claim):
            return self._describe_holder(status.claim)
        if not self._ranks.machines or status.claim.node in self._ranks.machines:
            self._separate_since_s = None
            return ""
        self._separate_since_s = read_clock_s() if self._separate_since_s is None else self._separate_since_s
        return (
            self._describe_holder(status.claim)
            if read_clock_s() - self._separate_since_s > machine.rendezvous_timeout_s + machine.lease_timeout_s
            else ""
        )

    def _describe_holder(self, claim: LeaseRecord) -> str:
        return (
            f"run {self._context.names.run_id}: machine {claim.node} trains it, since {claim.since}, and does not "
            f"belong to the machines at {self._context.machine.active_rendezvous}: stop it there or wait until it has "
            "ended, then run the command again"
        )

    # -------------------------------------------------------------------------------------------- replicated state

    def _save_replica_state(self) -> None:
        """Save what the replica has, so that the worker keeps the checkpoints that the replica lacks."""
        context = self._context
        _, step = restore.find_newest_step(self._store, context.names)
        result = bool(self._store.list(context.names.folder("result")))
        steps = (step,) if step else ()
        saved_state = self._saved_state
        if saved_state is None or (saved_state.token, saved_state.durable_steps, saved_state.result) != (
            0,
            steps,
            result,
        ):
            self._saved_state = context.save_state(0, steps, result=result)
            with suppress(OSError):
                if result:
                    restore.remove_superseded(context.run.paths)

    def _is_complete(self) -> bool:
        """Return whether the result is in the replica, so that nothing is left to upload."""
        return self._saved_state is not None and self._saved_state.result

    def _has_result(self) -> bool:
        return find_manifest(self._context.run.paths.result, RESULT) is not None

    def _describe_missing(self) -> str | None:
        """Describe what the replica lacks, and why; None if it is complete."""
        held, saved_state = self._held, self._saved_state
        if held is not None:
            held[1].hurry()
            return held[1].missing()
        paths = self._context.run.paths
        newest = max((s for s in paths.checkpoint_steps() if find_manifest(paths.checkpoint(s), CHECKPOINT)), default=0)
        durable = max(saved_state.durable_steps, default=0) if saved_state else 0
        if self._has_result():
            missing = "" if saved_state and saved_state.result else "the result"
        else:
            missing = f"the checkpoint of step {newest} (the replica has step {durable})" if newest > durable else ""
        if not missing:
            return None
        reason = self._outage.text or self._store.trouble
        if not reason:
            claim = self._status.claim if self._status.state == "alive" else None
            reason = f"machine {claim.node} uploads it" if claim else "no machine uploads it at the moment"
        return f"{missing}; {reason}"


class _RankActivity:
    """State of this machine's ranks according to the journal: whether they train, and with which machines."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reader: JournalReader | None = None
        self._since_s = read_clock_s()
        self.machines: frozenset[str] = frozenset()
        """Names, as in claims, of the machines that train in this attempt; empty before the workers are ready."""
        self.is_training = False

    def idle_s(self) -> float:
        """Return the seconds since the ranks trained last; 0 while they train."""
        return 0.0 if self.is_training else read_clock_s() - self._since_s

    def read_new_events(self) -> None:
        """Read new events. The first call skips the existing events, because they belong to earlier attempts."""
        journal = self._run.paths.journal
        if self._reader is None:
            self._reader = JournalReader(journal, journal.stat().st_size)
        for event in self._reader.read():
            if event.kind == "worker_ready":
                self.is_training, self.machines = True, frozenset(map(str, event.data.get("replicators", ())))
            elif event.kind in ("attempt_started", "worker_exited"):
                if self.is_training:
                    self._since_s = read_clock_s()
                self.is_training, self.machines = False, frozenset()
