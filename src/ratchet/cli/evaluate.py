"""`ratchet evaluate`: the DVC stage that scores base, candidate, champion and anchor on the test rows."""

import argparse
import math
import statistics
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record, progress_printer
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.stages.evaluate import EvaluateResult, QuantizationResult
    from ratchet.storage.records.evaluation import EvaluationReport, JudgeReport

HELP = "stage: score base, candidate and champion on the test rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantization", action="store_true", help="instead, measure what 4-bit weights cost the base, layer by layer"
    )


def run(arguments: argparse.Namespace) -> None:
    project, on_progress = Project(arguments.project), progress_printer(arguments)
    if arguments.quantization:
        from ratchet.stages.evaluate import measure_quantization

        print_record(measure_quantization(project, on_progress), format_quantization, arguments)
    else:
        from ratchet.stages.evaluate import evaluate

        print_record(evaluate(project, on_progress), format_evaluation, arguments)


def format_evaluation(result: "EvaluateResult") -> str:
    """Format the scores, and how often this test set has been used."""
    used, limit = f"{result.test_set_uses}", result.max_test_set_uses
    used += f" of {limit} models have" if limit else f" model{' has' if used == '1' else 's have'}"
    text = f"{format_scores(result.report)}\n  {used} been evaluated on these test rows"
    if remaining := result.report.remaining_rows:
        text += f"\n  {remaining:,} further test rows were not scored, because the gate decides without them"
    return text


def format_scores(report: "EvaluationReport") -> str:
    """Format a table with a row for each metric and a column for each model; then costs and notes.

    Brackets contain 95 % intervals.
    """
    names = sorted({name for scores in report.scores.values() for name in scores.metrics})
    rows = [["", *report.scores]]
    for name in names:
        figures = [scores.metrics.get(name) for scores in report.scores.values()]
        rows.append([name, *(f"{m.value:.4f} [{m.low:.4f}, {m.high:.4f}]" if m else "-" for m in figures)])
    lines = [format_table(rows)]
    for role, cost in report.costs.items():
        lines.append(
            f"  {role}: an answer takes {cost.latency_s:.3g} s (95 % within {cost.latency_p95_s:.3g} s), "
            f"{cost.tokens_per_s:.0f} tokens/s, {cost.memory_bytes / 2**20:,.0f} MiB, on {cost.device}"
        )
    if report.judge_report is not None:
        lines += [f"  {line}" for line in format_judge_lines(report.judge_report)]
    if report.safety is not None:
        lines += [f"  {line}" for line in format_safety_lines(report)]
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)


def format_judge_lines(judge_report: "JudgeReport") -> list[str]:
    """Format the judge's figures in a line for each opponent, and their cost."""
    lines = []
    for role, comparison in judge_report.comparisons.items():
        parts = [f"judge: {judge_report.candidate} and {role}, {comparison.rows} rows"]
        if (rate := comparison.win_rate) is not None:
            same = f", {comparison.identical_answers} of them the same text" if comparison.identical_answers else ""
            parts.append(
                f"win rate {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] "
                f"({comparison.wins} better, {comparison.ties} tied{same}, {comparison.losses} worse)"
            )
        if comparison.agreement is not None:
            parts.append(f"both orders agree on {comparison.agreement.value:.1%}")
        if (bias := comparison.position_bias) is not None:
            parts.append(f"first answer preferred by {bias.value:+.3f} [{bias.low:+.3f}, {bias.high:+.3f}]")
        if comparison.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in comparison.unreadable.items())
            parts.append(f"{comparison.skipped} rows left out ({reasons})")
        lines.append("; ".join(parts))
    counts = [f"{judge_report.questions:,} questions to {judge_report.model}", f"{judge_report.requests:,} requests"]
    if judge_report.prompt_tokens is not None and judge_report.tokens is not None:
        counts.append(f"{judge_report.prompt_tokens:,} tokens sent, {judge_report.tokens:,} written")
    counts += [] if judge_report.cost is None else [f"price {judge_report.cost:,.4g}"]
    lines.append(f"judge: {', '.join(counts)}")
    for other in judge_report.additional_judges:
        lines += format_judge_lines(other)
    for role, panel in judge_report.panel.items():
        parts = [f"all {1 + len(judge_report.additional_judges)} judges: {judge_report.candidate} and {role}"]
        for name, metric in (("win rate", panel.win_rate), ("Krippendorff's alpha", panel.alpha)):
            figures = f"{metric.value:.3f} [{metric.low:.3f}, {metric.high:.3f}]" if metric else "undefined"
            parts.append(f"{name} {figures}")
        lines.append("; ".join(parts))
    return lines


def format_safety_lines(report: "EvaluationReport") -> list[str]:
    """Format the scorer, changes from the base, significant differences between groups, and tests that are missing."""
    from ratchet.config.units import format_count
    from ratchet.storage.records.evaluation import list_untested

    safety = report.safety
    if safety is None:
        return []
    lines = [f"safety: answers judged by {safety.scorer[:40]}"]
    for name, change in safety.changes.items():
        lines.append(
            f"{name}: {100 * change.value:+.1f} points from the base "
            f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}] ({format_count(change.n, 'prompt')}; + is better)"
        )
    for role, differences in safety.differences.items():
        found = [one for one in differences if one.is_significant]
        lines.append(f"{role}: significant differences between groups: {len(found)} of {len(differences)}")
        lines += [
            f"  {one.score}, {one.second} minus {one.first}: {one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}], "
            f"p = {one.p:.2g}"
            for one in found
        ]
    if safety.untestable_rows:
        lines.append(f"training rows that are too short to test for memorization: {safety.untestable_rows:,}")
    if safety.unreadable:
        lines.append(f"replies of the judge without a verdict, which count as failures: {safety.unreadable:,}")
    if untested := list_untested(report):
        lines.append(f"not tested: {'; '.join(untested)}")
    return lines


def format_quantization(result: "QuantizationResult") -> str:
    """Format a table with a row for each storage format of the base."""
    report = result.report
    full = report.costs[0].weight_bytes
    rows = [["", "bytes", "of full", "loss", "perplexity", "KL", "same token", "layer error", "worst layer"]]
    for cost in report.costs:
        errors = {name: layer.output_error for name, layer in cost.layers.items()}
        worst = max(errors, key=lambda name: errors[name], default="-")
        rows.append(
            [
                cost.name, f"{cost.weight_bytes:,}", f"{cost.weight_bytes / full:.1%}", f"{cost.loss:.4f}",
                f"{math.exp(cost.loss):.3f}", f"{cost.kl:.4f}", f"{cost.greedy_agreement:.1%}",
                f"{statistics.median(errors.values()):.1%}" if errors else "-",
                f"{worst} {errors[worst]:.1%}" if errors else "-",
            ]
        )  # fmt: skip
    head = (
        f"4 bits against full precision ({report.dtype}): {report.rows} validation rows, {report.tokens} answer tokens"
    )
    return f"{head}\n{format_table(rows)}\n  {result.picture}"
