"""A run on this machine and its mirror: what whoever keeps the copy needs, alone or as one of several machines."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from uuid import uuid4

from ratchet.config.schema import Machine
from ratchet.errors import InterruptedRunError, MirrorError
from ratchet.runs import log, replication_protocol
from ratchet.runs.directory import Run
from ratchet.runs.replication import lease, manifests, restore
from ratchet.runs.replication.lease import SIGNS, Key, ReplicaLease
from ratchet.runs.replication.manifests import JournalStart
from ratchet.runs.replication.object_names import RunObjectNames
from ratchet.runs.replication.restore import DownloadProgress, RestoreSource
from ratchet.runs.replication.retry import strip_credentials
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.runs.replication.upload import ReplicationJob, RunUploader
from ratchet.runs.replication_protocol import ReplicationState

PATIENCE_S = 20.0
"""How long one call tries again while a training is under way; who called tries again later."""
TIMEOUT_S = 30.0
ASK_S = 10.0
"""For a mirror that only has to confirm what is known."""
POLL_S = 0.05
LAST_WORD_S = 5.0
"""For giving the run back, when nothing else is left to do."""


def create_node_name() -> str:
    """Of this process, for no other one: the machine's name and eight random digits."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:50] or "machine"
    return f"{host}-{uuid4().hex[:8]}"


