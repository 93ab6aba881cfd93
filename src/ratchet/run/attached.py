"""A run that somebody looks at, wherever it is trained: what its journal tells, and what stands beside it."""

from collections.abc import Sequence
from typing import Protocol

from ratchet.run import aside
from ratchet.run.aside import Aside
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event, Reader
from ratchet.run.vitals import Vitals, begun


class Attached(Protocol):
    """One run."""

    name: str
    vitals: Vitals
    aside: Aside
    new: Sequence[Event]
    """What the last look has found; all that was told before at the first."""

    def look(self) -> None:
        """Take in what is new."""


class Here:
    """A run whose directory this machine sees."""

    def __init__(self, paths: RunPaths) -> None:
        self.name = paths.root.name
        self.vitals, self.aside = begun(paths), Aside()
        self.new: Sequence[Event] = ()
        self._paths, self._reader = paths, Reader(paths.journal)

    def look(self) -> None:
        """See `Attached.look`. A run that is removed meanwhile tells nothing more."""
        self.aside = aside.of(self._paths)
        self.new = list(self._reader.read())
        for event in self.new:
            self.vitals.see(event)
