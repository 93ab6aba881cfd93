"""`ratchet sweep`: searches hyperparameters with Optuna."""

import argparse
import sys
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, print_record, progress_printer
from ratchet.cli.projects import open_project
from ratchet.errors import EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.project import Project
    from ratchet.stages.sweep import SweepResult
    from ratchet.tuning.report import AdoptedTrial

MAX_SHOWN = 5
"""Maximum number of trials of a Pareto front that are printed."""

HELP = "search hyperparameters (rank, alpha, learning rate ...) with many training runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="trials at a time, here or on the cluster (default: 1)"
    )
    parser.add_argument(
        "--fork", action="store_true", help="after a change of sweep settings: start a new study from the old trials"
    )
    parser.add_argument(
        "--chaos", type=int, default=0, metavar="N", help="kill N workers at random (fault-tolerance test)"
    )
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="where workers run: on this machine, or on the Ray cluster of machine.ray (default: local)",
    )  # fmt: skip
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--report", action="store_true", help="write the report without running more trials")
    mode.add_argument(
        "--adopt", nargs="?", const=True, type=int, metavar="TRIAL",
        help="write the values of the winner, or of a trial, into params.yaml without running more trials",
    )  # fmt: skip
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages import sweep

    project = open_project(arguments)
    if arguments.adopt is not None:
        number = None if arguments.adopt is True else arguments.adopt
        print_record(sweep.adopt_trial(project, number), format_adoption, arguments)
    elif arguments.report:
        print_record(sweep.report_sweep(project, arguments.fork), format_report, arguments)
    else:
        _run_trials(project, arguments)
    return EXIT_OK


def _run_trials(project: "Project", arguments: argparse.Namespace) -> None:
    from ratchet.console.sweep_table import SweepConsole
    from ratchet.stages import sweep

    def format_end(result: "SweepResult") -> str:  # the display has shown the trials
        return f"  page: {result.page}\n  `ratchet sweep --adopt` writes the winner's values into params.yaml"

    stream = sys.stderr if arguments.json else sys.stdout
    result = sweep.sweep(
        project, workers=arguments.workers, fork=arguments.fork, engine=arguments.engine, chaos=arguments.chaos,
        create_display=lambda: SweepConsole(stream), on_progress=progress_printer(arguments),
    )  # fmt: skip
    print_record(result, format_end, arguments)


def format_adoption(adopted: "AdoptedTrial") -> str:
    """Format the change of params.yaml, and what `dvc repro` will do."""
    title = f"trial {adopted.trial} of study {adopted.study} (run {adopted.run_id})"
    training = "finds this run already trained" if adopted.is_trained_here else "trains it again: its run is not here"
    if not adopted.diff:
        return f"{title}: params.yaml has these values already; `dvc repro` {training}"
    fork = ""
    if adopted.conditional:
        names = ", ".join(adopted.conditional)
        fork = f"; {names} now applies to trials without it, so resuming the study needs --fork"
    written = f"{title}: written to params.yaml. Review and commit it; `dvc repro` {training}{fork}"
    return "\n".join([*adopted.diff, written])


def format_report(result: "SweepResult") -> str:
    """Format the number of trials by state, the best trials, the winner, and the savings by pruning."""
    from ratchet.tuning.tracking_sync import count_states
    from ratchet.tuning.trial_summary import compute_savings

    report = result.report
    states = count_states(report.trials)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    savings = compute_savings(report)
    lines = [f"sweep {report.study}: {states.total()} trials ({counts})"]
    for number in report.best[:MAX_SHOWN]:
        trial = report.trials[number]
        figures = ", ".join(
            f"{objective.metric} {value:.6g}"
            for objective, value in zip(report.objectives, trial.objectives, strict=True)
        )
        values = ", ".join(f"{parameter} {_format_value(value)}" for parameter, value in trial.values.items())
        lines.append(f"  {'best' if len(report.best) == 1 else 'front'}: trial {number}: {figures} ({values})")
    if report.final_round:
        lines.append(f"  winner: {report.final_round.reason}")
    pruning = f"{savings.tokens:,} saved ({savings.pruned.tokens:,} by pruning)"
    lines.append(f"  learned from {savings.trained_tokens:,} answer tokens; {pruning}")
    lines.append(f"  page: {result.page}")
    return "\n".join(lines)


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
