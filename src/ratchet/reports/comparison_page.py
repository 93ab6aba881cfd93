"""Writes a comparison of runs as HTML: differences, metrics, curves, scores, significance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.units import format_bytes, format_count, format_duration
from ratchet.quality_gate import rules
from ratchet.reports import curves, pages
from ratchet.reports.comparison import (
    ComparisonSide,
    ModelEvaluation,
    PairwiseTestResult,
    RunComparison,
    comparison_rows,
)
from ratchet.reports.curves import SIGNS
from ratchet.reports.pages import MINUS, format_significant
from ratchet.reports.run_history import RunSummary
from ratchet.storage import html
from ratchet.storage.html import NONE

LABELS_SHOWN, SLICES_SHOWN, EVENTS_SHOWN = 200, 400, 200
"""Maximum numbers of labels, of slice scores, and of events."""


def write(comparison: RunComparison, target: Path) -> None:
    """Write the page. Equal comparisons give equal bytes."""
    html.write(target, render(comparison))


def render(comparison: RunComparison) -> str:
    """Return the page as text."""
    sides, macros = comparison.sides, pages.macros()
    names = [side.name for side in sides]
    numbered = [(number, found) for number, side in enumerate(sides) for found in side.evaluations]
    models = [found for _, found in numbered]
    results = [(name, *values) for name, values in summarize_sides(sides) if any(value != NONE for value in values)]
    return pages.render(
        "comparison",
        title=f"Compared: {', '.join(names)}",
        sections=("Differences", "Figures", "Curves", "Scores", "Significance", "Events"),
        **_summarize_header(comparison),
        comparison=comparison,
        columns=[macros.side(number, name) for number, name in enumerate(names)],
        results=results,
        curves=curves.summarize_curves(sides),
        models=[(names[number], found) for number, found in numbered],
        model_columns=[macros.side(number, names[number], found.role) for number, found in numbered],
        metrics=[
            (name, [model.scores.metrics.get(name) for model in models])
            for name in sorted({name for model in models for name in model.scores.metrics})
        ],
        labels=_compare_labels(models),
        slices=_compare_slices(models),
        costs=_compare_costs(models),
        test_results=format_test_results(comparison.test_results),
        events=summarize_events(sides),
    )


def _summarize_header(comparison: RunComparison) -> dict[str, Any]:
    def figures() -> Iterator[tuple[str, str, str]]:
        for side in comparison.sides:
            best = [run.best[1] for run in side.runs if run.best]
            seeds = f", mean of {len(best)} seeds" if side.is_group else ""
            about = "; ".join(dict.fromkeys(member.about for member in side.subject.members if member.about))
            state = ", ".join(dict.fromkeys(run.state for run in side.runs))
            note = f"lowest validation loss{seeds}; {state}" + (f"; {about}" if about else "")
            yield side.name, f"{sum(best) / len(best):.4f}" if best else NONE, note

    significant = sum(result.is_significant for result in comparison.test_results)
    differing = sum(row.differs for row in comparison.settings)
    summary = f"{format_count(differing, 'setting')} differ; " if differing != 1 else "1 setting differs; "
    summary += (
        f"{significant:,} of {format_count(len(comparison.test_results), 'difference')} on the same rows significant"
        if comparison.test_results
        else "no rows were scored for both sides"
    )
    count = sum(len(side.runs) for side in comparison.sides)
    has_groups = count > len(comparison.sides)
    heading = f"{count} runs in {len(comparison.sides)} groups" if has_groups else f"{count} runs compared"
    return {"heading": heading, "summary": summary, "figures": list(figures())}


def summarize_sides(sides: Sequence[ComparisonSide]) -> list[tuple[str, list[str]]]:
    """Return the results of each side as text, for the page and for the terminal."""
    formatters: dict[str, Callable[[RunSummary], str]] = {
        "state": lambda run: run.state,
        "lowest validation loss": lambda run: f"{run.best[1]:.4f}" if run.best else NONE,
        "at step": lambda run: f"{run.best[0]:,}" if run.best else NONE,
        "last training loss": lambda run: f"{run.history.loss:.4f}" if run.history.loss is not None else NONE,
        "steps": _format_steps,
        "answer tokens": lambda run: f"{run.history.trained_tokens:,.0f}" if run.history.lines else NONE,
        "training time": lambda run: format_duration(run.history.seconds) if run.history.seconds else NONE,
        "input tokens/s": lambda run: f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else NONE,
        "peak memory": lambda run: format_bytes(run.peak_bytes) if run.peak_bytes else NONE,
        "forecast": lambda run: format_bytes(run.forecast_bytes) if run.forecast_bytes else NONE,
        "trainable parameters": lambda run: f"{run.trainable_parameters:,}" if run.trainable_parameters else NONE,
        "attempts": lambda run: f"{run.history.progress.attempts:,}" if run.history.progress.attempts else NONE,
        "repeated steps": lambda run: f"{run.history.repeated_steps:,}" if run.history.lines else NONE,
        "blocked by checkpoints": lambda run: (
            format_duration(run.history.blocked_s) if run.history.checkpoints else NONE
        ),
    }
    rows = [(name, [_format_cell(side.runs, formatter) for side in sides]) for name, formatter in formatters.items()]
    rows.append(("trials", [", ".join(side.trials) or NONE for side in sides]))
    rows.append(("promotions, verdicts", [", ".join(dict.fromkeys(side.promotions)) or NONE for side in sides]))
    return rows


def _format_steps(run: RunSummary) -> str:
    planned = run.report.planned_steps if run.report else run.history.progress.planned_steps
    return f"{run.history.step:,} of {planned:,}" if planned else f"{run.history.step:,}" if run.history.lines else NONE


def _format_cell(runs: Sequence[RunSummary], formatter: Callable[[RunSummary], str]) -> str:
    """Format the distinct values of several runs, in order."""
    return ", ".join(dict.fromkeys(formatter(run) for run in runs))


def format_test_results(results: Sequence[PairwiseTestResult]) -> list[tuple[PairwiseTestResult | str, ...]]:
    """Return each tested difference with both values, the difference and its bound as text."""

    def signed(result: PairwiseTestResult, amount: float) -> str:
        if result.measured:
            return rules.format_signed_change(amount, result.measured).replace("-", MINUS)
        return ("+" if amount >= 0 else MINUS) + format_significant(abs(amount))

    return [
        (result, *(format_value(result, value) for value in result.values),
         signed(result, result.difference), signed(result, result.low))
        for result in results
    ]  # fmt: skip


def format_value(result: PairwiseTestResult, value: float) -> str:
    """Format a value of the tested metric."""
    return rules.format_value(value, result.measured) if result.measured else format_significant(value)


def _compare_labels(models: Sequence[ModelEvaluation]) -> list[tuple[object, ...]]:
    """Return F1 of each label, the largest differences between models first."""

    def values(label: str, name: str) -> list[float | None]:
        return [model.scores.per_class.get(label, {}).get(name) for model in models]

    def spread(label: str) -> float:
        known = [model.scores.per_class[label].get("f1", 0.0) for model in models if label in model.scores.per_class]
        return max(known) - min(known)

    labels = {label for model in models for label in model.scores.per_class}
    bdi = pages.macros().bdi
    return [
        (
            bdi(label),
            *(NONE if figure is None else f"{figure:.3f}" for figure in values(label, "f1")),
            f"{max(value or 0.0 for value in values(label, 'support')):,.0f}",
        )
        for label in sorted(labels, key=lambda label: (-spread(label), label))[:LABELS_SHOWN]
    ]


def _compare_slices(models: Sequence[ModelEvaluation]) -> dict[str, Any]:
    parts = sorted({part for model in models for part in model.scores.slices})
    rows = [
        (part, name, [model.scores.slices.get(part, {}).get(name) for model in models])
        for part in parts
        for name in sorted({name for model in models for name in model.scores.slices.get(part, {})})
    ]
    return {"count": len(parts), "rows": rows[:SLICES_SHOWN]}


def _compare_costs(models: Sequence[ModelEvaluation]) -> list[tuple[str, ...]]:
    costs = [model.cost for model in models]
    if not any(costs):
        return []
    return [
        ("median latency in seconds", *(f"{cost.latency_s:.3g}" if cost else NONE for cost in costs)),
        ("95th percentile of latency in seconds", *(f"{cost.latency_p95_s:.3g}" if cost else NONE for cost in costs)),
        ("generated tokens/s", *(f"{cost.tokens_per_s:.4g}" if cost else NONE for cost in costs)),
        ("peak memory", *(format_bytes(cost.memory_bytes) if cost else NONE for cost in costs)),
    ]


def summarize_events(sides: Sequence[ComparisonSide]) -> dict[str, Any]:
    """Return the events of the runs. The plots show the same events as symbols."""
    bdi = pages.macros().bdi
    rows = [
        (mark.step, bdi(side.name if len(side.runs) == 1 else f"{side.name}: {run.run_id}"),
         f"{SIGNS.get(mark.kind, '')} {mark.kind}", bdi(mark.text))
        for side in sides
        for run in side.runs
        for mark in run.history.marks
    ]  # fmt: skip
    more = sum(sum(run.history.counts.values()) for side in sides for run in side.runs) - len(rows[:EVENTS_SHOWN])
    return {"rows": rows[:EVENTS_SHOWN], "more": more}


def summarize_settings(side: ComparisonSide) -> list[tuple[str, Mapping[str, str]]]:
    """Return all settings of a side: those that affect learning, and those of execution."""
    groups: list[tuple[str, Mapping[str, str]]] = []
    for title, attribute in (("Settings that affect learning", "settings"), ("Execution", "execution")):
        if rows := comparison_rows([[getattr(run, attribute) for run in side.runs]]):
            groups.append((title, {row.name: row.values[0] for row in rows}))
    return groups
