"""`ratchet watch`: shows the runs of other processes in this terminal. Loads no torch or MLflow, writes no file."""

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import ConsoleDimensions, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ratchet.config.machine import Machine
from ratchet.console.callback import LINE_EVERY_S, RunEventFormatter, step_unit, summarize_run
from ratchet.console.run_screen import render_panel, render_table
from ratchet.console.terminal import choose_overflow, clean_text, create_console, is_live_terminal
from ratchet.errors import ReplicaError, SettingsError
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.runs.progress_view import LocalRunSource, RunSource
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.runs.replication.remote_status import RemoteRunSource
    from ratchet.runs.replication.store import ReplicaStore

DRAW_INTERVAL_S = 0.5
SEARCH_INTERVAL_S = 3.0
"""Time between two searches for new runs, because a search may read hundreds of directories."""
REPLICA_INTERVAL_S = 10.0
"""Time between two reads of a replica, which cost requests. Runs upload journals every machine.replica_interval_s."""
MIN_PANEL_LINES = 14
"""Minimum number of screen lines per run for which several runs are shown as panels; with fewer lines, as one table."""
FILE_SIZE = 100, 40
"""Columns and lines of the screen if the output is not a terminal; the variable COLUMNS sets another width."""


@dataclass(frozen=True)
class WatchOptions:
    """Options of `ratchet watch`."""

    runs: tuple[str, ...] = ()
    """Run ids, or their first characters; empty: all active runs."""
    replica: str | bool | None = None
    """A replica's URL; True: machine.replica; None: runs on this machine."""
    once: bool = False
    """Draw once and return."""


class WatchSource(Protocol):
    """The runs to show."""

    interval_s: float
    """Time between two calls of `refresh`, in seconds."""
    empty_text: str
    """Text to show while the list of runs is empty."""

    def refresh(self) -> Sequence[RunSource]:
        """Read new events, and return the runs. A run that was returned before stays in the list."""


def watch(layout: ProjectLayout | None, machine: Machine, options: WatchOptions, stream: TextIO) -> None:
    """Show runs until all are finished or the user presses Ctrl-C; without a terminal, until none is active.

    Args:
        layout: the project; None outside one, where only a replica can be watched.
        machine: settings of the project, or the defaults.
        options: which runs to show, and from where.
        stream: the output. If the output is not a terminal, a line is printed for each change.

    Raises:
        DataError: no run has this id, or several do.
        SettingsError: there is no project and no replica, or the replica cannot be used.
        ReplicaError: the replica cannot be reached at the start.
    """
    source = _choose_source(layout, machine, options)
    try:
        if options.once:
            _print_once(source, stream)
        elif is_live_terminal(stream):
            _WatchScreen(source, stream).run()
        else:
            _print_events(source, stream)
    except KeyboardInterrupt:
        return  # Ctrl-C is the normal end
    except BrokenPipeError:  # `| head`, or a closed terminal
        if stream is sys.stdout:
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)


def render_runs(runs: Sequence[RunSource], now: float, options: ConsoleOptions) -> RenderableType:
    """Draw runs: as panels if the screen is large enough, otherwise as a table. `now` is Unix time."""
    rows = [(run.name, run.view, run.sidecar) for run in runs]
    lines_per_run = options.max_height // len(rows)
    if len(rows) > 1 and lines_per_run < MIN_PANEL_LINES:
        return render_table(rows, now, options)
    options = options.copy()
    options.max_height = lines_per_run
    return Group(*(render_panel(*row, now, options) for row in rows))


def _choose_source(layout: ProjectLayout | None, machine: Machine, options: WatchOptions) -> WatchSource:
    if options.replica is not None:
        from ratchet.runs.replication import remote_status

        names = list(options.runs)
        store, first = remote_status.resolve_replica(machine, options.replica, names[0] if names else None)
        return _ReplicaWatchSource(store, [name for name in (first, *names[1:]) if name])
    if layout is None:
        raise SettingsError(
            "there is no params.yaml in this directory or above it: name a project (--project DIR) or a replica "
            "(--replica URL)"
        )
    return _LocalWatchSource((layout.runs, layout.generations), options.runs)


class _LocalWatchSource:
    """Runs of a project on this machine.

    Args:
        folders: directories that contain run directories.
        names: run ids, or their first characters; empty: every run that becomes active, or else the newest one.
    """

    interval_s = DRAW_INTERVAL_S

    def __init__(self, folders: tuple[Path, ...], names: Sequence[str]) -> None:
        self._folders, self._is_search = folders, not names
        self._runs: dict[str, LocalRunSource] = {}
        self._last_search_s = -math.inf
        for name in names:
            self._add(directory.find_run(folders, name))
        self.empty_text = f"no run in {folders[0]} yet; `dvc repro`, `ratchet sweep` or `ratchet generate` starts one"

    def _add(self, paths: RunPaths) -> None:
        if paths.root.name not in self._runs:
            paths.require_known_format()
            self._runs[paths.root.name] = LocalRunSource(paths)

    def refresh(self) -> Sequence[RunSource]:
        """See `WatchSource.refresh`."""
        if self._is_search and time.monotonic() - self._last_search_s > SEARCH_INTERVAL_S:
            self._last_search_s = time.monotonic()
            for paths in directory.list_runs(*self._folders):
                if paths.lock().is_held():
                    self._add(paths)
            if not self._runs and (newest := directory.find_newest_run(*self._folders)):
                self._add(newest)
        for run in self._runs.values():
            run.refresh()
        return list(self._runs.values())


