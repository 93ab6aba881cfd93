"""Copies a run to its mirror while it is trained: the newest sealed checkpoint, what was appended to the journal, the
result. Two threads, so that a large checkpoint holds up no journal; training waits for neither.
"""

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.schema import Machine
from ratchet.errors import DamagedFileError, MirrorError
from ratchet.runs.directory import CHECKPOINT, RESULT, Run
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

LOOK_S = 0.5
"""Between two looks for a new checkpoint."""
JOIN_S = 2.0


@dataclass(frozen=True)
class ReplicationJob:
    """A run, and where its copy is kept."""

    run: Run
    names: RunObjectNames
    store: ReplicaStore
    lease: ReplicaLease
    node: str
    machine: Machine


class RunUploader:
    """Everything that is copied under one token.

    Args:
        duty: with a lease that is held.
        noted: what of the run is in the mirror already, whoever brought it there.
        ended: set when nothing more is to be sent: the store is not tried again then.
    """

    def __init__(self, duty: ReplicationJob, noted: ReplicationState, ended: threading.Event) -> None:
        self._duty, self._noted, self._saved, self._ended = duty, noted, noted, ended
        self._sender = SealedDirectoryUploader(duty.store, duty.names)
        self._tidier = ReplicaGarbageCollector(duty.store, duty.names, duty.machine.keep_checkpoints, duty.lease)
        self._untidy = False
        self._sent: dict[int, str] = {}
        """Steps whose documents bear our token, and the digest of what they were: one may be sealed again."""
        self._refused: set[str] = set()
        begins = JournalStart(start=noted.journal_bytes, shift=noted.journal_shift)
        self._journal = JournalUploader(duty.run.paths.journal, duty.store, duty.names, duty.lease.token, begins)
        self._journal_mutex, self._note_mutex = threading.Lock(), threading.Lock()
        self._report: dict[str, Any] = {
            "node": duty.node, "token": duty.lease.token, "started": round(time.time(), 3), "bytes_sent": 0,
            "bytes_skipped": 0, "send_s": 0.0,
        }  # fmt: skip
        self._outage = OutageTracker(self._alert)
        self._errands = (
            PeriodicTask("mirror-checkpoints", self._copy_sealed, LOOK_S, self._outage),
            PeriodicTask("mirror-journal", self._copy_journal, duty.machine.mirror_every_s, self._outage),
        )

    def start(self) -> None:
        """Begin to copy."""
        for errand in self._errands:
            errand.start()

    def end(self) -> None:
        """Begin nothing more; what is under way is not waited for, for long."""
        self._ended.set()
        for errand in self._errands:
            errand.end()
        deadline = time.monotonic() + JOIN_S
        for errand in self._errands:
            if errand.is_alive():
                errand.join(max(0.0, deadline - time.monotonic()))

    def hurry(self) -> None:
        """Somebody waits until all is copied."""
        for errand in self._errands:
            errand.hurry()

    def missing(self) -> str | None:
        """What is not in the mirror yet, and why, in words; None: all of it is."""
        parts = []
        newest = max(self._noted.durable_steps, default=0)
        if find_manifest(self._duty.run.paths.result, RESULT) is not None:
            parts += [] if self._noted.result else ["the result"]
        elif (step := self._due_step()) is not None:
            parts.append(f"the checkpoint of step {step} (the newest there is of step {newest})")
        if behind := self._journal.behind():
            parts.append(f"{behind} bytes of the journal")
        if not parts:
            return None
        why = self._outage.text or self._duty.store.trouble or self._duty.lease.trouble
        return ", ".join(parts) + (f"; {why}" if why else "")

    def _copy_sealed(self) -> None:
        """One checkpoint, or the result, if there is one to copy."""
        duty = self._duty
        self._save_note()
        if duty.lease.lost():
            return
        self._tidy()
        if (manifest := find_manifest(duty.run.paths.result, RESULT)) is not None:
            if not self._noted.result:
                self._require_lease()
                self._send_result(manifest)
        elif (step := self._due_step()) is not None:
            self._require_lease()
            try:
                self._send_checkpoint(step)
            except FileNotFoundError:
                if duty.run.paths.checkpoint(step).exists():
                    raise
            except DamagedFileError as error:  # the worker will find it too, and go on from another
                self._refused |= {manifest.digest} if (manifest := self._checkpoint(step)) else set()
                duty.run.journal.append("notice", text=f"checkpoint of step {step} is not mirrored: {error}")

    def _due_step(self) -> int | None:
        """The newest sealed step, if it has not been copied under our token as it is.

        Not one before what the mirror has: readers take ours first.
        """
        there = max(self._noted.durable_steps, default=0)
        for step in reversed(self._duty.run.paths.checkpoint_steps()):
            manifest = self._checkpoint(step)
            if manifest is not None and manifest.digest not in self._refused:
                return None if step < there or self._sent.get(step) == manifest.digest else step
        return None

    def _checkpoint(self, step: int) -> Manifest | None:
        return find_manifest(self._duty.run.paths.checkpoint(step), CHECKPOINT)

    def _send_checkpoint(self, step: int) -> None:
        duty, started = self._duty, time.monotonic()
        self._note(in_flight=step)
        sealed = manifests.build_checkpoint_manifest(duty.run.paths.checkpoint(step))
        others = [manifests.build_checkpoint_manifest(duty.run.paths.checkpoint(other)) for other in sealed.refers_to]
        self._flush()  # decisions that later steps repeat are in the mirror before the state that follows from them
        costs = []
        for one in (*others, sealed):  # a document is there only when all that it needs is
            if self._sent.get(one.step) == one.digest:
                continue
            path, name = duty.run.paths.checkpoint(one.step), duty.names.checkpoint(duty.lease.token, one.step)
            self._tidier.forget(name)
            costs.append(self._sender.send(path, one, name))
        self._require_lease()
        self._tell(step, "checkpoint", costs, time.monotonic() - started)  # before anybody may take it for settled
        self._sent |= {one.step: one.digest for one in (*others, sealed)}
        durable = {*self._noted.durable_steps, *self._sent} & {*duty.run.paths.checkpoint_steps(), step}
        self._note(durable_steps=tuple(sorted(durable)), in_flight=None)
        self._untidy = True

    def _send_result(self, manifest: Manifest) -> None:
        duty, started = self._duty, time.monotonic()
        step = max(duty.run.paths.checkpoint_steps(), default=0)
        self._flush()
        sealed = ReplicaManifest(manifest.kind, step, manifest.files)
        cost = self._sender.send(duty.run.paths.result, sealed, duty.names.result(duty.lease.token))
        self._require_lease()
        self._tell(step, "result", [cost], time.monotonic() - started)  # else a run could end before it is told
        self._note(result=True, in_flight=None)
        with suppress(OSError):  # nobody looks for what was lost of a run that is finished, and safe
            restore.remove_superseded(duty.run.paths)

    def _tell(self, step: int, what: str, costs: list[TransferStatistics], seconds: float) -> None:
        sent, skipped = sum(cost.bytes_sent for cost in costs), sum(cost.bytes_skipped for cost in costs)
        self._report["bytes_sent"] += sent
        self._report["bytes_skipped"] += skipped
        self._report["send_s"] = round(self._report["send_s"] + seconds, 3)
        self._duty.run.journal.append(
            "mirror", step=step, what=what, bytes_sent=sent, bytes_skipped=skipped, seconds=round(seconds, 3),
            bytes_s=round(sent / seconds) if seconds else 0,
        )  # fmt: skip

    def _tidy(self) -> None:
        if self._untidy and self._duty.lease.is_sure():
            broken = self._tidier.tidy().broken
            self._untidy = False
            self._send_again(broken)

    def _send_again(self, broken: Collection[str]) -> None:
        """What was sent, and was removed by somebody who did not know it (see `tidy`), is not there any more."""
        duty = self._duty
        steps = {step for step in self._sent if duty.names.checkpoint(duty.lease.token, step) in broken}
        for step in steps:
            del self._sent[step]
        if steps:
            duty.run.journal.append("notice", text=f"parts of {len(steps)} mirrored checkpoints are gone: sent again")
            self._note(durable_steps=tuple(step for step in self._noted.durable_steps if step not in steps))

    def _copy_journal(self) -> None:
        if self._duty.lease.lost():
            return
        self._require_lease()
        sent = self._flush()
        self._report["bytes_sent"] += sent
        self._save_note()
        newest = max(self._noted.durable_steps, default=0)
        report = self._report | {"last": round(time.time(), 3), "step": newest, "outages": self._outage.count}
        if sent:
            self._duty.store.write(self._duty.names.node(self._duty.node), files.json_bytes(report))

    def _flush(self) -> int:
        with self._journal_mutex:
            sent = self._journal.copy()
            self._note(journal_bytes=self._journal.end, journal_sha256=self._journal.sha256)
        return sent

    def _require_lease(self) -> None:
        """Raise MirrorError while somebody else may have the run: what we sent now might count for nothing."""
        lease = self._duty.lease
        if why := lease.lost():
            raise MirrorError(why)
        if not lease.is_sure():
            raise MirrorError(lease.trouble or "the claim on the run has not been renewed for too long")

    def _note(self, **changes: object) -> None:
        with self._note_mutex:
            self._noted = self._noted.model_copy(update=changes)
        self._save_note()

    def _save_note(self) -> None:
        """Write mirror.json, if it has changed. Raises OSError; it is written the next time, then."""
        with self._note_mutex:
            noted = self._noted.model_copy(update={"failed_since": self._outage.since})
            if noted != self._saved:
                noted = noted.model_copy(update={"behind_bytes": self._journal.behind() + self._unsent_bytes()})
                noted.save(self._duty.run.paths.mirror)
                self._noted = self._saved = noted

    def _unsent_bytes(self) -> int:
        step = self._due_step()
        manifest = None if step is None else self._checkpoint(step)
        return manifest.size_bytes if manifest else 0

    def _alert(self, text: str) -> None:
        self._duty.run.journal.append("alert", text=text)


def find_manifest(directory: Path, kind: str) -> Manifest | None:
    """The manifest of a directory that looks sealed as this; None if it does not. Its files are not looked at."""
    try:
        manifest = files.read_manifest(directory)
    except DamagedFileError:
        return None
    return manifest if manifest.kind == kind else None
