"""Replicator of a run that one machine trains, and the steps that it shares with the multi-node one."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from uuid import uuid4

from ratchet.config.machine import Machine
from ratchet.errors import InterruptedRunError, ReplicaError
from ratchet.runs import log, replication_protocol
from ratchet.runs.directory import RunDirectory
from ratchet.runs.replication import lease, manifests, restore
from ratchet.runs.replication.lease import RENEWALS_PER_LEASE, Key, ReplicaLease
from ratchet.runs.replication.manifests import JournalStart
from ratchet.runs.replication.object_names import RunObjectNames
from ratchet.runs.replication.restore import DownloadProgress, RestoreSource
from ratchet.runs.replication.retry import strip_credentials
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.runs.replication.upload import ReplicationJob, RunUploader
from ratchet.runs.replication_protocol import ReplicationState

RETRY_TIMEOUT_S = 20.0
"""How long one call is retried during training. Its caller tries again later."""
TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 10.0
"""Time limit for checking that the replica still has a result."""
POLL_S = 0.05
RELEASE_TIMEOUT_S = 5.0
"""Time limit for releasing the lease at the end of the process."""


def create_node_name() -> str:
    """Unique name of this process: the machine's name and eight random digits."""
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
        """Open the replica; wait for it at most `machine.replica_timeout_s`.

        Raises:
            InterruptedRunError: `stopping` returned True.
            ReplicaError, SettingsError: the replica cannot be reached, or must not be used.
        """
        store = self._store(
            TransferLimits(retry_timeout_s=self.machine.replica_timeout_s, timeout_s=TIMEOUT_S), stopping
        )
        try:
            store.check()
            yield RestoreSource(store, self.names, DownloadProgress(self.names.run_id, stopping, print_notice))
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

    def shorten_timeouts(self) -> None:
        """Shorten the timeouts of all further calls, because the process is about to end."""
        if self._release_deadline_s is None:
            self._release_deadline_s = time.monotonic() + RELEASE_TIMEOUT_S

    def _is_past_deadline(self) -> bool:
        return self._release_deadline_s is not None and time.monotonic() > self._release_deadline_s

    def read_state(self) -> ReplicationState | None:
        """Read the replication state of this replica, if any."""
        state = replication_protocol.read_replication_state(self.run.paths)
        return state if state is not None and state.place == self._place else None

    def is_done(self, stopping: Callable[[], bool]) -> bool:
        """Whether the result is on this machine and in the replica.

        If replication.json says so, the replica is checked. If it no longer has the result, everything is marked as
        missing in the replica, so that it is uploaded again.
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
        """Claim of the supervisor that used this directory before. This process holds its lock, so that process has
        ended."""
        if state is None or state.lock != replication_protocol.get_lock_identity(self.run.lock):
            return None
        return state.token, state.node

    def save_state(
        self, token: int, durable_steps: tuple[int, ...] = (), begins: JournalStart | None = None, result: bool = False
    ) -> ReplicationState:
        """Save how much of the run is in the replica."""
        begins = begins or JournalStart()
        with self.run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(begins.start)).hexdigest()
        state = ReplicationState(
            place=self._place, token=token, node=self.node, lock=replication_protocol.get_lock_identity(self.run.lock),
            durable_steps=durable_steps, result=result, journal_bytes=begins.start, journal_sha256=known,
            journal_shift=begins.shift,
        )  # fmt: skip
        state.save(self.run.paths.replication_state)
        return state

    def log_notices(self, notices: list[str]) -> None:
        """Append notices to the journal, which may have been restored from the replica, and print them."""
        for text in notices:
            self.run.journal.append("notice", text=text)
            print_notice(text)

    def fetch_result(self, source: RestoreSource) -> bool:
        """Fetch the result if the replica has it. No lease is needed then. Returns whether it was fetched."""
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
            reason: why, for the notice.
        """
        had = self.run.paths.checkpoint_steps()
        found = restore.restore_all(self.run, source)
        if found.has_kept_local:
            source.notices.append(f"the replica has no complete checkpoint ({reason}): resuming from the local state")
        else:
            aside = f"; the local state is kept as {restore.SUPERSEDED}*" if had else ""
            what = f"the checkpoint of step {found.step}" if found.step else "no checkpoint"
            source.notices.append(f"restored from the replica: {what} ({reason}){aside}")
        return found


def wait_until_settled(missing: Callable[[], str | None], lost: Callable[[], str | None], wait_s: float) -> str | None:
    """Wait until the replica is complete or the lease is lost, at most `wait_s`. Returns what is missing."""
    deadline = time.monotonic() + wait_s
    while lacks := missing():
        if why := lost():
            return f"{lacks}; {why}"
        if time.monotonic() >= deadline:
            return lacks
        time.sleep(POLL_S)
    return None


def print_notice(text: str) -> None:
    """Print a notice on the terminal."""
    log.print_message(text)


class RunReplicator:
    """Implements `ReplicatorProtocol` for a run that one machine trains.

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
            known = restore.require_same_spec(source.store, context.names, context.run.spec)
            if known and context.fetch_result(source):
                context.log_notices(source.notices)
                return
            self._lease.acquire(stopping, print_notice, context.find_previous_claim(state))
            if not known:
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
        """Restore from the replica if it is further, and return what the replica has."""
        context, token = self._context, self._lease.token
        written = lease.find_highest_token(source.store, context.names, lease.WRITTEN)
        begins = JournalStart()
        steps: tuple[int, ...] = ()
        if written == 0:
            pass
        elif self._is_local_newer(source.store, state, written):
            begins = self._find_journal_start(source.store, state)
            steps = state.durable_steps if state else ()
        else:
            found = context.fetch(source, f"holder {written} of this run; this machine is holder {token}")
            steps = found.steps
            begins = JournalStart(found.origin, found.origin[1]) if found.origin else begins
        if begins.origin is not None:
            self._lease.record_origin(begins.origin)
        return context.save_state(token, steps, begins)

    def _is_local_newer(self, store: ReplicaStore, state: ReplicationState | None, written: int) -> bool:
        """Whether this directory is at least as far as the replica, or has a checkpoint and the replica has none.

        It is at least as far if no other holder has written the run since, or if another machine of the same training
        was the holder, and its newest valid step is not below that of the replica.
        """
        token, step = restore.find_newest_step(store, self._context.names)
        ours = restore.find_valid_step(self._context.run.paths)
        if token == 0 and ours:
            return True
        return state is not None and (state.token >= written or state.token == 0) and ours >= step

    def _find_journal_start(self, store: ReplicaStore, state: ReplicationState | None) -> JournalStart:
        """Find the part of the local journal that is in the replica. If the two differ, all of it is uploaded again."""
        context = self._context
        if state is not None and state.token == 0:
            return manifests.join_journal(context.run.paths.journal, store, context.names)
        if state is None or not state.journal_bytes:
            return JournalStart()
        with context.run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(state.journal_bytes)).hexdigest()
        if known != state.journal_sha256:
            return JournalStart()
        there = state.journal_bytes + state.journal_shift
        return JournalStart((state.token, there), state.journal_bytes, state.journal_shift)
