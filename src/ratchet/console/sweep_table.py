"""A sweep in the terminal while it runs: a live table; where none can be drawn, a line for each change of a trial."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ratchet.console.text_layout import TerminalConsole, choose_glyphs, encode_safely, is_live_terminal
from ratchet.runs.status import RunProgress, format_duration
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.sweep import SweepReport, Trial
from ratchet.tuning.tracking_payload import STATES, count_states
from ratchet.tuning.trial_summary import (
    LOSS,
    compute_savings,
    format_knob_value,
    format_objective,
    shorten_names,
    superseded_numbers,
    validation_curve,
)

LATEST = 12
"""Trials that are over and shown; fewer where the terminal is small."""
GAP = 2
"""Blanks between columns."""
LONGEST_NAME = 18
"""Characters of a worker's name; its end tells it from others."""
SHORTEST_REASON = 16
"""Characters; where there is room for fewer, reasons are left out."""

STYLES = {"running": "cyan", "complete": "green", "pruned": "bright_black", "infeasible": "yellow", "failed": "red"}


class SweepConsole:
    """Shows a sweep to whoever started it. A terminal that breaks ends the show, and nothing else.

    `stream` is the terminal or what stands in its place, `clock` gives Unix time in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._view: LiveSweepTable | SweepLogPrinter | None = (
            LiveSweepTable(stream, clock) if is_live_terminal(stream) else SweepLogPrinter(stream, clock)
        )

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Show where it stands; to be called about once a second.

        Args:
            report: the study.
            progress: of trials that run, by number, where something is known of them.
            workers: at work here.
        """
        self._shown(lambda view: view.show(report, progress, workers))

    def close(self, report: SweepReport) -> None:
        """Leave the last state on the screen."""
        self._shown(lambda view: view.close(report))
        self._view = None

    def _shown(self, show: Callable[["LiveSweepTable | SweepLogPrinter"], None]) -> None:
        view = self._view
        try:
            if view is not None:
                show(view)
        except (OSError, ValueError):  # the terminal is gone, or its file closed: nobody looks any more
            self._view = None
            if isinstance(view, LiveSweepTable):
                view.leave()


class LiveSweepTable:
    """The live table."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._clock, self._begun = clock, clock()
        self._console = TerminalConsole(stream)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,  # what others print goes above the table
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Draw it in the place of the last."""
        self._live.start()
        self._live.update(self._drawn(report, progress, workers), refresh=True)

    def close(self, report: SweepReport) -> None:
        """Draw it for the last time, and give the terminal back."""
        self._live.start()
        self._live.update(self._drawn(report, {}, 0))
        self._live.stop()

    def leave(self) -> None:
        """Give standard output and error back, of a terminal that takes nothing more."""
        with suppress(OSError, ValueError):
            self._live.stop()

    def _drawn(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> Group:
        width, encoding = self._console.width, self._console.encoding
        lines = [
            Text(encode_safely(line, encoding))
            for line in format_headlines(report, workers, self._clock() - self._begun)
        ]
        for line in lines:
            line.stylize("bold", 0, line.plain.find(":") + 1)
        taken = sum(len(line.wrap(self._console, width)) for line in lines)
        trials = select_trials(
            report, max(1, self._console.height - taken - 2)
        )  # a line for the head, one for the cursor
        if not trials:
            return Group(*lines)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="underline")
        chosen = fit_columns(build_columns(report, trials, progress), width, choose_glyphs(encoding).cut)
        for column in chosen:
            table.add_column(Text(encode_safely(column.title, encoding)), justify=column.justify, no_wrap=True)
        for place, trial in enumerate(trials):
            style = STYLES[trial.state] + (" bold" if trial.number in report.best else "")
            cells = (encode_safely(column.cells[place], encoding) for column in chosen)
            table.add_row(*(Text(cell, overflow="crop") for cell in cells), style=style)
        return Group(*lines, table)


class SweepLogPrinter:
    """A line for each change, as logs need it; nothing is told twice."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock, self._begun = stream, clock, clock()
        self._known: dict[int, Trial] | None = None

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Tell what has changed since the last call; at the first, where it stands and which trials run."""
        if self._known is None:
            self._print(format_headlines(report, workers, None))
            self._known = {trial.number: trial for trial in report.trials if trial.is_over}
        for trial in report.trials:
            if trial is not self._known.get(trial.number):
                self._print(describe_changes(report, trial, self._known.get(trial.number)))
                self._known[trial.number] = trial

    def close(self, report: SweepReport) -> None:
        """Tell the last changes, and where it stands at the end."""
        if self._known is not None:
            self.show(report, {}, 0)
        self._print(format_headlines(report, 0, self._clock() - self._begun))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._stream.write(encode_safely(line, self._stream.encoding or "utf-8") + "\n")
        self._stream.flush()


