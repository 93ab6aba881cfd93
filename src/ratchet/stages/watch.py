"""`ratchet watch`: trainings and generations of others, on this screen for as long as they go on. Imports neither torch
nor MLflow, and writes nothing."""

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.live import Live
from rich.text import Text

from ratchet.config.schema import Machine
from ratchet.console.log_lines import LINE_EVERY_S, RunEventFormatter, step_unit, summarize_run
from ratchet.console.run_screen import render_panel, render_table
from ratchet.console.text_layout import ScreenSize, TerminalConsole, encode_safely, is_live_terminal
from ratchet.errors import MirrorError, SettingsError
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.runs.run_source import LocalRunSource, RunSource
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.runs.replication.remote_status import RemoteRunSource
    from ratchet.runs.replication.store import ReplicaStore

DRAW_EVERY_S = 0.5
SEARCH_EVERY_S = 3.0
"""Between two searches for runs that have begun: there may be hundreds of directories."""
MIRROR_EVERY_S = 10.0
"""Between two looks at a mirror, which cost requests; journals are copied there every machine.mirror_every_s."""
PANEL_LINES = 14
"""Several runs that have so many lines each get a panel each."""
UNSIZED = ScreenSize(100, 40)
"""Of a picture that goes into a file."""


@dataclass(frozen=True)
class WatchOptions:
    """What was asked on the command line."""

    runs: tuple[str, ...] = ()
    """Ids, or their beginnings; none: all that go on now."""
    mirror: str | bool | None = None
    """What followed `--mirror`: a URL, or True: nothing; None: it was not there."""
    once: bool = False


class WatchSource(Protocol):
    """The runs that are looked at."""

    every_s: float
    """Between two looks."""
    nothing: str
    """What to say while there is none."""

    def now(self) -> Sequence[RunSource]:
        """Those of this moment, each looked at; what is once among them stays."""


def watch(layout: ProjectLayout | None, machine: Machine, options: WatchOptions, stream: TextIO) -> None:
    """The verb: returns when all runs are finished, at Ctrl-C, or, where nothing can be drawn, when none is trained.

    Args:
        layout: the project; None: outside of one, where only a mirror can be looked at.
        machine: settings of the project, or those of a new one.
        options: what was asked.
        stream: where to draw; if it is no terminal, a line for each change.

    Raises:
        DataError: no such run, or several.
        SettingsError: there is no project, or no mirror, or none that may be used like this.
        MirrorError: it cannot be reached at the beginning.
    """
    choice = _choose_source(layout, machine, options)
    try:
        if options.once:
            _print_once(choice, stream)
        elif is_live_terminal(stream):
            _WatchScreen(choice, stream).run()
        else:
            _print_events(choice, stream)
    except KeyboardInterrupt:
        return  # the way to end it
    except BrokenPipeError:  # `| head`, a closed terminal: nobody looks any more
        if stream is sys.stdout:
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)


def _choose_source(layout: ProjectLayout | None, machine: Machine, options: WatchOptions) -> WatchSource:
    if options.mirror is not None:
        from ratchet.runs.replication import remote_status

        names = list(options.runs)
        url, first = remote_status.resolve_mirror(machine, options.mirror, names[0] if names else None)
        return _ReplicaWatchSource(url, [name for name in (first, *names[1:]) if name])
    if layout is None:
        raise SettingsError("there is no params.yaml here: name the project (--project DIR) or a mirror (--mirror URL)")
    return _LocalWatchSource((layout.runs, layout.generations), options.runs)


class _LocalWatchSource:
    """Runs of a project."""

    every_s = DRAW_EVERY_S

    def __init__(self, runs: tuple[Path, ...], names: Sequence[str]) -> None:
        self._runs, self._named = runs, bool(names)
        self._found: dict[str, LocalRunSource] = {}
        self._searched_s = -math.inf
        for name in names:
            self._attach(directory.find_run(runs, name))
        self.nothing = f"no run in {runs[0]} yet; `dvc repro`, `ratchet sweep` or `ratchet generate` starts one"

    def _attach(self, paths: RunPaths) -> None:
        if paths.root.name not in self._found:
            paths.require_known_format()
            self._found[paths.root.name] = LocalRunSource(paths)

    def now(self) -> Sequence[RunSource]:
        """See `WatchSource.now`. Where none was named: all that go on now, else the one that did last."""
        if not self._named and time.monotonic() - self._searched_s > SEARCH_EVERY_S:
            self._searched_s = time.monotonic()
            for paths in directory.list_runs(*self._runs):
                if paths.lock().held_elsewhere():
                    self._attach(paths)
            if not self._found and (last := directory.find_newest_run(*self._runs)):
                self._attach(last)
        for run in self._found.values():
            run.look()
        return list(self._found.values())


