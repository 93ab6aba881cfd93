"""Removing from a mirror what nobody can need any more: old checkpoints, then objects that no document names."""

from collections.abc import Callable

from ratchet.errors import DamagedError
from ratchet.mirror import documents
from ratchet.mirror.documents import Sealed
from ratchet.mirror.names import RunNames, numbers_of
from ratchet.mirror.store import Store


class Tidier:
    """Of one run.

    Args:
        store: where.
        names: of the run.
        keep: so many checkpoints stay, beside those that they refer to.
        confirm: called before something is removed; raises unless the run is still ours.
    """

    def __init__(self, store: Store, names: RunNames, keep: int, confirm: Callable[[], None]) -> None:
        self._store, self._names, self._keep, self._confirm = store, names, keep, confirm
        self._known: dict[str, Sealed | None] = {}
        """Documents by name, read once; None: unreadable."""

    def forget(self, name: str) -> None:
        """This document is about to be written, perhaps anew."""
        self._known.pop(name, None)

    def tidy(self) -> int:
        """Remove what can go; returns how many things. Nothing may be on its way to the mirror meanwhile.

        Raises MirrorError, and BusyError when the run is another machine's.
        """
        found = self._documents()
        needed = self._needed(found)
        old = [name for name in found if name not in needed]
        wanted = {digest for name in needed if (document := found[name]) for digest in document.digests}
        objects = self._store.list(self._names.folder("objects"))
        idle = [name for name in objects if name.rsplit("/", 1)[-1] not in wanted]
        for names in (old, [self._names.object(name.rsplit("/", 1)[-1]) for name in idle]):
            if names:  # documents first: what has none is not there, what lacks an object is damaged
                self._confirm()
                self._store.remove(names)
        return len(old) + len(idle)

    def _documents(self) -> dict[str, Sealed | None]:
        """All of the run, by name."""
        there: dict[str, Sealed | None] = {}
        for kind in ("checkpoints", "result"):
            for listed in self._store.list(self._names.folder(kind)):
                name = f"{self._names.folder(kind)}/{listed.rsplit('/', 1)[-1]}"
                if name not in self._known:
                    try:
                        self._known[name] = documents.read(self._store, name)
                    except DamagedError:
                        self._known[name] = None
                there[name] = self._known[name]
        self._known = dict(there)
        return there

    def _needed(self, found: dict[str, Sealed | None]) -> set[str]:
        """Results, the newest checkpoints by token and step, and with each what it refers to."""
        checkpoints = [n for n in found if n.startswith(self._names.folder("checkpoints")) and len(numbers_of(n)) == 2]
        newest = sorted((n for n in checkpoints if found[n] is not None), key=numbers_of)[-self._keep :]
        needed = {name for name in found if name not in checkpoints}
        for name in newest:
            document = found[name]
            others = document.refers_to if document else ()
            needed |= {name, *(self._names.checkpoint(numbers_of(name)[0], step) for step in others)}
        return needed & found.keys()
