"""What a run's directory tells beside its journal: who writes to it, what is being sealed, what the mirror has."""

import re
from dataclasses import dataclass
from pathlib import Path

from ratchet import files
from ratchet.run import mirrored
from ratchet.run.directory import RunPaths
from ratchet.run.mirrored import Mirrored

_SEALING = re.compile(rf"{re.escape(files.PARTIAL)}step-([0-9]{{8,}})-([0-9]+)")


@dataclass(frozen=True)
class Aside:
    """At one moment."""

    running: bool = False
    """Whether some process holds the run's lock."""
    saving: int | None = None
    """Step whose checkpoint is being written; None: none is."""
    mirror: Mirrored | None = None
    """What is known of the mirror; None: the run has none, or nothing is noted."""
    finished: bool = False
    """Whether there is a result. It is not read through: that takes too long for somebody who looks twice a second."""


def of(paths: RunPaths) -> Aside:
    """Look into a run's directory. One that is not there, or cannot be read, tells nothing."""
    try:
        running = paths.lock().held_elsewhere()
        return Aside(running, _saving(paths) if running else None, mirrored.read(paths), paths.result.is_dir())
    except OSError:
        return Aside()


def _saving(paths: RunPaths) -> int | None:
    """The step that is being sealed, by a process of this machine; what one left that died is not."""
    try:
        names = [path.name for path in paths.checkpoints.iterdir()]
    except FileNotFoundError:
        return None
    partial = [match for match in map(_SEALING.fullmatch, names) if match]
    found = [int(match[1]) for match in partial if Path(f"/proc/{match[2]}").exists()]
    return max(found, default=None)
