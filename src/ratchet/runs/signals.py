"""Being asked to stop, and dying with one's parent."""

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
WAIT_STEP_S = 0.2


class StopSignal:
    """The supervisor's signal handler: SIGTERM, SIGINT and SIGHUP are remembered, and passed on to the worker.

    Plain attributes on purpose: threading.Event locks, and a second signal while the first is in `set` then waits for
    ever for itself.
    """

    def __init__(self, told: Callable[[], None] | None = None) -> None:
        self._told = told
        """Told of each signal; must not wait."""
        self.asked_s: float | None = None
        """When it was first asked for, by time.monotonic()."""
        self.worker: subprocess.Popen[bytes] | None = None

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.asked_s is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._told:
            self._told()
        self.ask()

    def ask(self) -> None:
        """The same without a signal. Asking again passes it on again, and changes nothing else."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()
        self.pass_on()

    def pass_on(self) -> None:
        """Send the worker a SIGTERM, if there is one; and let it go on if it was stopped, or it could not obey."""
        if self.worker is not None and self.worker.poll() is None:
            self.worker.send_signal(signal.SIGTERM)
            self.worker.send_signal(signal.SIGCONT)

    def wait(self, seconds: float, look: Callable[[], None]) -> None:
        """Sleep, but not on after a request; `look` is called now and then, and may make one."""
        deadline_s = time.monotonic() + seconds
        while not self.asked and (left := deadline_s - time.monotonic()) > 0:
            time.sleep(min(WAIT_STEP_S, left))
            look()

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """The signals are ours for this long."""
        old = {number: signal.signal(number, self) for number in list_stop_signals()}
        try:
            yield self
        finally:
            for number, before in old.items():
                signal.signal(number, before)


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a process to end. SIGHUP, when its terminal is closed, is none where it is ignored (nohup)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
