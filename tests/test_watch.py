"""`ratchet watch`: real trainings of other processes, seen on a terminal of another's, in lines, and from a mirror."""

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
from pathlib import Path

import pytest

import tiny_project
from ratchet.cli import main
from ratchet.config import Machine
from ratchet.errors import DataError, SettingsError
from ratchet.faults.injection import VARIABLE, Fault
from ratchet.layout import Layout
from ratchet.run.directory import RunPaths, all_runs
from ratchet.watch import Options, watch
from trained_runs import Training, lay

PATIENCE_S = 120
SLOW = json.dumps([Fault(kind="slow", seconds=0.15).model_dump(mode="json")])
ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """With a mirror, which a fast training gives its journal at once."""
    root = tmp_path_factory.mktemp("watched")
    machine = tiny_project.MACHINE.model_copy(update={"mirror": str(root / "mirror"), "mirror_every_s": 1})
    return tiny_project.prepared(root / "project", tiny_project.SETTINGS.model_copy(update={"machine": machine}))


@pytest.fixture
def training(prepared: Layout) -> Iterator[subprocess.Popen[bytes]]:
    """Goes on for some seconds."""
    environment = tiny_project.environment() | {VARIABLE: SLOW}
    for paths in all_runs(prepared.runs):
        subprocess.run(
            tiny_project.command("reset", paths.root.name, "--yes"), cwd=prepared.root, env=environment, check=True,
            capture_output=True,
        )  # fmt: skip
    shutil.rmtree(prepared.root.parent / "mirror", ignore_errors=True)
    process = subprocess.Popen(
        tiny_project.command("train"), cwd=prepared.root, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not any(paths.lock().held_elsewhere() for paths in all_runs(prepared.runs)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)


class Window:
    """A terminal of another process."""

    def __init__(self, layout: Layout, *words: str, columns: int = 90, lines: int = 30) -> None:
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
        """Read until it has shown this."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(words, self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            if not self._read() and self.process.poll() is not None:
                break
        assert re.search(words, self.seen), self.seen[-2000:]

    def end(self) -> int:
        """Read to its end."""
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
        except OSError:  # the other side is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def test_a_run_of_another_process_is_drawn_until_it_is_finished(
    prepared: Layout, training: subprocess.Popen[bytes]
) -> None:
    window = Window(prepared)
    window.until(r"step +[1-9][0-9]* of")
    (run,) = all_runs(prepared.runs)
    assert run.root.name[:8] in window.seen
    assert window.end() == 0
    assert training.wait(PATIENCE_S) == 0
    page, _, rest = window.seen.rpartition(BACK)
    assert ALTERNATE in page
    assert "finished" in rest  # what is left on the screen where it was started
    assert window.seen.rfind(CURSOR) > window.seen.rfind("\x1b[?25l")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_is_left_at_once_and_training_goes_on(
    prepared: Layout, training: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    window = Window(prepared)
    window.until(r"training|starting|loading")
    window.process.send_signal(number)
    assert window.end() == 0
    assert "Traceback" not in window.seen
    assert window.seen.rfind(CURSOR) > window.seen.rfind("\x1b[?25l")
    assert training.wait(PATIENCE_S) == 0


def test_lines_where_nothing_can_be_drawn_and_the_mirror_tells_the_same(
    prepared: Layout, training: subprocess.Popen[bytes]
) -> None:
    mirrored = subprocess.Popen(
        tiny_project.command("watch", "--mirror"), cwd=prepared.root, env=tiny_project.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    done = tiny_project.ratchet(prepared, "watch")
    assert done.returncode == 0, done.stderr
    (run,) = all_runs(prepared.runs)
    first, *others = done.stdout.splitlines()
    assert re.match(rf"{run.root.name} (loading|training), step \d+/", first)
    assert all(line.startswith(run.root.name) for line in others)
    assert any("validation loss" in line for line in others)
    assert others[-1].startswith(f"{run.root.name} finished, step")
    assert training.wait(PATIENCE_S) == 0
    said, complained = mirrored.communicate(timeout=PATIENCE_S)
    assert mirrored.returncode == 0, complained
    if run.root.name in said:  # else it had looked before there was a claim
        assert said.splitlines()[-1].startswith(f"{run.root.name} finished, step")
    again = tiny_project.ratchet(prepared, "watch", "--mirror", str(prepared.root.parent / "mirror"), run.root.name)
    assert again.stdout == others[-1] + "\n"
    apart = subprocess.run(
        tiny_project.command("watch", "--once", "--mirror", str(prepared.root.parent / "mirror"), run.root.name),
        cwd="/", env=tiny_project.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "finished" in apart.stdout
    assert max(map(len, apart.stdout.splitlines())) <= 100


def shown(layout: Layout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), Options(runs, once=once), stream)
    return stream.getvalue()


def test_several_runs_are_shown_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path)
    names = [lay(layout, Training(seed=seed, done=40 + seed)) for seed in range(6)]
    table = shown(layout, *names)
    assert all(name in table for name in names)
    two = shown(layout, *names[:2])
    assert all(name in two for name in names[:2])
    assert len(two.splitlines()) > len(table.splitlines())  # a panel each
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, shown(layout, *names).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b" not in shown(layout, *names)  # a file gets no colours


def test_where_none_is_trained_the_latest_is_told_of_and_without_a_run_that_is_said(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert "no run in" in shown(layout)
    assert "no run in" in shown(layout, once=False)
    lay(layout, Training(seed=1))
    last = lay(layout, Training(seed=2))
    told = shown(layout, once=False)
    assert told.startswith(last)
    assert len(told.splitlines()) == 1


def test_what_is_not_there_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    lay(layout, Training())
    with pytest.raises(DataError, match="zzz: no run of that name"):
        shown(layout, "zzz")
    with pytest.raises(SettingsError, match="which one"):
        watch(layout, Machine(), Options(mirror=True), io.StringIO())
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert "no params.yaml" in capsys.readouterr().err


def test_a_damaged_run_is_drawn_all_the_same(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    paths = RunPaths(layout.runs / lay(layout, Training()))
    with paths.journal.open("ab") as stream:
        stream.write(
            b'{"event":"step","t":1,"attempt":1}\n\xff\xfe{"event":\n'
            + b'{"event":"validation","t":2,"attempt":1,"loss":"x"}\n'
        )
    assert paths.root.name in shown(layout, paths.root.name)
