"""Callbacks of a run. Each callback reads the journal in a thread of its own, at its own position.

A callback that is slow or fails delays neither training nor the other callbacks.
"""

import threading
import time
from collections.abc import Sequence
from typing import Literal, Protocol

from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.log import print_message

POLL_S = 0.05  # short, because a sweep prunes a trial by the validations that its callback receives
DEFERRED_POLL_S = 2.0
"""Interval for deferred callbacks. Their calls are expensive: at 8 steps/s, MLflow took 17 % of a CPU when it received
each step at once."""
RETRY_S = 5.0

STARTUP_EVENTS = {
    "attempt_started", "memory_forecast", "memory_peak", "notice", "alert", "microbatch_budget", "worker_ready",
    "system_metrics",
}  # fmt: skip
"""Events that occur while a worker loads."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class RunCallback(Protocol):
    """Receiver of the events of a journal. Its methods are called in a thread of its own.

    A callback with a true attribute `is_deferred` is not called before the first step or the end of the run, because
    its start-up would compete with the start-up of the worker (MLflow: 2 s of a CPU). Afterwards it is called every
    DEFERRED_POLL_S.

    A callback with an attribute `offset` receives no events before that byte of the journal. One with an attribute
    `poll_s` is called at this interval in seconds instead of POLL_S.
    """

    name: str

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Process the next events. After an exception, the same events come again later, followed by newer events."""

    def on_end(self, status: Status) -> None:
        """Clean up: the supervision has ended, and no more events come."""


class RunPruner(Protocol):
    """Interface of an object that can end a run early, as a sweep does with an unpromising trial. No method blocks."""

    def prune_reason(self) -> str | None:
        """Return why the run should save a checkpoint and end now; None: it continues. Called a few times a second."""

    def on_stop_signal(self) -> None:
        """Handle a signal that asks this process to stop: start no other work after this run."""


class _CallbackThread(threading.Thread):
    """Thread that passes the events of the journal to one callback, until `end` is called and all events are passed."""

    def __init__(self, callback: RunCallback, journal: Journal) -> None:
        super().__init__(name=f"callback-{callback.name}", daemon=True)
        self._callback, self._notices = callback, journal
        self._reader = JournalReader(journal.path, getattr(callback, "offset", 0))
        self._status: Status | None = None
        self._ended = threading.Event()
        self._pending: list[JournalEvent] = []
        self._is_failure_reported = False
        self._waits = bool(getattr(callback, "is_deferred", False))
        self._poll_s: float = DEFERRED_POLL_S if self._waits else getattr(callback, "poll_s", POLL_S)

    def end(self, status: Status) -> None:
        """Ask the thread to pass on the remaining events, and then to call `on_end` with this status."""
        self._status = status
        self._ended.set()

    def run(self) -> None:
        while True:
            is_last_round = self._ended.is_set()
            try:
                self._pending += self._reader.read()
                self._waits = self._waits and not is_last_round and {e.kind for e in self._pending} <= STARTUP_EVENTS
                if self._pending and not self._waits:
                    self._callback.on_events(self._pending)
                    self._pending = []
                if is_last_round:
                    self._callback.on_end(self._status or "FAILED")
                    return
            except Exception as error:  # the failure of a callback is reported and must never end the run
                if not self._is_failure_reported:
                    self._is_failure_reported = True
                    cause = " ".join(str(error).splitlines()[:2])
                    failure = f"{self._callback.name} failed ({type(error).__name__}: {cause})"
                    self._notices.append("notice", text=f"{failure}; retrying, training continues")
                self._ended.wait(RETRY_S)
                if is_last_round:
                    return
            self._ended.wait(self._poll_s if not self._waits else POLL_S)


class CallbackList:
    """The callbacks of a run, each with its thread."""

    def __init__(self, callbacks: Sequence[RunCallback], journal: Journal) -> None:
        self._threads = [_CallbackThread(callback, journal) for callback in callbacks]

    def start(self) -> None:
        """Start passing events, from the beginning of the journal."""
        for thread in self._threads:
            thread.start()

    def end(self, status: Status, grace_s: float) -> None:
        """End all callbacks. Wait at most `grace_s` in all."""
        for thread in self._threads:
            thread.end(status)
        deadline_s = time.monotonic() + grace_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                print_message(
                    f"{thread.name} did not finish within {grace_s:g} s; the events that it missed are in the journal"
                )
