"""Proves the README's sentence "Monitoring cannot disturb a run" for `ratchet watch`: it follows another process and
can exit at any time."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

import tiny_project
from ratchet.config.machine import Machine
from ratchet.runs.directory import list_runs
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from ratchet.stages.watch import watch
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "reports", "console")
PATIENCE_S = 120
SLOW = json.dumps([InjectedFault(kind="slow", seconds=0.15).model_dump(mode="json")])
ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project with a replica. A fast training sends its journal to the replica at once."""
    root = tmp_path_factory.mktemp("watched")
    machine = tiny_project.MACHINE.model_copy(update={"replica": str(root / "replica"), "replica_interval_s": 1})
    return tiny_project.prepared(root / "project", tiny_project.SETTINGS.model_copy(update={"machine": machine}))


@pytest.fixture
def training(prepared: ProjectLayout) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training that takes some seconds."""
    environment = tiny_project.environment() | {VARIABLE: SLOW}
    for paths in list_runs(prepared.runs):
        subprocess.run(
            tiny_project.command("reset", paths.root.name, "--yes"), cwd=prepared.root, env=environment, check=True,
            capture_output=True,
        )  # fmt: skip
    shutil.rmtree(prepared.root.parent / "replica", ignore_errors=True)
    process = subprocess.Popen(
        tiny_project.command("train"), cwd=prepared.root, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not any(paths.lock().is_held() for paths in list_runs(prepared.runs)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)


class Window:
    """A pseudo-terminal that runs `ratchet watch`."""

    def __init__(self, layout: ProjectLayout, *words: str, columns: int = 90, lines: int = 30) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {k: v for k, v in tiny_project.environment().items() if k not in ("CI", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            tiny_project.command("watch", *words), cwd=layout.root, env=environment | {"TERM": "xterm"}, stdin=theirs,
            stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._fd, self.seen = ours, ""

    def until(self, words: str) -> None:
        """Read until the output matches the pattern."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(words, self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            if not self._read() and self.process.poll() is not None:
                break
        assert re.search(words, self.seen), self.seen[-2000:]

    def end(self) -> int:
        """Read the remaining output and return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
        os.close(self._fd)
        return self.process.wait()

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def test_a_run_of_another_process_is_drawn_until_it_is_finished(
    prepared: ProjectLayout, training: subprocess.Popen[bytes]
) -> None:
    window = Window(prepared)
    window.until(r"step +[1-9][0-9]* of")
    (run,) = list_runs(prepared.runs)
    assert run.root.name[:8] in window.seen
    assert window.end() == 0
    assert training.wait(PATIENCE_S) == 0
    page, _, rest = window.seen.rpartition(BACK)
    assert ALTERNATE in page
    assert "finished" in rest  # the text that remains on the original screen
    assert window.seen.rfind(CURSOR) > window.seen.rfind("\x1b[?25l")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_is_left_at_once_and_training_goes_on(
    prepared: ProjectLayout, training: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    window = Window(prepared)
    window.until(r"training|starting|loading")
    window.process.send_signal(number)
    assert window.end() == 0
    assert "Traceback" not in window.seen
    assert window.seen.rfind(CURSOR) > window.seen.rfind("\x1b[?25l")
    assert training.wait(PATIENCE_S) == 0


def test_lines_where_nothing_can_be_drawn_and_the_replica_tells_the_same(
    prepared: ProjectLayout, training: subprocess.Popen[bytes]
) -> None:
    replicated = subprocess.Popen(
        tiny_project.command("watch", "--replica"), cwd=prepared.root, env=tiny_project.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    done = tiny_project.ratchet(prepared, "watch")
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(prepared.runs)
    first, *others = done.stdout.splitlines()
    assert re.match(rf"{run.root.name} (loading|training), step \d+/", first)
    assert all(line.startswith(run.root.name) for line in others)
    assert any("validation loss" in line for line in others)
    assert others[-1].startswith(f"{run.root.name} finished, step")
    assert training.wait(PATIENCE_S) == 0
    said, complained = replicated.communicate(timeout=PATIENCE_S)
    assert replicated.returncode == 0, complained
    if run.root.name in said:  # otherwise `watch` ended before the first claim existed
        assert said.splitlines()[-1].startswith(f"{run.root.name} finished, step")
    again = tiny_project.ratchet(prepared, "watch", "--replica", str(prepared.root.parent / "replica"), run.root.name)
    assert again.stdout == others[-1] + "\n"
    apart = subprocess.run(
        tiny_project.command("watch", "--once", "--replica", str(prepared.root.parent / "replica"), run.root.name),
        cwd="/", env=tiny_project.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "finished" in apart.stdout
    assert max(map(len, apart.stdout.splitlines())) <= 100


def shown(layout: ProjectLayout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), stream, runs, once=once)
    return stream.getvalue()
