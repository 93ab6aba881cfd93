"""Uploads a run to its replica during training: the newest sealed checkpoint, the journal, and the result.

Two threads upload, so that a large checkpoint does not delay the journal. Training waits for neither thread.

The holder of the lease also removes old checkpoints from the replica, and then objects that no document refers to. It
does so between two uploads of checkpoints, so none of its own is in progress. A holder may be suspended during the
removal (a sleeping laptop, a migrated virtual machine), and another machine may succeed it. When it wakes up, it must
not continue with its old list of objects. Three rules ensure that only time can be lost:

- The lease is renewed after the list was made, and checked right before each removal. A successor waits until the lease
  has not changed for its whole duration, so a holder that wakes up after that removes nothing more.
- The machine may be suspended between the check and the request, so one removal may come late. A late removal matters
  only if the successor has just sent this content or found it in the replica: then a durable document lacks an object.
- The successor detects the missing object in its own garbage collection after its next upload, and sends the document
  again. Until then, a restore skips this document and takes the previous one.

The checkpoint that a successor restores from is never removed: both machines keep the newest documents and the
documents that these refer to.
"""

import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.machine import Machine
from ratchet.errors import DamagedFileError, ReplicaError, first_line
from ratchet.runs.directory import CHECKPOINT, RESULT, RunDirectory
from ratchet.runs.replication import manifests, restore
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.manifests import (
    JournalStart,
    JournalUploader,
    ReplicaManifest,
    SealedDirectoryUploader,
    TransferStatistics,
)
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, parse_numbers
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage import files
from ratchet.storage.files import Manifest

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
URGENT_INTERVAL_S = 0.25
"""Interval while a caller waits for the work to finish."""
CHECKPOINT_POLL_S = 0.2
"""Interval at which a new checkpoint is looked for."""
JOIN_S = 2.0
"""Longest wait for an upload in progress when the uploads end."""


class OutageTracker:
    """Record of the outage of periodic tasks: since when they fail, and why. Each beginning and each end of an outage
    is reported once.

    Args:
        on_change: called with a message when an outage begins or ends.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._failing: dict[str, str] = {}
        self._mutex = threading.Lock()
        self.since: float | None = None
        """Unix time at which the present outage began; None without one."""
        self.count = 0

    @property
    def text(self) -> str:
        """First line of the last failure; empty without an outage."""
        with self._mutex:
            return next(reversed(self._failing.values()), "")

    def failed(self, name: str, error: BaseException) -> None:
        """Record that a task has failed."""
        with self._mutex:
            begins = not self._failing
            self._failing.pop(name, None)
            self._failing[name] = first_line(error)
            if begins:
                self.since, self.count = time.time(), self.count + 1
        if begins:
            self._on_change(f"the replica cannot be updated ({first_line(error)}); training continues, retrying")

    def worked(self, name: str) -> None:
        """Record that a task has succeeded."""
        with self._mutex:
            ends = self._failing.pop(name, None) is not None and not self._failing
            since, self.since = self.since, None if ends else self.since
        if ends and since is not None:
            self._on_change(f"the replica is reached again, after {max(0.0, time.time() - since):.0f} s")


class PeriodicTask(threading.Thread):
    """Thread that runs a function at an interval: more often after `hurry`, less often after a failure.

    Args:
        name: name of the thread.
        work: the function. It returns when no work is left for now, and may raise any exception.
        every_s: the interval.
        outage: records failures and successes.
    """

    def __init__(self, name: str, work: Callable[[], None], every_s: float, outage: OutageTracker) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._every_s, self._outage = work, every_s, outage
        self._wake = threading.Event()
        self._is_urgent = self._ended = False
        self._retry_s = FIRST_RETRY_S

    def hurry(self) -> None:
        """Work without delay from now on, because a caller waits."""
        self._is_urgent = True
        self._wake.set()

    def end(self) -> None:
        """Start no more work."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        while not self._ended:
            wait_s = self._run_once()
            self._wake.wait(min(wait_s, URGENT_INTERVAL_S) if self._is_urgent else wait_s)
            if not self._is_urgent:
                self._wake.clear()
            else:
                time.sleep(URGENT_INTERVAL_S)

    def _run_once(self) -> float:
        """Run the function once. Return the seconds until the next run."""
        try:
            self._work()
        except Exception as error:
            if self._ended:
                return 0.0
            self._outage.failed(self.name, error)
            wait_s, self._retry_s = self._retry_s * random.uniform(0.5, 1), min(LAST_RETRY_S, 2 * self._retry_s)
            return wait_s
        self._retry_s = FIRST_RETRY_S
        self._outage.worked(self.name)
        return self._every_s


