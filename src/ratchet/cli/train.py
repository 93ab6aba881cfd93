"""`ratchet train`: the DVC stage that fine-tunes under supervision."""

import argparse
import sys
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, print_record, print_text
from ratchet.cli.projects import open_project
from ratchet.errors import EXIT_OK, SettingsError

if TYPE_CHECKING:
    from ratchet.stages.train import TrainResult

HELP = "stage: fine-tune under supervision; run it again to resume"
PROFILE_STEPS = 20
"""Number of optimizer steps that `--profile` measures by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--force", action="store_true", help="train even if the forecast says that memory is too small")
    parser.add_argument("--nodes", metavar="MIN:MAX", help="machines that train this run (default: machine.nodes)")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="address at which the machines meet (default: machine.rendezvous)"
    )
    parser.add_argument(
        "--profile", nargs="?", const=PROFILE_STEPS, type=int, metavar="STEPS",
        help=f"do not train: measure where the time of the first steps goes (default: {PROFILE_STEPS} steps)",
    )  # fmt: skip
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    on_insufficient_memory = "report" if arguments.force else None
    project = open_project(
        arguments, nodes=arguments.nodes, rendezvous=arguments.rendezvous, on_insufficient_memory=on_insufficient_memory
    )
    if arguments.profile is not None and arguments.json:
        raise SettingsError("--json: --profile prints a page; leave out one of the two")
    if arguments.profile is not None:
        from ratchet.stages.train import profile_training

        print_text(profile_training(project, arguments.profile))
        return EXIT_OK
    from ratchet.console.callback import ConsoleCallback
    from ratchet.stages.callbacks import open_callbacks
    from ratchet.stages.train import train

    stream = sys.stderr if arguments.json else sys.stdout
    with open_callbacks(project, lambda paths: ConsoleCallback(paths, stream)) as callbacks:
        print_record(train(project, callbacks.for_run, callbacks.publish), format_training, arguments)
    return EXIT_OK


def format_training(result: "TrainResult") -> str:
    """Format the finished training in a few lines."""
    report = result.report
    state = "trained before, used as it is" if result.was_trained_before else f"{report.steps} steps"
    early = f" (stopped early, {report.planned_steps} were planned)" if report.steps < report.planned_steps else ""
    loss = report.validation_loss[report.best_step]
    trainable, total = report.trainable_parameters, report.total_parameters
    return "\n".join(
        [
            f"run {report.run_id}: {state}{early}",
            f"  validation loss {loss:.4f} at step {report.best_step}; adapter of step {report.kept_step}, "
            f"digest {report.adapter_digest[:12]}",
            f"  {trainable:,} of {total:,} parameters trained ({trainable / total:.1%}) on "
            f"{report.trained_tokens:,} answer tokens",
            f"  page: {result.page}",
        ]
    )
