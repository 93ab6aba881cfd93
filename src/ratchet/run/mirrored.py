"""What of a run lies in its mirror: written by the supervisor, read by the worker before it removes checkpoints."""

import os
import time

from ratchet.errors import DamagedError, DataError
from ratchet.lock import Lock
from ratchet.records import Record
from ratchet.run.directory import Launch, RunPaths


class Mirrored(Record):
    """Of one run directory, by its last holder here."""

    place: str
    """Where the mirror is: what lies in another one is not known."""
    token: int
    """Of the last time that this directory's run was ours to write; see mirror/names.py. 0: another of the machines
    that train it together copied it."""
    node: str
    lock: tuple[int, int]
    """Device and inode of the run's lock: a copy of the directory has another."""
    durable_steps: tuple[int, ...] = ()
    in_flight: int | None = None
    """Checkpoint that is being copied."""
    result: bool = False
    """Whether the sealed result is in the mirror."""
    behind_bytes: int = 0
    failed_since: float | None = None
    """Unix time at which the mirror was out of reach first; None while it is not."""
    journal_bytes: int = 0
    """Of the journal, so much from its beginning is in the mirror."""
    journal_shift: int = 0
    """Added to a place in the journal here, this is the place in the mirror's: another machine told what was before."""
    journal_sha256: str = ""

    def describe(self, newest_step: int, now: float | None = None) -> str:
        """One line; `newest_step` is the newest sealed one, `now` Unix time."""
        newest = max(self.durable_steps, default=0)
        behind = max(0, newest_step - newest)
        text = f"step {newest} durable, {behind} step{'s' * (behind != 1)} behind" if newest else "no step durable yet"
        if self.result:
            text = "the result is durable"
        if self.failed_since is None:
            return text
        return f"{text}; out of reach for {max(0.0, (now or time.time()) - self.failed_since):.0f} s, tried again"


def identity(lock: Lock) -> tuple[int, int]:
    """Device and inode of a lock that is held."""
    found = os.fstat(lock.fd)
    return found.st_dev, found.st_ino


def read(paths: RunPaths) -> Mirrored | None:
    """What was noted; None where nothing was, or nothing that can be read."""
    try:
        return Mirrored.load(paths.mirror)
    except (DataError, DamagedError):
        return None


def unsent(paths: RunPaths) -> set[int]:
    """Steps whose checkpoints must stay here: newer than the newest in the mirror, or on their way there.

    None of a run that has no mirror, or that nobody mirrors.
    """
    if not paths.mirror.exists():
        return set()
    try:
        if Launch.load(paths.launch).machine.mirror is None:
            return set()
    except (DataError, DamagedError):  # no supervisor has started this training
        return set()
    found = read(paths)
    newest = max(found.durable_steps, default=0) if found else 0
    return {step for step in paths.checkpoint_steps() if step > newest} | on_its_way(paths)


def on_its_way(paths: RunPaths) -> set[int]:
    """The step whose checkpoint is being copied, if one is."""
    found = read(paths) if paths.mirror.exists() else None
    return set() if found is None or found.in_flight is None else {found.in_flight}
