"""Shows a running sweep: a live table on a terminal, or a line for each change of a trial elsewhere."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TextIO

from rich.console import ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet.config.units import format_count, format_duration
from ratchet.console.progress import ProgressTask
from ratchet.console.run_screen import LEAST_BAR, LONGEST_BAR
from ratchet.console.terminal import (
    LiveDisplay,
    TableColumn,
    build_table,
    choose_overflow,
    create_console,
    is_live_terminal,
)
from ratchet.runs.status import RunProgress
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.sweep import FinalRound, SweepReport, Trial
from ratchet.tuning.tracking_sync import STATES, count_states
from ratchet.tuning.trial_requests import describe_clone, list_paused
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
LONGEST_NAME = 18
"""Maximum number of characters of a worker's name. Of a longer name, the end is shown, because the end differs between
workers."""
STYLES = {"running": "cyan", "complete": "green", "pruned": "bright_black", "infeasible": "yellow", "failed": "red"}


def create_sweep_display(stream: TextIO, clock: Callable[[], float] = time.time) -> "LiveSweepTable | SweepLogPrinter":
    """Create the display of a sweep for the user who started it. An error of the terminal ends the display, not the
    sweep.

    Args:
        stream: The terminal or its replacement.
        clock: Returns Unix time in seconds.
    """
    return LiveSweepTable(stream, clock) if is_live_terminal(stream) else SweepLogPrinter(stream, clock)


class LiveSweepTable:
    """A table that is redrawn in place."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._clock, self._start_s = clock, clock()
        self._task: ProgressTask | None = None
        self._state: tuple[SweepReport, Mapping[int, RunProgress], int] | None = None
        self._display = LiveDisplay(stream, self._render)

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Draw the table in place of the last one. Call it about once a second.

        Args:
            report: The report of the study.
            progress: Progress of running trials by number, as far as known.
            workers: Number of active local workers.
        """
        self._state = report, progress, workers
        if self._task is None:
            done = count_progress(report)
            self._task = ProgressTask("trials", self._clock(), done, done, report.planned_trials)
        self._task.done, self._task.total = count_progress(report, self._task.done), report.planned_trials
        self._display.start(refresh=False)
        self._display.refresh()

    def close(self, report: SweepReport) -> None:
        """Draw the last table and restore the terminal."""
        self._state = report, {}, 0
        self._display.start(refresh=False)
        self._display.stop()

    def _render(self, options: ConsoleOptions) -> RenderableType:
        if self._state is None:
            return Text("")
        report, progress, workers = self._state
        lines = [Text(line) for line in format_headlines(report, workers, self._clock() - self._start_s)]
        for line in lines:
            line.stylize("bold", 0, line.plain.find(":") + 1)
        used_lines = sum(len(line.wrap(self._display.console, options.max_width)) for line in lines)
        header: list[RenderableType] = list(lines)
        if workers and self._task is not None and self._task.done < report.planned_trials:
            header.insert(1, _render_bar(self._task, self._clock(), options))
            used_lines += 1
        trials = select_trials(report, max(1, options.max_height - used_lines - 1))  # one line for the table's titles
        if not trials:
            return Group(*header)
        styles = [STYLES[trial.state] + (" bold" if trial.number in report.best else "") for trial in trials]
        return Group(*header, build_table(build_columns(report, trials, progress), styles, options))


def _render_bar(task: ProgressTask, now_s: float, options: ConsoleOptions) -> RenderableType:
    """Render the finished trials as a bar, with the time left."""
    row = Table.grid(padding=(0, 1, 0, 0))
    text = Text(task.describe(now_s), no_wrap=True, overflow=choose_overflow(options))
    row.add_row(
        ProgressBar(task.total, task.done, width=max(LEAST_BAR, min(LONGEST_BAR, options.max_width // 2))), text
    )
    return row


class SweepLogPrinter:
    """Printer of a line for each change of a trial, for logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._console, self._clock, self._start_s = create_console(stream), clock, clock()
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
        try:
            for line in lines:
                self._console.print(line, soft_wrap=True)
        except (OSError, ValueError):  # the terminal or its file is closed: the sweep continues
            self._console.quiet = True


def count_finished(report: SweepReport) -> int:
    """Return the number of trials that count for the plan and are over."""
    by_state = count_states(report.trials)
    return sum(by_state[state] for state in STATES if state != "running")


