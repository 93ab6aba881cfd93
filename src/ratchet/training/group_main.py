"""Process of a training group: `python -m ratchet.training.group_main SOCKET FOLDER PARENT_PID`.

SOCKET is the descriptor of the socket on which supervisors of runs connect (runs/group_connection.py). FOLDER is for
the group's log and its record of common checkpoints.
"""

import ctypes
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

from ratchet.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK
from ratchet.models import lazy_imports
from ratchet.redaction import redact_stderr
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.directory import RunPaths, TrainingLaunchSpec
from ratchet.runs.group_connection import MAX_DESCRIPTORS, MESSAGE_BYTES
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.signals import die_with_parent, list_stop_signals

if TYPE_CHECKING:
    from ratchet.training.group import MemberShutdown

RECORD = "common_checkpoints.json"
POLL_S = 1.0
_M_ARENA_MAX = -8
"""Option of mallopt (glibc, malloc.h)."""


def main(arguments: list[str]) -> int:
    """Train the runs of all supervisors that connect, until no run is left and a run waits to be trained alone."""
    listener, folder, parent = socket.socket(fileno=int(arguments[0])), Path(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return EXIT_INTERRUPTED
    for number in list_stop_signals():  # a service may send them to all processes; supervisors pass them on to members
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _use_one_heap()
    device_lock = DeviceLock(Path(listener.getsockname()).parent)
    with redact_stderr(), device_lock.hold_shared():
        _serve(listener, folder, device_lock)
        sys.stdout.flush()
        os._exit(EXIT_OK)  # the lock ends with the process, which uses memory until then


def _use_one_heap() -> None:
    """Let all threads share the heap of the main thread, if the C library is glibc. By default, up to eight heaps per
    core each keep the memory of the largest pass or validation that their threads have computed."""
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_M_ARENA_MAX, 1)


def _serve(listener: socket.socket, folder: Path, device_lock: DeviceLock) -> None:
    lazy_imports.import_model_libraries(in_own_process=True)
    with lazy_imports.pause_garbage_collection():
        from ratchet.training.group import MemberShutdown, TrainingGroup
        from ratchet.training.worker import run_member

    group = TrainingGroup(folder / RECORD)

    def run(connection: socket.socket, request: dict[str, str], descriptors: list[int]) -> int:
        paths, attempt = RunPaths(Path(request["root"])), int(request["attempt"])
        connection.send(json.dumps({"pid": os.getpid()}).encode())
        log, heartbeat_fd = descriptors[:2]
        with suppress(OSError):  # the disk is full; the training waits until it can save
            where = f"output and stacks are in {folder / 'group.log'}"
            text = f"ratchet: trained by process {os.getpid()}, together with other runs; {where}\n"
            os.write(log, text.encode())
        machine = TrainingLaunchSpec.load(paths.launch).machine
        heartbeat = Heartbeat(heartbeat_fd, machine.stall_timeout_s, machine.first_stall_timeout_s)
        heartbeat.beat("load")
        shutdown = MemberShutdown()
        threading.Thread(target=_receive_requests, args=(connection, shutdown), daemon=True).start()
        return run_member(paths, attempt, shutdown, heartbeat, group)

    def serve(connection: socket.socket) -> None:
        exit_code, descriptors = EXIT_BUG, list[int]()
        try:
            content, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
            if content:  # otherwise the supervisor has withdrawn the run
                exit_code = run(connection, json.loads(content), descriptors)
        except ConnectionError:
            pass  # the supervisor is gone
        finally:
            for fd in descriptors:  # among them is the lock of the run: then another process may open it
                os.close(fd)
            with suppress(OSError):  # the supervisor is gone
                connection.send(json.dumps({"exit_code": exit_code}).encode())
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    running = set[threading.Thread]()
    listener.settimeout(POLL_S)
    while running or not device_lock.has_queue():
        running = {thread for thread in running if thread.is_alive()}
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        thread = threading.Thread(target=serve, args=(connection,), daemon=True)
        thread.start()
        running.add(thread)
    (folder / RECORD).unlink(missing_ok=True)  # the runs of the last common checkpoint have ended


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
