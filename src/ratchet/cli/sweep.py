"""`ratchet sweep`: searches hyperparameters with Optuna."""

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.sweep import SweepResult, TrialRequestResult
    from ratchet.storage.records.sweep import RequestAction
    from ratchet.tuning.report import AdoptedTrial

HELP = "search hyperparameters (rank, alpha, learning rate ...) with many training runs"


REQUESTS: "dict[RequestAction, str]" = {
    "stop": "end a trial for good, while the sweep runs or later; its checkpoint stays",
    "pause": "end a trial until --resume, while the sweep runs or later",
    "resume": "continue a trial that was paused with --pause",
    "clone": "request a trial with the values of a trial, changed by --set, or started from its weights by --warm",
}
"""Options that request something for a trial, with their help."""
START = " (if no sweep runs, run `ratchet sweep`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="workers, here or on the cluster, each with one trial or sweep.concurrent_trials at a time (default: 1)",
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
    for action, text in REQUESTS.items():
        mode.add_argument(f"--{action}", type=int, metavar="TRIAL", help=text)
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="with --clone: a changed value, such as train.rank=16"
    )
    parser.add_argument("--warm", action="store_true", help="with --clone: a warm start, from the trial's best weights")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.config.params_file import parse_changes
    from ratchet.stages import sweep

    project = Project(arguments.project)
    requests = {action: number for action in REQUESTS if (number := getattr(arguments, action)) is not None}
    if (arguments.set or arguments.warm) and "clone" not in requests:
        option, usage = ("--set", "--set KEY=VALUE") if arguments.set else ("--warm", "--warm")
        raise SettingsError(f"{option}: found without --clone; expected `ratchet sweep --clone TRIAL {usage}`")
    _refuse_search_options(arguments, requests)
    if requests:
        [(action, number)] = requests.items()
        changes = parse_changes(arguments.set or [])
        result = sweep.control_trial(project, action, number, changes, arguments.warm)
        print_record(result, format_request, arguments)
    elif arguments.adopt is not None:
        number = None if arguments.adopt is True else arguments.adopt
        print_record(sweep.adopt_trial(project, number), format_adoption, arguments)
    elif arguments.report:
        print_record(sweep.report_sweep(project, arguments.fork), format_report, arguments)
    else:
        from ratchet.console.sweep_table import create_sweep_display

        stream = sys.stderr if arguments.json else sys.stdout
        create_display = None if arguments.quiet else lambda: create_sweep_display(stream)
        ended = sweep.sweep(
            project, workers=arguments.workers, fork=arguments.fork, engine=arguments.engine, chaos=arguments.chaos,
            create_display=create_display, on_progress=progress_printer(arguments),
        )  # fmt: skip
        print_record(ended, format_end, arguments)


def _refuse_search_options(arguments: argparse.Namespace, requests: Iterable[str]) -> None:
    """Raise SettingsError if an option of the search is given with an option that starts no trial."""
    others = {"report": arguments.report, "adopt": arguments.adopt is not None}
    mode = next(iter([*requests, *(name for name, is_given in others.items() if is_given)]), None)
    given = {
        "workers": arguments.workers != 1, "chaos": arguments.chaos, "engine": arguments.engine != "local",
        "fork": arguments.fork and mode != "report",
    }  # fmt: skip
    if mode is not None and (option := next((name for name, is_given in given.items() if is_given), None)):
        raise SettingsError(
            f"--{option}: found with --{mode}, which starts no trials; give it to a `ratchet sweep` without --{mode}"
        )


def format_end(result: "SweepResult") -> str:
    """Format the end of a sweep. The display has already shown its trials."""
    page = f"  page: {result.page}"
    if result.report.winner is None:
        return page
    return f"{page}\n  `ratchet sweep --adopt` writes the winner's values into params.yaml"


def format_request(result: "TrialRequestResult") -> str:
    """Format a request about a trial, with its effect."""
    request, trial = result.request, result.trial
    title = f"trial {request.trial} of study {request.study}"
    if request.action == "clone":
        values = ", ".join(f"{key} {value}" for key, value in request.values.items())
        return f"{title}: a clone is requested ({values}); the next free worker begins it{START}"
    if trial.state in ("complete", "infeasible"):
        return f"{title}: it was {trial.state} before the request had an effect"
    if request.action == "resume":
        return f"{title}: it may be continued again; the next free worker decides{START}"
    if not trial.is_over:
        return f"{title}: its worker saves a checkpoint and ends it now{START}"
    again = f"; `ratchet sweep --resume {trial.number}` continues it" if request.action == "pause" else ""
    return f"{title}: {trial.reason}{again}"


def format_adoption(adopted: "AdoptedTrial") -> str:
    """Format the change of params.yaml, and what `dvc repro` will do."""
    from ratchet.models.start_adapter import INIT_ADAPTER

    title = f"trial {adopted.trial} of study {adopted.study} (run {adopted.run_id})"
    training = "finds this run already trained" if adopted.is_trained_here else "trains it again: its run is not here"
    if not adopted.diff:
        return f"{title}: params.yaml has these values already; `dvc repro` {training}"
    remarks = ""
    if adopted.conditional:
        names = ", ".join(adopted.conditional)
        remarks = f"; {names} now applies to trials without it, so resuming the study needs --fork"
    if INIT_ADAPTER in adopted.conditional:
        remarks += "; git ignores experiments/start_weights: copy it to other machines, or `git add -f` the directory"
    written = f"{title}: written to params.yaml. Review and commit it; `dvc repro` {training}{remarks}"
    return "\n".join([*adopted.diff, written])


def format_report(result: "SweepResult") -> str:
    """Format the number of trials by state, the best trials, the winner, and the savings by pruning."""
    from ratchet.console.sweep_table import format_headlines
    from ratchet.tuning.trial_summary import compute_savings

    learned = f"learned from {compute_savings(result.report).trained_tokens:,} answer tokens"
    return "\n  ".join([*format_headlines(result.report, 0, None), learned, f"page: {result.page}"])