def count_progress(report: SweepReport, before: int = 0) -> int:
    """Return the progress of a running sweep in trials, which never falls below `before`.

    A paused trial counts, but may be continued. So the last trial does not count before the sweep has ended.
    """
    return max(before, min(count_finished(report), report.planned_trials - 1))


def format_headlines(report: SweepReport, workers: int, elapsed_s: float | None) -> list[str]:
    """Return the summary lines: trials, best values, time, and savings from pruning."""
    by_state = count_states(report.trials)
    kinds = ", ".join(f"{by_state[state]} {state}" for state in STATES if by_state[state])
    lines = [
        f"{report.study}: {count_finished(report)} of {report.planned_trials} trials{f' ({kinds})' if kinds else ''}"
    ]
    if len(report.best) == 1:
        trial = report.trials[report.best[0]]
        lines.append(
            f"best: trial {trial.number}, {format_objectives(report, trial)} ({format_parameters(report, trial)})"
        )
    elif report.best:
        lines.append(f"Pareto front: trials {', '.join(map(str, report.best))}")
    if report.winner is not None:
        winner = describe_winner(report.final_round) if report.final_round else f"trial {report.winner}"
        lines.append(f"winner: {winner}")
    if paused := ", ".join(map(str, list_paused(report.trials))):
        lines.append(f"paused by a person and not continued: {paused} (`ratchet sweep --resume TRIAL`)")
    if report.stopped:
        lines.append(f"stopped: {first_line(report.stopped)}")
    facts = [] if elapsed_s is None else [format_duration(elapsed_s)]
    if workers:
        facts.append(format_count(workers, "worker"))
    savings = compute_savings(report)
    if savings.pruned.tokens:
        share = savings.pruned.tokens / savings.full_tokens
        facts.append(f"pruning saved {savings.pruned.tokens:,} of {savings.full_tokens:,} tokens ({share:.0%})")
    return [*lines, "; ".join(facts)] if facts else lines


def describe_winner(final_round: FinalRound) -> str:
    """Describe why the winner was chosen, with the p-values of the paired comparisons and the number of rows."""
    reason = first_line(final_round.reason)
    if not final_round.comparisons:
        return reason
    leader, rows = final_round.finalists[0].number, final_round.rows
    p_values = ", ".join(f"p = {pair.p:.2g} against trial {pair.other}" for pair in final_round.comparisons)
    return f"{reason}; over {rows:,} validation rows, trial {leader} has {p_values}"


def describe_changes(report: SweepReport, trial: Trial, known: Trial | None) -> Iterator[str]:
    """Yield the changes of a trial since its state `known`, which is None for a trial that was not shown yet."""
    name, worker = f"trial {trial.number}", trial.executions[-1].worker if trial.executions else "no worker"
    if trial.is_over:
        if known is None or not known.is_over:
            parameters = f" ({format_parameters(report, trial)})" if known is None else ""
            yield escape_invisible(f"{name}{parameters} {describe_outcome(report, trial)}")
    elif known is None:
        change = f"started: {format_parameters(report, trial)}"
        if trial.request is not None:
            change = f"started ({describe_clone(trial)}): {format_parameters(report, trial)}"
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


def build_columns(
    report: SweepReport, trials: Sequence[Trial], progress: Mapping[int, RunProgress]
) -> list[TableColumn]:
    """Return all columns, from left to right."""
    free = shorten_names(axis.name for axis in report.axes if axis.kind != "tie")
    hosts = {trial.executions[-1].worker.split("/")[0] for trial in trials if trial.executions}

    def column(title: str, cell: Callable[[Trial], str], weight: int, *, left: bool = False) -> TableColumn:
        texts = tuple(map(cell, trials))
        return TableColumn(title, texts, weight, "left" if left else "right", is_elastic=title == "why")

    def worker(trial: Trial) -> str:
        name = trial.executions[-1].worker if trial.executions else ""
        return (name if len(hosts) > 1 else name.rpartition("/")[2])[-LONGEST_NAME:]

    def rate(trial: Trial) -> str:
        tokens_per_s = progress[trial.number].tokens_per_s if trial.number in progress else None
        return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"

    def tries(trial: Trial) -> str:
        return str(progress[trial.number].attempts if trial.number in progress else trial.cost.attempts or "")

    return [
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


def first_line(text: str) -> str:
    """Return the first line of external text, safe for the terminal."""
    return escape_invisible(next((line.strip() for line in text.splitlines() if line.strip()), ""))