class _ReplicaWatchSource:
    """Runs in a replica.

    Args:
        store: the replica.
        names: run ids, or their first characters; empty: every run whose lease a machine holds.
    """

    interval_s = REPLICA_INTERVAL_S

    def __init__(self, store: "ReplicaStore", names: Sequence[str]) -> None:
        from ratchet.runs.replication import remote_status

        self._store, self._is_search = store, not names
        self._runs: dict[str, RemoteRunSource] = {}
        for name in names:
            self._add(remote_status.find_remote_run(store, name))
        self.empty_text = (
            f"no machine trains a run in {store.display_url} now; to name one, `ratchet status --replica` lists them"
        )

    def _add(self, name: str) -> None:
        from ratchet.runs.replication.remote_status import RemoteRunSource

        self._runs.setdefault(name, RemoteRunSource(self._store, name))

    def refresh(self) -> Sequence[RunSource]:
        """See `WatchSource.refresh`."""
        from ratchet.runs.replication import remote_status

        if self._is_search:
            for name in remote_status.list_held_runs(self._store):
                self._add(name)
        for run in self._runs.values():
            run.refresh()
        return list(self._runs.values())


def _print_once(source: WatchSource, stream: TextIO) -> None:
    """Draw the runs once."""
    runs = source.refresh()
    if not runs:
        print(source.empty_text, file=stream, flush=True)
        return
    console = create_console(stream)
    if not stream.isatty():
        console.size = ConsoleDimensions(shutil.get_terminal_size(FILE_SIZE).columns, FILE_SIZE[1])
    console.print(render_runs(runs, time.time(), console.options))


class _WatchScreen:
    """Redraws on the terminal's alternate screen, and leaves the last picture on the normal screen."""

    def __init__(self, source: WatchSource, stream: TextIO) -> None:
        self._source, self._console = source, create_console(stream)
        self._runs: Sequence[RunSource] = []
        self._refreshed_s = -math.inf
        self._problem = ""

    def run(self) -> None:
        """Redraw until all runs are finished. Raises ReplicaError if the first refresh fails."""
        self._refresh()
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(self._render(), refresh=True)
                    if self._runs and all(run.sidecar.finished for run in self._runs):
                        break
                    time.sleep(DRAW_INTERVAL_S)
                    self._refresh_if_due()
        finally:
            self._console.print(self._render())

    def _refresh_if_due(self) -> None:
        if time.monotonic() - self._refreshed_s < self._source.interval_s:
            return
        try:
            self._refresh()
        except ReplicaError as error:
            self._refreshed_s, self._problem = time.monotonic(), str(error).splitlines()[0]

    def _refresh(self) -> None:
        self._runs = self._source.refresh()
        self._refreshed_s, self._problem = time.monotonic(), ""

    def _render(self) -> RenderableType:
        options = self._console.options
        options.max_height = max(1, options.max_height - 2)
        parts = [render_runs(self._runs, time.time(), options) if self._runs else Text(self._source.empty_text)]
        if self._problem:
            parts.append(Text(clean_text(f"! {self._problem}"), no_wrap=True, overflow=choose_overflow(options)))
        return Group(*parts)


def _print_events(source: WatchSource, stream: TextIO) -> None:
    """Print lines: a summary of each run when it is first seen, then its events, until no run is active."""
    console = create_console(stream)
    formatters: dict[str, RunEventFormatter] = {}
    summaries: dict[str, str] = {}

    def print_line(line: str) -> None:
        console.print(clean_text(line), soft_wrap=True)

    def print_summary(run: RunSource) -> None:
        line = f"{run.name} {summarize_run(run.view, run.sidecar, time.time())}"
        if summaries.get(run.name) != line:
            print_line(line)
        summaries[run.name] = line

    while True:
        runs = source.refresh()
        if not runs:
            print_line(source.empty_text)
            return
        for run in runs:
            if run.name not in formatters:
                formatters[run.name] = RunEventFormatter(print_line, f"{run.name} ", step_unit(run.view))
                print_summary(run)
                continue
            for event in run.new_events:
                formatters[run.name].event(event)
            formatters[run.name].figures(run.view, time.time())
        if not any(run.sidecar.running for run in runs):
            for run in runs:
                print_summary(run)
            return
        time.sleep(max(LINE_EVERY_S, source.interval_s))