def format_headlines(report: SweepReport, workers: int, elapsed_s: float | None) -> list[str]:
    """Where the sweep stands: trials, best values, time, and what pruning saved."""
    by_state = count_states(report.trials)
    over = sum(by_state[state] for state in STATES if state != "running")
    kinds = ", ".join(f"{by_state[state]} {state}" for state in STATES if by_state[state])
    lines = [f"{report.study}: {over} of {report.wanted_trials} trials{f' ({kinds})' if kinds else ''}"]
    if len(report.best) == 1:
        trial = report.trials[report.best[0]]
        lines.append(
            f"best: trial {trial.number}, {format_objectives(report, trial)} ({format_parameters(report, trial)})"
        )
    elif report.best:
        lines.append(f"Pareto front: trials {', '.join(map(str, report.best))}")
    if report.winner is not None:
        lines.append(f"winner: {first_line(report.finals.reason) if report.finals else f'trial {report.winner}'}")
    if report.stopped:
        lines.append(f"stopped: {first_line(report.stopped)}")
    facts = [] if elapsed_s is None else [format_duration(elapsed_s)]
    if workers:
        facts.append(f"{workers} worker{'s' * (workers != 1)}")
    spent = compute_savings(report)
    if spent.pruned.tokens:
        share = spent.pruned.tokens / spent.full_tokens
        facts.append(f"pruning saved {spent.pruned.tokens:,} of {spent.full_tokens:,} tokens ({share:.0%})")
    return [*lines, "; ".join(facts)] if facts else lines


def describe_changes(report: SweepReport, trial: Trial, known: Trial | None) -> Iterator[str]:
    """What has become of a trial, given what was known of it; nothing where nothing has."""
    name, worker = f"trial {trial.number}", trial.takes[-1].worker if trial.takes else "nobody"
    if trial.is_over:
        if known is None or not known.is_over:
            which = f" ({format_parameters(report, trial)})" if known is None else ""
            yield escape_invisible(f"{name}{which} {describe_outcome(report, trial)}")
    elif known is None:
        what = f"begun: {format_parameters(report, trial)}"
        if trial.continues is not None:
            what = f"goes on with trial {trial.continues}"
        yield escape_invisible(f"{name} {what}, by {worker}")
    elif len(trial.takes) > len(known.takes):
        yield escape_invisible(f"{name} taken over by {worker}")


def describe_outcome(report: SweepReport, trial: Trial) -> str:
    """How a trial ended: `pruned: validation loss 1.234 after 960 rows is number 5 of 9`."""
    if trial.state == "complete":
        alone = len(report.objectives) == 1 and report.best == (trial.number,)
        best = ", the best so far" if alone else ""
        return f"complete: {format_objectives(report, trial)}{best}"
    at = f"at step {trial.cost.steps:,}" if trial.cost.steps else "before its first step"
    return f"{trial.state}: {first_line(trial.reason) or at}"


def format_objectives(report: SweepReport, trial: Trial) -> str:
    """What a complete trial came to: `validation loss 1.234, memory 3.1 GiB`."""
    pairs = zip(report.objectives, trial.objectives, strict=False)
    return ", ".join(
        f"{measure.metric.replace('_', ' ')} {format_objective(measure, found)}" for measure, found in pairs
    )


def format_parameters(report: SweepReport, trial: Trial) -> str:
    """What was searched: `rank 16, learning_rate 3e-4`; ties follow from it and are left out."""
    free = [axis.knob for axis in report.axes if axis.kind != "tie" and axis.knob in trial.values]
    return ", ".join(f"{name} {_format_parameter(knob, trial)}" for knob, name in shorten_names(free).items())


def select_trials(report: SweepReport, room: int) -> list[Trial]:
    """Trials that get a row: those that run, the best, and the latest that are over, `room` in all."""
    old = superseded_numbers(report)
    own = [trial for trial in report.trials if trial.number not in old]
    running = [trial for trial in own if not trial.is_over]
    over = sorted((t for t in own if t.is_over), key=lambda t: (t.ended or 0.0, t.number), reverse=True)
    best = [trial for trial in over if trial.number in report.best]
    others = [trial for trial in over if trial.number not in report.best]
    return [*running, *best, *others][: min(room, len(running) + LATEST)]


@dataclass(frozen=True)
class SweepTableColumn:
    """One column of the table."""

    title: str
    cells: tuple[str, ...]
    weight: int
    """Those with the smallest are shown where there is no room for all."""
    justify: Literal["left", "right"] = "right"
    elastic: bool = False
    """Takes what the others leave."""


