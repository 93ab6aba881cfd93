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
from ratchet.reports.training_page import STYLE as PART_STYLE
from ratchet.reports.training_page import render_memory
from ratchet.reports.verdict_page import render_judge_results
from ratchet.storage import html
from ratchet.storage import html as placed
from ratchet.storage.html import NONE, Html, explanation, format_count, format_percentage, tag
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, ModelRole
from ratchet.tuning.trial_summary import format_duration

LABELS_NAMED, LABELS_DRAWN, PAIRS_DRAWN = 40, 150, 3000
"""Maximum numbers of labels with names next to a confusion matrix, of labels in a plot, and of pairs in one plot."""
CURVES = 6
"""Number of precision-recall curves: labels with the lowest average precision."""
WORST, TEXT_SHOWN = 20, 600
"""Numbers of samples and of characters of a text."""
LEFT, TOP, SQUARE = 56, 10, 360
"""Geometry of the precision-recall plot, in its own pixels."""
BY = ("answer_loss", "accuracy", "exact_match", "token_f1")
"""Metrics that rank the worst samples; the first available one is used."""
SIDE, COUNTED_PX = 420, 22
"""Size of a matrix in its own pixels, and the minimum size of its squares for numbers inside."""


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
    """`labels` and `matrix`, as stage evaluate writes them."""
    curves: Mapping[str, Any] | None = None
    """Precision and recall by label."""


