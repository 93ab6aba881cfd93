"""Processes that a supervisor watches."""

import os
import select
import subprocess
import time
from typing import Protocol


class WorkerProcess(Protocol):
    """A child process that a supervisor watches."""

    start_error: str
    """Reason why the process could not be started, if that was known only after its start; otherwise empty."""

    @property
    def died_with_others(self) -> bool:
        """Whether a signal ended a process that several workers share, and `kill` was not called for this worker."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. A negative code is the signal that ended it."""

    def wait_for(self, seconds: float) -> int | None:
        """Wait for the end of the process, at most this time. Return what `poll` returns."""

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""

    def kill(self) -> None:
        """Send SIGKILL, if the process runs."""

    def abandon(self) -> None:
        """End the worker and no other one, because its supervisor ends."""


class SpawnedProcess(subprocess.Popen[bytes]):
    """A process started from its program file."""

    start_error = ""
    died_with_others = False

    def abandon(self) -> None:
        """Send SIGKILL, if the process runs."""
        self.kill()

    def wait_for(self, seconds: float) -> int | None:
        """Wait for the end of the process, at most this time. Return what `poll` returns.

        This method sleeps on a descriptor of the process. Popen.wait with a timeout would poll eighty times a second.
        """
        if self.poll() is None:
            try:
                fd = os.pidfd_open(self.pid)
            except OSError:  # a kernel older than Linux 5.3, or no descriptor available
                time.sleep(seconds)
            else:
                try:
                    poll = select.poll()
                    poll.register(fd, select.POLLIN)
                    poll.poll(1000 * seconds)
                finally:
                    os.close(fd)
        return self.poll()
