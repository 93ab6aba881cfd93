"""Shows a running sweep: a live table on a terminal, or a line for each change of a trial elsewhere."""

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
from ratchet.tuning.tracking_sync import STATES, count_states
from ratchet.tuning.trial_summary import (
    LOSS,
    compute_savings,
    format_objective,
    format_parameter_value,
    shorten_names,
    superseded_numbers,
    validation_curve,
)

LATEST = 12
"""Maximum number of finished trials in the table. Small terminals show fewer trials."""
GAP = 2
"""Number of blanks between columns."""
LONGEST_NAME = 18
"""Maximum number of characters of a worker's name. Of a longer name, the end is shown, because the end differs between
workers."""
SHORTEST_REASON = 16
"""Minimum width in columns for reasons that must be cut. With less space, reasons are omitted."""

STYLES = {"running": "cyan", "complete": "green", "pruned": "bright_black", "infeasible": "yellow", "failed": "red"}


class SweepConsole:
    """Display of a sweep for the user who started it. An error of the terminal ends the display, not the sweep.

    Args:
        stream: The terminal or its replacement.
        clock: Returns Unix time in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._view: LiveSweepTable | SweepLogPrinter | None = (
            LiveSweepTable(stream, clock) if is_live_terminal(stream) else SweepLogPrinter(stream, clock)
        )

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Show the current state. Call it about once a second.

        Args:
            report: The report of the study.
            progress: Progress of running trials by number, as far as known.
            workers: Number of active local workers.
        """
        self._run_guarded(lambda view: view.show(report, progress, workers))

    def close(self, report: SweepReport) -> None:
        """Leave the last state on the screen."""
        self._run_guarded(lambda view: view.close(report))
        self._view = None

    def _run_guarded(self, show: Callable[["LiveSweepTable | SweepLogPrinter"], None]) -> None:
        view = self._view
        try:
            if view is not None:
                show(view)
        except (OSError, ValueError):  # the terminal or its file is closed: stop the display
            self._view = None
            if isinstance(view, LiveSweepTable):
                view.leave()


