"""Starts workers as members of a training group (training/group_main.py), instead of as processes.

A supervisor connects to the group's socket and passes on the descriptors of the run. The connection stands for the
process of the worker: its end is the end of the worker. If the group dies, all its members end as if they were killed.
The socket stays open while the group is started again, so supervisors may connect at any time.
"""

import json
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ratchet.runs.fork_server import Program
from ratchet.runs.worker_process import WorkerProcess

MESSAGE_BYTES = 4096
MAX_DESCRIPTORS = 4
BACKLOG = 128
STOP = b"stop"
"""Message by which a supervisor asks a member to stop."""


class WorkerServer(Protocol):
    """Starts the workers of a supervisor."""

    def start(self, program: Program, log: int, inherited: Sequence[int] = ()) -> WorkerProcess:
        """Start a worker whose output is appended to the file with descriptor `log`; it keeps `inherited` open."""


def listen(path: Path) -> socket.socket:
    """Return a socket on which members connect to a group. Raises OSError if it cannot be created."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class GroupConnection:
    """A training group, as a supervisor uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, program: Program, log: int, inherited: Sequence[int] = ()) -> "GroupMemberProcess":
        """Let the group train a run. The program's arguments are those of training/worker_main.py, of which the group
        uses the run directory, the attempt and the heartbeat. Raises OSError if the group cannot be reached."""
        root, attempt, _, heartbeat = program.arguments
        if not isinstance(heartbeat, int):
            raise TypeError("a member of a group needs the descriptor of its heartbeat")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(self._path))
            request = json.dumps({"root": root, "attempt": attempt}).encode()
            socket.send_fds(connection, [request], [log, heartbeat, *inherited])
        except OSError:
            connection.close()
            raise
        return GroupMemberProcess(connection)


class GroupMemberProcess:
    """A member of a group, which a supervisor watches as if it were a process of its own."""

    start_error = ""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._group_pid: int | None = None
        self._is_killed = False
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the group; until the group has accepted the run, that of this process."""
        return os.getpid() if self._group_pid is None else self._group_pid

    @property
    def died_with_others(self) -> bool:
        """Whether the group has died for another reason than `kill`."""
        return self.returncode is not None and self.returncode < 0 and not self._is_killed

    def poll(self) -> int | None:
        """Return the exit code, or None while the member runs; -SIGKILL if the group has died, for any reason."""
        while self.returncode is None:
            try:
                content = self._connection.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:  # reported once, before the last messages
                continue
            message: dict[str, Any] = json.loads(content) if content else {"exit_code": -signal.SIGKILL}
            if "pid" in message:
                self._group_pid = message["pid"]
            else:
                self.returncode = message["exit_code"]
                self._connection.close()
        return self.returncode

    def wait_for(self, seconds: float) -> int | None:
        """Wait for the end of the member, at most this time. Return what `poll` returns."""
        if self.poll() is None:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            poll.poll(1000 * seconds)
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Ask the member to stop for SIGTERM; ignore other signals, which would reach all members."""
        if number == signal.SIGTERM:  # without `poll`, which a signal handler may have interrupted
            with suppress(OSError):  # the group or this member has ended: the next `poll` sees it
                self._connection.send(STOP)

    def kill(self) -> None:
        """Kill the group, if the member runs, because a thread cannot be killed. If the group has not accepted the run
        yet, withdraw it."""
        if self.poll() is not None:
            return
        self._is_killed = True
        if self._group_pid is None:
            self.abandon()
        else:
            with suppress(ProcessLookupError):
                os.kill(self._group_pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Withdraw the run. The group ends it at its next step, without a checkpoint; the other members continue."""
        if self.poll() is None:
            self._is_killed = True
            self.returncode = -signal.SIGKILL
            self._connection.close()
