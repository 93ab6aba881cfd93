"""`ratchet forecast`: the memory that a training needs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.cli.set_option import add_set_argument, parse_set_options
from ratchet.config.units import choose_unit, format_bytes, parse_bytes
from ratchet.stages.project import open_project_or_defaults

if TYPE_CHECKING:
    from ratchet.stages.forecast import ForecastReport
    from ratchet.storage.records.training import MemoryForecast

HELP = "forecast how much memory a training needs, without loading weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a single config.json")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of a micro-batch (default: from params.yaml)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of the longest row (default: from the data)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to train on (default: this machine's)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of that device, such as 24GiB (default: this machine's)"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="GPUs that train together (default: from params.yaml)")
    add_set_argument(parser, ("train", "prepare", "base", "machine"))
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the table and a picture as HTML")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.forecast import ForecastOptions, forecast

    options = ForecastOptions(
        base=arguments.base, rows=arguments.rows, tokens=arguments.tokens, device=arguments.device,
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory, "--memory"),
        html=arguments.html, ranks=arguments.ranks,
    )  # fmt: skip
    layout, settings = open_project_or_defaults(arguments.project, parse_set_options(arguments))
    print_record(forecast(layout, settings, options), format_forecast, arguments)


def format_forecast(report: "ForecastReport") -> str:
    """Format a table of the parts by phase, and whether the training fits."""
    from ratchet.reports import training_page
    from ratchet.stages.forecast import ACCURACY

    memory = report.forecast
    share = memory.trainable_parameters / max(1, memory.total_parameters)
    lines = [
        f"{report.architecture}: {', '.join(training_page.describe_forecast(memory))}",
        f"{memory.trainable_parameters:,} of {memory.total_parameters:,} parameters learn ({share:.2%})",
    ]
    lines += ["", *_format_table(memory), "", *_format_verdict(report)]
    return "\n".join([*lines, *(f"note: {note}" for note in memory.notes), ACCURACY])


def _format_table(memory: "MemoryForecast") -> list[str]:
    """Format the parts by phase, all in the same unit."""
    size, unit = choose_unit(memory.peak.total_bytes)
    heads = [phase.phase.replace("_", " ") for phase in memory.phases]
    parts = dict.fromkeys(part for phase in memory.phases for part in phase.parts)
    rows = [(part, [phase.parts.get(part, 0) for phase in memory.phases]) for part in parts]
    rows.append(("in all", [phase.total_bytes for phase in memory.phases]))
    table = [(unit, heads)]
    table += [(name, [f"{count / size:,.2f}" if count else "-" for count in counts]) for name, counts in rows]
    first = max(len(name) for name, _ in table)
    return [f"{name:<{first}}  " + "  ".join(f"{cell:>10}" for cell in cells) for name, cells in table]


def _format_verdict(report: "ForecastReport") -> list[str]:
    peak = report.forecast.peak
    needed = f"peak {format_bytes(peak.total_bytes)} in phase {peak.phase.replace('_', ' ')}"
    host = [f"memory of the host: {format_bytes(report.forecast.host_bytes)}"] * (report.forecast.device == "cuda")
    if report.available_bytes is None:
        advice = "this machine has no GPU to compare it with: set its memory with --memory, such as 24GiB"
        return [f"{needed}; {advice}", *host]
    per_rank = f" for each of {report.local_ranks} ranks" if report.local_ranks > 1 else ""
    left = report.available_bytes - report.needed_bytes
    size = format_bytes(abs(left))
    fits = f"it fits, {size} are left" if left >= 0 else f"it does not fit, {size} are missing"
    limits = ", ".join(
        f"{name} {'(not even 1)' if count is None else f'{count:,}'}" for name, count in report.limits.items()
    )
    return [
        f"{needed}, {format_bytes(report.available_bytes)} available{per_rank}: {fits}",
        *host,
        f"largest that fits, with the other sizes unchanged: {limits}",
        "(tried: rows up to train.batch_size, tokens up to the base's positions, rank up to a matrix's smaller side)",
    ]
