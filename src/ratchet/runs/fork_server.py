"""Starts worker processes by fork, from a server process that has imported torch and transformers once.

Importing the libraries takes most of a worker's start (docs/performance.md). The server imports them for its first
worker, creates no tensor, starts no thread and does not use CUDA, so each fork of it can do all of this itself. A fork
behaves like `python -m MODULE ARGUMENTS`: own session, own environment, standard output and error in a log.

The kernel kills the server when the thread that started it ends, and each worker when the server ends (a worker asks
for this itself, see `signals.die_with_parent`). A worker that crashes affects neither the server nor other workers.

A process that was itself started by a server forks its own server instead of starting one. It must create its
ForkServer before it starts threads and opens files.
"""

import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from setproctitle import setproctitle

from ratchet.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK
from ratchet.redaction import redact
from ratchet.runs.signals import die_with_parent
from ratchet.runs.worker_process import SpawnedProcess

SERVER = (sys.executable, "-m", "ratchet.training.fork_server_main")
POLL_S = 0.1
FORK_WAIT_S = 1.0
"""Longest time that a server which has imported the libraries needs for a fork, in seconds."""
CLOSE_WAIT_S = 5.0
"""Time after which a server that was asked to end is killed, in seconds."""
MAX_DESCRIPTORS = 16
MESSAGE_BYTES = 256
BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD}

Argument = str | int | None
"""Argument of a worker: a text; the descriptor of a file that the worker inherits; None: the id of its parent."""


class ForkedProcess:
    """A process that a ForkServer starts. Until it is forked, signals go to the server, which may still import."""

    def __init__(self, server: "ForkServer") -> None:
        self._server = server
        self._pid: int | None = None
        self.lost = ""
        """Empty: this process and its supervisor are on the same machine, so they are lost together."""
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Process id; until the process is forked, that of the server."""
        return self._server.pid if self._pid is None else self._pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. A negative code is the signal that ended it."""
        self._server.receive()
        return self.returncode

    def wait_for(self, seconds: float) -> int | None:
        """Wait for the end of the process, at most this time. Return what `poll` returns."""
        if self.poll() is None:
            self._server.wait_for_message(seconds)
        return self.poll()

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired if the process still runs after `timeout` seconds."""
        deadline_s = time.monotonic() + timeout
        while (code := self.wait_for(min(POLL_S, max(0.0, deadline_s - time.monotonic())))) is None:
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs. The server keeps an ended process until `poll` has seen its end, so the
        process id belongs to no other process."""
        deadline_s = time.monotonic() + FORK_WAIT_S
        while self.poll() is None and self._pid is None and self._server.has_forked and time.monotonic() < deadline_s:
            self._server.wait_for_message(POLL_S)  # a signal to the server would end its other workers
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, if the process runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if the process runs."""
        self.send_signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Ask the process to end, kill it if it still runs after this time, and wait until it has ended."""
        try:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        finally:  # also if an exception of a signal handler interrupts the wait
            self.kill()
            while self.wait_for(POLL_S) is None:
                pass

    def on_forked(self, pid: int) -> None:
        """Set the process id. Called by the server object."""
        self._pid = pid

    def on_server_ended(self, exit_code: int) -> None:
        """Set the exit code after the end of the server, when this process is gone too. Called by the server object."""
        if self._pid is None:
            self.returncode = exit_code or EXIT_BUG
        elif not _is_running(self._pid):
            self.returncode = -signal.SIGKILL


@dataclass(frozen=True)
class Program:
    """What a worker runs: function `main(arguments: list[str]) -> int` of a module."""

    module: str
    arguments: Sequence[Argument]
    environment: Mapping[str, str]
    """The complete environment. Variables that libraries read on import keep the values that the server started
    with."""
    stacks: str | None = None
    """File to which SIGUSR1 writes the stacks of all threads while libraries are imported; None: nowhere."""


