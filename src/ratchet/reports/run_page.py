"""Renders the report of one run as HTML: results, curves, evaluation, lineage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.config.units import format_bytes
from ratchet.quality_gate.evidence import Samples
from ratchet.reports import comparison_page, curves, verdict_page
from ratchet.reports.comparison import ComparisonSide, PairwiseTestResult
from ratchet.reports.curves import render_swatch, side_classes
from ratchet.reports.forest_plot import format_significant, render_digest
from ratchet.reports.training_page import MEMORY_STYLE, render_memory
from ratchet.reports.verdict_page import render_judge_results
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, explanation, format_count, format_percentage, tag
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, ModelRole
from ratchet.tuning.trial_summary import format_duration

LABELS_NAMED, LABELS_DRAWN, PAIRS_DRAWN = 40, 150, 3000
"""Maximum numbers of labels with names next to a confusion matrix, of labels in a matrix, and of pairs in a matrix."""
CURVES = 6
"""Maximum number of precision-recall curves. Labels with the lowest average precision are shown."""
WORST_SHOWN, TEXT_SHOWN = 20, 600
"""Maximum numbers of worst samples, and of characters of a text."""
LEFT, TOP, SQUARE = 56, 10, 360
"""Left margin, top margin, and side length of the precision-recall plot, in its own pixels."""
RANKING_METRICS = ("answer_loss", "accuracy", "exact_match", "token_f1")
"""Metrics that rank the worst samples; the first available one is used."""
MATRIX_PX, COUNTED_PX = 420, 22
"""Size of a confusion matrix, and minimum size of its squares for numbers inside, in its own pixels."""

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))


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


def render_evaluation(evaluation: RunEvaluation | None) -> verdict_page.Body:
    """Render metrics, error rates, confusions, curves, and the worst samples."""
    if evaluation is None:
        return (
            "The run was not evaluated, or its evaluation was not kept. Stage evaluate scores the run of params.yaml "
            "and the champions."
        )
    content = [*_wrap_body(verdict_page.render_metrics(evaluation.report)), tag("h3", "Row by row")]
    content += (
        [comparison_page.render_test_results(evaluation.test_results)]
        if evaluation.test_results
        else [explanation("Scores of single rows were not kept.")]
    )
    content.append(tag("h3", "By label"))
    content += _wrap_body(
        verdict_page.render_labels(
            evaluation.report, [evaluation.role], evaluation.rows, {evaluation.role: evaluation.answers}
        )
    )
    if evaluation.confusion is not None:
        content.append(render_confusion_matrix(evaluation.confusion))
    if evaluation.curves:
        content.append(render_precision_recall(evaluation.curves))
    content += [tag("h3", "Forgetting"), *_wrap_body(verdict_page.render_forgetting(evaluation.report))]
    if evaluation.report.judge_report is not None:
        content += [tag("h3", "Judge"), *_wrap_body(render_judge_results(evaluation.report))]
    content.append(tag("h3", "Worst samples"))
    return [*content, *_render_worst_samples(evaluation)]


def _wrap_body(body: verdict_page.Body) -> Sequence[Html]:
    return [explanation(body)] if isinstance(body, str) else body


def render_confusion_matrix(confusion: Mapping[str, Any]) -> Html:
    """Render a square for each pair of labels, darker for a larger share of the true label's rows."""
    labels: list[str] = list(confusion["labels"])
    matrix: list[list[int]] = confusion["matrix"]
    columns = len(matrix[0]) if matrix else 0
    if not columns or columns > LABELS_DRAWN:
        return explanation(
            f"{format_count(columns, 'label')} are too many for a plot; see the table of confused labels."
        )
    margin = 7 * min(24, max(map(len, labels))) + 10 if len(labels) <= LABELS_NAMED else 14
    cell = max(3.0, min(44.0, MATRIX_PX / columns))
    parts = [
        tag(
            "rect",
            x=f"{margin}",
            y=f"{margin}",
            width=f"{cell * columns:.1f}",
            height=f"{cell * len(labels):.1f}",
            class_="empty",
        )
    ]
    known = sorted((count for counts in matrix for count in counts if count), reverse=True)
    least = known[PAIRS_DRAWN] + 1 if len(known) > PAIRS_DRAWN else 1
    for row, counts in enumerate(matrix):
        total = sum(counts) or 1
        for column, count in enumerate(counts):
            if count >= least:
                answer = labels[column] if column < len(labels) else "other"
                title = tag("title", f"{labels[row]}: {count:,} of {total:,} answered {answer}")
                x, y = margin + column * cell, margin + row * cell
                shade = {
                    "class_": "right" if row == column else "wrong",
                    "fill_opacity": f"{0.15 + 0.85 * count / total:.2f}",
                }
                size = {"width": f"{cell:.1f}", "height": f"{cell:.1f}"}
                parts.append(tag("rect", title, x=f"{x:.1f}", y=f"{y:.1f}", **size, **shade))
                if cell >= COUNTED_PX:
                    place = {"x": f"{x + cell / 2:.1f}", "y": f"{y + cell / 2 + 4:.1f}"}
                    parts.append(tag("text", f"{count:,}", **place, text_anchor="middle", class_="count"))
    if len(labels) <= LABELS_NAMED:
        parts += _render_label_names(labels, columns, margin, cell)
    wide, high = margin + cell * columns + 6, margin + cell * len(labels) + 6
    description = (
        f"Confusion matrix of {format_count(len(labels), 'label')}; the table of confused labels has the numbers."
    )
    style = f"width:{wide:.0f}px;min-width:{min(wide, 420):.0f}px"
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {wide:.0f} {high:.0f}",
        role="img",
        aria_label=description,
        style=style,
        class_="matrix",
    )
    note = " Rows are expected labels, columns are answers. Entries off the diagonal are errors."
    if least > 1:
        note += f" Pairs with fewer than {least:,} answers are omitted."
    caption = tag("figcaption", "Confusion matrix.", tag("span", note))
    framed = tag("div", svg, class_="scroll", role="region", aria_label="Confusion matrix", tabindex="0")
    return tag("figure", caption, framed)


