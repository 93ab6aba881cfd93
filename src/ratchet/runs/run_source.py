"""Live state of a run: its journal, and what its directory shows besides (lock, checkpoint in progress, replica)."""

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
    """State of a run directory that is not in the journal, at one moment."""

    running: bool = False
    """Whether a process holds the lock of the run."""
    saving: int | None = None
    """Step of the checkpoint that is being written; None: none is."""
    replica: ReplicationState | None = None
    """State of the replica; None: there is no replica, or nothing is known of it."""
    finished: bool = False
    """Whether there is a result. It is not verified, which would take too long twice a second."""


def read_sidecar_state(paths: RunPaths) -> SidecarState:
    """Read the state of a run directory. If it is missing or cannot be read, all fields have their defaults."""
    """Look into a run's directory. One that is not there, or cannot be read, tells nothing."""
    try:
        running = paths.lock().is_held()
        return SidecarState(
            running,
            _find_saving_step(paths) if running else None,
            replication_protocol.read_replication_state(paths),
            paths.result.is_dir(),
        )
    except OSError:
        return SidecarState()


def _find_saving_step(paths: RunPaths) -> int | None:
    """The step that a live process of this machine is saving; leftovers of a dead process do not count."""
    try:
        names = [path.name for path in paths.checkpoints.iterdir()]
    except FileNotFoundError:
        return None
    partial = [match for match in map(_SEALING.fullmatch, names) if match]
    found = [int(match[1]) for match in partial if Path(f"/proc/{match[2]}").exists()]
    return max(found, default=None)


class RunSource(Protocol):
    """A run to display, wherever it is trained."""

    name: str
    view: ProgressView
    sidecar: SidecarState
    new_events: Sequence[JournalEvent]
    """Events that the last `refresh` found; at first all of them."""

    def refresh(self) -> None:
        """Read what is new."""


class LocalRunSource:
    """A run whose directory is on this machine."""

    def __init__(self, paths: RunPaths) -> None:
        self.name = paths.root.name
        self.view, self.sidecar = create_view(paths), SidecarState()
        self.new_events: Sequence[JournalEvent] = ()
        self._paths, self._reader = paths, JournalReader(paths.journal)

    def refresh(self) -> None:
        """See `RunSource.refresh`. A run that was removed has no new events."""
        self.sidecar = read_sidecar_state(self._paths)
        self.new_events = list(self._reader.read())
        for event in self.new_events:
            self.view.update(event)
