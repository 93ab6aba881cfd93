"""A real terminal for tests: tmux, which draws, wraps lines and can be resized."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed (.ci/terminal)"
)
PATIENCE_S = 120.0


class Screen:
    """A terminal that runs one command. The terminal stays open after the command ends."""

    def __init__(
        self, command: str, width: int = 80, height: int = 24, environment: dict[str, str] | None = None
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="screen-"))  # socket paths must be short
        self._command, self._size, self._environment = command, (width, height), environment or {}

    def __enter__(self) -> "Screen":
        script = self._folder / "script"
        script.write_text(f'{self._command}\necho "[ended $?]"\nexec sleep 600\n', encoding="utf-8")
        left_out = ("CI", "NO_COLOR", "COLUMNS", "LINES", "TMUX", "TERM")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        width, height = map(str, self._size)
        self.do("-u", "-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, f"bash {script}",
                environment={**kept, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color", **self._environment})  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["tmux", "-S", str(self._folder / "socket"), "kill-server"], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def do(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """Run a tmux command."""
        line = ["tmux", "-S", str(self._folder / "socket"), *words]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    def lines(self, *, all_of_it: bool = False) -> list[str]:
        """Return the visible lines without blank lines. `all_of_it` adds the lines that have scrolled out of view."""
        text = self.do("capture-pane", "-p", *(["-S", "-"] if all_of_it else []))
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self.do("resize-window", "-x", str(width), "-y", str(height))

    def until(self, found: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the visible lines satisfy the condition, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            lines = self.lines()
            if found(lines):
                return lines
            time.sleep(0.1)
        raise AssertionError("\n".join(["never seen:", *self.lines(all_of_it=True)]))

    @property
    def shows_cursor(self) -> bool:
        """Whether the cursor is visible."""
        return self.do("display-message", "-p", "#{cursor_flag}").strip() == "1"
