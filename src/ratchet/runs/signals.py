"""Stop signals of the supervisor, and processes that die with their parent.

Handles requests to stop (SIGTERM, SIGINT), also while the training thread is busy. Imports no torch.

Python runs signal handlers in the main thread, between two bytecodes: a backward pass of a minute delays them by a
minute. The wake-up descriptor (`signal.set_wakeup_fd`) is written by the C handler at once; a thread here reads it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
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


PR_SET_PDEATHSIG = 1  # linux/prctl.h
WAIT_STEP_S = 0.2


class StopSignal:
    """Signal handler of the supervisor: records SIGTERM, SIGINT and SIGHUP and passes them on to the worker.

    It uses plain attributes, because threading.Event locks: a second signal that arrives during `set` would wait for
    itself forever.

    Args:
        on_signal: called for each signal; must not block.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self._on_signal = on_signal
        self.asked_s: float | None = None
        """Time of the first request, by time.monotonic()."""
        self.worker: subprocess.Popen[bytes] | None = None

    @property
    def asked(self) -> bool:
        """Whether the run should end."""
        return self.asked_s is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._on_signal:
            self._on_signal()
        self.ask()

    def ask(self) -> None:
        """Request the end of the run, without a signal. A repeated request is only passed on to the worker again."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()
        self.pass_on()

    def pass_on(self) -> None:
        """Send the worker, if there is one, SIGTERM, and SIGCONT so that a stopped process can handle it."""
        if self.worker is not None and self.worker.poll() is None:
            self.worker.send_signal(signal.SIGTERM)
            self.worker.send_signal(signal.SIGCONT)

    def wait(self, seconds: float, poll: Callable[[], None]) -> None:
        """Sleep until a request to stop arrives; `poll` is called every WAIT_STEP_S and may make the request."""
        deadline_s = time.monotonic() + seconds
        while not self.asked and (left := deadline_s - time.monotonic()) > 0:
            time.sleep(min(WAIT_STEP_S, left))
            poll()

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """Handle the stop signals inside this context."""
        old = {number: signal.signal(number, self) for number in list_stop_signals()}
        try:
            yield self
        finally:
            for number, before in old.items():
                signal.signal(number, before)


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a process to end. SIGHUP (its terminal was closed) does not if it is ignored (nohup)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
