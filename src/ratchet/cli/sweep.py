"""`ratchet sweep`: searches hyperparameters with Optuna."""

import argparse
import sys
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.project import Project
    from ratchet.stages.sweep import SweepResult
    from ratchet.tuning.report import AdoptedTrial

HELP = "search hyperparameters (rank, alpha, learning rate ...) with many training runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages import sweep

    project = Project(arguments.project)
    if arguments.adopt is not None:
        number = None if arguments.adopt is True else arguments.adopt
        print_record(sweep.adopt_trial(project, number), format_adoption, arguments)
    elif arguments.report:
        print_record(sweep.report_sweep(project, arguments.fork), format_report, arguments)
    else:
        from ratchet.console.sweep_table import create_sweep_display

        stream = sys.stderr if arguments.json else sys.stdout
        result = sweep.sweep(
            project, workers=arguments.workers, fork=arguments.fork, engine=arguments.engine, chaos=arguments.chaos,
            create_display=lambda: create_sweep_display(stream), on_progress=progress_printer(arguments),
        )  # fmt: skip
        print_record(result, format_end, arguments)


def format_end(result: "SweepResult") -> str:
    """Format the end of a sweep. The display has already shown its trials."""
    return f"  page: {result.page}\n  `ratchet sweep --adopt` writes the winner's values into params.yaml"


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
    from ratchet.console.sweep_table import format_headlines
    from ratchet.tuning.trial_summary import compute_savings

    learned = f"learned from {compute_savings(result.report).trained_tokens:,} answer tokens"
    return "\n  ".join([*format_headlines(result.report, 0, None), learned, f"page: {result.page}"])
