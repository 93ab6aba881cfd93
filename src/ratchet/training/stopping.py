"""Being asked to stop (SIGTERM, SIGINT), and ending within the grace even when the training thread is busy. No torch.

Python runs signal handlers in the main thread, between two bytecodes: a backward pass of a minute delays them by a
minute. The wake-up descriptor (`signal.set_wakeup_fd`) is written by the C handler at once; a thread of ours reads it.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from ratchet.errors import EXIT_INTERRUPTED

OWN_SHARE = 0.5
"""Of the grace: as long is left to the training thread to reach the end of its micro-batch and seal by itself."""


class GracefulShutdown:
    """A request to stop. Not installed, it is a plain flag."""

    def __init__(self) -> None:
        # A plain attribute on purpose: threading.Event locks, and a second signal during `set` waits for itself.
        self._asked = False
        self._begun = threading.Event()
        self._armed: tuple[float, Callable[[], None]] | None = None

    @property
    def asked(self) -> bool:
        """Whether training should end now, after sealing its last completed step."""
        return self._asked

    def install(self) -> "GracefulShutdown":
        """Take SIGTERM and SIGINT from now on. Before `arm`, a request ends the process at once: nothing is lost."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read,), name="stopping", daemon=True).start()
        return self

    def arm(self, grace_s: float, seal: Callable[[], None]) -> None:
        """Call `seal` from another thread if the training thread has not called `begin` after half of the grace."""
        self._armed = (grace_s, seal)

    def begin(self) -> None:
        """The training thread has noticed, and seals by itself."""
        self._begun.set()

    @property
    def begun(self) -> bool:
        """Whether it has."""
        return self._begun.is_set()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _watch(self, read: int) -> None:
        while os.read(read, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass  # other signals are written here too
        self._asked = True
        if self._armed is None:
            os._exit(EXIT_INTERRUPTED)  # still loading: there is nothing to save
        grace_s, seal = self._armed
        if not self._begun.wait(grace_s * OWN_SHARE):
            seal()
