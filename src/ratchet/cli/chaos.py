"""`ratchet chaos`: proves on this project that faults do not change the result of a training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, progress_printer
from ratchet.errors import EXIT_BUG, EXIT_OK
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.chaos import ChaosReport

HELP = "prove on this project that faults change nothing: train, inject faults, compare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="kills with each kind of signal (default: 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all schedules (default: 0)")
    parser.add_argument(
        "--faults", metavar="A,B", help="only these kinds of fault (default: all; an unknown name lists them)"
    )
    parser.add_argument("--steps", type=int, default=24, metavar="K", help="optimizer steps of a run (default: 24)")
    parser.add_argument("--keep", action="store_true", help="keep the directories of all trials")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory for chaos.json and timeline.html")


def run(arguments: argparse.Namespace) -> int:
    from ratchet.stages.chaos import ChaosOptions, chaos

    options = ChaosOptions(
        kills=arguments.kills, seed=arguments.seed, steps=arguments.steps, keep=arguments.keep, output=arguments.output,
        faults=None if arguments.faults is None else tuple(name for name in arguments.faults.split(",") if name),
    )  # fmt: skip
    report = chaos(Project(arguments.project), options, progress_printer(arguments))
    print_record(report, format_chaos, arguments)
    return EXIT_OK if report.has_passed else EXIT_BUG


def format_chaos(report: "ChaosReport") -> str:
    """Format a table of the faults, the failures, and the conclusion."""
    lines = [f"  {'row':<12}{'trials':>7}{'faults':>8}{'exact':>8}{'unaided':>9}{'recovery':>10}   what"]
    for row in report.rows:
        slowest = row["slowest_recovery_s"]
        shown = "-" if slowest is None else f"{slowest:.1f} s"
        exact, unaided = (f"{row[key]}/{row['trials']}" for key in ("exact", "recovered"))
        name = row["row"] + "*" * row["reference_has_faults"]  # `*`: the reference has the same fault
        lines.append(
            f"  {name:<12}{row['trials']:>7}{row['faults']:>8}{exact:>8}{unaided:>9}{shown:>10}   {row['text']}"
        )
    if any(row["reference_has_faults"] for row in report.rows):
        lines.append("  * compared with an undisturbed training under the same fault (nan: where it is never finite)")
    lines += [f"  {failure}" for failure in report.failures]
    failed = f"{report.failed_trials} of {report.trials} trials FAILED"
    state = f"all {report.trials} trials are exact and unaided" if report.has_passed else failed
    return "\n".join([*lines, f"seed {report.seed}: {state}; {report.output / 'chaos.json'}, timeline.html"])