class _ReplicaWatchSource:
    """Runs in a mirror."""

    every_s = MIRROR_EVERY_S

    def __init__(self, store: "ReplicaStore", names: Sequence[str]) -> None:
        from ratchet.runs.replication import remote_status

        self._store, self._named = store, bool(names)
        self._found: dict[str, RemoteRunSource] = {}
        for name in names:
            self._attach(remote_status.find_remote_run(store, name))
        self.nothing = f"nobody trains a run in {store.shown} now; name one: ratchet status --mirror lists them"

    def _attach(self, name: str) -> None:
        from ratchet.runs.replication.remote_status import RemoteRunSource

        self._found.setdefault(name, RemoteRunSource(self._store, name))

    def now(self) -> Sequence[RunSource]:
        """See `WatchSource.now`. Where none was named: all that a machine holds."""
        from ratchet.runs.replication import remote_status

        if not self._named:
            for name in remote_status.list_held_runs(self._store):
                self._attach(name)
        for run in self._found.values():
            run.look()
        return list(self._found.values())


def render_runs(runs: Sequence[RunSource], size: ScreenSize, now: float) -> Text:
    """One run as a panel; several below each other where there is room, else in a table."""
    rows = [(run.name, run.vitals, run.aside) for run in runs]
    if len(rows) == 1:
        return render_panel(*rows[0], now, size)
    each = size.height // max(1, len(rows))
    if each < PANEL_LINES:
        return render_table(rows, now, size)
    return _stack_texts([render_panel(*row, now, size._replace(height=each)) for row in rows])


def _stack_texts(parts: Sequence[Text]) -> Text:
    """One below the other."""
    return Text("\n", no_wrap=True, overflow="crop", end="").join(parts)


def _print_once(choice: WatchSource, stream: TextIO) -> None:
    runs = choice.now()
    if not runs:
        print(choice.nothing, file=stream, flush=True)
        return
    terminal = TerminalConsole(stream)
    width = shutil.get_terminal_size(UNSIZED[:2]).columns
    size = terminal.extent() if stream.isatty() else UNSIZED._replace(width=width, encoding=terminal.encoding)
    terminal.width = size.width
    terminal.print(render_runs(runs, size, time.time()), no_wrap=True, overflow="crop")


class _WatchScreen:
    """Draws over and over on the terminal's other page, and leaves the last picture on the first."""

    def __init__(self, choice: WatchSource, stream: TextIO) -> None:
        self._choice, self._terminal = choice, TerminalConsole(stream)
        self._runs: Sequence[RunSource] = []
        self._looked_s = -math.inf
        self._trouble = ""

    def run(self) -> None:
        """Until all are finished, or somebody has seen enough."""
        self._look()  # what is wrong from the beginning is an error
        try:
            with Live(console=self._terminal, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(self._drawn(), refresh=True)
                    if self._runs and all(run.aside.finished for run in self._runs):
                        break
                    time.sleep(DRAW_EVERY_S)
                    self._look_again()
        finally:
            self._terminal.print(self._drawn(), no_wrap=True, overflow="crop")

    def _look_again(self) -> None:
        if time.monotonic() - self._looked_s < self._choice.every_s:
            return
        try:
            self._look()
        except MirrorError as error:
            self._looked_s, self._trouble = time.monotonic(), str(error).splitlines()[0]

    def _look(self) -> None:
        self._runs = self._choice.now()
        self._looked_s, self._trouble = time.monotonic(), ""

    def _drawn(self) -> Text:
        size = self._terminal.extent()
        parts: list[Text] = []
        if not self._runs:
            parts.append(Text(self._choice.nothing))
        else:
            parts.append(render_runs(self._runs, size._replace(height=size.height - 2), time.time()))
        if self._trouble:
            parts.append(Text(encode_safely(f"! {self._trouble}", size.encoding)))
        return _stack_texts(parts)


def _print_events(choice: WatchSource, stream: TextIO) -> None:
    """Lines: where each run stands when it is first seen, then what happens; until nobody trains any of them."""
    encoding = stream.encoding or "utf-8"

    def say(line: str) -> None:
        print(encode_safely(line, encoding), file=stream, flush=True)

    tellings: dict[str, RunEventFormatter] = {}
    said: dict[str, str] = {}

    def stands(run: RunSource) -> None:
        line = f"{run.name} {summarize_run(run.vitals, run.aside, time.time())}"
        if said.get(run.name) != line:
            say(line)
        said[run.name] = line

    while True:
        runs = choice.now()
        if not runs:
            say(choice.nothing)
            return
        for run in runs:
            if run.name not in tellings:
                tellings[run.name] = RunEventFormatter(say, f"{run.name} ", step_unit(run.vitals))
                stands(run)
                continue
            for event in run.new:
                tellings[run.name].event(event)
            tellings[run.name].figures(run.vitals, time.time())
        if not any(run.aside.running for run in runs):
            for run in runs:
                stands(run)
            return
        time.sleep(max(LINE_EVERY_S, choice.every_s))