def _render_label_names(labels: Sequence[str], columns: int, margin: float, cell: float) -> Iterator[Html]:
    names = [*labels, *["other"] * (columns - len(labels))]
    for place, name in enumerate(names):
        text = name if len(name) <= 24 else f"{name[:23]}\u2026"
        center = margin + (place + 0.5) * cell
        if place < len(labels):
            yield tag("text", text, x=f"{margin - 5:.1f}", y=f"{center + 4:.1f}", text_anchor="end")
        rotation = f"rotate(-90 {center + 4:.1f} {margin - 5:.1f})"
        yield tag("text", text, x=f"{center + 4:.1f}", y=f"{margin - 5:.1f}", transform=rotation)


def render_precision_recall(curves: Mapping[str, Any]) -> Html:
    """Render precision-recall curves of the labels with the lowest average precision."""
    known = {label: curve for label, curve in curves.items() if curve["precision"]}
    worst = sorted(known, key=lambda label: (known[label]["average_precision"], label))[:CURVES]
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = f"{LEFT + SQUARE * tick:.0f}", f"{TOP + SQUARE * (1 - tick):.0f}"
        parts.append(tag("line", x1=f"{LEFT}", x2=f"{LEFT + SQUARE}", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{tick:g}", x=f"{LEFT - 8}", y=y, dy="4", text_anchor="end"))
        parts.append(tag("text", f"{tick:g}", x=x, y=f"{TOP + SQUARE + 20}", text_anchor="middle"))
    middle = TOP + SQUARE // 2
    vertical = {"transform": f"rotate(-90 14 {middle})", "x": "14", "y": f"{middle}"}
    parts.append(tag("text", "recall", x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", "precision", text_anchor="middle", **vertical))
    for number, label in enumerate(worst):
        pairs = zip(known[label]["recall"], known[label]["precision"], strict=True)
        points = " ".join(f"{LEFT + SQUARE * a:.1f},{TOP + SQUARE * (1 - b):.1f}" for a, b in pairs)
        parts.append(tag("polyline", points=points, class_=f"curve {side_classes(number)}"))
    description = f"Precision and recall of {', '.join(worst)}; the table of labels has the average precision of each."
    size = f"0 0 {LEFT + SQUARE + 12} {TOP + SQUARE + 44}"
    svg = tag("svg", *parts, viewBox=size, role="img", aria_label=description, class_="square")
    keys = [
        tag("span", render_swatch(number), tag("bdi", label), f" {known[label]['average_precision']:.3f}")
        for number, label in enumerate(worst)
    ]
    note = f" The {len(worst)} lowest of {len(known)} labels." if len(known) > len(worst) else ""
    caption = tag("figcaption", "Precision and recall,", tag("span", f" with average precision.{note}"))
    return tag("figure", caption, svg, tag("p", *keys, class_="key legend"))


def _render_worst_samples(evaluation: RunEvaluation) -> list[Html]:
    metric = next((name for name in RANKING_METRICS if evaluation.samples.get(name)), None)
    measured = evaluation.report.scores[evaluation.role].metrics.get(metric) if metric else None
    if metric is None or measured is None or not evaluation.rows:
        return [explanation("Scores of single rows were not kept.")]
    sign = -1.0 if measured.better == "lower" else 1.0
    scores = evaluation.samples[metric]
    order = sorted(
        (row for row in evaluation.rows if row.id in scores), key=lambda row: (sign * scores[row.id].value, row.id)
    )
    articles = [
        tag(
            "article",
            tag("p", f"{metric} {format_significant(scores[row.id].value)}", class_="chips"),
            tag("div", tag("small", "prompt"), tag("p", tag("bdi", _truncate(row.prompt)))),
            tag("div", tag("small", "expected"), tag("p", tag("bdi", _truncate(row.expected)))),
            tag("div", tag("small", "answered"), tag("p", *_render_answer(evaluation.answers.get(row.id)))),
        )
        for row in order[:WORST_SHOWN]
    ]
    note = f"The {len(articles)} of {format_count(len(order), 'test row')} with the worst {metric}."
    samples = tag("div", *articles, class_="list worst", tabindex="0", role="region", aria_label="Worst samples")
    return [explanation(note), samples]


def _render_answer(answers: Sequence[str] | None) -> Iterator[Html]:
    yield tag("i", "not answered") if not answers else tag("bdi", _truncate("\n".join(answers)))


def _truncate(text: str) -> str:
    if len(text) <= TEXT_SHOWN:
        return text
    half = TEXT_SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


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


def render_lineage(side: ComparisonSide, provenance: RunProvenance) -> verdict_page.Body:
    """Render base, data, code, and the state of Git and DVC."""
    run = side.runs[0]
    facts: dict[str, str] = {"Run": tag("code", run.run_id)}
    if run.launch is not None:
        base = run.launch.base
        facts["Base model"] = tag("bdi", f"{base.source}" + (f", revision {base.revision}" if base.revision else ""))
        facts["Licence"] = base.licence or NONE
        facts["Base parameters"] = f"{base.parameters:,}"
    if run.spec is not None:
        facts["Base digest"] = render_digest(run.spec.base_digest)
        data = render_digest(run.spec.data_digest)
        link = (
            tag("a", "data card", href=provenance.card)
            if provenance.card
            else "the data has changed since the run, so its card is not available"
        )
        facts["Data"] = tag("span", data, " ", link)
    if run.report is not None:
        facts["Adapter"] = render_digest(run.report.adapter_digest)
    if version := run.history.progress.code_version:
        facts["Code"] = tag("code", version)
    for name, value in provenance.checkout.items():
        facts[name] = tag("code", value)
    if side.trials:
        facts["Trials"] = ", ".join(side.trials)
    links = [
        tag("a", text, href=href)
        for text, href in (("modules, gradients, updates", provenance.page), ("gate report", provenance.gate_page))
        if href
    ]
    if links:
        facts["Related pages"] = tag("span", *(part for link in links for part in (link, " ")))
    return [comparison_page.render_facts(facts)]


def render_registry(side: ComparisonSide) -> verdict_page.Body:
    """Render promotions and verdicts of the run."""
    if not side.promotions:
        return "The gate has not judged this run, and it was not promoted."
    return [tag("ul", *(tag("li", text) for text in dict.fromkeys(side.promotions)))]


# The page: one HTML file without external resources, complete without its script.


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
    plots = curves.build_plots([side])
    measured = run.history.progress.memory.peaks
    sections: dict[str, Sequence[Html] | str] = {
        "Figures": [
            comparison_page.render_facts(
                {name: value for name, [value] in comparison_page.summarize_sides([side]) if value != NONE}
            )
        ],
        "Curves": _render_curves(plots, side) if plots else "The run has not done a step.",
        "Events": comparison_page.render_events([side]),
        "Evaluation": render_evaluation(evaluation),
        "Memory": render_memory(run.forecast, measured),
        "Settings": comparison_page.render_settings(side),
        "Registry": render_registry(side),
        "Lineage": render_lineage(side, provenance),
    }
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    data = curves.render_script_data(plots, [side])
    title = f"Run {run.run_id}"
    return html.document(title, style + more + MEMORY_STYLE, _render_header(side), contents, main, data, script=script)


def _render_curves(plots: Sequence[curves.CurvePlot], side: ComparisonSide) -> list[Html]:
    content = [explanation(curves.describe_legend([side])), curves.render_controls([side])]
    return [*content, *(curves.render_figure(plot, [side]) for plot in plots)]


def _render_header(side: ComparisonSide) -> Html:
    run = side.runs[0]
    history = run.history

    def figures() -> Iterator[tuple[str, str, str]]:
        best, planned = run.best, history.progress.planned_steps
        yield "Validation loss", f"{best[1]:.4f}" if best else NONE, f"lowest, step {best[0]:,}" if best else "not yet"
        yield "Steps", f"{history.step:,}", f"of {planned:,} planned" if planned else "none planned yet"
        speed = f"{run.tokens_per_s:,.0f} input tokens/s" if run.tokens_per_s else ""
        yield "Training time", format_duration(history.seconds) if history.seconds else NONE, speed
        forecast = f"forecast {format_bytes(run.forecast_bytes)}" if run.forecast_bytes else ""
        yield "Peak memory", format_bytes(run.peak_bytes) if run.peak_bytes else NONE, forecast
        if run.report is not None:
            total = run.report.total_parameters
            share = format_percentage(run.report.trainable_parameters, total)
            yield "Trained", share, f"{run.report.trainable_parameters:,} of {total:,} parameters"

    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in figures()
    ]
    events = sum(history.counts.values())
    summary = f"{run.state}; {format_count(history.progress.attempts, 'attempt')}, {format_count(events, 'event')}"
    names = "; ".join(dict.fromkeys((*(m.about for m in side.subject.members if m.about), *side.promotions)))
    title = tag("h1", f"Run {run.run_id}", tag("span", f"{summary}; {names}" if names else summary))
    return tag("header", tag("p", "Training", class_="quiet"), title, tag("dl", *items))
