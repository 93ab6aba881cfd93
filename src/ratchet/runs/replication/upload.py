"""Uploads a run to its replica during training: the newest sealed checkpoint, the journal, and the result.

Two threads do this, so that a large checkpoint does not delay the journal. Training waits for neither.
"""

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.machine import Machine
from ratchet.errors import DamagedFileError, ReplicaError
from ratchet.runs.directory import CHECKPOINT, RESULT, RunDirectory
from ratchet.runs.replication import manifests, restore
from ratchet.runs.replication.garbage_collection import ReplicaGarbageCollector
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.manifests import (
    JournalStart,
    JournalUploader,
    ReplicaManifest,
    SealedDirectoryUploader,
    TransferStatistics,
)
from ratchet.runs.replication.object_names import RunObjectNames
from ratchet.runs.replication.periodic_task import OutageTracker, PeriodicTask
from ratchet.runs.replication.store import ReplicaStore
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage import files
from ratchet.storage.files import Manifest

CHECKPOINT_POLL_S = 0.5
"""Interval at which a new checkpoint is looked for."""
JOIN_S = 2.0


@dataclass(frozen=True)
class ReplicationJob:
    """A run, its replica and the lease under which it is uploaded."""

    run: RunDirectory
    names: RunObjectNames
    store: ReplicaStore
    lease: ReplicaLease
    node: str
    machine: Machine


class RunUploader:
    """Uploads of one holder of the lease.

    Args:
        job: the run and its replica; the lease is held.
        state: what the replica has already.
        ended: set to stop all uploads; the store no longer retries then.
    """

    def __init__(self, job: ReplicationJob, state: ReplicationState, ended: threading.Event) -> None:
        self._job, self._state, self._saved, self._ended = job, state, state, ended
        self._sender = SealedDirectoryUploader(job.store, job.names)
        self._garbage_collector = ReplicaGarbageCollector(job.store, job.names, job.machine.keep_checkpoints, job.lease)
        self._needs_collection = False
        self._sent: dict[int, str] = {}
        """Digests of uploaded checkpoints by step. A step may be sealed again with other content."""
        self._refused: set[str] = set()
        begins = JournalStart(start=state.journal_bytes, shift=state.journal_shift)
        self._journal = JournalUploader(job.run.paths.journal, job.store, job.names, job.lease.token, begins)
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
        why = self._outage.text or self._job.store.trouble or self._job.lease.trouble
        return ", ".join(parts) + (f"; {why}" if why else "")

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
            except DamagedFileError as error:  # the worker finds the damage too, and resumes from another checkpoint
                self._refused |= {manifest.digest} if (manifest := self._checkpoint(step)) else set()
                job.run.journal.append("notice", text=f"checkpoint of step {step} cannot be replicated: {error}")

    def _find_due_step(self) -> int | None:
        """Return the newest sealed step, unless it was uploaded under this token with the same content.

        Never a step before the newest one in the replica, because readers prefer the checkpoint of this token.
        """
        there = max(self._state.durable_steps, default=0)
        for step in reversed(self._job.run.paths.checkpoint_steps()):
            manifest = self._checkpoint(step)
            if manifest is not None and manifest.digest not in self._refused:
                return None if step < there or self._sent.get(step) == manifest.digest else step
        return None

    def _checkpoint(self, step: int) -> Manifest | None:
        return find_manifest(self._job.run.paths.checkpoint(step), CHECKPOINT)

    def _send_checkpoint(self, step: int) -> None:
        job, started = self._job, time.monotonic()
        self._update_state(in_flight=step)
        sealed = manifests.build_checkpoint_manifest(job.run.paths.checkpoint(step))
        others = [manifests.build_checkpoint_manifest(job.run.paths.checkpoint(other)) for other in sealed.refers_to]
        self._flush()  # the journal has the decisions that led to this state, so it is uploaded first
        costs = []
        for one in (*others, sealed):  # a document is written only after everything that it refers to
            if self._sent.get(one.step) == one.digest:
                continue
            path, name = job.run.paths.checkpoint(one.step), job.names.checkpoint(job.lease.token, one.step)
            self._garbage_collector.forget(name)
            costs.append(self._sender.send(path, one, name))
        self._require_lease()
        # Recorded first: after the next line the run may end at any time.
        self._record_upload(step, "checkpoint", costs, time.monotonic() - started)
        self._sent |= {one.step: one.digest for one in (*others, sealed)}
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
        """Upload incomplete checkpoints again. A former holder removed some of their objects (see
        garbage_collection.py)."""
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
        if why := lease.lost_reason():
            raise ReplicaError(why)
        if not lease.is_sure():
            raise ReplicaError(lease.trouble or "the lease of the run was not renewed for too long")

    def _update_state(self, **changes: object) -> None:
        with self._state_mutex:
            self._state = self._state.model_copy(update=changes)
        self._save_state()

    def _save_state(self) -> None:
        """Write replication.json if it has changed. Raises OSError; the next call writes it then."""
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
    """Read the manifest of a sealed directory; None if it is not sealed. Its files are not verified."""
    try:
        manifest = files.read_manifest(directory)
    except DamagedFileError:
        return None
    return manifest if manifest.kind == kind else None
