"""Starts worker processes by fork, from a server process that has imported torch and transformers once.

Importing the libraries takes most of a worker's start (docs/evidence_speed.md). The server imports them for its first
worker, computes nothing and does not use CUDA, so each fork of it can start threads and use CUDA itself. A fork
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
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from setproctitle import setproctitle

from ratchet.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK
from ratchet.redaction import redact
from ratchet.runs.signals import die_with_parent, list_stop_signals
from ratchet.runs.worker_process import SpawnedProcess

SERVER = (sys.executable, "-m", "ratchet.training.fork_server_main")
POLL_S = 0.1
END_POLL_S = 0.02
CLOSE_WAIT_S = 5.0
"""Time after which a server that was asked to end is killed, in seconds."""
MAX_DESCRIPTORS = 16
MESSAGE_BYTES = 256
BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD}

Argument = str | int | None
"""Argument of a worker: a text; the descriptor of a file that the worker inherits; None: the id of its parent."""


class ForkedProcess:
    """A process that a ForkServer starts."""

    died_with_others = False

    def __init__(self, server: "_ServerConnection") -> None:
        self._server = server
        self._pid: int | None = None
        self._pending_signals: list[int] = []
        """Signals to send as soon as the process is forked."""
        self.lost = ""
        """Empty: this process and its supervisor are on the same machine, so they are lost together."""
        self.returncode: int | None = None
        self.start_error = ""
        """Reason why the server could not fork the process; empty if it could."""

    @property
    def pid(self) -> int:
        """Process id; until the process is forked, that of the server."""
        return self._server.process.pid if self._pid is None else self._pid

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
        """Send a signal, if the process runs.

        While the server imports libraries for this process, the signal goes to the server. The server keeps an ended
        process until `poll` has seen its end, so the process id belongs to no other process.
        """
        if self.poll() is not None:
            return
        if self._pid is None and not self._server.has_forked:
            _send_signal(self.pid, number)
            return
        self._pending_signals.append(number)
        if self._pid is not None:
            self._send_pending_signals(self._pid)

    def terminate(self) -> None:
        """Send SIGTERM, if the process runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if the process runs."""
        if self.poll() is None:
            _send_signal(self._server.process.pid, signal.SIGCONT)  # a stopped server would not report the end
            self.send_signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Send SIGKILL, if the process runs."""
        self.kill()

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
        """Set the process id, and send the signals that had to wait. Called by the connection."""
        self._pid = pid
        self._send_pending_signals(pid)

    def on_server_ended(self, exit_code: int) -> None:
        """Set the exit code after the end of the server, when this process is gone too. Called by the connection."""
        if self._pid is None:
            self.returncode = exit_code or EXIT_BUG
        elif not _is_running(self._pid):
            self.returncode = -signal.SIGKILL

    def _send_pending_signals(self, pid: int) -> None:
        with suppress(IndexError):  # another thread may send some of them
            while True:
                _send_signal(pid, self._pending_signals.pop(0))


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True)
class Program:
    """The program of a worker: function `main(arguments: list[str]) -> int` of a module."""

    module: str
    arguments: Sequence[Argument]
    environment: Mapping[str, str]
    """The complete environment. Variables that libraries read on import keep the values that the server started
    with."""
    stacks: str | None = None
    """File to which SIGUSR1 writes the stacks of all threads while libraries are imported; None: nowhere."""