class ReplicationContext:
    """What is here, and how to reach what is there.

    Args:
        run: opened; its lock is held.
        machine: with `mirror` set.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.node, self._place = create_node_name(), strip_credentials(machine.mirror or "")
        self.names = RunObjectNames(run.paths.root.name)
        self._last_word_s: float | None = None

    # ------------------------------------------------------------------------------------------------ what is there

    @contextmanager
    def opened(self, stopping: Callable[[], bool]) -> Iterator[RestoreSource]:
        """The mirror, which is waited for as long as `machine.mirror_wait_s`.

        Raises:
            InterruptedRunError: asked to stop.
            MirrorError, SettingsError: it cannot be reached, or not be used.
        """
        store = self._store(TransferLimits(patience_s=self.machine.mirror_wait_s, timeout_s=TIMEOUT_S), stopping)
        try:
            store.check()
            yield RestoreSource(store, self.names, DownloadProgress(self.names.run_id, stopping, print_notice))
        except MirrorError:
            if stopping():
                raise InterruptedRunError(f"run {self.names.run_id}: stopped while it waited for its mirror") from None
            raise

    def quick_store(self) -> ReplicaStore:
        """The mirror for calls that have to be done, or to have failed, within a quarter of the lease."""
        quarter_s = self.machine.lease_s / SIGNS
        return self._store(TransferLimits(patience_s=quarter_s, timeout_s=min(TIMEOUT_S, quarter_s)), self._is_over)

    def lease(self) -> ReplicaLease:
        """A claim on the run that has not been made yet."""
        return ReplicaLease(self.quick_store(), self.names, self.node, self.machine.lease_s, self.machine.meeting_place)

    def upload(self, lease: ReplicaLease, note: ReplicationState) -> RunUploader:
        """Begins to copy what is here, under a lease that is held."""
        ended = threading.Event()
        store = self._store(TransferLimits(self.machine.mirror_bytes_s, PATIENCE_S, TIMEOUT_S), ended.is_set)
        upload = RunUploader(ReplicationJob(self.run, self.names, store, lease, self.node, self.machine), note, ended)
        upload.start()
        return upload

    def _store(self, terms: TransferLimits, stopping: Callable[[], bool]) -> ReplicaStore:
        return ReplicaStore(self.machine.mirror or "", terms, stopping)

    def leave(self) -> None:
        """From now on there is little time, for whatever is still said."""
        if self._last_word_s is None:
            self._last_word_s = time.monotonic() + LAST_WORD_S

    def _is_over(self) -> bool:
        return self._last_word_s is not None and time.monotonic() > self._last_word_s

    # ------------------------------------------------------------------------------------------------- what is here

    def noted(self) -> ReplicationState | None:
        """What was noted of this mirror here before."""
        noted = replication_protocol.read_replication_state(self.run.paths)
        return noted if noted is not None and noted.place == self._place else None

    def is_done(self, stopping: Callable[[], bool]) -> bool:
        """Whether the result is here, and in the mirror.

        When it was noted there, the mirror is asked whether it still has it; if not, all is noted as lacking there.
        """
        noted = self.noted()
        if noted is None or not noted.result or not self.run.paths.is_finished():
            return False
        store = self._store(
            TransferLimits(patience_s=min(ASK_S, self.machine.mirror_wait_s), timeout_s=ASK_S), stopping
        )
        try:
            if restore.has_result(store, self.names):
                return True
        except MirrorError as error:
            print_notice(f"it was in the mirror, which cannot be asked now whether it still is: {error}")
            return True
        noted = noted.model_copy(update={"result": False, "durable_steps": (), "journal_bytes": 0, "journal_shift": 0})
        noted.save(self.run.paths.mirror)
        self.tell(["the mirror has not all of the result any more: it is sent again"])
        return False

    def earlier(self, noted: ReplicationState | None) -> Key | None:
        """The claim of the supervisor that had this directory before us: we hold its lock, so it is gone."""
        if noted is None or noted.lock != replication_protocol.get_lock_identity(self.run.lock):
            return None
        return noted.token, noted.node

    def note(
        self, token: int, durable_steps: tuple[int, ...] = (), begins: JournalStart | None = None, result: bool = False
    ) -> ReplicationState:
        """Note what of the run is in the mirror."""
        begins = begins or JournalStart()
        with self.run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(begins.start)).hexdigest()
        note = ReplicationState(
            place=self._place, token=token, node=self.node, lock=replication_protocol.get_lock_identity(self.run.lock),
            durable_steps=durable_steps, result=result, journal_bytes=begins.start, journal_sha256=known,
            journal_shift=begins.shift,
        )  # fmt: skip
        note.save(self.run.paths.mirror)
        return note

    def tell(self, notices: list[str]) -> None:
        """What happened on the way, in the journal that goes on: it may have come from the mirror."""
        for text in notices:
            self.run.journal.append("notice", text=text)
            print_notice(text)

    # ------------------------------------------------------------------------------------------------ both together

    def is_finished_there(self, source: RestoreSource) -> bool:
        """Fetch the result, if the mirror has it: then there is nothing to write, and nobody to agree with."""
        if self.run.paths.is_finished():
            return False
        token = restore.restore_result(self.run, source)
        if token is None:
            return False
        self.note(token, result=True)
        with suppress(OSError):
            restore.remove_superseded(self.run.paths)
        source.notices.append(f"the result of run {self.names.run_id} is taken from its mirror")
        return True

    def fetch(self, source: RestoreSource, as_what: str) -> restore.RestoreResult:
        """Bring what the mirror has, in the place of what is here.

        Args:
            source: of it.
            as_what: this machine does it, for the notice.
        """
        had = self.run.paths.checkpoint_steps()
        found = restore.restore_all(self.run, source)
        if found.put_back:
            source.notices.append(f"the mirror has no whole checkpoint ({as_what}): what is here goes on")
        else:
            aside = f"; what was here is kept as {restore.SUPERSEDED}*" if had else ""
            what = f"the checkpoint of step {found.step}" if found.step else "no checkpoint"
            source.notices.append(f"taken from the mirror: {what} ({as_what}){aside}")
        return found


def wait_until_settled(missing: Callable[[], str | None], lost: Callable[[], str | None], wait_s: float) -> str | None:
    """Wait until nothing is missing in the mirror, or the run is lost: then, or after `wait_s`, what is."""
    deadline = time.monotonic() + wait_s
    while lacks := missing():
        if why := lost():
            return f"{lacks}; {why}"
        if time.monotonic() >= deadline:
            return lacks
        time.sleep(POLL_S)
    return None


def print_notice(text: str) -> None:
    """To whoever reads what the command says."""
    log.print_message(text)


# The mirror of a run as its supervisor sees it: take the run, keep the copy going, wait for it, give the run back.
#
# Of a run that one machine trains; `member` is the same for several that train one together.


class RunReplicator:
    """Implements `run.custody.Custody`.

    Args:
        run: opened; its lock is held.
        machine: with `mirror` set.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self._here = ReplicationContext(run, machine)
        self._lease = self._here.lease()
        self._upload: RunUploader | None = None

    def take(self, stopping: Callable[[], bool]) -> None:
        """See Custody."""
        here = self._here
        if here.is_done(stopping):
            return
        noted = here.noted()
        with here.opened(stopping) as source:
            known = restore.require_same_spec(source.store, here.names, here.run.spec)
            if known and here.is_finished_there(source):
                here.tell(source.notices)
                return
            self._lease.take(stopping, print_notice, here.earlier(noted))
            if not known:
                source.store.write(here.names.spec, here.run.paths.spec.read_bytes())
            note = self._brought(source, noted)
            source.store.remove([here.names.object(digest) for digest in source.damaged])
            here.tell(source.notices)
        self._upload = here.upload(self._lease, note)

    def lost(self) -> str | None:
        """See Custody."""
        return self._lease.lost()

    def settle(self, wait_s: float) -> str | None:
        """See Custody."""
        if self._upload is None:
            return None
        self._upload.hurry()
        return wait_until_settled(self._upload.missing, self.lost, wait_s)

    def release(self) -> None:
        """See Custody."""
        self._here.leave()
        if self._upload is not None:
            self._upload.end()
        self._lease.release()

    def _brought(self, source: RestoreSource, noted: ReplicationState | None) -> ReplicationState:
        """Bring the directory to where the mirror stands, if that is further, and say what lies there of it."""
        here, token = self._here, self._lease.token
        written = lease.find_highest_token(source.store, here.names, lease.WRITTEN)
        begins = JournalStart()
        steps: tuple[int, ...] = ()
        if written == 0:
            pass
        elif self._is_further(source.store, noted, written):
            begins = self._own_beginning(source.store, noted)
            steps = noted.durable_steps if noted else ()
        else:
            found = here.fetch(source, f"holder {written} of this run; we are {token}")
            steps = found.steps
            begins = JournalStart(found.origin, found.origin[1]) if found.origin else begins
        if begins.origin is not None:
            self._lease.go_on_from(begins.origin)
        return here.note(token, steps, begins)

    def _is_further(self, store: ReplicaStore, noted: ReplicationState | None, written: int) -> bool:
        """Whether this directory has all that the mirror has, or the mirror has no checkpoint and we do: nobody else
        has written the run since this directory's last holder, or its last training was one of several machines, of
        which another one was the holder."""
        token, step = restore.find_newest_step(store, self._here.names)
        ours = restore.find_valid_step(self._here.run.paths)
        if token == 0 and ours:
            return True
        return noted is not None and (noted.token >= written or noted.token == 0) and ours >= step

    def _own_beginning(self, store: ReplicaStore, noted: ReplicationState | None) -> JournalStart:
        """How this directory's journal goes on from the mirror's; if they do not agree any more, all is sent anew."""
        here = self._here
        if noted is not None and noted.token == 0:
            return manifests.join_journal(here.run.paths.journal, store, here.names)
        if noted is None or not noted.journal_bytes:
            return JournalStart()
        with here.run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(noted.journal_bytes)).hexdigest()
        if known != noted.journal_sha256:
            return JournalStart()
        there = noted.journal_bytes + noted.journal_shift
        return JournalStart((noted.token, there), noted.journal_bytes, noted.journal_shift)
