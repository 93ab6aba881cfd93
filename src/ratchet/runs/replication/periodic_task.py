"""Periodic work in a thread of its own, and tracking of its outages."""

import random
import threading
import time
from collections.abc import Callable

from ratchet.errors import first_line

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
URGENT_INTERVAL_S = 0.25
"""Interval while a caller waits for the work to finish."""


class OutageTracker:
    """Tracks since when tasks fail, and why; reports the beginning and the end of an outage once.

    Args:
        on_change: called with a message when an outage begins or ends.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._failing: dict[str, str] = {}
        self._mutex = threading.Lock()
        self.since: float | None = None
        """Unix time at which the present outage began; None without one."""
        self.count = 0

    @property
    def text(self) -> str:
        """Text of the last failure; empty without an outage."""
        with self._mutex:
            return next(reversed(self._failing.values()), "")

    def failed(self, name: str, error: BaseException) -> None:
        with self._mutex:
            begins = not self._failing
            self._failing.pop(name, None)
            self._failing[name] = first_line(error)
            if begins:
                self.since, self.count = time.time(), self.count + 1
        if begins:
            self._on_change(f"the replica cannot be updated ({first_line(error)}); training continues, retrying")

    def worked(self, name: str) -> None:
        with self._mutex:
            ends = self._failing.pop(name, None) is not None and not self._failing
            since, self.since = self.since, None if ends else self.since
        if ends and since is not None:
            self._on_change(f"the replica is reached again, after {max(0.0, time.time() - since):.0f} s")


class PeriodicTask(threading.Thread):
    """Runs a function at an interval; more often after `hurry`, less often after a failure.

    Args:
        name: name of the thread.
        work: the function. It returns when no work is left for now, and may raise any exception.
        every_s: interval.
        outage: records failures and successes.
    """

    def __init__(self, name: str, work: Callable[[], None], every_s: float, outage: OutageTracker) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._every_s, self._outage = work, every_s, outage
        self._wake = threading.Event()
        self._is_urgent = self._ended = False
        self._retry_s = FIRST_RETRY_S

    def hurry(self) -> None:
        """Work without delay from now on, because a caller waits."""
        self._is_urgent = True
        self._wake.set()

    def end(self) -> None:
        """Start no more work."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        while not self._ended:
            wait_s = self._run_once()
            self._wake.wait(min(wait_s, URGENT_INTERVAL_S) if self._is_urgent else wait_s)
            if not self._is_urgent:
                self._wake.clear()
            else:
                time.sleep(URGENT_INTERVAL_S)

    def _run_once(self) -> float:
        """Run the function once; return the seconds until the next run."""
        try:
            self._work()
        except Exception as error:
            if self._ended:
                return 0.0
            self._outage.failed(self.name, error)
            wait_s, self._retry_s = self._retry_s * random.uniform(0.5, 1), min(LAST_RETRY_S, 2 * self._retry_s)
            return wait_s
        self._retry_s = FIRST_RETRY_S
        self._outage.worked(self.name)
        return self._every_s
