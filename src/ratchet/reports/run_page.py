"""Writes the report of one run as HTML: results, curves, evaluation, lineage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ratchet.config.units import format_bytes, format_count, format_duration
from ratchet.quality_gate.evidence import Samples
from ratchet.reports import comparison_page, curves, pages, verdict_page
from ratchet.reports.comparison import ComparisonSide, PairwiseTestResult
from ratchet.reports.pages import truncate_middle
from ratchet.reports.training_page import summarize_memory
from ratchet.storage import html
from ratchet.storage.html import NONE, format_percentage
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, ModelRole

WORST_SHOWN, TEXT_SHOWN = 20, 600
"""Maximum numbers of worst samples, and of characters of a text."""
RANKING_METRICS = ("answer_loss", "accuracy", "exact_match", "token_f1")
"""Metrics that rank the worst samples; the first available one is used."""


@dataclass(frozen=True)
class RunEvaluation:
    """Evaluation of the run's own model, row by row."""

    report: EvaluationReport
    role: ModelRole
    """Role under which the model was scored."""
    test_results: Sequence[PairwiseTestResult] = ()
    """Paired tests against base, champion and anchor, row by row."""
    rows: Sequence[EvaluatedRow] = ()
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Answers by row id."""
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Per-sample scores by metric."""
    confusion: Mapping[str, Any] | None = None
    """`labels` and `matrix`, in the format of stage evaluate."""
    curves: Mapping[str, Any] | None = None
    """Precision and recall by label."""


@dataclass(frozen=True)
class RunProvenance:
    """Facts and links about the origin of a run that its own directory does not contain."""

    checkout: Mapping[str, str]
    """Current Git and DVC state, by name."""
    card: str | None
    """Link to the data card, if the run was trained on the current data."""
    page: str | None
    """Link to the page that stage train wrote."""
    gate_page: str | None
    """Link to the gate's page, if the gate judged this run."""


