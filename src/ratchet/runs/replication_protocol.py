"""Somebody who keeps a second copy of a run elsewhere, and sees to it that one machine at a time writes it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ratchet.config.schema import Machine
from ratchet.errors import DamagedFileError, DataError, InterruptedRunError, LeaseHeldError, RatchetError
from ratchet.runs.directory import Run, RunPaths, TrainingLaunchSpec
from ratchet.runs.signals import StopSignal
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import Record

LEAST_S = 2.0
"""For the copy after a request to stop, however long the worker took to seal."""
STEP_S = 0.2


class ReplicatorProtocol(Protocol):
    """What the supervisor asks of the keeper of the copy. It works in threads of its own; nothing here waits for long
    but what says so."""

    def take(self, stopping: Callable[[], bool]) -> None:
        """Before the first attempt, the run's lock held: become the one who may write (of several machines that train
        together: one of them), and bring the run directory to where the copy stands, if that is further. Waits for the
        claim of another machine to run out.

        Args:
            stopping: asked while it waits, whether it is to end.

        Raises:
            LeaseHeldError: another machine trains this run, and is alive.
            MirrorError, SettingsError: the copy cannot be reached, or must not be used.
            InterruptedRunError: asked to stop meanwhile.
        """

    def lost(self) -> str | None:
        """Why this machine may no longer write the run; None: it may. Asked a few times a second; never waits."""

    def settle(self, wait_s: float) -> str | None:
        """All that is sealed now is to be in the copy before this returns; else, after `wait_s`, what is missing and
        why, in words. May be called again and again, and hurries those who copy."""

    def release(self) -> None:
        """The run has ended for now: give up the claim, end all threads. May be called twice."""


class ReplicationSession:
    """What a supervisor does about the copy of its run, if there is one.

    Args:
        custody: keeps the copy; None: there is none, and nothing is done.
        run: that is supervised.
        machine: for how long is waited.
    """

    def __init__(self, custody: ReplicatorProtocol | None, run: Run, machine: Machine) -> None:
        self._custody, self._run, self._machine = custody, run, machine
        self._lost = ""
        self._waited = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """The run is ours to write for this long. Raises what `ReplicatorProtocol.take` does."""
        if self._custody is None:
            yield
            return
        try:
            with StopSignal().installed() as stop:
                self._take(self._custody, stop)
            try:
                yield
            except (InterruptedRunError, LeaseHeldError):
                raise
            except RatchetError:  # somebody may want to read elsewhere why it has failed
                self._custody.settle(self._machine.grace_s)
                raise
        finally:
            self._custody.release()

    def _take(self, custody: ReplicatorProtocol, stop: StopSignal) -> None:
        """`ReplicatorProtocol.take`; why it refuses is kept for whoever asks later where the run stands."""
        try:
            custody.take(lambda: stop.asked)
        except InterruptedRunError:
            raise
        except RatchetError as error:
            self._run.journal.append("refused", text=str(error))
            raise

    def look(self, stop: StopSignal) -> None:
        """Ask the run to stop when it has become another machine's."""
        if self._custody is not None and not stop.asked and (why := self._custody.lost()):
            self._lost = why
            self._run.journal.append("alert", text=why)
            stop.ask()

    def finish(self, stop: StopSignal) -> None:
        """Wait until the result is in the copy. Raises InterruptedRunError when it is not, within `mirror_wait_s`."""
        missing = self._settle(time.monotonic() + self._machine.mirror_wait_s, stop)
        if missing is not None:
            self._waited = True
            raise InterruptedRunError(
                f"run {self._run.paths.root.name} is trained, but not done: its mirror lacks {missing}. "
                "Repeat the command: nothing is trained again, what is missing is sent"
            )

    def leave(self, stop: StopSignal, error: InterruptedRunError) -> RatchetError:
        """Use what is left of the grace for the copy; returns what to raise."""
        if self._lost:
            return LeaseHeldError(self._lost)
        if self._waited:
            return error
        since_s = time.monotonic() if stop.asked_s is None else stop.asked_s
        until_s = max(since_s + self._machine.grace_s, time.monotonic() + LEAST_S)
        missing = self._settle(until_s, None)
        return error if missing is None else InterruptedRunError(f"{error}; its mirror lacks {missing}")

    def _settle(self, until_s: float, stop: StopSignal | None) -> str | None:
        """What is missing at a time by time.monotonic(), or when the grace after a request to stop is over."""
        if self._custody is None:
            return None
        while missing := self._custody.settle(STEP_S):
            if stop is not None and stop.asked_s is not None:
                until_s = min(until_s, max(stop.asked_s + self._machine.grace_s, stop.asked_s + LEAST_S))
            if time.monotonic() >= until_s:
                return missing
        return None


# What of a run lies in its mirror: written by the supervisor, read by the worker before it removes checkpoints.


class ReplicationState(Record):
    """Of one run directory, by its last holder here."""

    place: str
    """Where the mirror is: what lies in another one is not known."""
    token: int
    """Token of the last lease that this directory held (runs/replication/object_names.py); 0: another machine of the
    same training copied the run."""
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


def get_lock_identity(lock: FileLock) -> tuple[int, int]:
    """Device and inode of a lock that is held."""
    found = os.fstat(lock.fd)
    return found.st_dev, found.st_ino


def read_replication_state(paths: RunPaths) -> ReplicationState | None:
    """What was noted; None where nothing was, or nothing that can be read."""
    try:
        return ReplicationState.load(paths.mirror)
    except (DataError, DamagedFileError):
        return None


def find_unsent_steps(paths: RunPaths) -> set[int]:
    """Steps whose checkpoints must stay here: newer than the newest in the mirror, or on their way there.

    None of a run that has no mirror, or that nobody mirrors.
    """
    if not paths.mirror.exists():
        return set()
    try:
        if TrainingLaunchSpec.load(paths.launch).machine.mirror is None:
            return set()
    except (DataError, DamagedFileError):  # no supervisor has started this training
        return set()
    found = read_replication_state(paths)
    newest = max(found.durable_steps, default=0) if found else 0
    return {step for step in paths.checkpoint_steps() if step > newest} | find_steps_in_flight(paths)


def find_steps_in_flight(paths: RunPaths) -> set[int]:
    """The step whose checkpoint is being copied, if one is."""
    found = read_replication_state(paths) if paths.mirror.exists() else None
    return set() if found is None or found.in_flight is None else {found.in_flight}