class ForkServer:
    """Starts workers by a server process. One thread starts workers and closes the server; `poll` and signals of
    workers may come from any thread and from a signal handler.

    The server process starts with the first worker, and again if it has died.
    """

    def __init__(self) -> None:
        # Later, this process may have threads, and files whose locks a fork would hold too.
        self._connection = _ServerConnection(by_fork=True) if _is_fork else None

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the server. Raises RuntimeError before the first worker."""
        if self._connection is None:
            raise RuntimeError("the server has not been started")
        return self._connection.process.pid

    def start(self, program: Program, log: int, inherited: Sequence[int] = ()) -> ForkedProcess:
        """Start a worker whose standard output and error are appended to the file with descriptor `log`. It keeps the
        descriptors `inherited` open.

        The call does not wait until the server has imported the libraries, unless ten workers wait already. What the
        server prints meanwhile is added to `log` without secrets. Raises OSError if no process or descriptor is
        available.
        """
        if self._connection is not None:
            self._connection.receive()
            if self._connection.is_ended:
                self.close()
        if self._connection is None:
            self._connection = _ServerConnection(by_fork=False)
        return self._connection.start(program, log, inherited)

    def close(self) -> None:
        """End the server and its workers."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _ServerConnection:
    """A server process, and the connection with it. Starts the process."""

    def __init__(self, by_fork: bool) -> None:
        self.has_forked = False
        """Whether the server has started a worker, and so has imported the libraries."""
        self.is_ended = False
        """Whether the server has ended. Its workers may need a moment longer."""
        self._workers: dict[int, ForkedProcess] = {}
        self._count = 0
        self._copied_bytes = 0
        self._output_log: int | None = None
        """Descriptor of the log of the first worker that waits to be forked."""
        self._mutex = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._output = os.memfd_create("ratchet-fork-server-output")
                try:
                    self.process = self._start_process(theirs, by_fork)
                except OSError:
                    os.close(self._output)
                    raise
            except OSError:
                self._socket.close()
                raise

    def _start_process(self, theirs: socket.socket, by_fork: bool) -> "SpawnedProcess | _ForkedServerProcess":
        if by_fork:
            return _fork_server(theirs, self._socket, self._output)
        return SpawnedProcess(
            [*SERVER, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip

    def start(self, program: Program, log: int, inherited: Sequence[int]) -> ForkedProcess:
        """Request a worker."""
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
        worker = self._workers[self._count] = ForkedProcess(self)
        try:
            content = os.memfd_create("ratchet-request")  # a file, because an environment may exceed a message
            try:
                os.write(content, json.dumps(request).encode())
                if self._output_log is None:
                    self._output_log = os.dup(log)
                socket.send_fds(self._socket, [b"start"], [content, log, *descriptors, *inherited])
            finally:
                os.close(content)
        except OSError:
            self._workers.pop(self._count, None)
            raise
        return worker

    def receive(self) -> None:
        """Handle all messages of the server. Do nothing if that is already being done, in another thread or in the code
        that a signal handler has interrupted."""
        if self._mutex.acquire(blocking=False):
            try:
                while not self.is_ended and (content := self._receive_message()) is not None:
                    if content:
                        self._handle(json.loads(content))
                    else:
                        self._on_ended()
                if self.is_ended:
                    self._settle_workers()
            finally:
                self._mutex.release()

    def _receive_message(self) -> bytes | None:
        """Return the next message; None if there is none yet; an empty one after the end of the server."""
        while True:
            try:
                return self._socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:  # reported once, before the last messages
                continue

    def _handle(self, message: dict[str, Any]) -> None:
        number = message["number"]
        worker = self._workers[number]
        if message["event"] == "forked":
            self.has_forked = True
            worker.on_forked(message["pid"])
            self._copy_output()
        elif message["event"] == "refused":
            worker.start_error, worker.returncode = message["text"], EXIT_BUG
            del self._workers[number]
        else:
            worker.returncode = message["exit_code"]
            del self._workers[number]
            with suppress(ConnectionError):
                self._socket.sendall(str(number).encode())

    def wait_for_message(self, seconds: float) -> None:
        """Wait until the server sends a message or ends, at most this time."""
        if self.is_ended:
            time.sleep(seconds)
        else:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * seconds)

    def close(self) -> None:
        """End the server and its workers."""
        with suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._mutex:
            if not self.is_ended:
                self._on_ended()
            self._settle_workers()
        self._socket.close()
        os.close(self._output)

    def _on_ended(self) -> None:
        """Wait for the process, which has closed the connection or sees that it is closed."""
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        while self.process.wait_for(END_POLL_S) is None and time.monotonic() < deadline_s:
            pass
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait_for(CLOSE_WAIT_S)
        self._copy_output()
        self.is_ended = True

    def _copy_output(self) -> None:
        """Append what the server has printed to the log of the worker that it starts."""
        if self._output_log is None:
            return
        log, self._output_log = self._output_log, None
        with suppress(OSError):  # as for a worker's own output: a full disk does not end the training
            # The server writes at the position that a `read` would move.
            content = os.pread(self._output, os.fstat(self._output).st_size - self._copied_bytes, self._copied_bytes)
            self._copied_bytes += len(content)
            if content:
                os.write(log, redact(content.decode(errors="replace")).encode())
        os.close(log)

    def _settle_workers(self) -> None:
        """After the end of the server, report the end of its workers, which the kernel has killed."""
        exit_code = self.process.poll()
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
        os.close(output)
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
    running: dict[int, int] = {}
    for number in list_stop_signals():
        signal.signal(number, partial(_pass_on_stop, running))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the descriptor
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    own_descriptors = [wake_read, wake_write, connection.fileno()]
    ended: dict[int, int] = {}
    preload_once = cache(preload)
    poll = select.poll()  # select() refuses descriptors above 1023
    for fd in (connection.fileno(), wake_read):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake_read in ready:
            os.read(wake_read, MESSAGE_BYTES)
            _report_ended(running, ended, connection)
        if connection.fileno() not in ready:
            continue
        content, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not content:
            os._exit(EXIT_OK)  # the kernel kills the workers
        if not descriptors:
            os.waitpid(ended.pop(int(content)), 0)
            continue
        _start_worker(connection, descriptors, own_descriptors, running, preload_once)


def _start_worker(
    connection: socket.socket,
    descriptors: list[int],
    own_descriptors: list[int],
    running: dict[int, int],
    preload: Callable[[], None],
) -> None:
    """Start the worker of a request. The first descriptor is of the request, the others are for the worker."""
    request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
    if request["stacks"] is not None:
        _dump_stacks_into(request["stacks"])
    preload()
    importlib.import_module(request["module"])
    try:
        pid = _fork_worker(request, descriptors[1:], [*own_descriptors, descriptors[0]], running)
        _send(connection, {"event": "forked", "number": request["number"], "pid": pid})
    except OSError as error:
        text = str(error)[: MESSAGE_BYTES // 2]
        _send(connection, {"event": "refused", "number": request["number"], "text": text})
    for fd in descriptors:
        os.close(fd)


def _report_ended(running: dict[int, int], ended: dict[int, int], connection: socket.socket) -> None:
    """Move the workers that have ended from `running` to `ended`, and report them."""
    for number, pid in list(running.items()):
        # WNOWAIT: the process id stays taken until the other end knows that the process has ended.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            ended[number] = running.pop(number)  # before the report: afterwards, a request to stop ends this process
            exit_code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            _send(connection, {"event": "ended", "number": number, "exit_code": exit_code})


def _fork_worker(
    request: dict[str, Any], descriptors: list[int], own_descriptors: list[int], running: dict[int, int]
) -> int:
    server = os.getpid()
    # Python discards the signals that a new process receives before its first instruction, unless they are blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in own_descriptors:
                os.close(fd)
            for number in (*list_stop_signals(), signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
            _run_worker(request, descriptors, server)
        running[request["number"]] = pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    return pid


def _pass_on_stop(running: Mapping[int, int], number: int, frame: FrameType | None) -> None:
    """Pass a request to stop on to the workers; without workers, end. A signal may reach all processes of a service,
    and workers need time to seal their checkpoints."""
    if not running:
        os._exit(EXIT_INTERRUPTED)
    for pid in running.values():
        os.kill(pid, signal.SIGTERM)  # zombies are kept until they are reported, so no pid belongs to another process


def _send(connection: socket.socket, message: dict[str, str | int]) -> None:
    with suppress(ConnectionError):  # the other end is closed: the next `recv` ends this process
        connection.sendall(json.dumps(message).encode())


def _dump_stacks_into(path: str) -> None:
    with suppress(OSError):
        file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123 (faulthandler keeps it open)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _redirect(output: int) -> None:
    """Let standard output and error go to a file. Standard input is empty."""
    sys.stdout.flush()
    sys.stderr.flush()
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(empty)


def _run_worker(request: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
    """Run the main function of the worker. The first descriptor is of its log, the others are for its arguments."""
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
