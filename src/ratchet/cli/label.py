"""`ratchet label`: people judge which of two models answers better, blind, on a local web page."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, progress_printer
from ratchet.errors import SettingsError
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.storage.records.evaluation import MetricValue
    from ratchet.storage.records.label import LabelPairsReport, LabelReport

HOST, PORT = "127.0.0.1", 8770
HELP = "judge in the browser which of two models answers better, without their names"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "candidate or the id of the evaluated run, base, champion, anchor, or a file of answers"
    parser.add_argument("a", metavar="A", help=f"first side: {names}")
    parser.add_argument("b", metavar="B", help="second side")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--results", action="store_true", help="only print the figures of the judgements")
    mode.add_argument(
        "--pairs", type=Path, metavar="FILE", help="write preference pairs (.jsonl) for prepare.task: preferences"
    )
    parser.add_argument("--rater", metavar="NAME", help="name of the rater (default: the page asks)")
    parser.add_argument(
        "--host", metavar="ADDRESS",
        help=f"address to listen on; any but loopback needs the token in the printed address (default: {HOST})",
    )  # fmt: skip
    parser.add_argument("--port", type=int, help=f"port of the page (default: {PORT})")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="the file of prompts, if the directory of a generation no longer exists",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.label import label, label_pairs, label_results

    project, names = Project(arguments.project), (arguments.a, arguments.b)
    if mode := "--results" if arguments.results else "--pairs" if arguments.pairs is not None else None:
        for name in ("rater", "host", "port"):
            if (value := getattr(arguments, name)) is not None:
                raise SettingsError(f"--{name} {value}: {mode} shows no page; leave out one of the two")
    host, port = arguments.host or HOST, PORT if arguments.port is None else arguments.port
    if not 0 <= port < 65536:
        raise SettingsError(f"--port: found {port}; expected a number from 0 to 65535")
    if arguments.pairs is not None:
        print_record(label_pairs(project, names, arguments.pairs, arguments.prompts), format_pairs, arguments)
    elif arguments.results:
        print_record(label_results(project, names, arguments.prompts), format_report, arguments)
    else:
        report = label(
            project, names, prompts=arguments.prompts, host=host, port=port, rater=arguments.rater,
            on_progress=progress_printer(arguments),
        )  # fmt: skip
        print_record(report, format_report, arguments)


def format_report(report: "LabelReport") -> str:
    """Format the figures as tables."""
    from ratchet.config.units import format_count

    first, second = (side.name for side in report.sides)
    head = f"{first} against {second}: {report.judged:,} of {format_count(report.samples, 'prompt')} judged"
    notes = [
        (report.identical_answers, "prompt", " with equal answers, not judged"),
        (report.skipped, "skipped judgement", ""),
        (report.outdated, "judgement", " about earlier answers of these models, not counted"),
        (report.damaged_lines, "damaged line", " in the file of judgements"),
    ]
    lines = [head, *(f"  {format_count(count, noun)}{rest}" for count, noun, rest in notes if count)]
    if not report.judgements:
        return "\n".join(lines)
    rows = [
        ["", "value", "95 % interval", "n"],
        _format_row(f"win rate of {first}", report.win_rate),
        *(_format_row(f"  by {rater.rater}", rater.win_rate) for rater in report.raters if len(report.raters) > 1),
        _format_row("position bias", report.position_bias),
        _format_row("length bias", report.length_bias),
        *(_format_row("Fleiss' kappa", kappa) for kappa in (report.fleiss_kappa,) if kappa is not None),
    ]
    for pair in report.agreements:
        both = " and ".join(pair.raters)
        rows += [_format_row(f"agreement of {both}", pair.agreement), _format_row("  Cohen's kappa", pair.kappa)]
    for judge in report.judges:
        rows += [
            _format_row(f"judge {judge.judge} and people agree", judge.agreement),
            _format_row("  Cohen's kappa", judge.kappa),
            _format_row("  win rate by the judge", judge.win_rate),
            _format_row("  win rate by people, same prompts", judge.people_win_rate),
            _format_row("  length bias of the judge", judge.length_bias),
            _format_row("  length bias of people", judge.people_length_bias),
        ]
    return "\n".join([*lines, format_table(rows)])


def _format_row(title: str, metric: "MetricValue | None") -> list[str]:
    if metric is None:
        return [title, "undefined", "", ""]
    return [title, f"{metric.value:.3f}", f"{metric.low:.3f} to {metric.high:.3f}", f"{metric.n:,}"]


def format_pairs(report: "LabelPairsReport") -> str:
    """Format how many pairs were written, and how many samples were left out."""
    from ratchet.config.units import format_count

    left_out = {
        "tie": report.ties, "sample with different judgements": report.disagreements, "empty answer": report.empty,
    }  # fmt: skip
    lines = [f"{format_count(report.pairs, 'pair')}: {report.output}"]
    lines += [f"  left out: {format_count(count, noun)}" for noun, count in left_out.items() if count]
    if report.are_test_rows:
        lines.append(
            "  these are test rows, so `prepare` assigns them to the test split again; for training, judge outputs of "
            "`ratchet generate` on other prompts"
        )
    return "\n".join(lines)