def build_columns(
    report: SweepReport, trials: Sequence[Trial], progress: Mapping[int, RunProgress]
) -> list[SweepTableColumn]:
    """All columns there could be, from left to right; each says something about at least one trial."""
    free = shorten_names(axis.knob for axis in report.axes if axis.kind != "tie")
    hosts = {trial.takes[-1].worker.split("/")[0] for trial in trials if trial.takes}

    def column(title: str, cell: Callable[[Trial], str], weight: int, *, left: bool = False) -> SweepTableColumn:
        texts = tuple(escape_invisible(cell(trial)) for trial in trials)
        return SweepTableColumn(title, texts, weight, "left" if left else "right", elastic=title == "why")

    def worker(trial: Trial) -> str:
        name = trial.takes[-1].worker if trial.takes else ""
        return (name if len(hosts) > 1 else name.rpartition("/")[2])[-LONGEST_NAME:]

    def rate(trial: Trial) -> str:
        found = progress[trial.number].tokens_per_s if trial.number in progress else None
        return "" if found is None else f"{found:,.0f}"

    def tries(trial: Trial) -> str:
        return str(progress[trial.number].attempts if trial.number in progress else trial.cost.attempts or "")

    made = [
        column("trial", lambda trial: f"{trial.number}{'*' if trial.number in report.best else ' '}", 0),
        column("state", lambda trial: trial.state, 1, left=True),
        *(
            column(name, partial(_format_parameter, knob), weight)
            for weight, (knob, name) in zip((5, 6, *range(10, 10 + len(free))), free.items(), strict=False)
        ),
        column("loss", partial(_format_loss, report, progress), 2),
        *(
            column(measure.metric, partial(_format_objective, report, at), 3)
            for at, measure in enumerate(report.objectives)
            if measure.metric != LOSS
        ),
        column("step", lambda trial: _format_steps(trial, progress), 4),
        column("tokens/s", rate, 7),
        column("worker", worker, 8),
        column("tries", tries, 9),
        column("why", lambda trial: "" if trial.state == "complete" else first_line(trial.reason), 99, left=True),
    ]
    return [column for column in made if any(column.cells)]


def _format_loss(report: SweepReport, progress: Mapping[int, RunProgress], trial: Trial) -> str:
    """The objective where it is the loss, else the last validation."""
    pairs = zip(report.objectives, trial.objectives, strict=False)
    found = next((objective for measure, objective in pairs if measure.metric == LOSS), None)
    if found is None and trial.number in progress:
        found = progress[trial.number].validation_loss
    if found is None:
        found = next(reversed(validation_curve(trial, {one.number: one for one in report.trials}).values()), None)
    return "" if found is None else f"{found:.4f}"


def _format_objective(report: SweepReport, at: int, trial: Trial) -> str:
    return format_objective(report.objectives[at], trial.objectives[at]) if at < len(trial.objectives) else ""


def _format_parameter(knob: str, trial: Trial) -> str:
    """Of one setting; empty where it is not searched. Names in a list are joined so that they stay one thing."""
    found = trial.values.get(knob, "")
    return format_knob_value("+".join(map(str, found)) if isinstance(found, list | tuple) else found)


def _format_steps(trial: Trial, progress: Mapping[int, RunProgress]) -> str:
    """Steps done, of those that were planned."""
    known = progress.get(trial.number)
    done, planned = (known.step, known.planned_steps) if known else (trial.cost.steps, trial.cost.planned_steps)
    return f"{done}/{planned}" if planned else ""


def fit_columns(made: Sequence[SweepTableColumn], width: int, mark: str) -> list[SweepTableColumn]:
    """The columns that fit into so many characters, from left to right; the elastic one is cut to what is left.

    `mark`, a letter, stands for what was cut off.
    """
    left, chosen = width + GAP, []
    for place in sorted(range(len(made)), key=lambda place: made[place].weight):
        column = made[place]
        widest = max(map(cell_len, (column.title, *column.cells)))
        if column.elastic and SHORTEST_REASON <= left - GAP < widest:
            cells = tuple(_truncate(cell, left - GAP, mark) for cell in column.cells)
            column, widest = SweepTableColumn(column.title, cells, column.weight, column.justify), left - GAP
        if widest + GAP <= left:
            left -= widest + GAP
            chosen.append((place, column))
    return [column for _, column in sorted(chosen, key=lambda one: one[0])]


def _truncate(text: str, width: int, mark: str) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + mark


def first_line(text: str) -> str:
    """The first line of what others wrote, safe to be shown."""
    return escape_invisible(next((line.strip() for line in text.splitlines() if line.strip()), ""))
