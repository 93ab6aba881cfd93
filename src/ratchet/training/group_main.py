"""Process of a training group: `python -m ratchet.training.group_main SOCKET FOLDER PARENT_PID`.

SOCKET is the descriptor of the socket on which supervisors of runs connect (runs/group_connection.py). FOLDER is for
the group's log and its record of common checkpoints.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import EXIT_BUG, EXIT_INTERRUPTED
from ratchet.models import lazy_imports
from ratchet.redaction import redact_stderr
from ratchet.runs.directory import RunPaths, TrainingLaunchSpec
from ratchet.runs.group_connection import MAX_DESCRIPTORS, MESSAGE_BYTES
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.signals import die_with_parent, list_stop_signals

if TYPE_CHECKING:
    from ratchet.training.group import MemberShutdown

RECORD = "common_checkpoints.json"


def main(arguments: list[str]) -> int:
    """Train the runs of all supervisors that connect, until this process is killed."""
    listener, folder, parent = socket.socket(fileno=int(arguments[0])), Path(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return EXIT_INTERRUPTED
    for number in list_stop_signals():  # a service may send them to all processes; supervisors pass them on to members
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with redact_stderr():
        _serve(listener, folder)
    return EXIT_BUG


def _serve(listener: socket.socket, folder: Path) -> None:
    lazy_imports.import_model_libraries()
    with lazy_imports.pause_garbage_collection():
        from ratchet.training.group import MemberShutdown, TrainingGroup
        from ratchet.training.worker import run_member

    group = TrainingGroup(folder / RECORD)

    def run(connection: socket.socket) -> None:
        content, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
        try:
            if not content:
                return  # the supervisor has withdrawn the run
            request = json.loads(content)
            paths, attempt = RunPaths(Path(request["root"])), int(request["attempt"])
            with suppress(ConnectionError):  # found again by the thread below
                connection.send(json.dumps({"pid": os.getpid()}).encode())
            log, heartbeat_fd = descriptors[:2]
            os.write(log, f"ratchet: trained by process {os.getpid()}, together with other runs\n".encode())
            machine = TrainingLaunchSpec.load(paths.launch).machine
            heartbeat = Heartbeat(heartbeat_fd, machine.stall_timeout_s, machine.first_stall_timeout_s)
            heartbeat.beat("load")
            shutdown = MemberShutdown()
            threading.Thread(target=_receive_requests, args=(connection, shutdown), daemon=True).start()
            exit_code = run_member(paths, attempt, shutdown, heartbeat, group)
        finally:
            for fd in descriptors:  # among them is the lock of the run: then another process may open it
                os.close(fd)
        with suppress(ConnectionError):  # the supervisor is gone
            connection.send(json.dumps({"exit_code": exit_code}).encode())
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def run_to_the_end(connection: socket.socket) -> None:
        with connection:
            run(connection)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=run_to_the_end, args=(connection,), daemon=True).start()


def _receive_requests(connection: socket.socket, shutdown: "MemberShutdown") -> None:
    """Pass on the requests of a supervisor to stop its run, and its end."""
    while True:
        try:
            content = connection.recv(MESSAGE_BYTES)
        except OSError:
            content = b""
        if not content:
            shutdown.abandon()
            return
        shutdown.request()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
