"""`ratchet train`: the DVC stage that fine-tunes under supervision."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, print_text
from ratchet.cli.set_option import add_set_argument, parse_set_options
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.train import TrainResult

HELP = "stage: fine-tune under supervision; run it again to resume"
PROFILE_STEPS = 20
"""Number of optimizer steps that `--profile` measures by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="train even if the forecast says that memory is too small")
    parser.add_argument("--nodes", metavar="MIN:MAX", help="machines that train this run (default: machine.nodes)")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="address at which the machines meet (default: machine.rendezvous)"
    )
    add_set_argument(parser, ("train", "machine"))
    parser.add_argument(
        "--profile", nargs="?", const=PROFILE_STEPS, type=int, metavar="STEPS",
        help=f"do not train: measure where the time of the first steps goes (default: {PROFILE_STEPS} steps)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    overrides = {
        "machine.nodes": arguments.nodes, "machine.rendezvous": arguments.rendezvous,
        "machine.on_insufficient_memory": "report" if arguments.force else None,
    }  # fmt: skip
    changes = parse_set_options(arguments)
    if "DVC_STAGE" in os.environ and (changed := [key for key in changes if not key.startswith("machine.")]):
        raise SettingsError(
            f"--set {changed[0]}: DVC does not know this value, so it would take the result for that of params.yaml; "
            f"remove it from cmd in dvc.yaml, and use `dvc exp run -S {changed[0]}={changes[changed[0]]}`"
        )
    pipeline = Project(arguments.project, {name: value for name, value in overrides.items() if value is not None})
    project = pipeline.with_overrides(changes)
    if arguments.profile is not None and arguments.json:
        raise SettingsError("--json: --profile prints a page; leave out one of the two")
    if arguments.profile is not None:
        from ratchet.stages.train import profile_training

        print_text(profile_training(project, arguments.profile))
        return
    from ratchet.console.callback import ConsoleCallback
    from ratchet.stages.callbacks import open_callbacks
    from ratchet.stages.train import train

    stream = sys.stderr if arguments.json else sys.stdout
    create_console = None if arguments.quiet else lambda paths: ConsoleCallback(paths, stream)
    with open_callbacks(project, create_console) as callbacks:
        result = train(project, callbacks.for_run, callbacks.publish, pipeline)
        print_record(result, format_training, arguments)


def format_training(result: "TrainResult") -> str:
    """Format the finished training in a few lines."""
    report = result.report
    state = "trained before, used as it is" if result.was_trained_before else f"{report.steps} steps"
    early = f" (stopped early, {report.planned_steps} were planned)" if report.steps < report.planned_steps else ""
    loss = report.validation_loss[report.best_step]
    trainable, total = report.trainable_parameters, report.total_parameters
    unchanged_output = (
        "\n  experiments/train is unchanged, because params.yaml has other values; `ratchet report` and `ratchet "
        "compare` show this run, and `dvc repro` uses it once params.yaml has its values"
    )
    return (
        f"run {report.run_id}: {state}{early}\n"
        f"  validation loss {loss:.4f} at step {report.best_step}; adapter of step {report.kept_step}, "
        f"digest {report.adapter_digest[:12]}\n"
        f"  {trainable:,} of {total:,} parameters trained ({trainable / total:.1%}) on "
        f"{report.trained_tokens:,} answer tokens\n"
        f"  page: {result.page}{'' if result.is_output else unchanged_output}"
    )
