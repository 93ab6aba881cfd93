"""Removes from a replica what is no longer needed: old checkpoints, then objects that no document refers to.

The holder of the lease does this between two of its own uploads, so none of its own is in progress. A holder that was
suspended during the removal (a sleeping laptop, a migrated virtual machine) and was succeeded must not continue with
its old list. It cannot, with one exception:

- The claims are read after the list was made, and the lease is checked right before each removal. A successor waits
  until the claim has not changed for a whole lease, so a holder that wakes up after that removes nothing more.
- The machine may be suspended between that check and the request, so one request may come late. It matters only if the
  successor has just sent, or found, this content: then a durable document lacks an object.
- The successor notices that in its own garbage collection after its next upload, and sends the document again. Until
  then a restore skips it and takes the previous one. So only time can be lost.

The checkpoint that a successor restores from is never removed: both keep the newest documents and those that they refer
to.
"""

from dataclasses import dataclass
from typing import Protocol

from ratchet.errors import DamagedFileError, ReplicaError
from ratchet.runs.replication import manifests
from ratchet.runs.replication.manifests import ReplicaManifest
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore


class LeaseGuard(Protocol):
    """The lease of a run (`ReplicaLease`)."""

    def confirm(self) -> None:
        """Raise unless this process still holds the lease."""

    def is_sure(self) -> bool:
        """Whether no other process can hold the lease."""


@dataclass(frozen=True)
class GarbageCollectionResult:
    """Counts of a garbage collection, and the documents that turned out to be incomplete."""

    removed: int
    """Number of removed documents and objects."""
    incomplete: frozenset[str]
    """Names of needed documents that lack an object, or refer to a document that lacks one."""


class ReplicaGarbageCollector:
    """Removes obsolete checkpoints and unused objects of one run.

    Args:
        store: the replica.
        names: object names of the run.
        keep: number of checkpoints to keep, in addition to those that they refer to.
        claim: the lease; confirmed before a removal, and checked before each object.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, keep: int, claim: LeaseGuard) -> None:
        self._store, self._names, self._keep, self._claim = store, names, keep, claim
        self._known: dict[str, ReplicaManifest | None] = {}
        """Documents by name, read once; None: unreadable."""

    def forget(self, name: str) -> None:
        """Forget the content of a document, because it is about to be written or rewritten."""
        self._known.pop(name, None)

    def collect(self) -> GarbageCollectionResult:
        """Remove old documents and unused objects. No upload of this process may be in progress.

        Raises:
            LeaseHeldError: another machine holds the run.
            ReplicaError: the replica does not answer, or the lease is uncertain.
        """
        found = self._documents()
        needed = self._needed(found)
        old = [name for name in found if name not in needed]
        digests = {name: document.digests for name in needed if (document := found[name])}
        wanted = set[str]().union(*digests.values())
        there = {name.rsplit("/", 1)[-1] for name in self._store.list(self._names.folder("objects"))}
        idle = [self._names.object(digest) for digest in sorted(there - wanted)]
        for names in (old, idle):  # documents first: a document that lacks an object is damaged
            if names:
                self._claim.confirm()
                self._store.remove(names, self._require_claim)
        lacking = {name for name, objects in digests.items() if objects - there}
        incomplete = {name for name in digests if lacking & {name, *self._referenced(name, found)}}
        return GarbageCollectionResult(len(old) + len(idle), frozenset(incomplete))

    def _require_claim(self) -> None:
        if not self._claim.is_sure():
            raise ReplicaError("the lease of the run is uncertain: garbage collection in its replica is stopped")

    def _documents(self) -> dict[str, ReplicaManifest | None]:
        """Read all documents of the run, by name."""
        there: dict[str, ReplicaManifest | None] = {}
        for kind in ("checkpoints", "result"):
            for listed in self._store.list(self._names.folder(kind)):
                name = f"{self._names.folder(kind)}/{listed.rsplit('/', 1)[-1]}"
                if name not in self._known:
                    try:
                        self._known[name] = manifests.read_replica_manifest(self._store, name)
                    except DamagedFileError:
                        self._known[name] = None
                there[name] = self._known[name]
        self._known = dict(there)
        return there

    def _needed(self, found: dict[str, ReplicaManifest | None]) -> set[str]:
        """Names of the results, the newest checkpoints by token and step, and the checkpoints that they refer to."""
        checkpoints = [
            n for n in found if n.startswith(self._names.folder("checkpoints")) and len(parse_numbers(n)) == 2
        ]
        newest = sorted((n for n in checkpoints if found[n] is not None), key=parse_numbers)[-self._keep :]
        needed = {name for name in found if name not in checkpoints}
        for name in newest:
            needed |= {name, *self._referenced(name, found)}
        return needed & found.keys()

    def _referenced(self, name: str, found: dict[str, ReplicaManifest | None]) -> list[str]:
        """Names of the documents that this one refers to."""
        document = found[name]
        steps = document.refers_to if document else ()
        return [self._names.checkpoint(parse_numbers(name)[0], step) for step in steps]
