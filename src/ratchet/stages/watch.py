"""`ratchet watch`: shows the runs of other processes in this terminal. Loads no torch or MLflow, writes no file."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import ConsoleDimensions, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ratchet.config.machine import Machine
from ratchet.console.callback import LINE_EVERY_S, RunEventFormatter, step_unit, summarize_run
from ratchet.console.run_screen import render_panel, render_table
from ratchet.console.terminal import choose_overflow, clean_text, create_console, is_live_terminal
from ratchet.errors import ReplicaError, SettingsError, first_line
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.runs.progress_view import LocalRunSource, RunSource
from ratchet.storage.layout import ProjectLayout

DRAW_INTERVAL_S = 0.5
SEARCH_INTERVAL_S = 3.0
"""Time between two searches for new runs, because a search may read hundreds of directories."""
REPLICA_INTERVAL_S = 10.0
"""Time between two reads of a replica, which cost requests. Runs upload journals every machine.replica_interval_s."""
MIN_PANEL_LINES = 14
"""Minimum number of screen lines per run for which several runs are shown as panels; with fewer lines, as one table."""
FILE_SIZE = 100, 40
"""Columns and lines of the screen if the output is not a terminal; the variable COLUMNS sets another width."""


@dataclass
class _WatchSource:
    """The runs to show."""

    interval_s: float
    """Time between two calls of `refresh`, in seconds."""
    empty_text: str
    """Text to show while there are no runs."""
    runs: dict[str, RunSource]
    find_active: Callable[[Container[str]], Iterable[RunSource]] | None
    """Finds active runs that are not among the given names; None: only runs that the user named are shown."""
    searched_s: float = -math.inf

    def refresh(self) -> Sequence[RunSource]:
        """Read new events, and return the runs. A run that was returned before stays in the list."""
        if self.find_active is not None and time.monotonic() - self.searched_s > SEARCH_INTERVAL_S:
            self.searched_s = time.monotonic()
            self.runs |= {run.name: run for run in self.find_active(self.runs)}
        for run in self.runs.values():
            run.refresh()
        return list(self.runs.values())


def watch(
    layout: ProjectLayout | None,
    machine: Machine,
    stream: TextIO,
    names: Sequence[str] = (),
    replica: str | bool | None = None,
    once: bool = False,
) -> None:
    """Show runs until all are finished or the user presses Ctrl-C; without a terminal, until none is active.

    Args:
        layout: the project; None outside one, where only a replica can be watched.
        machine: settings of the project, or the defaults.
        stream: the output. If the output is not a terminal, a line is printed for each change.
        names: run ids, or their first characters; empty: all active runs, or else the newest one.
        replica: a replica's URL; True: machine.replica; None: runs on this machine.
        once: draw once and return.

    Raises:
        DataError: no run has this id, or several do.
        SettingsError: there is no project and no replica, or the replica cannot be used.
        ReplicaError: the replica cannot be reached at the start.
    """
    source = _open_source(layout, machine, names, replica)
    try:
        if once:
            _print_once(source, stream)
        elif is_live_terminal(stream):
            _redraw_screen(source, stream)
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


def _open_source(
    layout: ProjectLayout | None, machine: Machine, names: Sequence[str], replica: str | bool | None
) -> _WatchSource:
    if replica is not None:
        from ratchet.runs.replication import remote_status
        from ratchet.runs.replication.remote_status import RemoteRunSource

        store, first = remote_status.resolve_replica(machine, replica, names[0] if names else None)
        ids = [remote_status.find_remote_run(store, name) for name in (first, *names[1:]) if name]

        def find_held(known: Container[str]) -> Iterable[RunSource]:
            return [RemoteRunSource(store, name) for name in remote_status.list_held_runs(store) if name not in known]

        text = f"no machine trains a run in {store.display_url} now; to name one, `ratchet status --replica` lists them"
        remote_runs: dict[str, RunSource] = {name: RemoteRunSource(store, name) for name in ids}
        return _WatchSource(REPLICA_INTERVAL_S, text, remote_runs, None if ids else find_held)
    if layout is None:
        raise SettingsError(
            "there is no params.yaml in this directory or above it: name a project (--project DIR) or a replica "
            "(--replica URL)"
        )
    folders = layout.runs, layout.generations

    def open_run(paths: RunPaths) -> RunSource:
        paths.require_known_format()
        return LocalRunSource(paths)

    def find_active(known: Container[str]) -> Iterable[RunSource]:
        new = [paths for paths in directory.list_runs(*folders) if paths.root.name not in known]
        active = [paths for paths in new if paths.lock().is_held()]
        if not known and not active and (newest := directory.find_newest_run(*folders)):
            active = [newest]
        return map(open_run, active)

    text = f"no run in {folders[0]} yet; `dvc repro`, `ratchet sweep` or `ratchet generate` starts one"
    runs = {run.name: run for run in (open_run(directory.find_run(folders, name)) for name in names)}
    return _WatchSource(DRAW_INTERVAL_S, text, runs, None if names else find_active)


def _print_once(source: _WatchSource, stream: TextIO) -> None:
    """Draw the runs once."""
    runs = source.refresh()
    if not runs:
        print(source.empty_text, file=stream, flush=True)
        return
    console = create_console(stream)
    if not stream.isatty():
        console.size = ConsoleDimensions(shutil.get_terminal_size(FILE_SIZE).columns, FILE_SIZE[1])
    console.print(render_runs(runs, time.time(), console.options))


def _redraw_screen(source: _WatchSource, stream: TextIO) -> None:
    """Redraw on the terminal's alternate screen until all runs are finished; leave the last picture on the normal one.

    Raises ReplicaError if the first refresh fails; later failures are shown below the runs.
    """
    console, problem = create_console(stream), ""
    runs, refreshed_s = source.refresh(), time.monotonic()

    def render() -> RenderableType:
        options = console.options
        options.max_height = max(1, options.max_height - 2)
        parts = [render_runs(runs, time.time(), options) if runs else Text(source.empty_text)]
        if problem:
            parts.append(Text(clean_text(f"! {problem}"), no_wrap=True, overflow=choose_overflow(options)))
        return Group(*parts)

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(), refresh=True)
                if runs and all(run.sidecar.finished for run in runs):
                    break
                time.sleep(DRAW_INTERVAL_S)
                if time.monotonic() - refreshed_s >= source.interval_s:
                    try:
                        runs, problem = source.refresh(), ""
                    except ReplicaError as error:
                        problem = first_line(error)
                    refreshed_s = time.monotonic()
    finally:
        console.print(render())


def _print_events(source: _WatchSource, stream: TextIO) -> None:
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
