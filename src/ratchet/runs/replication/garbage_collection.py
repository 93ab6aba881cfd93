"""Removing from a mirror what nobody can need any more: old checkpoints, then objects that no document names.

A holder does this between two uploads of its own, so nothing of its own is on the way meanwhile. Another holder's
uploads are another matter: one that was frozen while it removed things (a laptop that slept, a virtual machine that
was moved), and was succeeded, must not go on with a list that it made before. It cannot, but for one name:

- The claims are looked at after the list was made, and the claim is asked for right before each try to remove. A
  successor waits until the claim has stood still for a whole lease: who wakes up after that removes nothing more.
- Between that question and the request there is no moment at which nobody can freeze. So one request may come late. It
  hurts if the successor has sent, or found there, just this content: then a document that was durable lacks an object.
- The successor sees that when it tidies up itself, after its next upload, and sends the document again. Until then who
  restores passes over it, and takes the one before. So what can be lost is time.

What a successor restores from is not on such a list: both keep the newest, and what those refer to.
"""

from dataclasses import dataclass
from typing import Protocol

from ratchet.errors import DamagedFileError, MirrorError
from ratchet.runs.replication import manifests
from ratchet.runs.replication.manifests import ReplicaManifest
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore


class LeaseGuard(Protocol):
    """A claim on a run (`Lease`)."""

    def confirm(self) -> None:
        """Raises unless the run is still ours."""

    def is_sure(self) -> bool:
        """Whether nobody else can have the run."""


@dataclass(frozen=True)
class GarbageCollectionResult:
    """What was found."""

    removed: int
    """Documents and objects."""
    broken: frozenset[str]
    """Names of documents that are needed, and lack an object, or refer to one that does."""


class ReplicaGarbageCollector:
    """Of one run.

    Args:
        store: where.
        names: of the run.
        keep: so many checkpoints stay, beside those that they refer to.
        claim: confirmed before something is removed, and asked at each removal.
    """

    def __init__(self, store: ReplicaStore, names: RunObjectNames, keep: int, claim: LeaseGuard) -> None:
        self._store, self._names, self._keep, self._claim = store, names, keep, claim
        self._known: dict[str, ReplicaManifest | None] = {}
        """Documents by name, read once; None: unreadable."""

    def forget(self, name: str) -> None:
        """This document is about to be written, perhaps anew."""
        self._known.pop(name, None)

    def tidy(self) -> GarbageCollectionResult:
        """Remove what can go. Nothing of ours may be on its way to the mirror meanwhile.

        Raises MirrorError, and LeaseHeldError when the run is another machine's.
        """
        found = self._documents()
        needed = self._needed(found)
        old = [name for name in found if name not in needed]
        digests = {name: document.digests for name in needed if (document := found[name])}
        wanted = set[str]().union(*digests.values())
        there = {name.rsplit("/", 1)[-1] for name in self._store.list(self._names.folder("objects"))}
        idle = [self._names.object(digest) for digest in sorted(there - wanted)]
        for names in (old, idle):  # documents first: what has none is not there, what lacks an object is damaged
            if names:
                self._claim.confirm()
                self._store.remove(names, self._require_claim)
        lacking = {name for name, objects in digests.items() if objects - there}
        broken = {name for name in digests if lacking & {name, *self._others(name, found)}}
        return GarbageCollectionResult(len(old) + len(idle), frozenset(broken))

    def _require_claim(self) -> None:
        if not self._claim.is_sure():
            raise MirrorError("the claim on the run is in doubt: nothing more is removed from its mirror")

    def _documents(self) -> dict[str, ReplicaManifest | None]:
        """All of the run, by name."""
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
        """Results, the newest checkpoints by token and step, and with each what it refers to."""
        checkpoints = [
            n for n in found if n.startswith(self._names.folder("checkpoints")) and len(parse_numbers(n)) == 2
        ]
        newest = sorted((n for n in checkpoints if found[n] is not None), key=parse_numbers)[-self._keep :]
        needed = {name for name in found if name not in checkpoints}
        for name in newest:
            needed |= {name, *self._others(name, found)}
        return needed & found.keys()

    def _others(self, name: str, found: dict[str, ReplicaManifest | None]) -> list[str]:
        """Documents that this one refers to."""
        document = found[name]
        steps = document.refers_to if document else ()
        return [self._names.checkpoint(parse_numbers(name)[0], step) for step in steps]
