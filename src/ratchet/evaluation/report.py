"""The results of all models as they are sealed: report, samples, answers, documents, pictures; and a table of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet import digest, files, records
from ratchet.config import Settings
from ratchet.evaluation.examination import Result
from ratchet.evaluation.rows import TestRows
from ratchet.records_evaluation import (
    ROWS,
    EvalReport,
    Judgements,
    Metric,
    Sample,
    Scores,
    Who,
    answers_file,
    curves_file,
    documents_file,
    judged_file,
    sample_file,
)
from ratchet.services import curves_plot, metrics, plots


def scores(who: Who, result: Result) -> Scores:
    """One model's results without its samples.

    A figure that is not finite has no place in JSON; its samples have, and the gate names the first that is none.
    """
    return Scores(
        model_digest=result.subject.model_digest,
        form=result.subject.form,
        contract=digest.of_json(result.contract),
        metrics=finite(result.metrics),
        samples={name: sample_file(who, name) for name in result.samples},
        per_class=result.per_class,
        slices={part: finite(found) for part, found in result.slices.items()},
    )


def finite(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Those that are numbers; what is none has no place in JSON."""
    return {name: one for name, one in metrics.items() if is_finite(one)}


def is_finite(metric: Metric) -> bool:
    """Whether value and interval are numbers."""
    return all(map(math.isfinite, (metric.value, metric.low, metric.high)))


def write(
    target: Path,
    report: EvalReport,
    results: Mapping[Who, Result],
    rows: TestRows,
    settings: Settings,
    judged: Mapping[Who, list[dict[str, Any]]],
) -> None:
    """Seal everything that was found. `judged`: lines behind the judge's figures, by opponent."""
    with files.sealed_directory(target, "evaluation") as scratch:
        asked = [row.model_dump(mode="json", exclude={"format"}) for row in rows.records(settings.evaluate.categories)]
        records.write_lines(scratch / ROWS, asked)
        for who, result in results.items():
            _write_one(scratch, who, result, rows)
        for who, lines in judged.items():
            records.write_lines(scratch / judged_file(who), lines)
        report.save(scratch / "eval.json")


def _write_one(scratch: Path, who: Who, result: Result, rows: TestRows) -> None:
    write_samples(scratch, who, result.samples)
    answers = [{"id": key, "answers": given} for key, given in zip(rows.ids, result.answers, strict=False)]
    records.write_lines(scratch / answers_file(who), answers)
    for task, documents in result.documents.items():
        records.write_lines(scratch / documents_file(who, task), documents)
    if result.confusion:
        table = {"labels": result.confusion.labels, "matrix": result.confusion.matrix}
        files.write_json(scratch / f"confusion/{who}.json", table)
        if who == "candidate" or (who == "merged" and not (scratch / "confusion" / "candidate.png").exists()):
            labels = [*result.confusion.labels, metrics.OTHER]
            plots.confusion_matrix(labels, result.confusion.matrix, scratch / f"confusion/{who}.png")
    if result.curves:
        files.write_json(scratch / curves_file(who), result.curves)
        if who in ("candidate", "merged"):
            curves_plot.precision_recall(result.curves, scratch / curves_file(who).with_suffix(".png"))


def write_samples(scratch: Path, who: str, found: Mapping[str, Sequence[Sample]]) -> None:
    """Per-sample scores, a file a metric."""
    for name, samples in found.items():
        rows = [sample.model_dump(mode="json", exclude={"format"}) for sample in samples]
        records.write_lines(scratch / sample_file(who, name), rows)


def describe(report: EvalReport) -> str:
    """A table for the terminal: a row a metric, a column a model, 95 % intervals; then what a reader should know."""
    names = sorted({name for one in report.scores.values() for name in one.metrics})
    rows = [["", *report.scores]]
    for name in names:
        figures = [one.metrics.get(name) for one in report.scores.values()]
        rows.append([name, *(f"{m.value:.4f} [{m.low:.4f}, {m.high:.4f}]" if m else "-" for m in figures)])
    lines = [table(rows)]
    for who, cost in report.costs.items():
        lines.append(
            f"  {who}: an answer takes {cost.latency_s:.3g} s (95 % within {cost.latency_p95_s:.3g} s), "
            f"{cost.tokens_per_s:.0f} tokens/s, {cost.memory_bytes / 2**20:,.0f} MiB, on {cost.device}"
        )
    if report.judged is not None:
        lines += [f"  {line}" for line in judged_lines(report.judged)]
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)


def judged_lines(judged: Judgements) -> list[str]:
    """The judge's figures, a line an opponent, and what they cost."""
    lines = []
    for who, one in judged.comparisons.items():
        parts = [f"judge: {judged.candidate} and {who}, {one.rows} rows"]
        if one.win_rate is not None:
            same = f", {one.equal} of them the same text" if one.equal else ""
            parts.append(
                f"win rate {one.win_rate.value:.3f} [{one.win_rate.low:.3f}, {one.win_rate.high:.3f}] "
                f"({one.wins} better, {one.ties} tied{same}, {one.losses} worse)"
            )
        if one.agreement is not None:
            parts.append(f"both orders agree on {one.agreement.value:.1%}")
        if (bias := one.first_bias) is not None:
            parts.append(f"first answer preferred by {bias.value:+.3f} [{bias.low:+.3f}, {bias.high:+.3f}]")
        if one.left_out:
            why = ", ".join(f"{count} {reason}" for reason, count in one.unreadable.items())
            parts.append(f"{one.left_out} rows left out ({why})")
        lines.append("; ".join(parts))
    counts = [f"{judged.questions:,} questions to {judged.model}", f"{judged.requests:,} requests"]
    if judged.prompt_tokens is not None and judged.tokens is not None:
        counts.append(f"{judged.prompt_tokens:,} tokens sent, {judged.tokens:,} written")
    counts += [] if judged.cost is None else [f"price {judged.cost:,.4g}"]
    return [*lines, f"judge: {', '.join(counts)}"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, two spaces in."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
