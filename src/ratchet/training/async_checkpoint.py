"""Saving in a thread of its own: training is held up by the snapshot alone, and never by a disk.

At most one save is in flight. While it is, a snapshot that is due by interval is not taken (the interval grows to the
length of a save); one that must be kept (a new best, the end) waits in memory, at most one of each kind. A disk that
takes no checkpoint (full, failing, read-only) is told of once, and tried again until it does.
"""

import contextlib
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.runs.log import say
from ratchet.training import checkpoint
from ratchet.training.train_state import Snapshot, State

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
POLL_S = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Waiting:
    snapshot: Snapshot
    block_s: float


class Saver:
    """Seals snapshots in the order of their steps.

    Args:
        paths: the run.
        journal: told of every sealed checkpoint and of every outage.
        identity: written beside each checkpoint (see checkpoint.py).
        keep: `machine.keep_checkpoints`.
        sealed: state of the newest checkpoint on disk; that of step 0 if there is none.
    """

    def __init__(self, paths: RunPaths, journal: Journal, identity: dict[str, Any], keep: int, sealed: State) -> None:
        self._paths, self._journal, self._identity, self._keep = paths, journal, identity, keep
        self.sealed = sealed
        """The newest state that is on disk."""
        self.save_s = 0.0
        """Duration of the last save."""
        self.outage = ""
        """Why nothing can be saved at the moment; empty when it can."""
        self.chunks = 0
        """Grows while a save makes progress."""
        self._waiting: dict[int, _Waiting] = {}
        self._in_flight: int | None = None
        self._failed: BaseException | None = None
        self._closed = False
        self._retry_s = FIRST_RETRY_S
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way. Raises what ended the thread, if anything did."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            return self._in_flight is not None

    def offer(self, snapshot: Snapshot, block_s: float) -> None:
        """Save this one as soon as can be; older ones that it does not refer to need no saving any more."""
        with self._changed:
            needed = snapshot.state.refers_to | {self._in_flight}
            self._waiting = {step: item for step, item in self._waiting.items() if step in needed}
            self._waiting[snapshot.state.step] = _Waiting(snapshot, block_s)
            self._changed.notify_all()

    def drain(self, wait_s: float, beat: Callable[[], None]) -> bool:
        """Wait until everything is sealed; False when that took longer than `wait_s`.

        Args:
            wait_s: counted from the last sign of progress.
            beat: called while the disk makes progress, or says why it does not.
        """
        self._retry_s = FIRST_RETRY_S
        seen, since = self.chunks, time.monotonic()
        while self.in_flight or self._waiting:
            if self.chunks != seen or self.outage:
                beat()
            if self.chunks != seen and not self.outage:
                seen, since = self.chunks, time.monotonic()
            if time.monotonic() - since > wait_s:
                return False
            with self._changed:
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Save nothing more; what is under way is finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    step, item = min(self._waiting.items())
                    self._in_flight = step
                try:
                    self._save(item)
                except OSError as error:
                    self._make_room(error)
                    self._tell_outage(error)
                else:
                    self._tell_end_of_outage()
                    with self._changed:
                        del self._waiting[step]
                        self._in_flight = None
                        self._changed.notify_all()
        except BaseException as error:  # the training thread raises it: see `busy`
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _save(self, item: _Waiting) -> None:
        started, state = time.monotonic(), item.snapshot.state
        self._journal.sync()  # what the checkpoint assumes to be told must not be lost with the machine
        if state != self.sealed:
            written = checkpoint.write(self._paths, item.snapshot, self._identity, self._beat)
            self.sealed = state
            self.save_s = time.monotonic() - started
            self._journal.append(
                "checkpoint", step=state.step, best=state.best_step == state.step, size_bytes=written.size_bytes,
                bytes_written=written.bytes_written, bytes_linked=written.bytes_linked,
                block_s=round(item.block_s, 6), seconds=round(self.save_s, 4),
            )  # fmt: skip
        checkpoint.rotate(
            self._paths, self._keep, {state.best_step, state.good_step} | replication_protocol.unsent(self._paths)
        )

    def _make_room(self, error: OSError) -> None:
        """On a full disk old checkpoints go although the mirror has not got them: newer ones stand for them."""
        if error.errno in FULL:
            needed = {self.sealed.best_step, self.sealed.good_step} | replication_protocol.on_its_way(self._paths)
            with contextlib.suppress(OSError):  # the error that we have is the one to tell
                checkpoint.rotate(self._paths, self._keep, needed)

    def _beat(self) -> None:
        self.chunks += 1

    def _tell_outage(self, error: OSError) -> None:
        if not self.outage:
            self.outage = str(error)
            where = self._paths.checkpoints
            text = f"no checkpoint can be saved in {where} ({error}); training goes on, saving is tried again"
            self._journal.append("alert", text=text)
            say(text)
        with self._changed:
            self._in_flight = None  # a newer snapshot may take the place of this one
            self._changed.notify_all()
            self._changed.wait(self._retry_s)
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)

    def _tell_end_of_outage(self) -> None:
        self._retry_s = FIRST_RETRY_S
        if self.outage:
            self.outage = ""
            self._journal.append("alert", text=f"checkpoints are saved again, the newest is of step {self.sealed.step}")


class Bystander:
    """The saver of a rank whose machine has another one that saves."""

    in_flight = False
    save_s = 0.0
    outage = ""

    def __init__(self, sealed: State) -> None:
        self.sealed = sealed
        """The newest state that was to be saved."""

    def offer(self, snapshot: Snapshot, block_s: float) -> None:
        """Somebody else saves the same."""
        self.sealed = snapshot.state

    def drain(self, wait_s: float, beat: Callable[[], None]) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self) -> None:
        """There is nothing to end."""
