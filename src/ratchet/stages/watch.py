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
from ratchet.console.log_lines import LINE_EVERY_S, Telling, summary, unit_of
from ratchet.console.run_screen import panel, table
from ratchet.console.text_layout import Size, Terminal, is_live, writable
from ratchet.errors import MirrorError, SettingsError
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.runs.run_source import Attached, Here
from ratchet.storage.layout import Layout

if TYPE_CHECKING:
    from ratchet.runs.replication.remote_status import There
    from ratchet.runs.replication.store import Store

DRAW_EVERY_S = 0.5
SEARCH_EVERY_S = 3.0
"""Between two searches for runs that have begun: there may be hundreds of directories."""
MIRROR_EVERY_S = 10.0
"""Between two looks at a mirror, which cost requests; journals are copied there every machine.mirror_every_s."""
PANEL_LINES = 14
"""Several runs that have so many lines each get a panel each."""
UNSIZED = Size(100, 40)
"""Of a picture that goes into a file."""


@dataclass(frozen=True)
class Options:
    """What was asked on the command line."""

    runs: tuple[str, ...] = ()
    """Ids, or their beginnings; none: all that go on now."""
    mirror: str | bool | None = None
    """What followed `--mirror`: a URL, or True: nothing; None: it was not there."""
    once: bool = False


class Choice(Protocol):
    """The runs that are looked at."""

    every_s: float
    """Between two looks."""
    nothing: str
    """What to say while there is none."""

    def now(self) -> Sequence[Attached]:
        """Those of this moment, each looked at; what is once among them stays."""


def watch(layout: Layout | None, machine: Machine, options: Options, stream: TextIO) -> None:
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
    choice = _choice(layout, machine, options)
    try:
        if options.once:
            _once(choice, stream)
        elif is_live(stream):
            _Screen(choice, stream).run()
        else:
            _tell(choice, stream)
    except KeyboardInterrupt:
        return  # the way to end it
    except BrokenPipeError:  # `| head`, a closed terminal: nobody looks any more
        if stream is sys.stdout:
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)


def _choice(layout: Layout | None, machine: Machine, options: Options) -> Choice:
    if options.mirror is not None:
        from ratchet.runs.replication import remote_status

        names = list(options.runs)
        url, first = remote_status.meant(machine, options.mirror, names[0] if names else None)
        return _Mirrored(url, [name for name in (first, *names[1:]) if name])
    if layout is None:
        raise SettingsError("there is no params.yaml here: name the project (--project DIR) or a mirror (--mirror URL)")
    return _Local((layout.runs, layout.generations), options.runs)


class _Local:
    """Runs of a project."""

    every_s = DRAW_EVERY_S

    def __init__(self, runs: tuple[Path, ...], names: Sequence[str]) -> None:
        self._runs, self._named = runs, bool(names)
        self._found: dict[str, Here] = {}
        self._searched_s = -math.inf
        for name in names:
            self._attach(directory.named(runs, name))
        self.nothing = f"no run in {runs[0]} yet; `dvc repro`, `ratchet sweep` or `ratchet generate` starts one"

    def _attach(self, paths: RunPaths) -> None:
        if paths.root.name not in self._found:
            paths.require_known_format()
            self._found[paths.root.name] = Here(paths)

    def now(self) -> Sequence[Attached]:
        """See `Choice.now`. Where none was named: all that go on now, else the one that did last."""
        if not self._named and time.monotonic() - self._searched_s > SEARCH_EVERY_S:
            self._searched_s = time.monotonic()
            for paths in directory.all_runs(*self._runs):
                if paths.lock().held_elsewhere():
                    self._attach(paths)
            if not self._found and (last := directory.newest(*self._runs)):
                self._attach(last)
        for run in self._found.values():
            run.look()
        return list(self._found.values())


class _Mirrored:
    """Runs in a mirror."""

    every_s = MIRROR_EVERY_S

    def __init__(self, store: "Store", names: Sequence[str]) -> None:
        from ratchet.runs.replication import remote_status

        self._store, self._named = store, bool(names)
        self._found: dict[str, There] = {}
        for name in names:
            self._attach(remote_status.named(store, name))
        self.nothing = f"nobody trains a run in {store.shown} now; name one: ratchet status --mirror lists them"

    def _attach(self, name: str) -> None:
        from ratchet.runs.replication.remote_status import There

        self._found.setdefault(name, There(self._store, name))

    def now(self) -> Sequence[Attached]:
        """See `Choice.now`. Where none was named: all that a machine holds."""
        from ratchet.runs.replication import remote_status

        if not self._named:
            for name in remote_status.held(self._store):
                self._attach(name)
        for run in self._found.values():
            run.look()
        return list(self._found.values())


def drawn(runs: Sequence[Attached], size: Size, now: float) -> Text:
    """One run as a panel; several below each other where there is room, else in a table."""
    rows = [(run.name, run.vitals, run.aside) for run in runs]
    if len(rows) == 1:
        return panel(*rows[0], now, size)
    each = size.height // max(1, len(rows))
    if each < PANEL_LINES:
        return table(rows, now, size)
    return _stacked([panel(*row, now, size._replace(height=each)) for row in rows])


def _stacked(parts: Sequence[Text]) -> Text:
    """One below the other."""
    return Text("\n", no_wrap=True, overflow="crop", end="").join(parts)


def _once(choice: Choice, stream: TextIO) -> None:
    runs = choice.now()
    if not runs:
        print(choice.nothing, file=stream, flush=True)
        return
    terminal = Terminal(stream)
    width = shutil.get_terminal_size(UNSIZED[:2]).columns
    size = terminal.extent() if stream.isatty() else UNSIZED._replace(width=width, encoding=terminal.encoding)
    terminal.width = size.width
    terminal.print(drawn(runs, size, time.time()), no_wrap=True, overflow="crop")


class _Screen:
    """Draws over and over on the terminal's other page, and leaves the last picture on the first."""

    def __init__(self, choice: Choice, stream: TextIO) -> None:
        self._choice, self._terminal = choice, Terminal(stream)
        self._runs: Sequence[Attached] = []
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
            parts.append(drawn(self._runs, size._replace(height=size.height - 2), time.time()))
        if self._trouble:
            parts.append(Text(writable(f"! {self._trouble}", size.encoding)))
        return _stacked(parts)


def _tell(choice: Choice, stream: TextIO) -> None:
    """Lines: where each run stands when it is first seen, then what happens; until nobody trains any of them."""
    encoding = stream.encoding or "utf-8"

    def say(line: str) -> None:
        print(writable(line, encoding), file=stream, flush=True)

    tellings: dict[str, Telling] = {}
    said: dict[str, str] = {}

    def stands(run: Attached) -> None:
        line = f"{run.name} {summary(run.vitals, run.aside, time.time())}"
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
                tellings[run.name] = Telling(say, f"{run.name} ", unit_of(run.vitals))
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
