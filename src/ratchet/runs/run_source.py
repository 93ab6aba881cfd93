"""What a run's directory tells beside its journal: who writes to it, what is being sealed, what the mirror has."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.progress_view import ProgressView, create_view
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage import files

_SEALING = re.compile(rf"{re.escape(files.PARTIAL)}step-([0-9]{{8,}})-([0-9]+)")


@dataclass(frozen=True)
class SidecarState:
    """At one moment."""

    running: bool = False
    """Whether some process holds the run's lock."""
    saving: int | None = None
    """Step whose checkpoint is being written; None: none is."""
    mirror: ReplicationState | None = None
    """What is known of the mirror; None: the run has none, or nothing is noted."""
    finished: bool = False
    """Whether there is a result. It is not read through: that takes too long for somebody who looks twice a second."""


def read_sidecar_state(paths: RunPaths) -> SidecarState:
    """Look into a run's directory. One that is not there, or cannot be read, tells nothing."""
    try:
        running = paths.lock().held_elsewhere()
        return SidecarState(
            running,
            _find_saving_step(paths) if running else None,
            replication_protocol.read_replication_state(paths),
            paths.result.is_dir(),
        )
    except OSError:
        return SidecarState()


def _find_saving_step(paths: RunPaths) -> int | None:
    """The step that is being sealed, by a process of this machine; what one left that died is not."""
    try:
        names = [path.name for path in paths.checkpoints.iterdir()]
    except FileNotFoundError:
        return None
    partial = [match for match in map(_SEALING.fullmatch, names) if match]
    found = [int(match[1]) for match in partial if Path(f"/proc/{match[2]}").exists()]
    return max(found, default=None)


# A run that somebody looks at, wherever it is trained: what its journal tells, and what stands beside it.


class RunSource(Protocol):
    """One run."""

    name: str
    vitals: ProgressView
    aside: SidecarState
    new: Sequence[JournalEvent]
    """What the last look has found; all that was told before at the first."""

    def look(self) -> None:
        """Take in what is new."""


class LocalRunSource:
    """A run whose directory this machine sees."""

    def __init__(self, paths: RunPaths) -> None:
        self.name = paths.root.name
        self.vitals, self.aside = create_view(paths), SidecarState()
        self.new: Sequence[JournalEvent] = ()
        self._paths, self._reader = paths, JournalReader(paths.journal)

    def look(self) -> None:
        """See `RunSource.look`. A run that is removed meanwhile tells nothing more."""
        self.aside = read_sidecar_state(self._paths)
        self.new = list(self._reader.read())
        for event in self.new:
            self.vitals.see(event)
