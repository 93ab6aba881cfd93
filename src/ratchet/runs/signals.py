"""Signals that ask a run to stop, in the worker and in the supervisor; and processes that die with their parent.

Python runs signal handlers in the main thread, between two bytecodes, so a backward pass of a minute delays them by a
minute. The C handler writes the wake-up descriptor (`signal.set_wakeup_fd`) at once. In a worker, a thread reads the
descriptor, so it learns of a signal while the training thread is busy. This module does not import torch.
"""

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from ratchet.errors import EXIT_INTERRUPTED
from ratchet.runs.worker_process import WorkerProcess

TRAINING_THREAD_SHARE = 0.5
"""Share of the grace period in which the training thread may end its micro-batch and seal the run itself."""
WAIT_STEP_S = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SHELLS = ("sh", "dash", "ash", "bash", "ksh", "zsh", "fish")
"""Shells that may stand between dvc and the command of a stage."""


class GracefulShutdown:
    """Request to stop, as the worker sees it. Without `install`, it is a plain flag."""

    def __init__(self) -> None:
        # No threading.Event, because an Event locks: a second signal during `set` would wait for itself.
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
        """Handle SIGTERM and SIGINT from now on. Before `arm`, a request ends the process at once, without loss."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="stopping", daemon=True).start()
        return self

    def arm(self, grace_period_s: float, seal: Callable[[], None]) -> None:
        """Let another thread call `seal` if the training thread does not acknowledge a request within
        TRAINING_THREAD_SHARE of the grace period."""
        self._fallback = (grace_period_s, seal)

    def acknowledge(self) -> None:
        """Report that the training thread has seen the request and seals the run itself."""
        self._acknowledged.set()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _watch(self, read_fd: int) -> None:
        while os.read(read_fd, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass  # the descriptor receives all signals
        self._is_requested = True
        if self._fallback is None:
            os._exit(EXIT_INTERRUPTED)  # the worker is still loading and has nothing to save
        grace_period_s, seal = self._fallback
        if not self._acknowledged.wait(grace_period_s * TRAINING_THREAD_SHARE):
            seal()


class StopSignal:
    """Signal handler of the supervisor: it records SIGTERM, SIGINT and SIGHUP, and passes them on to the worker.

    It has plain attributes instead of a threading.Event, because an Event locks: a second signal during `set` would
    wait for itself forever.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self._on_signal = on_signal
        self.requested_s: float | None = None
        """Time of the first request, by time.monotonic()."""
        self.worker: WorkerProcess | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the run has been asked to stop."""
        return self.requested_s is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._on_signal:
            self._on_signal()
        self.request()

    def request(self) -> None:
        """Ask the run to stop, without a signal. A repeated request is only passed on to the worker again."""
        if self.requested_s is None:
            self.requested_s = time.monotonic()
        self.pass_on()

    def pass_on(self) -> None:
        """Send SIGTERM to the worker, if there is one, and SIGCONT so that a stopped process handles it."""
        if self.worker is not None and self.worker.poll() is None:
            self.worker.send_signal(signal.SIGTERM)
            self.worker.send_signal(signal.SIGCONT)

    def wait(self, seconds: float, poll: Callable[[], None]) -> None:
        """Sleep for this time or until a request to stop arrives. Calls `poll`, which may make the request, every
        WAIT_STEP_S."""
        deadline_s = time.monotonic() + seconds
        while not self.is_requested and (remaining_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(WAIT_STEP_S, remaining_s))
            poll()

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """Handle the stop signals inside this context. Outside the main thread, Python allows no handlers: then nothing
        is installed, and only `request` stops the run."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self) for number in list_stop_signals()}
        try:
            yield self
        finally:
            for number, action in previous.items():
                signal.signal(number, action)


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to end. SIGHUP (the terminal was closed) is included unless nohup ignores
    it."""
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if handles_hangup else ()))


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def die_with_starter(number: int) -> None:
    """Ask for a signal when the program that started this one ends: the parent, or the parent's parent if the parent is
    a shell that waits for this command.

    DVC runs the command of a stage with `$SHELL -c`. Some shells (bash) replace themselves by the last command, others
    (dash of Debian 12) wait for it, also after dvc was killed. A thread therefore watches the shell's parent.
    """
    import psutil

    die_with_parent(number)
    # The parent may have ended, and then the signal is on its way; or this machine does not let us see or watch it.
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process(os.getppid())
        starter = parent.ppid()
        if parent.name() in SHELLS and "-c" in parent.cmdline():
            threading.Thread(target=_send_at_end, args=(os.pidfd_open(starter), number), daemon=True).start()


def _send_at_end(descriptor: int, number: int) -> None:
    """Wait until the process of a descriptor ends, also if no process has read its exit code; then send the signal."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), number)