def render_evaluation(evaluation: RunEvaluation | None) -> verdict_page.Body:
    """Render metrics, error rates, confusions, curves, and the worst samples."""
    if evaluation is None:
        return (
            "The run was not evaluated, or its evaluation was not kept. Stage evaluate scores the run of "
            "params.yaml and "
            "champions."
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
    """Render the confusion matrix: a square per pair, darker for a larger share of the true label's rows."""
    labels: list[str] = list(confusion["labels"])
    matrix: list[list[int]] = confusion["matrix"]
    columns = len(matrix[0]) if matrix else 0
    if not columns or columns > LABELS_DRAWN:
        return explanation(
            f"{format_count(columns, 'label')} are too many for a plot; see the table of confused labels."
        )
    room = 7 * min(24, max(map(len, labels))) + 10 if len(labels) <= LABELS_NAMED else 14
    cell = max(3.0, min(44.0, SIDE / columns))
    parts = [
        tag(
            "rect",
            x=f"{room}",
            y=f"{room}",
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
                x, y = room + column * cell, room + row * cell
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
        parts += _render_label_names(labels, columns, room, cell)
    wide, high = room + cell * columns + 6, room + cell * len(labels) + 6
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


def _render_label_names(labels: Sequence[str], columns: int, room: float, cell: float) -> Iterator[Html]:
    names = [*labels, *["other"] * (columns - len(labels))]
    for place, name in enumerate(names):
        cut = name if len(name) <= 24 else f"{name[:23]}\u2026"
        at = room + (place + 0.5) * cell
        if place < len(labels):
            yield tag("text", cut, x=f"{room - 5:.1f}", y=f"{at + 4:.1f}", text_anchor="end")
        turned = f"rotate(-90 {at + 4:.1f} {room - 5:.1f})"
        yield tag("text", cut, x=f"{at + 4:.1f}", y=f"{room - 5:.1f}", transform=turned)


def render_precision_recall(curves: Mapping[str, Any]) -> Html:
    """Render the curves of the labels with the lowest average precision."""
    known = {label: one for label, one in curves.items() if one["precision"]}
    worst = sorted(known, key=lambda label: (known[label]["average_precision"], label))[:CURVES]
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = f"{LEFT + SQUARE * tick:.0f}", f"{TOP + SQUARE * (1 - tick):.0f}"
        parts.append(tag("line", x1=f"{LEFT}", x2=f"{LEFT + SQUARE}", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{tick:g}", x=f"{LEFT - 8}", y=y, dy="4", text_anchor="end"))
        parts.append(tag("text", f"{tick:g}", x=x, y=f"{TOP + SQUARE + 20}", text_anchor="middle"))
    middle = TOP + SQUARE // 2
    turned = {"transform": f"rotate(-90 14 {middle})", "x": "14", "y": f"{middle}"}
    parts.append(tag("text", "recall", x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", "precision", text_anchor="middle", **turned))
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
    metric = next((name for name in BY if evaluation.samples.get(name)), None)
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
        for row in order[:WORST]
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
    """Origin of a run that is not recorded in its own directory."""

    checkout: Mapping[str, str]
    """Current Git and DVC state, by name."""
    card: str | None
    """Link to the data card, if the current data is that of the run."""
    page: str | None
    """Link to the page written by stage train."""
    gate_page: str | None
    """Link to the gate's page, if it is about this run."""


def render_lineage(side: ComparisonSide, origin: RunProvenance) -> verdict_page.Body:
    """Render base, data, code, Git and DVC state."""
    account = side.runs[0]
    facts: dict[str, str] = {"Run": tag("code", account.run_id)}
    if account.launch is not None:
        base = account.launch.base
        facts["Base model"] = tag("bdi", f"{base.source}" + (f", revision {base.revision}" if base.revision else ""))
        facts["Licence"] = base.licence or NONE
        facts["Base parameters"] = f"{base.parameters:,}"
    if account.spec is not None:
        facts["Base digest"] = render_digest(account.spec.base_digest)
        data = render_digest(account.spec.data_digest)
        link = (
            tag("a", "data card", href=origin.card)
            if origin.card
            else "the data has changed since, and its card is not available"
        )
        facts["Data"] = tag("span", data, " ", link)
    if account.report is not None:
        facts["Adapter"] = render_digest(account.report.adapter_digest)
    if version := account.history.progress.code_version:
        facts["Code"] = tag("code", version)
    for name, value in origin.checkout.items():
        facts[name] = tag("code", value)
    if side.trials:
        facts["Trials"] = ", ".join(side.trials)
    links = [
        tag("a", text, href=href)
        for text, href in (("modules, gradients, updates", origin.page), ("gate report", origin.gate_page))
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

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))


def write(side: ComparisonSide, examination: RunEvaluation | None, origin: RunProvenance, target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        side: The run, as a group of one.
        examination: Its per-row evaluation, if available.
        origin: Origin of the run.
        target: HTML file to write.
    """
    placed.write(target, render(side, examination, origin))


def render(side: ComparisonSide, examination: RunEvaluation | None, origin: RunProvenance) -> str:
    """Render the page as text. See `write`."""
    account = side.runs[0]
    pictures = curves.build_plots([side])
    measured = account.history.progress.memory.peaks
    sections: dict[str, Sequence[Html] | str] = {
        "Figures": [
            comparison_page.render_facts(
                {name: value for name, [value] in comparison_page.summarize_sides([side]) if value != NONE}
            )
        ],
        "Curves": _render_curves(pictures, side) if pictures else "The run has not done a step.",
        "Events": comparison_page.render_events([side]),
        "Evaluation": render_evaluation(examination),
        "Memory": render_memory(account.forecast, measured),
        "Settings": comparison_page.render_settings(side),
        "Registry": render_registry(side),
        "Lineage": render_lineage(side, origin),
    }
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    data = curves.render_script_data(pictures, [side])
    title = f"Run {account.run_id}"
    return html.document(title, style + more + PART_STYLE, _render_header(side), contents, main, data, script=script)


def _render_curves(pictures: Sequence[curves.CurvePlot], side: ComparisonSide) -> list[Html]:
    content = [explanation(curves.describe_legend([side])), curves.render_controls([side])]
    return [*content, *(curves.render_figure(one, [side]) for one in pictures)]


def _render_header(side: ComparisonSide) -> Html:
    account = side.runs[0]
    course = account.history

    def figures() -> Iterator[tuple[str, str, str]]:
        best, planned = account.best, course.progress.planned_steps
        yield "Validation loss", f"{best[1]:.4f}" if best else NONE, f"lowest, step {best[0]:,}" if best else "not yet"
        yield "Steps", f"{course.step:,}", f"of {planned:,} planned" if planned else "none planned yet"
        speed = f"{account.tokens_per_s:,.0f} input tokens/s" if account.tokens_per_s else ""
        yield "Training time", format_duration(course.seconds) if course.seconds else NONE, speed
        forecast = f"forecast {format_bytes(account.forecast_bytes)}" if account.forecast_bytes else ""
        yield "Peak memory", format_bytes(account.peak_bytes) if account.peak_bytes else NONE, forecast
        if account.report is not None:
            total = account.report.total_parameters
            share = format_percentage(account.report.trainable_parameters, total)
            yield "Trained", share, f"{account.report.trainable_parameters:,} of {total:,} parameters"

    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in figures()
    ]
    events = sum(course.counts.values())
    summary = f"{account.state}; {format_count(course.progress.attempts, 'attempt')}, {format_count(events, 'event')}"
    known = "; ".join(dict.fromkeys((*(m.about for m in side.subject.members if m.about), *side.promotions)))
    title = tag("h1", f"Run {account.run_id}", tag("span", f"{summary}; {known}" if known else summary))
    return tag("header", tag("p", "Training", class_="quiet"), title, tag("dl", *items))
