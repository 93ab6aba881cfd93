"""Cases for `ratchet chat`: on a real terminal, from a script, with a real model and with servers."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import generations
from generations import SETTINGS
from ratchet.config.machine import EndpointSettings
from ratchet.storage.layout import ProjectLayout

PATIENCE_S = 30.0
MACHINE = SETTINGS.machine.model_copy(
    update={"endpoint": EndpointSettings(max_attempts=1, retry_delay_s=0.001, timeout_s=20)}
)
QUICK = SETTINGS.model_copy(update={"machine": MACHINE})


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return generations.project(tmp_path / "p", QUICK)


class Terminal:
    """A program in a pseudo-terminal with a given number of columns, and the keys that a user presses."""

    def __init__(
        self,
        layout: ProjectLayout,
        model: str,
        columns: int = 80,
        verb: tuple[str, ...] = ("chat",),
        **environment: str,
    ) -> None:
        self.text = ""
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(layout.root)
            command = [sys.executable, "-m", "ratchet", *verb, "--model", model]
            os.execve(sys.executable, command, {**clean, "TERM": "xterm-256color", **environment})  # noqa: S606
        self.pid = pid
        self.resize(columns)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self, pattern: str) -> str:
        """Press Ctrl-C until the pattern appears, at most five times. If Ctrl-C arrives between two keys, Python's
        input() sees it only at the next key."""
        for _ in range(5):
            self.press("\x03")
            with suppress(AssertionError):
                return self.until(pattern, PATIENCE_S / 5)
        return self.until(pattern)

    def until(self, pattern: str, patience_s: float = PATIENCE_S) -> str:
        """Read until the pattern appears. Return the text up to its end; later calls do not search this text again."""
        deadline_s = time.monotonic() + patience_s
        while (found := re.search(pattern, self.text, re.DOTALL)) is None:
            assert time.monotonic() < deadline_s, f"never seen: {pattern!r}\n{self.text}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended without {pattern!r}\n{self.text}") from None
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def end(self) -> int:
        """Read the remaining output and wait for the program. Return its exit code."""
        while True:
            try:
                if not (block := os.read(self._fd, 65536)):
                    break
            except OSError:
                break
            self.text += block.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)


@contextmanager
def terminal(
    layout: ProjectLayout, model: str, columns: int = 80, *verb: str, **environment: str
) -> Iterator[Terminal]:
    found = Terminal(layout, model, columns, verb or ("chat",), **environment)
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generations.chat_directory(tmp_path_factory.mktemp("chat") / "model")
