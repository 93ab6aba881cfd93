"""Observers of a run: told what its journal says, each in a thread of its own with a place of its own in the journal.

One that is slow, or fails, delays neither training nor the other observers.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.log import print_message

POLL_S = 0.05  # a sweep ends a trial by what an observer finds: soon after the validation that tells it
PATIENT_POLL_S = 2.0
"""Of observers to whom each telling costs something: MLflow took 17 % of a CPU at 8 steps a second, told at once."""
RETRY_S = 5.0

STARTING = {"attempt", "forecast", "memory", "notice", "alert", "budget", "ready", "system"}
"""Events of a worker that loads."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class RunCallback(Protocol):
    """Somebody who is told what the journal says. Called in a thread of its own.

    One that has an attribute `patient` which is true is told nothing before the first step, or the end: what it loads
    to begin with would compete with the worker's loading for the machine (MLflow: 2 s of a CPU). After that it is told
    every PATIENT_POLL_S.

    One that has an attribute `offset` is told nothing of what stands in the journal before it, in bytes.
    """

    name: str

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events. May raise: it is then given the same events again later, with newer ones after them."""

    def finish(self, status: Status) -> None:
        """The run has ended for now; no more events come."""


class RunPruner(Protocol):
    """Somebody who may end a run before its end, as a sweep does with a trial that is not worth going on with."""

    def verdict(self) -> str | None:
        """Why the run is to end now, a checkpoint sealed; None: it goes on. Asked a few times a second; never waits."""

    def signalled(self) -> None:
        """A signal has asked this process to stop: the run ends, and nothing is to come after it. Never waits."""


class _CallbackThread(threading.Thread):
    """Feeds one observer from the journal until told to stop and the journal is drained."""

    def __init__(self, observer: RunCallback, journal: Path, notices: Journal) -> None:
        super().__init__(name=f"observer-{observer.name}", daemon=True)
        self._observer = observer
        self._reader = JournalReader(journal, getattr(observer, "offset", 0))
        self._notices = notices
        self._status: Status | None = None
        self._ended = threading.Event()
        self._pending: list[JournalEvent] = []
        self._complained = False
        self._waits = bool(getattr(observer, "patient", False))
        self._poll_s = PATIENT_POLL_S if self._waits else POLL_S

    def end(self, status: Status) -> None:
        """Drain what is left, then finish with this status."""
        self._status = status
        self._ended.set()

    def run(self) -> None:
        while True:
            last_round = self._ended.is_set()
            try:
                self._pending += self._reader.read()
                self._waits = self._waits and not last_round and {e.kind for e in self._pending} <= STARTING
                if self._pending and not self._waits:
                    self._observer.see(self._pending)
                    self._pending = []
                if last_round:
                    self._observer.finish(self._status or "FAILED")
                    return
            except Exception as error:  # an observer's failure is reported, and must never become the run's
                self._complain(error)
                self._ended.wait(RETRY_S)
                if last_round:
                    return
            self._ended.wait(self._poll_s if not self._waits else POLL_S)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            cause = " ".join(str(error).splitlines()[:2])
            what = f"{self._observer.name} failed ({type(error).__name__}: {cause})"
            self._notices.append("notice", text=f"{what}; tried again, training goes on")


class CallbackList:
    """All observers of a run."""

    def __init__(self, observers: Sequence[RunCallback], journal: Journal) -> None:
        self._followers = [_CallbackThread(observer, journal.path, journal) for observer in observers]

    def start(self) -> None:
        """Tell them the journal from its beginning, and go on."""
        for follower in self._followers:
            follower.start()

    def end(self, status: Status, grace_s: float) -> None:
        """Let them finish, and wait for that no longer than `grace_s` in all."""
        for follower in self._followers:
            follower.end(status)
        deadline_s = time.monotonic() + grace_s
        for follower in self._followers:
            follower.join(max(0.0, deadline_s - time.monotonic()))
            if follower.is_alive():
                lacks = "what it lacks is in the journal"
                print_message(f"{follower.name} is not done after {grace_s:g} s; {lacks}")
