"""Handles requests to stop (SIGTERM, SIGINT), also while the training thread is busy. Imports no torch.

Python runs signal handlers in the main thread, between two bytecodes: a backward pass of a minute delays them by a
minute. The wake-up descriptor (`signal.set_wakeup_fd`) is written by the C handler at once; a thread here reads it.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from ratchet.errors import EXIT_INTERRUPTED

TRAINING_THREAD_SHARE = 0.5
"""Share of the grace period that the training thread has to end its micro-batch and seal the run itself."""


class GracefulShutdown:
    """A request to stop. Without `install`, it is a plain flag."""

    def __init__(self) -> None:
        # A plain attribute on purpose: threading.Event locks, and a second signal during `set` waits for itself.
        self._is_requested = False
        self._acknowledged = threading.Event()
        self._fallback: tuple[float, Callable[[], None]] | None = None

    @property
    def is_requested(self) -> bool:
        """Whether training should end now, after sealing its last completed step."""
        return self._is_requested

    @property
    def is_handled(self) -> bool:
        """Whether the training thread has called `acknowledge`."""
        return self._acknowledged.is_set()

    def install(self) -> "GracefulShutdown":
        """Handle SIGTERM and SIGINT from now on. Before `arm`, a request ends the process at once: nothing is lost."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="stopping", daemon=True).start()
        return self

    def arm(self, grace_period_s: float, seal: Callable[[], None]) -> None:
        """Call `seal` from another thread if the training thread has not acknowledged after half of the period."""
        self._fallback = (grace_period_s, seal)

    def acknowledge(self) -> None:
        """Tell that the training thread has seen the request and seals the run itself."""
        self._acknowledged.set()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _watch(self, read_fd: int) -> None:
        while os.read(read_fd, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass  # other signals are written here too
        self._is_requested = True
        if self._fallback is None:
            os._exit(EXIT_INTERRUPTED)  # still loading: there is nothing to save
        grace_period_s, seal = self._fallback
        if not self._acknowledged.wait(grace_period_s * TRAINING_THREAD_SHARE):
            seal()
