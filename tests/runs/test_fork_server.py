"""Tests of the fork server with real processes: what a worker gets, how it ends, and what follows if the server or its
starter dies."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import plain_fork_server
from ratchet.runs import fork_server
from ratchet.runs.fork_server import Argument, ForkedProcess, ForkServer, Program

WAIT_S = 60.0
DYING = """
import os, time
from ratchet.runs.signals import die_with_parent
die_with_parent(9)
print(os.getppid(), os.getpid(), flush=True)
time.sleep(60)
"""


def until(done: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. A process whose parent has died may be a zombie for a while."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Starter:
    """Starts workers that execute code, and reads their log."""

    def __init__(self, folder: Path) -> None:
        self.log, self.server = folder / "worker.log", ForkServer()

    def start(self, code: str, *arguments: Argument, inherited: tuple[int, ...] = ()) -> ForkedProcess:
        environment = os.environ | {plain_fork_server.CODE: code}
        with self.log.open("ab") as log:
            program = Program("plain_fork_server", arguments, environment)
            return self.server.start(program, log.fileno(), inherited)

    def run(self, code: str, *arguments: Argument) -> int:
        return self.start(code, *arguments).wait(WAIT_S)

    def read(self) -> str:
        return self.log.read_text()


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setattr(fork_server, "SERVER", plain_fork_server.COMMAND)
    made = Starter(tmp_path)
    with made.server:
        yield made


def test_a_worker_has_its_arguments_environment_session_and_output(starter: Starter, tmp_path: Path) -> None:
    file = os.open(tmp_path / "inherited", os.O_RDWR | os.O_CREAT)
    code = (
        "import os, sys; text, fd, parent = arguments; os.write(int(fd), b'written'); print(text); "
        "print(parent == str(os.getppid()), os.getsid(0) == os.getpid(), sys.argv[1:] == arguments); "
        "print(repr(sys.stdin.read()), flush=True); "
        "print('error', file=sys.stderr)"
    )
    assert starter.run(code, "two words", file, None) == 0
    os.close(file)
    assert starter.read() == "two words\nTrue True True\n''\nerror\n"
    assert (tmp_path / "inherited").read_text() == "written"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('ValueError: wrong')  # raise", 1),
        ("raise ValueError('wrong')", 1),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("import os; os._exit(75)", 75),
    ],
)
def test_exit_codes_are_those_of_a_program(starter: Starter, code: str, exit_code: int) -> None:
    assert starter.run(code) == exit_code
    assert ("ValueError: wrong" in starter.read()) == ("raise" in code)
    assert starter.run("pass") == 0, "the server goes on"


def test_a_worker_begins_in_the_directory_of_its_starter(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starter.run("pass") == 0
    monkeypatch.chdir(tmp_path)
    assert starter.run("import os; print(os.getcwd())") == 0
    assert starter.read() == f"{tmp_path}\n"


def test_a_worker_does_not_see_what_another_one_changed(starter: Starter) -> None:
    assert starter.run("import os, ratchet.errors; os.environ['CHANGED'] = '1'; ratchet.errors.CHANGED = 1") == 0
    look = "import os, sys, ratchet.errors; sys.exit('CHANGED' in os.environ or hasattr(ratchet.errors, 'CHANGED'))"
    assert starter.run(look) == 0


def test_the_title_of_a_worker_is_the_command_that_it_stands_for(starter: Starter) -> None:
    worker = begun(starter, "print('begun', flush=True); import time; time.sleep(60)", "the-run")
    until(lambda: "begun" in starter.read(), "it never began")
    title = " ".join(psutil.Process(worker.pid).cmdline()).strip()
    assert title == f"{sys.executable} -m plain_fork_server the-run"
    worker.terminate()
    assert worker.wait(WAIT_S) == -signal.SIGTERM


def test_an_ended_worker_is_kept_until_its_end_was_seen(starter: Starter) -> None:
    """Otherwise a signal could reach another process, which has got its process id."""
    worker = begun(starter)
    process = psutil.Process(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "it survived")
    assert starter.server.pid == process.ppid()
    assert worker.wait(WAIT_S) == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(process.pid), "the server keeps it")


STOPPABLE = """
import os, signal, sys, time
from ratchet.runs.signals import die_with_parent
die_with_parent(9)
def stop(*_):
    time.sleep(0.5)
    print('sealed', flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print('begun', flush=True)
time.sleep(60)
"""


def test_a_stop_of_all_processes_of_a_service_leaves_workers_time(starter: Starter) -> None:
    """`systemctl stop` sends SIGTERM to each process."""
    worker = begun(starter, STOPPABLE)
    until(lambda: "begun" in starter.read(), "it never began")
    for pid in (starter.server.pid, worker.pid):
        os.kill(pid, signal.SIGTERM)
    assert worker.wait(WAIT_S) == 75
    assert starter.read() == "begun\nsealed\n"


def test_a_server_without_workers_ends_on_request(starter: Starter) -> None:
    worker = begun(starter, "pass")
    assert worker.wait(WAIT_S) == 0
    server = starter.server.pid
    os.kill(server, signal.SIGTERM)
    until(lambda: psutil.Process(server).status() == psutil.STATUS_ZOMBIE, "it goes on")
    assert starter.run("pass") == 0
    assert starter.server.pid != server


def test_the_workers_of_a_dead_server_are_reported_while_a_new_one_works(starter: Starter) -> None:
    """A worker that seals a checkpoint outlives its server, whose successor is started meanwhile."""
    slow = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1.5)"
    first, second = begun(starter, slow), begun(starter, DYING)
    until(starter.read, "the second one has not asked to die with its server")
    os.kill(starter.server.pid, signal.SIGKILL)
    assert second.wait(WAIT_S) == -signal.SIGKILL
    assert starter.run("pass") == 0
    assert first.wait(WAIT_S) == -signal.SIGKILL
    assert is_gone(first.pid)


def test_a_signal_to_a_worker_that_is_not_forked_yet_is_sent_later(starter: Starter) -> None:
    assert starter.run("pass") == 0
    os.kill(starter.server.pid, signal.SIGSTOP)
    worker = starter.start("import time; time.sleep(60)")
    worker.terminate()
    os.kill(starter.server.pid, signal.SIGCONT)
    assert worker.wait(WAIT_S) == -signal.SIGTERM
    assert starter.run("pass") == 0


def test_a_stopped_server_does_not_hide_the_end_of_a_worker_that_is_killed(starter: Starter) -> None:
    worker = begun(starter)
    os.kill(starter.server.pid, signal.SIGSTOP)
    worker.kill()
    assert worker.wait(WAIT_S) == -signal.SIGKILL


def test_a_worker_inherits_only_what_it_is_given(starter: Starter, tmp_path: Path) -> None:
    file = os.open(tmp_path / "inherited", os.O_RDWR | os.O_CREAT)
    code = (
        "import os\n"
        "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2 and "
        "os.path.lexists(f'/proc/self/fd/{fd}')]\n"
        "print(sorted(link for link in links if not link.startswith('/proc')))"
    )
    assert starter.run(code, file) == 0
    os.close(file)
    assert starter.read() == f"{[str(tmp_path / 'inherited')]}\n"


def test_more_descriptors_than_select_can_watch(starter: Starter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert starter.run("print('well')") == 0
    finally:
        for fd in many:
            os.close(fd)
        starter.server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert starter.read() == "well\n"


def begun(starter: Starter, code: str = "import time; time.sleep(60)", *arguments: Argument) -> ForkedProcess:
    """Return a worker that has begun."""
    worker = starter.start(code, *arguments)
    until(lambda: worker.poll() or worker.pid != starter.server.pid, "it was not forked")
    return worker


def test_a_worker_that_is_killed_leaves_the_others_alone(starter: Starter) -> None:
    first, second = (begun(starter) for _ in range(2))
    first.kill()
    assert first.wait(WAIT_S) == -signal.SIGKILL
    assert second.poll() is None
    second.terminate()
    assert second.wait(WAIT_S) == -signal.SIGTERM


def test_workers_end_with_their_server_and_a_new_one_is_started(starter: Starter) -> None:
    worker = begun(starter, DYING)
    until(starter.read, "it never began")
    pid = worker.pid
    os.kill(starter.server.pid, signal.SIGKILL)
    assert worker.wait(WAIT_S) == -signal.SIGKILL
    until(lambda: is_gone(pid), "it survived")
    assert starter.run("print('again')") == 0
    assert starter.read().endswith("again\n")


def test_what_an_import_prints_is_in_the_log_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports before there is a worker, whose output is redacted."""
    server = tmp_path / "failing.py"
    server.write_text(
        "import os, socket, sys\nfrom ratchet.runs import fork_server\n"
        "def preload():\n"
        "    print('token', os.environ['HF_TOKEN'], flush=True)\n"
        "    raise ImportError('no such library')\n"
        "fork_server.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), preload)\n"
    )
    monkeypatch.setattr(fork_server, "SERVER", (sys.executable, str(server)))
    monkeypatch.setenv("HF_TOKEN", "planted-token-1234567")
    starter = Starter(tmp_path)
    with starter.server:
        assert starter.run("pass") == 1
    assert "token (hidden)" in starter.read()
    assert "ImportError: no such library" in starter.read()
    assert "planted" not in starter.read()


STARTER = """
import os, sys, time
sys.path[:0] = {paths}
import plain_fork_server
from ratchet.runs import fork_server
fork_server.SERVER = plain_fork_server.COMMAND
server = fork_server.ForkServer()
server.start(fork_server.Program("plain_fork_server", (), os.environ | {{plain_fork_server.CODE: {code!r}}}), 1)
time.sleep(60)
"""


def test_server_and_workers_end_with_the_process_that_started_them() -> None:
    paths = [str(Path(plain_fork_server.__file__).parent)]
    command = [sys.executable, "-c", STARTER.format(paths=paths, code=DYING)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(map(psutil.pid_exists, pids))
        process.kill()
        until(lambda: all(map(is_gone, pids)), "they survived")


def test_a_worker_may_be_a_server_itself(starter: Starter) -> None:
    """A worker of a sweep starts trainings: its server is a fork of itself and dies with it."""
    code = (
        "import os, plain_fork_server\nfrom ratchet.runs.fork_server import ForkServer, Program\n"
        "with ForkServer() as server:\n"
        "    code = 'import os; print(os.getppid(), flush=True); os._exit(5)'\n"
        "    environment = os.environ | {plain_fork_server.CODE: code}\n"
        "    worker = server.start(Program('plain_fork_server', (), environment), 1)\n"
        "    print(worker.wait(60), server.pid)"
    )
    assert starter.run(code) == 0
    first, second = starter.read().splitlines()
    assert second == f"5 {first}"


SERVER = """
import os, socket, sys, types
sys.path[:0] = {paths}
from ratchet.runs import fork_server
def preload():
    print("imported", flush=True)
{preload}
fork_server.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), preload)
"""


def server_with(monkeypatch: pytest.MonkeyPatch, folder: Path, preload: str) -> Starter:
    """Return a starter whose server executes this code before its first worker."""
    script = folder / "server.py"
    paths = [str(Path(plain_fork_server.__file__).parent)]
    script.write_text(SERVER.format(paths=paths, preload=textwrap.indent(preload, "    ")))
    monkeypatch.setattr(fork_server, "SERVER", (sys.executable, str(script)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return Starter(folder)


def test_a_log_that_cannot_be_written_does_not_stop_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starter = server_with(monkeypatch, tmp_path, "pass")
    starter.log = Path("/dev/full")
    with starter.server:
        assert starter.run(f"open({str(tmp_path / 'done')!r}, 'w')") == 0
    assert (tmp_path / "done").exists()


def test_a_fork_that_fails_is_reported_and_the_next_one_may_succeed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = (
        "fork = os.fork\n"
        "def fail():\n"
        "    os.fork = fork\n"
        "    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "os.fork = fail"
    )
    with (starter := server_with(monkeypatch, tmp_path, failing)).server:
        worker = starter.start("pass")
        assert worker.wait(WAIT_S) == 1
        assert "Resource temporarily unavailable" in worker.start_error
        assert starter.run("pass") == 0


def test_a_worker_starts_as_a_program_if_an_import_has_used_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = (
        "torch = types.SimpleNamespace(cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: True))\n"
        "sys.modules['torch'] = torch"
    )
    with (starter := server_with(monkeypatch, tmp_path, bad)).server:
        code = "import os, sys; print('torch' in sys.modules, arguments[0], os.getppid() == int(arguments[1]))"
        assert starter.run(code, "two words", None) == 0
    assert starter.read() == "imported\nFalse two words True\n"