@dataclass(frozen=True)
class GarbageCollectionResult:
    """Result of a garbage collection."""

    removed: int
    """Number of removed documents and objects."""
    incomplete: frozenset[str]
    """Names of needed documents that lack an object, or refer to a document that lacks one."""


class ReplicaGarbageCollector:
    """Garbage collector of one run: removes obsolete checkpoints and unused objects.

    Args:
        store: the replica.
        names: object names of the run.
        keep: number of checkpoints to keep, in addition to the checkpoints that they refer to.
        claim: the lease. It is confirmed before the removal of the documents and before that of the objects, and
            checked before each single removal.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, keep: int, claim: ReplicaLease) -> None:
        self._store, self._names, self._keep, self._claim = store, names, keep, claim
        self._known: dict[str, ReplicaManifest | None] = {}
        """Documents by name, each read once; None: the document is unreadable."""

    def forget(self, name: str) -> None:
        """Forget the content of a document, because it is about to be written or rewritten."""
        self._known.pop(name, None)

    def collect(self) -> GarbageCollectionResult:
        """Remove old documents and unused objects. No upload of this process may be in progress.

        Raises:
            LeaseHeldError: another machine holds the run.
            ReplicaError: the replica does not answer, or the lease is uncertain.
        """
        documents = self._read_documents()
        needed = self._find_needed(documents)
        obsolete = [name for name in documents if name not in needed]
        objects_by_name = {name: document.digests for name in needed if (document := documents[name])}
        used = set[str]().union(*objects_by_name.values())
        stored = {name.rsplit("/", 1)[-1] for name in self._store.list(self._names.folder("objects"))}
        unused = [self._names.object(digest) for digest in sorted(stored - used)]
        for names in (obsolete, unused):  # documents first: a document that lacks an object is damaged
            if names:
                self._claim.confirm()
                self._store.remove(names, self._require_claim)
        lacking = {name for name, objects in objects_by_name.items() if objects - stored}
        incomplete = {name for name in objects_by_name if lacking & {name, *self._list_referenced(name, documents)}}
        return GarbageCollectionResult(len(obsolete) + len(unused), frozenset(incomplete))

    def _require_claim(self) -> None:
        if not self._claim.is_sure():
            raise ReplicaError("the lease of the run is uncertain: garbage collection in its replica is stopped")

    def _read_documents(self) -> dict[str, ReplicaManifest | None]:
        """Read all documents of the run. Return them by name."""
        documents: dict[str, ReplicaManifest | None] = {}
        for kind in ("checkpoints", "result"):
            for listed_name in self._store.list(self._names.folder(kind)):
                name = f"{self._names.folder(kind)}/{listed_name.rsplit('/', 1)[-1]}"
                if name not in self._known:
                    try:
                        self._known[name] = manifests.read_replica_manifest(self._store, name)
                    except DamagedFileError:
                        self._known[name] = None
                documents[name] = self._known[name]
        self._known = dict(documents)
        return documents

    def _find_needed(self, documents: dict[str, ReplicaManifest | None]) -> set[str]:
        """Return the names of the results, of the newest checkpoints, and of the checkpoints that these refer to."""
        checkpoints = [
            name
            for name in documents
            if name.startswith(self._names.folder("checkpoints")) and len(parse_numbers(name)) == 2
        ]
        newest = sorted((name for name in checkpoints if documents[name] is not None), key=parse_numbers)[-self._keep :]
        needed = {name for name in documents if name not in checkpoints}
        for name in newest:
            needed |= {name, *self._list_referenced(name, documents)}
        return needed & documents.keys()

    def _list_referenced(self, name: str, documents: dict[str, ReplicaManifest | None]) -> list[str]:
        """Return the names of the documents that this document refers to."""
        document = documents[name]
        steps = document.refers_to if document else ()
        return [self._names.checkpoint(parse_numbers(name)[0], step) for step in steps]


@dataclass(frozen=True)
class ReplicationJob:
    """A run, its replica, and the lease under which the run is uploaded."""

    run: RunDirectory
    names: RunObjectNames
    store: ReplicaStore
    lease: ReplicaLease
    node: str
    machine: Machine


class RunUploader:
    """Uploader of one holder of the lease.

    Args:
        job: the run and its replica; the lease is held.
        state: what the replica already has.
        ended: set by `end` to stop all uploads. The store of the job retries no call after that.
    """

    def __init__(self, job: ReplicationJob, state: ReplicationState, ended: threading.Event) -> None:
        self._job, self._state, self._saved, self._ended = job, state, state, ended
        self._sender = SealedDirectoryUploader(job.store, job.names, job.lease.confirm)
        self._garbage_collector = ReplicaGarbageCollector(job.store, job.names, job.machine.keep_checkpoints, job.lease)
        self._needs_collection = False
        self._sent: dict[int, str] = {}
        """Digests of uploaded checkpoints, by step. A step may be sealed again with other content."""
        self._refused: set[str] = set()
        journal_start = JournalStart(start=state.journal_bytes, shift=state.journal_shift)
        self._journal = JournalUploader(job.run.paths.journal, job.store, job.names, job.lease.token, journal_start)
        self._journal_mutex, self._state_mutex = threading.Lock(), threading.Lock()
        self._report: dict[str, Any] = {
            "node": job.node, "token": job.lease.token, "started": round(time.time(), 3), "bytes_sent": 0,
            "bytes_skipped": 0, "send_s": 0.0,
        }  # fmt: skip
        self._outage = OutageTracker(self._alert)
        self._tasks = (
            PeriodicTask("replica-checkpoints", self._copy_sealed, CHECKPOINT_POLL_S, self._outage),
            PeriodicTask("replica-journal", self._copy_journal, job.machine.replica_interval_s, self._outage),
        )

    def start(self) -> None:
        """Start the uploads."""
        for task in self._tasks:
            task.start()

    def end(self) -> None:
        """Start no more uploads, and wait at most JOIN_S for uploads in progress."""
        self._ended.set()
        for task in self._tasks:
            task.end()
        deadline = time.monotonic() + JOIN_S
        for task in self._tasks:
            if task.is_alive():
                task.join(max(0.0, deadline - time.monotonic()))

    def hurry(self) -> None:
        """Upload without delay, because a caller waits."""
        for task in self._tasks:
            task.hurry()

    def missing(self) -> str | None:
        """Describe what the replica lacks, and why; None if it is complete."""
        parts = []
        newest = max(self._state.durable_steps, default=0)
        if find_manifest(self._job.run.paths.result, RESULT) is not None:
            parts += [] if self._state.result else ["the result"]
        elif (step := self._find_due_step()) is not None:
            parts.append(f"the checkpoint of step {step} (the replica has step {newest})")
        if behind := self._journal.behind():
            parts.append(f"{behind} bytes of the journal")
        if not parts:
            return None
        reason = self._outage.text or self._job.store.trouble or self._job.lease.trouble
        return ", ".join(parts) + (f"; {reason}" if reason else "")

    def _copy_sealed(self) -> None:
        """Upload one checkpoint or the result, if the replica lacks it."""
        job = self._job
        self._save_state()
        if job.lease.lost_reason():
            return
        self._collect_garbage()
        if (manifest := find_manifest(job.run.paths.result, RESULT)) is not None:
            if not self._state.result:
                self._require_lease()
                self._send_result(manifest)
        elif (step := self._find_due_step()) is not None:
            self._require_lease()
            try:
                self._send_checkpoint(step)
            except FileNotFoundError:
                if job.run.paths.checkpoint(step).exists():
                    raise
            except DamagedFileError as error:  # the worker will find the damage too, and resume from another checkpoint
                self._refused |= {manifest.digest} if (manifest := self._checkpoint(step)) else set()
                job.run.journal.append("notice", text=f"checkpoint of step {step} cannot be replicated: {error}")

    def _find_due_step(self) -> int | None:
        """Return the newest sealed step, unless it was uploaded under this token with the same content.

        A step before the newest step in the replica is not due. Its checkpoint would have the token of this holder,
        which is the highest, so readers would prefer it to the newer checkpoint of an earlier holder.
        """
        replica_step = max(self._state.durable_steps, default=0)
        for step in reversed(self._job.run.paths.checkpoint_steps()):
            manifest = self._checkpoint(step)
            if manifest is not None and manifest.digest not in self._refused:
                return None if step < replica_step or self._sent.get(step) == manifest.digest else step
        return None

    def _checkpoint(self, step: int) -> Manifest | None:
        return find_manifest(self._job.run.paths.checkpoint(step), CHECKPOINT)

    def _send_checkpoint(self, step: int) -> None:
        job, started = self._job, time.monotonic()
        self._update_state(in_flight=step)
        sealed = manifests.build_checkpoint_manifest(job.run.paths.checkpoint(step))
        referenced = [
            manifests.build_checkpoint_manifest(job.run.paths.checkpoint(other)) for other in sealed.refers_to
        ]
        self._flush()  # the journal has the decisions that led to this checkpoint, so it is uploaded first
        costs = []
        for document in (*referenced, sealed):  # a document is written only after everything that it refers to
            if self._sent.get(document.step) == document.digest:
                continue
            path, name = job.run.paths.checkpoint(document.step), job.names.checkpoint(job.lease.token, document.step)
            self._garbage_collector.forget(name)
            costs.append(self._sender.send(path, document, name))
        self._require_lease()
        # The journal is written first, because the run may end at any time after the state is updated.
        self._record_upload(step, "checkpoint", costs, time.monotonic() - started)
        self._sent |= {document.step: document.digest for document in (*referenced, sealed)}
        durable = {*self._state.durable_steps, *self._sent} & {*job.run.paths.checkpoint_steps(), step}
        self._update_state(durable_steps=tuple(sorted(durable)), in_flight=None)
        self._needs_collection = True

    def _send_result(self, manifest: Manifest) -> None:
        job, started = self._job, time.monotonic()
        step = max(job.run.paths.checkpoint_steps(), default=0)
        self._flush()
        sealed = ReplicaManifest(manifest.kind, step, manifest.files)
        cost = self._sender.send(job.run.paths.result, sealed, job.names.result(job.lease.token))
        self._require_lease()
        self._record_upload(step, "result", [cost], time.monotonic() - started)
        self._update_state(result=True, in_flight=None)
        with suppress(OSError):  # superseded files of a finished run are no longer needed
            restore.remove_superseded(job.run.paths)

    def _record_upload(self, step: int, artifact: str, costs: list[TransferStatistics], seconds: float) -> None:
        sent, skipped = sum(cost.bytes_sent for cost in costs), sum(cost.bytes_skipped for cost in costs)
        self._report["bytes_sent"] += sent
        self._report["bytes_skipped"] += skipped
        self._report["send_s"] = round(self._report["send_s"] + seconds, 3)
        self._job.run.journal.append(
            "replicated", step=step, artifact=artifact, bytes_sent=sent, bytes_skipped=skipped,
            seconds=round(seconds, 3), bytes_per_s=round(sent / seconds) if seconds else 0,
        )  # fmt: skip

    def _collect_garbage(self) -> None:
        if self._needs_collection and self._job.lease.is_sure():
            incomplete = self._garbage_collector.collect().incomplete
            self._needs_collection = False
            self._send_again(incomplete)

    def _send_again(self, incomplete: Collection[str]) -> None:
        """Upload incomplete checkpoints again. A former holder has removed some of their objects (see the module's
        docstring)."""
        job = self._job
        steps = {step for step in self._sent if job.names.checkpoint(job.lease.token, step) in incomplete}
        for step in steps:
            del self._sent[step]
        if steps:
            job.run.journal.append(
                "notice",
                text=f"parts of {len(steps)} replicated checkpoints are missing in the replica: sending them again",
            )
            self._update_state(durable_steps=tuple(step for step in self._state.durable_steps if step not in steps))

    def _copy_journal(self) -> None:
        if self._job.lease.lost_reason():
            return
        self._require_lease()
        sent = self._flush()
        self._report["bytes_sent"] += sent
        self._save_state()
        newest = max(self._state.durable_steps, default=0)
        report = self._report | {"last": round(time.time(), 3), "step": newest, "outages": self._outage.count}
        if sent:
            self._job.store.write(self._job.names.node(self._job.node), files.json_bytes(report))

    def _flush(self) -> int:
        with self._journal_mutex:
            sent = self._journal.copy()
            self._update_state(journal_bytes=self._journal.end, journal_sha256=self._journal.sha256)
        return sent

    def _require_lease(self) -> None:
        """Raise ReplicaError while another machine may hold the run, because readers would ignore the upload."""
        lease = self._job.lease
        if reason := lease.lost_reason():
            raise ReplicaError(reason)
        if not lease.is_sure():
            raise ReplicaError(lease.trouble or "the lease of the run was not renewed for too long")

    def _update_state(self, **changes: object) -> None:
        with self._state_mutex:
            self._state = self._state.model_copy(update=changes)
        self._save_state()

    def _save_state(self) -> None:
        """Write replication.json if the state has changed. Raises OSError; the next call tries again."""
        with self._state_mutex:
            state = self._state.model_copy(update={"failed_since": self._outage.since})
            if state != self._saved:
                state = state.model_copy(update={"behind_bytes": self._journal.behind() + self._unsent_bytes()})
                state.save(self._job.run.paths.replication_state)
                self._state = self._saved = state

    def _unsent_bytes(self) -> int:
        step = self._find_due_step()
        manifest = None if step is None else self._checkpoint(step)
        return manifest.size_bytes if manifest else 0

    def _alert(self, text: str) -> None:
        self._job.run.journal.append("alert", text=text)


def find_manifest(directory: Path, kind: str) -> Manifest | None:
    """Read the manifest of a sealed directory; None if the directory is not sealed. Files are not verified."""
    try:
        manifest = files.read_manifest(directory)
    except DamagedFileError:
        return None
    return manifest if manifest.kind == kind else None