def write(side: ComparisonSide, evaluation: RunEvaluation | None, provenance: RunProvenance, target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        side: The run, as a group of one.
        evaluation: Evaluation of the run, if available.
        provenance: Origin of the run.
        target: HTML file to write.
    """
    html.write(target, render(side, evaluation, provenance))


def render(side: ComparisonSide, evaluation: RunEvaluation | None, provenance: RunProvenance) -> str:
    """Return the page as text. See `write`."""
    run = side.runs[0]
    events = sum(run.history.counts.values())
    summary = f"{run.state}; {format_count(run.history.progress.attempts, 'attempt')}, {format_count(events, 'event')}"
    names = "; ".join(dict.fromkeys((*(m.about for m in side.subject.members if m.about), *side.promotions)))
    return pages.render(
        "run",
        title=f"Run {run.run_id}",
        sections=("Figures", "Curves", "Events", "Evaluation", "Memory", "Settings", "Registry", "Lineage"),
        heading=f"Run {run.run_id}",
        summary=f"{summary}; {names}" if names else summary,
        figures=list(_key_figures(side)),
        results={name: value for name, [value] in comparison_page.summarize_sides([side]) if value != NONE},
        curves=curves.summarize_curves([side]),
        events=comparison_page.summarize_events([side]),
        evaluation=evaluation,
        **(_summarize_evaluation(evaluation) if evaluation else {}),
        memory=summarize_memory(run.forecast, run.history.progress.memory.peaks),
        settings=comparison_page.summarize_settings(side),
        promotions=list(dict.fromkeys(side.promotions)),
        lineage=_describe_lineage(side, provenance),
    )


def _key_figures(side: ComparisonSide) -> Iterator[tuple[str, str, str]]:
    run = side.runs[0]
    history, best, planned = run.history, run.best, run.history.progress.planned_steps
    yield "Validation loss", f"{best[1]:.4f}" if best else NONE, f"lowest, step {best[0]:,}" if best else "not yet"
    yield "Steps", f"{history.step:,}", f"of {planned:,} planned" if planned else "none planned yet"
    speed = f"{run.tokens_per_s:,.0f} input tokens/s" if run.tokens_per_s else ""
    yield "Training time", format_duration(history.seconds) if history.seconds else NONE, speed
    forecast = f"forecast {format_bytes(run.forecast_bytes)}" if run.forecast_bytes else ""
    yield "Peak memory", format_bytes(run.peak_bytes) if run.peak_bytes else NONE, forecast
    if run.report is not None:
        trainable, total = run.report.trainable_parameters, run.report.total_parameters
        yield "Trained", format_percentage(trainable, total), f"{trainable:,} of {total:,} parameters"


def _summarize_evaluation(evaluation: RunEvaluation) -> dict[str, Any]:
    """Return metrics, error rates, confusions, curves, and the worst samples."""
    report, role = evaluation.report, evaluation.role
    confusion = evaluation.confusion
    return {
        "test_results": comparison_page.format_test_results(evaluation.test_results),
        "metrics": verdict_page.summarize_metrics(report),
        "labels": verdict_page.summarize_labels(report, [role], evaluation.rows, {role: evaluation.answers}),
        "confusion": pages.describe_confusion(confusion["labels"], confusion["matrix"]) if confusion else None,
        "precision_recall": pages.describe_precision_recall(evaluation.curves) if evaluation.curves else None,
        "forgetting": verdict_page.summarize_forgetting(report),
        "safety": verdict_page.summarize_safety(report),
        "samples": _select_worst_samples(evaluation),
    }


def _select_worst_samples(evaluation: RunEvaluation) -> dict[str, Any] | None:
    metric = next((name for name in RANKING_METRICS if evaluation.samples.get(name)), None)
    measured = evaluation.report.scores[evaluation.role].metrics.get(metric) if metric else None
    if metric is None or measured is None or not evaluation.rows:
        return None
    sign = -1.0 if measured.better == "lower" else 1.0
    scores = evaluation.samples[metric]
    order = sorted(
        (row for row in evaluation.rows if row.id in scores), key=lambda row: (sign * scores[row.id].value, row.id)
    )

    def answer(row: EvaluatedRow) -> str | None:
        answers = evaluation.answers.get(row.id)
        return truncate_middle("\n".join(answers), TEXT_SHOWN) if answers else None

    rows = [
        {"score": scores[row.id].value, "prompt": truncate_middle(row.prompt, TEXT_SHOWN),
         "expected": truncate_middle(row.expected, TEXT_SHOWN), "answer": answer(row)}
        for row in order[:WORST_SHOWN]
    ]  # fmt: skip
    return {"metric": metric, "count": len(order), "rows": rows}


def _describe_lineage(side: ComparisonSide, provenance: RunProvenance) -> dict[str, object]:
    """Return base, data, code, and the state of Git and DVC."""
    run, macros = side.runs[0], pages.macros()
    link = Markup('<a href="{}">{}</a>')
    facts: dict[str, object] = {"Run": macros.code(run.run_id)}
    if run.launch is not None:
        base = run.launch.base
        facts["Base model"] = f"{base.source}" + (f", revision {base.revision}" if base.revision else "")
        facts["Licence"] = base.licence or NONE
        facts["Base parameters"] = base.parameters
    if run.spec is not None:
        facts["Base digest"] = macros.digest(run.spec.base_digest)
        card = "the data has changed since the run, so its card is not available"
        if provenance.card:
            card = link.format(provenance.card, "data card")
        facts["Data"] = Markup("{} {}").format(macros.digest(run.spec.data_digest), card)
    if run.report is not None:
        facts["Adapter"] = macros.digest(run.report.adapter_digest)
    if version := run.history.progress.code_version:
        facts["Code"] = macros.code(version)
    for name, value in provenance.checkout.items():
        facts[name] = macros.code(value)
    if side.trials:
        facts["Trials"] = ", ".join(side.trials)
    related = (("modules, gradients, updates", provenance.page), ("gate report", provenance.gate_page))
    links = [link.format(href, text) for text, href in related if href]
    if links:
        facts["Related pages"] = Markup(" ").join(links)
    return facts