class LiveSweepTable:
    """A table that is redrawn in place."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._clock, self._start_s = clock, clock()
        self._console = TerminalConsole(stream)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,  # other output goes above the table
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Draw the table in place of the last one."""
        self._live.start()
        self._live.update(self._render(report, progress, workers), refresh=True)

    def close(self, report: SweepReport) -> None:
        """Draw the last table and restore the terminal."""
        self._live.start()
        self._live.update(self._render(report, {}, 0))
        self._live.stop()

    def leave(self) -> None:
        """Restore standard output and error after an error of the terminal."""
        with suppress(OSError, ValueError):
            self._live.stop()

    def _render(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> Group:
        width, encoding = self._console.width, self._console.encoding
        lines = [
            Text(encode_safely(line, encoding))
            for line in format_headlines(report, workers, self._clock() - self._start_s)
        ]
        for line in lines:
            line.stylize("bold", 0, line.plain.find(":") + 1)
        used_lines = sum(len(line.wrap(self._console, width)) for line in lines)
        # Two lines are reserved: one for the heading of the table, and one for the cursor.
        trials = select_trials(report, max(1, self._console.height - used_lines - 2))
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
    """Printer of a line for each change of a trial, for logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock, self._start_s = stream, clock, clock()
        self._known: dict[int, Trial] | None = None

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Print the changes since the last call. The first call prints the state and the running trials."""
        if self._known is None:
            self._print(format_headlines(report, workers, None))
            self._known = {trial.number: trial for trial in report.trials if trial.is_over}
        for trial in report.trials:
            if trial is not self._known.get(trial.number):
                self._print(describe_changes(report, trial, self._known.get(trial.number)))
                self._known[trial.number] = trial

    def close(self, report: SweepReport) -> None:
        """Print the last changes and the final state."""
        if self._known is not None:
            self.show(report, {}, 0)
        self._print(format_headlines(report, 0, self._clock() - self._start_s))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._stream.write(encode_safely(line, self._stream.encoding or "utf-8") + "\n")
        self._stream.flush()


def format_headlines(report: SweepReport, workers: int, elapsed_s: float | None) -> list[str]:
    """Return the summary lines: trials, best values, time, and savings from pruning."""
    by_state = count_states(report.trials)
    finished = sum(by_state[state] for state in STATES if state != "running")
    kinds = ", ".join(f"{by_state[state]} {state}" for state in STATES if by_state[state])
    lines = [f"{report.study}: {finished} of {report.planned_trials} trials{f' ({kinds})' if kinds else ''}"]
    if len(report.best) == 1:
        trial = report.trials[report.best[0]]
        lines.append(
            f"best: trial {trial.number}, {format_objectives(report, trial)} ({format_parameters(report, trial)})"
        )
    elif report.best:
        lines.append(f"Pareto front: trials {', '.join(map(str, report.best))}")
    if report.winner is not None:
        lines.append(
            f"winner: {first_line(report.final_round.reason) if report.final_round else f'trial {report.winner}'}"
        )
    if report.stopped:
        lines.append(f"stopped: {first_line(report.stopped)}")
    facts = [] if elapsed_s is None else [format_duration(elapsed_s)]
    if workers:
        facts.append(f"{workers} worker{'s' * (workers != 1)}")
    savings = compute_savings(report)
    if savings.pruned.tokens:
        share = savings.pruned.tokens / savings.full_tokens
        facts.append(f"pruning saved {savings.pruned.tokens:,} of {savings.full_tokens:,} tokens ({share:.0%})")
    return [*lines, "; ".join(facts)] if facts else lines


def describe_changes(report: SweepReport, trial: Trial, known: Trial | None) -> Iterator[str]:
    """Yield the changes of a trial since its state `known`, which is None for a trial that was not shown yet."""
    name, worker = f"trial {trial.number}", trial.executions[-1].worker if trial.executions else "no worker"
    if trial.is_over:
        if known is None or not known.is_over:
            parameters = f" ({format_parameters(report, trial)})" if known is None else ""
            yield escape_invisible(f"{name}{parameters} {describe_outcome(report, trial)}")
    elif known is None:
        change = f"started: {format_parameters(report, trial)}"
        if trial.continues is not None:
            change = f"continues trial {trial.continues}"
        yield escape_invisible(f"{name} {change}, by {worker}")
    elif len(trial.executions) > len(known.executions):
        yield escape_invisible(f"{name} taken over by {worker}")


def describe_outcome(report: SweepReport, trial: Trial) -> str:
    """Describe how a trial ended: `pruned: validation loss 1.234 after 960 rows is number 5 of 9`."""
    if trial.state == "complete":
        is_only_best = len(report.objectives) == 1 and report.best == (trial.number,)
        suffix = ", best so far" if is_only_best else ""
        return f"complete: {format_objectives(report, trial)}{suffix}"
    end = f"at step {trial.cost.steps:,}" if trial.cost.steps else "before its first step"
    return f"{trial.state}: {first_line(trial.reason) or end}"


def format_objectives(report: SweepReport, trial: Trial) -> str:
    """Format the objectives of a complete trial: `validation loss 1.234, memory 3.1 GiB`."""
    pairs = zip(report.objectives, trial.objectives, strict=False)
    return ", ".join(
        f"{objective.metric.replace('_', ' ')} {format_objective(objective, value)}" for objective, value in pairs
    )


def format_parameters(report: SweepReport, trial: Trial) -> str:
    """Format the searched hyperparameters: `rank 16, learning_rate 3e-4`. Derived values are omitted."""
    free = [axis.name for axis in report.axes if axis.kind != "tie" and axis.name in trial.values]
    return ", ".join(f"{name} {_format_parameter(parameter, trial)}" for parameter, name in shorten_names(free).items())


def select_trials(report: SweepReport, room: int) -> list[Trial]:
    """Select at most `room` trials for the table: the running, the best, and the latest finished ones."""
    superseded = superseded_numbers(report)
    current = [trial for trial in report.trials if trial.number not in superseded]
    running = [trial for trial in current if not trial.is_over]
    finished = sorted((t for t in current if t.is_over), key=lambda t: (t.ended or 0.0, t.number), reverse=True)
    best = [trial for trial in finished if trial.number in report.best]
    others = [trial for trial in finished if trial.number not in report.best]
    return [*running, *best, *others][: min(room, len(running) + LATEST)]


@dataclass(frozen=True)
class SweepTableColumn:
    """A column of the table."""

    title: str
    cells: tuple[str, ...]
    weight: int
    """If not all columns fit, those with the greatest weight are omitted first."""
    justify: Literal["left", "right"] = "right"
    elastic: bool = False
    """Whether the column is cut to the remaining width."""


def build_columns(
    report: SweepReport, trials: Sequence[Trial], progress: Mapping[int, RunProgress]
) -> list[SweepTableColumn]:
    """Return all columns with a value for at least one trial, from left to right."""
    free = shorten_names(axis.name for axis in report.axes if axis.kind != "tie")
    hosts = {trial.executions[-1].worker.split("/")[0] for trial in trials if trial.executions}

    def column(title: str, cell: Callable[[Trial], str], weight: int, *, left: bool = False) -> SweepTableColumn:
        texts = tuple(escape_invisible(cell(trial)) for trial in trials)
        return SweepTableColumn(title, texts, weight, "left" if left else "right", elastic=title == "why")

    def worker(trial: Trial) -> str:
        name = trial.executions[-1].worker if trial.executions else ""
        return (name if len(hosts) > 1 else name.rpartition("/")[2])[-LONGEST_NAME:]

    def rate(trial: Trial) -> str:
        tokens_per_s = progress[trial.number].tokens_per_s if trial.number in progress else None
        return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"

    def tries(trial: Trial) -> str:
        return str(progress[trial.number].attempts if trial.number in progress else trial.cost.attempts or "")

    columns = [
        column("trial", lambda trial: f"{trial.number}{'*' if trial.number in report.best else ' '}", 0),
        column("state", lambda trial: trial.state, 1, left=True),
        *(
            column(name, partial(_format_parameter, parameter), weight)
            for weight, (parameter, name) in zip((5, 6, *range(10, 10 + len(free))), free.items(), strict=False)
        ),
        column("loss", partial(_format_loss, report, progress), 2),
        *(
            column(objective.metric, partial(_format_objective, report, at), 3)
            for at, objective in enumerate(report.objectives)
            if objective.metric != LOSS
        ),
        column("step", lambda trial: _format_steps(trial, progress), 4),
        column("tokens/s", rate, 7),
        column("worker", worker, 8),
        column("tries", tries, 9),
        column("why", lambda trial: "" if trial.state == "complete" else first_line(trial.reason), 99, left=True),
    ]
    return [column for column in columns if any(column.cells)]


def _format_loss(report: SweepReport, progress: Mapping[int, RunProgress], trial: Trial) -> str:
    """Format the trial's loss: its value if the loss is an objective, else the last validation loss."""
    pairs = zip(report.objectives, trial.objectives, strict=False)
    loss = next((value for objective, value in pairs if objective.metric == LOSS), None)
    if loss is None and trial.number in progress:
        loss = progress[trial.number].validation_loss
    if loss is None:
        loss = next(reversed(validation_curve(trial, {other.number: other for other in report.trials}).values()), None)
    return "" if loss is None else f"{loss:.4f}"


def _format_objective(report: SweepReport, at: int, trial: Trial) -> str:
    return format_objective(report.objectives[at], trial.objectives[at]) if at < len(trial.objectives) else ""


def _format_parameter(parameter: str, trial: Trial) -> str:
    """Format one hyperparameter; empty if it is not searched. Names in a list are joined without blanks."""
    value = trial.values.get(parameter, "")
    return format_parameter_value("+".join(map(str, value)) if isinstance(value, list | tuple) else value)


def _format_steps(trial: Trial, progress: Mapping[int, RunProgress]) -> str:
    """Format completed and planned steps."""
    known = progress.get(trial.number)
    done, planned = (known.step, known.planned_steps) if known else (trial.cost.steps, trial.cost.planned_steps)
    return f"{done}/{planned}" if planned else ""


def fit_columns(columns: Sequence[SweepTableColumn], width: int, mark: str) -> list[SweepTableColumn]:
    """Return the columns that fit into `width`, from left to right. An elastic column is cut to the remaining width.

    Args:
        columns: All columns.
        width: Available columns of the terminal.
        mark: Letter that replaces cut text.
    """
    free, chosen = width + GAP, []
    for index in sorted(range(len(columns)), key=lambda index: columns[index].weight):
        column = columns[index]
        widest = max(map(cell_len, (column.title, *column.cells)))
        if column.elastic and SHORTEST_REASON <= free - GAP < widest:
            cells = tuple(_truncate(cell, free - GAP, mark) for cell in column.cells)
            column, widest = SweepTableColumn(column.title, cells, column.weight, column.justify), free - GAP
        if widest + GAP <= free:
            free -= widest + GAP
            chosen.append((index, column))
    return [column for _, column in sorted(chosen, key=lambda item: item[0])]


def _truncate(text: str, width: int, mark: str) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + mark


def first_line(text: str) -> str:
    """Return the first line of external text, safe for the terminal."""
    return escape_invisible(next((line.strip() for line in text.splitlines() if line.strip()), ""))