class ForkServer:
    """A server process, seen from the process that starts workers by it. One thread starts workers and closes the
    server; `poll` and signals may come from any thread and from a signal handler.

    The server process starts with the first worker, and again if it has died.
    """

    def __init__(self) -> None:
        self._process: SpawnedProcess | _ForkedServerProcess | None = None
        self._connection: socket.socket | None = None
        """None: no server is running."""
        self._output = -1
        """Descriptor of the file with the output of the server."""
        self._copied_bytes = 0
        self._output_log: int | None = None
        """Descriptor of the log of the first worker that waits to be forked."""
        self._workers: dict[int, ForkedProcess] = {}
        self._count = 0
        self._mutex = threading.Lock()
        self.has_forked = False
        """Whether the running server has started a worker, and so has imported the libraries."""
        if _is_fork:  # later, this process may have threads, and files whose locks a fork would hold too
            self._start(by_fork=True)

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the server. Raises RuntimeError before the first worker."""
        if self._process is None:
            raise RuntimeError("the server has not been started")
        return self._process.pid

    def start(self, program: Program, log: int, inherited: Sequence[int] = ()) -> ForkedProcess:
        """Start a worker whose standard output and error are appended to the file with descriptor `log`. It keeps the
        descriptors `inherited` open.

        The call returns at once, also while the server still imports libraries. What they print is added to `log`
        without secrets. Raises OSError if no process or descriptor is available.
        """
        self.receive()
        connection = self._connection or self._start(by_fork=False)
        self._count += 1
        descriptors = [value for value in program.arguments if isinstance(value, int)]
        request = {
            "number": self._count,
            "module": program.module,
            # Descriptors have other numbers in the server: an argument gives the index in the message.
            "arguments": [descriptors.index(value) if isinstance(value, int) else value for value in program.arguments],
            "environment": dict(program.environment),
            "directory": str(Path.cwd()),
            "stacks": program.stacks,
        }
        content = os.memfd_create("ratchet-request")
        try:
            os.write(content, json.dumps(request).encode())  # a file, because an environment may exceed a message
            if self._output_log is None:
                self._output_log = os.dup(log)
            socket.send_fds(connection, [b"start"], [content, log, *descriptors, *inherited])
        finally:
            os.close(content)
        worker = self._workers[self._count] = ForkedProcess(self)
        return worker

    def receive(self) -> None:
        """Handle all messages of the server. Do nothing if that is already being done, in another thread or in the code
        that a signal handler has interrupted."""
        if self._mutex.acquire(blocking=False):
            try:
                self._receive()
                self._settle_workers()
            finally:
                self._mutex.release()

    def _receive(self) -> None:
        while self._connection is not None:
            try:
                content = self._connection.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                content = b""
            if not content:
                self._disconnect()
                return
            message = json.loads(content)
            worker = self._workers[message["number"]]
            if message["event"] == "forked":
                self._copy_output()
                self.has_forked = True
                worker.on_forked(message["pid"])
            else:
                worker.returncode = message["exit_code"]
                del self._workers[message["number"]]
                with suppress(ConnectionError):
                    self._connection.sendall(str(message["number"]).encode())

    def wait_for_message(self, seconds: float) -> None:
        """Wait until the server sends a message or ends, at most this time."""
        if self._connection is None:
            time.sleep(seconds)
        else:
            poll = select.poll()  # select() refuses descriptors above 1023
            poll.register(self._connection, select.POLLIN)
            poll.poll(1000 * seconds)

    def close(self) -> None:
        """End the server and its workers."""
        self._disconnect()

    def _start(self, by_fork: bool) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output, self._copied_bytes = os.memfd_create("ratchet-fork-server-output"), 0
        with theirs:
            try:
                if by_fork:
                    self._process = _fork_server(theirs, ours, self._output)
                else:
                    self._process = SpawnedProcess(
                        [*SERVER, str(theirs.fileno()), str(os.getpid())],
                        stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
            except OSError:
                ours.close()
                os.close(self._output)
                raise
        self._connection = ours
        return ours

    def _disconnect(self) -> None:
        if self._connection is None or self._process is None:
            return
        self._connection.close()
        self._connection, self.has_forked = None, False
        if self._process.wait_for(CLOSE_WAIT_S) is None:
            self._process.kill()
            self._process.wait_for(CLOSE_WAIT_S)
        self._copy_output()
        os.close(self._output)

    def _copy_output(self) -> None:
        """Append what the server has printed to the log of the worker that it starts."""
        if self._output_log is None:
            return
        # The server writes at the position that a `read` would move.
        content = os.pread(self._output, os.fstat(self._output).st_size - self._copied_bytes, self._copied_bytes)
        self._copied_bytes += len(content)
        if content:
            os.write(self._output_log, redact(content.decode(errors="replace")).encode())
        os.close(self._output_log)
        self._output_log = None

    def _settle_workers(self) -> None:
        """After the end of the server, report the end of its workers, which the kernel has killed."""
        if self._connection is not None or self._process is None or not self._workers:
            return
        exit_code = self._process.poll()
        for worker in self._workers.values():
            worker.on_server_ended(EXIT_BUG if exit_code is None else exit_code)
        self._workers = {number: worker for number, worker in self._workers.items() if worker.returncode is None}


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


# The server process.

_is_fork = False
"""Whether this process is a fork of a server, so that it has all libraries and may be a server itself."""


class _ForkedServerProcess:
    """A server that this process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait_for(self, seconds: float) -> int | None:
        deadline_s = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self._exit_code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _fork_server(connection: socket.socket, other_end: socket.socket, output: int) -> _ForkedServerProcess:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return _ForkedServerProcess(pid)
    try:
        other_end.close()
        setproctitle(" ".join(SERVER))
        os.setsid()
        _redirect(output)
        serve(connection, parent, lambda: None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(EXIT_BUG)


def serve(connection: socket.socket, parent: int, preload: Callable[[], None]) -> None:
    """Start workers on request until the other end is closed.

    Args:
        connection: socket of type SOCK_SEQPACKET, connected with a ForkServer.
        parent: id of the process that started this server; the kernel kills this process when the parent ends.
        preload: imports libraries; called at the first request.
    """
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_INTERRUPTED)
    signal.signal(signal.SIGTERM, _exit_interrupted)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the descriptor
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    ended: dict[int, int] = {}
    is_preloaded = False
    while True:
        ready, _, _ = select.select([connection.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, MESSAGE_BYTES)
            for number in _report_ended(running, connection):
                ended[number] = running.pop(number)
        if connection.fileno() not in ready:
            continue
        content, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not content:
            os._exit(EXIT_OK)  # the kernel kills the workers
        if not descriptors:
            os.waitpid(ended.pop(int(content)), 0)
            continue
        request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        if request["stacks"] is not None:
            _dump_stacks_into(request["stacks"])
        if not is_preloaded:
            preload()
            is_preloaded = True
        importlib.import_module(request["module"])
        running[request["number"]] = _fork_worker(
            request, descriptors[1:], [wake_read, wake_write, connection.fileno()]
        )
        for fd in descriptors:
            os.close(fd)
        _send(connection, {"event": "forked", "number": request["number"], "pid": running[request["number"]]})


def _report_ended(running: Mapping[int, int], connection: socket.socket) -> list[int]:
    """Report the workers that have ended; return their numbers."""
    numbers = []
    for number, pid in running.items():
        # WNOWAIT: the process id stays taken until the other end knows that the process has ended.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            numbers.append(number)
            exit_code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            _send(connection, {"event": "ended", "number": number, "exit_code": exit_code})
    return numbers


def _fork_worker(request: dict[str, Any], descriptors: list[int], own_descriptors: list[int]) -> int:
    server = os.getpid()
    # Python discards the signals that a new process receives before its first instruction, unless they are blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in own_descriptors:
                os.close(fd)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
            _run_worker(request, descriptors, server)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    return pid


def _exit_interrupted(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def _send(connection: socket.socket, message: dict[str, str | int]) -> None:
    with suppress(ConnectionError):  # the other end is closed: the next `recv` ends this process
        connection.sendall(json.dumps(message).encode())


def _dump_stacks_into(path: str) -> None:
    with suppress(OSError):
        file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123 (faulthandler keeps it open)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _redirect(output: int) -> None:
    """Let standard output and error go to a file, and standard input come from nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(empty)


def _run_worker(request: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
    """Be the worker: the first descriptor is that of its log, the others are for its arguments."""
    global _is_fork  # noqa: PLW0603
    exit_code = EXIT_BUG
    try:
        os.setsid()
        _redirect(descriptors[0])
        os.close(descriptors[0])
        arguments = [_resolve(argument, descriptors[1:], parent) for argument in request["arguments"]]
        command = [sys.executable, "-m", request["module"], *arguments]
        setproctitle(" ".join(command))  # before the environment is changed, next to which Linux stores the title
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if _is_cuda_unusable():
            for fd in descriptors[1:]:
                os.set_inheritable(fd, True)
            os.execv(sys.executable, command)  # noqa: S606 (no shell is wanted)
        sys.argv = [request["module"], *arguments]
        _is_fork = True
        exit_code = importlib.import_module(request["module"]).main(arguments)
    except SystemExit as error:
        exit_code = EXIT_OK if error.code is None else EXIT_BUG
        if isinstance(error.code, int):
            exit_code = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _resolve(argument: Argument, descriptors: list[int], parent: int) -> str:
    if argument is None:
        return str(parent)
    return str(descriptors[argument]) if isinstance(argument, int) else argument


def _is_cuda_unusable() -> bool:
    """Return whether a library has used CUDA while it was imported: then no fork of the server can use CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())
