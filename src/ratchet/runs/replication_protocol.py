"""Interface between the supervisor and the replicator of a run.

A replicator copies a run to remote storage, and ensures that only one machine at a time writes the run.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ratchet.config.machine import Machine
from ratchet.config.units import format_count
from ratchet.errors import DamagedFileError, DataError, InterruptedRunError, LeaseHeldError, RatchetError
from ratchet.runs.directory import RunDirectory, RunPaths, TrainingLaunchSpec
from ratchet.runs.signals import StopSignal
from ratchet.storage.files import FileLock
from ratchet.storage.records.base import Record

MIN_STOP_S = 2.0
"""Minimum time for the last upload after a request to stop, even if the worker used up the grace period."""
WAIT_STEP_S = 0.2


class ReplicatorProtocol(Protocol):
    """Interface of the replicator of a run. It works in its own threads; a method waits only if its docstring says
    so."""

    def acquire(self, stopping: Callable[[], bool]) -> None:
        """Acquire the lease of the run. If the replica is ahead of the run directory, update the directory from it.

        Called once, before the first attempt, while the lock of the run is held. If several machines train the run
        together, each of them calls it. Waits until the lease of another machine expires.

        Args:
            stopping: called during the wait; returns whether to give up.

        Raises:
            LeaseHeldError: another machine trains this run and is alive.
            ReplicaError, SettingsError: the replica cannot be reached, or this run must not use it.
            InterruptedRunError: `stopping` returned True.
        """

    def lost_reason(self) -> str | None:
        """Return why this machine may no longer write the run; None if it may. Called often, so it never blocks."""

    def wait_until_replicated(self, wait_s: float) -> str | None:
        """Wait until everything that is sealed is in the replica, at most `wait_s`. May be called repeatedly. Speeds up
        the upload.

        Returns:
            Text that names the missing parts and the reason; None if the replica is complete.
        """

    def release(self) -> None:
        """Release the lease and end all threads. May be called twice."""


class ReplicationSession:
    """Replication of the run that a supervisor supervises. Without a replicator, the methods do nothing."""

    def __init__(self, replicator: ReplicatorProtocol | None, run: RunDirectory, machine: Machine) -> None:
        self._replicator, self._run, self._machine = replicator, run, machine
        self._lost_reason = ""
        self._has_waited = False

    @contextmanager
    def hold_lease(self) -> Iterator[None]:
        """Hold the lease of the run inside this context. Raises the errors of `ReplicatorProtocol.acquire`."""
        if self._replicator is None:
            yield
            return
        try:
            with StopSignal().installed() as stop:
                try:
                    self._replicator.acquire(lambda: stop.is_requested)
                except InterruptedRunError:
                    raise
                except RatchetError as error:  # for `ratchet status`
                    self._run.journal.append("start_refused", text=str(error))
                    raise
                if stop.is_requested:
                    raise InterruptedRunError(
                        f"run {self._run.paths.root.name}: stopped while its replica was read; run it again to resume"
                    )
            try:
                yield
            except (InterruptedRunError, LeaseHeldError):
                raise
            except RatchetError:  # replicate the journal, so that other machines can show why the run failed
                self._replicator.wait_until_replicated(self._machine.grace_period_s)
                raise
        finally:
            self._replicator.release()

    def check_lease(self, stop: StopSignal) -> None:
        """Ask the run to stop if another machine has taken it over."""
        if self._replicator is not None and not stop.is_requested and (reason := self._replicator.lost_reason()):
            self._lost_reason = reason
            self._run.journal.append("alert", text=reason)
            stop.request()

    def wait_for_result(self, stop: StopSignal) -> None:
        """Wait until the result is in the replica. Raises InterruptedRunError after machine.replica_timeout_s."""
        missing = self._wait(time.monotonic() + self._machine.replica_timeout_s, stop)
        if missing is not None:
            self._has_waited = True
            raise InterruptedRunError(
                f"run {self._run.paths.root.name}: training is complete, but its replica lacks {missing}. "
                "Run the same command again: it uploads the rest and does not train again"
            )

    def wait_after_stop(self, stop: StopSignal, error: InterruptedRunError) -> RatchetError:
        """Use the rest of the grace period for the upload. Returns the error to raise."""
        if self._lost_reason:
            return LeaseHeldError(self._lost_reason)
        if self._has_waited:
            return error
        requested_s = time.monotonic() if stop.requested_s is None else stop.requested_s
        until_s = max(requested_s + self._machine.grace_period_s, time.monotonic() + MIN_STOP_S)
        missing = self._wait(until_s, None)
        return error if missing is None else InterruptedRunError(f"{error}; its replica lacks {missing}")

    def _wait(self, until_s: float, stop: StopSignal | None) -> str | None:
        """Wait for the replica until `until_s` (time.monotonic()), or until the grace period of a stop request ends.
        Return the missing parts as text, or None."""
        if self._replicator is None:
            return None
        while missing := self._replicator.wait_until_replicated(WAIT_STEP_S):
            if stop is not None and stop.requested_s is not None:
                until_s = min(
                    until_s, max(stop.requested_s + self._machine.grace_period_s, stop.requested_s + MIN_STOP_S)
                )
            if time.monotonic() >= until_s:
                return missing
        return None


class ReplicationState(Record):
    """Content of replication.json: how much of this run directory is in the replica.

    The supervisor writes it; the worker reads it before it removes checkpoints.
    """

    place: str
    """Address of the replica. The state does not apply to a replica at another address."""
    token: int
    """Token of the last lease that this directory held (runs/replication/store.py). 0: another machine of the same
    training replicated the run."""
    node: str
    lock: tuple[int, int]
    """Device and inode of the run's lock file. They differ in a copy of the directory."""
    durable_steps: tuple[int, ...] = ()
    in_flight: int | None = None
    """Step of the checkpoint that is being uploaded."""
    result: bool = False
    """Whether the sealed result is in the replica."""
    behind_bytes: int = 0
    failed_since: float | None = None
    """Unix time since which the replica cannot be reached; None if it can be reached."""
    journal_bytes: int = 0
    """Number of bytes, from the beginning of the journal, that are in the replica."""
    journal_shift: int = 0
    """Offset of an event in the replica's journal minus its offset in this journal; not 0 if another machine wrote the
    beginning of the replica's journal."""
    journal_sha256: str = ""

    def describe(self, newest_step: int, now: float | None = None) -> str:
        """Describe the state in one line."""
        newest = max(self.durable_steps, default=0)
        behind = max(0, newest_step - newest)
        text = f"step {newest} durable, {format_count(behind, 'step')} behind" if newest else "no step durable yet"
        if self.result:
            text = "the result is durable"
        if self.failed_since is None:
            return text
        return f"{text}; unreachable for {max(0.0, (now or time.time()) - self.failed_since):.0f} s, retrying"


