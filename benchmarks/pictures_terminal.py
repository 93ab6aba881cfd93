"""Runs programs in a terminal of tmux, and takes screenshots of it in the colours of a light and of a dark theme."""

import io
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

import pictures_pages
from pictures_pages import Browser, Tab
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme

COLUMNS, LINES = 120, 36
TAB_SIZE = (1600, 1200)
PATIENCE_S = 600.0
LOOK_S = 0.2
LIGHT = TerminalTheme(
    (246, 248, 250),
    (36, 41, 47),
    [(36, 41, 47), (190, 30, 40), (20, 105, 45), (138, 88, 0), (9, 95, 200), (140, 45, 170), (10, 105, 115),
     (92, 99, 108)],
    [(92, 99, 108), (165, 14, 38), (17, 90, 40), (115, 72, 0), (5, 75, 170), (115, 30, 145), (5, 85, 95),
     (66, 73, 82)],
)  # fmt: skip
DARK = TerminalTheme(
    (24, 26, 31),
    (222, 225, 230),
    [(60, 64, 72), (240, 110, 100), (120, 200, 130), (230, 180, 90), (110, 165, 240), (205, 140, 225), (95, 200, 205),
     (222, 225, 230)],
    [(150, 156, 168), (250, 140, 130), (150, 225, 160), (245, 205, 125), (150, 195, 255), (225, 170, 245),
     (135, 225, 230), (255, 255, 255)],
)  # fmt: skip
PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><style>
#screen {{ display: inline-block; padding: 10px 14px 14px; background: {paper}; color: {ink}; }}
#command {{ border-bottom: 1px solid {quiet}; margin-bottom: 8px; line-height: 1.6; color: {quiet}; }}
#screen, pre {{ margin: 0; font: 14px/1.17 "DejaVu Sans Mono", monospace; }}
</style></head><body><div id="screen"><div id="command">$ {command}</div><pre>{code}</pre></div></body></html>
"""


class Screen:
    """A terminal in which one program runs."""

    def __init__(self, socket: Path, command: Sequence[str]) -> None:
        self._socket, self._command = socket, command

    @property
    def process(self) -> int:
        """Id of the program's process."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    @property
    def over(self) -> bool:
        """Whether the program has ended. Its output remains."""
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() == "1"

    def text(self) -> str:
        """Return the visible text."""
        return self._tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names; after `-l`, type a text."""
        self._tmux("send-keys", *keys)

    def wait(self, pattern: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until the pattern is visible. Raises SystemExit after `limit_s`, or if the program ends before."""
        self.until(lambda: re.search(pattern, self.text()) is not None, f"no {pattern!r}", limit_s)

    def until(self, there: Callable[[], bool], lacking: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds. Raises SystemExit like `wait`."""
        end_s = time.monotonic() + limit_s
        while not there():
            if self.over or time.monotonic() > end_s:
                if there():
                    return
                raise SystemExit(f"{' '.join(self._command)}: {lacking}\n{self.text()}")
            time.sleep(LOOK_S)

    def end(self, limit_s: float = PATIENCE_S) -> None:
        """Wait until the program has ended."""
        self.until(lambda: self.over, "it does not end", limit_s)

    def shoot(self, browser: Browser, scratch: Path, target: Path) -> None:
        """Take screenshots of the present content, without empty lines at the end, for light and for dark pages."""
        history = ("-S", "-") if self.over else ()  # tmux scrolls by a line to write that the pane is dead
        text = self._tmux("capture-pane", "-e", "-p", *history)
        lines = text.partition("Pane is dead")[0].rstrip("\n").split("\n")
        for dark in (False, True):
            file = scratch / "terminal.html"
            file.write_text(page(lines, self._command, dark), encoding="utf-8")
            with Tab(browser, TAB_SIZE) as tab:
                pictures_pages.opened(tab, file.as_uri())
                pictures_pages.element(tab, "#screen", pictures_pages.variant(target, dark))

    def close(self) -> None:
        """End the program and the terminal."""
        self._tmux("kill-server", check=False)

    def _tmux(self, *words: str, check: bool = True) -> str:
        command = ["tmux", "-u", "-S", str(self._socket), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


@contextmanager
def screen(
    scratch: Path, command: Sequence[str], folder: Path, size: tuple[int, int] = (COLUMNS, LINES)
) -> Iterator[Screen]:
    """Run `command` in `folder` in a terminal of this many columns and lines, until the block ends.

    The terminal has its own tmux server. The server's socket is in `scratch`, which must have a short path (the path of
    a socket may have 107 characters).
    """
    socket, settings = scratch / "tmux", scratch / "tmux.conf"
    settings.write_text(
        "set -g default-terminal tmux-256color\nset -g remain-on-exit on\nset -g status off\n", encoding="utf-8"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "TMUX", "TMUX_PANE")}
    subprocess.run(
        ["tmux", "-u", "-f", str(settings), "-S", str(socket), "new-session", "-d", "-x", str(size[0]),
         "-y", str(size[1]), "-c", str(folder), "exec " + shlex.join(command)],
        env=clean | {"LC_ALL": "C.UTF-8"}, check=True,
    )  # fmt: skip
    found = Screen(socket, command)
    try:
        yield found
    finally:
        found.close()


def page(lines: Sequence[str], command: Sequence[str], dark: bool) -> str:
    """Return lines of a terminal, which may contain control sequences for colours, as HTML."""
    theme = DARK if dark else LIGHT
    console = Console(
        record=True, file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    decoder = AnsiDecoder()  # one decoder for all lines: tmux sends a style only where it changes
    for line in lines:
        text = decoder.decode_line(line)
        text.spans = [span._replace(style=readable(span.style)) for span in text.spans]
        console.print(text, soft_wrap=True, highlight=False)
    code = console.export_html(theme=theme, inline_styles=True, code_format="{code}")
    paper, ink, quiet = (
        f"rgb{tuple(colour)}" for colour in (theme.background_color, theme.foreground_color, theme.ansi_colors[8])
    )
    return PAGE.format(command=escape(shlex.join(command)), code=code, paper=paper, ink=ink, quiet=quiet)


def readable(style: str | Style) -> str | Style:
    """Return a style with grey instead of dim, because Rich would mix dim text with the background, half and half."""
    if isinstance(style, Style) and style.dim and (style.color is None or style.color.is_default):
        return style + Style(dim=False, color="bright_black")
    return style
