"""Work that is done again and again in a thread of its own, whatever becomes of it; and since when it fails."""

import random
import threading
import time
from collections.abc import Callable

from ratchet.errors import first_line

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
HURRIED_S = 0.25
"""Between two tries while somebody waits for us."""


class OutageTracker:
    """Since when errands fail, and why; told at its beginning and at its end, however many fail.

    Args:
        tell: told in words.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._failing: dict[str, str] = {}
        self._mutex = threading.Lock()
        self.since: float | None = None
        """Unix time."""
        self.count = 0

    @property
    def text(self) -> str:
        """What the last failure said; empty while there is none."""
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
            self._tell(
                f"the mirror gets nothing at the moment ({first_line(error)}); training goes on, it is tried again"
            )

    def worked(self, name: str) -> None:
        with self._mutex:
            ends = self._failing.pop(name, None) is not None and not self._failing
            since, self.since = self.since, None if ends else self.since
        if ends and since is not None:
            self._tell(f"the mirror is reached again, after {max(0.0, time.time() - since):.0f} s")


class PeriodicTask(threading.Thread):
    """Does a piece of work every so often, sooner when it is asked to hurry, later when it fails.

    Args:
        name: of the thread.
        work: returns when nothing is left to do for now; may raise anything.
        every_s: between two times.
        outage: told how it went.
    """

    def __init__(self, name: str, work: Callable[[], None], every_s: float, outage: OutageTracker) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._every_s, self._outage = work, every_s, outage
        self._wake = threading.Event()
        self._hurried = self._ended = False
        self._retry_s = FIRST_RETRY_S

    def hurry(self) -> None:
        """Somebody waits for this work: from now on nothing else is waited for."""
        self._hurried = True
        self._wake.set()

    def end(self) -> None:
        """Begin no more."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        while not self._ended:
            wait_s = self._once()
            self._wake.wait(min(wait_s, HURRIED_S) if self._hurried else wait_s)
            if not self._hurried:
                self._wake.clear()
            else:
                time.sleep(HURRIED_S)

    def _once(self) -> float:
        """Seconds until the next time."""
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