def get_lock_identity(lock: FileLock) -> tuple[int, int]:
    """Return device and inode of a lock that this process holds."""
    status = os.fstat(lock.fd)
    return status.st_dev, status.st_ino


def read_replication_state(paths: RunPaths) -> ReplicationState | None:
    """Read replication.json; None if it does not exist or is damaged."""
    try:
        return ReplicationState.load(paths.replication_state)
    except (DataError, DamagedFileError):
        return None


def find_unsent_steps(paths: RunPaths) -> set[int]:
    """Find steps whose checkpoints must not be removed: the step in upload, and all steps after the newest step in the
    replica.

    A run without a replica has no such steps.
    """
    if not paths.replication_state.exists():
        return set()
    try:
        if TrainingLaunchSpec.load(paths.launch).machine.replica is None:
            return set()
    except (DataError, DamagedFileError):  # no supervisor has started this training
        return set()
    state = read_replication_state(paths)
    newest = max(state.durable_steps, default=0) if state else 0
    return {step for step in paths.checkpoint_steps() if step > newest} | find_steps_in_flight(paths)


def find_steps_in_flight(paths: RunPaths) -> set[int]:
    """Find the step whose checkpoint is being uploaded, if any."""
    state = read_replication_state(paths) if paths.replication_state.exists() else None
    return set() if state is None or state.in_flight is None else {state.in_flight}
