"""What the report of one training shows of its evaluation and where it comes from, beside what comparisons show."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.config.units import format_bytes
from ratchet.gate.evidence import Samples
from ratchet.reports import comparison_page, curves, verdict_page
from ratchet.reports import page_files as placed
from ratchet.reports.comparison import ComparisonSide, PairwiseTestResult
from ratchet.reports.curves import render_swatch, side_classes
from ratchet.reports.forest_plot import format_significant, render_digest
from ratchet.reports.training_page import STYLE as PART_STYLE
from ratchet.reports.training_page import render_memory
from ratchet.reports.verdict_page import render_judge_results
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, explanation, format_count, format_percentage, tag
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, Who
from ratchet.tuning.trial_summary import format_duration

LABELS_NAMED, LABELS_DRAWN, PAIRS_DRAWN = 40, 150, 3000
"""Labels whose names stand beside a confusion matrix; labels that a picture can tell apart; pairs in one."""
CURVES = 6
"""Of precision and recall: the labels with the lowest average precision."""
WORST, TEXT_SHOWN = 20, 600
"""Samples, and characters of a text."""
LEFT, TOP, SQUARE = 56, 10, 360
"""Of the picture of precision and recall, in pixels of its own."""
BY = ("answer_loss", "accuracy", "exact_match", "token_f1")
"""Metrics by which samples are called the worst, the first that there is."""
SIDE, COUNTED_PX = 420, 22
"""Of a matrix, in pixels of its own; of its squares, from which on there is room for a number."""


@dataclass(frozen=True)
class RunEvaluation:
    """What the evaluation has of the training's own model, row by row."""

    report: EvaluationReport
    who: Who
    """Under which it was scored."""
    findings: Sequence[PairwiseTestResult] = ()
    """Its scores beside those of base, champion and anchor, row by row."""
    rows: Sequence[EvaluatedRow] = ()
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By id of the row."""
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """By metric."""
    confusion: Mapping[str, Any] | None = None
    """`labels` and `matrix`, as stage evaluate writes it."""
    curves: Mapping[str, Any] | None = None
    """Precision and recall by label."""


def render_evaluation(found: RunEvaluation | None) -> verdict_page.Body:
    """Figures, error rates, confusions, curves, and the samples that went worst."""
    if found is None:
        return (
            "It was not evaluated, or its evaluation was not kept: stage evaluate scores what params.yaml means, and "
            "champions."
        )
    shown = [*_wrap_body(verdict_page.render_metrics(found.report)), tag("h3", "Row by row")]
    shown += (
        [comparison_page.render_test_results(found.findings)]
        if found.findings
        else [explanation("Scores of single rows were not kept.")]
    )
    shown.append(tag("h3", "By label"))
    shown += _wrap_body(verdict_page.render_labels(found.report, [found.who], found.rows, {found.who: found.answers}))
    if found.confusion is not None:
        shown.append(render_confusion_matrix(found.confusion))
    if found.curves:
        shown.append(render_precision_recall(found.curves))
    shown += [tag("h3", "Forgetting"), *_wrap_body(verdict_page.render_forgetting(found.report))]
    if found.report.judged is not None:
        shown += [tag("h3", "Judge"), *_wrap_body(render_judge_results(found.report))]
    shown.append(tag("h3", "Worst samples"))
    return [*shown, *_render_worst_samples(found)]


def _wrap_body(body: verdict_page.Body) -> Sequence[Html]:
    return [explanation(body)] if isinstance(body, str) else body


def render_confusion_matrix(found: Mapping[str, Any]) -> Html:
    """What was answered for each label: a square for each pair, the darker the larger its share of the label's rows."""
    labels: list[str] = list(found["labels"])
    matrix: list[list[int]] = found["matrix"]
    columns = len(matrix[0]) if matrix else 0
    if not columns or columns > LABELS_DRAWN:
        return explanation(
            f"{format_count(columns, 'label')}: the table of those taken for each other says more than a picture."
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
    said = (
        f"Confusion matrix of {format_count(len(labels), 'label')}; "
        "the table of labels taken for each other has numbers."
    )
    style = f"width:{wide:.0f}px;min-width:{min(wide, 420):.0f}px"
    drawn = tag(
        "svg", *parts, viewBox=f"0 0 {wide:.0f} {high:.0f}", role="img", aria_label=said, style=style, class_="matrix"
    )
    note = " Rows: what was expected; columns: what was answered; what lies off the diagonal is wrong."
    if least > 1:
        note += f" Pairs that came less than {least:,} times are left out."
    caption = tag("figcaption", "Confusion matrix.", tag("span", note))
    framed = tag("div", drawn, class_="scroll", role="region", aria_label="Confusion matrix", tabindex="0")
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
    """Curves of the labels with the lowest average precision."""
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
    said = f"Precision and recall of {', '.join(worst)}; the table of labels has the average precision of each."
    size = f"0 0 {LEFT + SQUARE + 12} {TOP + SQUARE + 44}"
    drawn = tag("svg", *parts, viewBox=size, role="img", aria_label=said, class_="square")
    keys = [
        tag("span", render_swatch(number), tag("bdi", label), f" {known[label]['average_precision']:.3f}")
        for number, label in enumerate(worst)
    ]
    note = f" The {len(worst)} lowest of {len(known)} labels." if len(known) > len(worst) else ""
    caption = tag("figcaption", "Precision and recall,", tag("span", f" with average precision.{note}"))
    return tag("figure", caption, drawn, tag("p", *keys, class_="key legend"))


def _render_worst_samples(found: RunEvaluation) -> list[Html]:
    metric = next((name for name in BY if found.samples.get(name)), None)
    measured = found.report.scores[found.who].metrics.get(metric) if metric else None
    if metric is None or measured is None or not found.rows:
        return [explanation("Scores of single rows were not kept.")]
    sign = -1.0 if measured.better == "lower" else 1.0
    scores = found.samples[metric]
    order = sorted(
        (row for row in found.rows if row.id in scores), key=lambda row: (sign * scores[row.id].value, row.id)
    )
    articles = [
        tag(
            "article",
            tag("p", f"{metric} {format_significant(scores[row.id].value)}", class_="chips"),
            tag("div", tag("small", "prompt"), tag("p", tag("bdi", _truncate(row.prompt)))),
            tag("div", tag("small", "expected"), tag("p", tag("bdi", _truncate(row.expected)))),
            tag("div", tag("small", "answered"), tag("p", *_render_answer(found.answers.get(row.id)))),
        )
        for row in order[:WORST]
    ]
    said = f"The {len(articles)} of {format_count(len(order), 'test row')} with the worst {metric}."
    listed = tag("div", *articles, class_="list worst", tabindex="0", role="region", aria_label="Worst samples")
    return [explanation(said), listed]


def _render_answer(given: Sequence[str] | None) -> Iterator[Html]:
    yield tag("i", "not answered") if not given else tag("bdi", _truncate("\n".join(given)))


def _truncate(text: str) -> str:
    if len(text) <= TEXT_SHOWN:
        return text
    half = TEXT_SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


@dataclass(frozen=True)
class RunProvenance:
    """Where a training comes from, beside what its own directory says."""

    checkout: Mapping[str, str]
    """Git and DVC as they are now, by name."""
    card: str | None
    """Link to the page of the data card, if the data of now are those of the training."""
    page: str | None
    """Link to the page that the training itself has made."""
    gate_page: str | None
    """Link to the gate's evidence, if it is about this training."""


def render_lineage(side: ComparisonSide, origin: RunProvenance) -> verdict_page.Body:
    """Base, data, code, git, DVC."""
    account = side.accounts[0]
    listed: dict[str, str] = {"Run": tag("code", account.run_id)}
    if account.launch is not None:
        base = account.launch.base
        listed["Base model"] = tag("bdi", f"{base.source}" + (f", revision {base.revision}" if base.revision else ""))
        listed["Licence"] = base.licence or NONE
        listed["Parameters of it"] = f"{base.parameters:,}"
    if account.spec is not None:
        listed["Base digest"] = render_digest(account.spec.base_digest)
        data = render_digest(account.spec.data_digest)
        link = (
            tag("a", "data card", href=origin.card) if origin.card else "the data of now are others; its card is gone"
        )
        listed["Data"] = tag("span", data, " ", link)
    if account.report is not None:
        listed["Adapter"] = render_digest(account.report.adapter_digest)
    if version := account.course.progress.code_version:
        listed["Code"] = tag("code", version)
    for name, value in origin.checkout.items():
        listed[name] = tag("code", value)
    if side.trials:
        listed["Trials"] = ", ".join(side.trials)
    links = [
        tag("a", text, href=href)
        for text, href in (("modules, gradients, updates", origin.page), ("the gate's evidence", origin.gate_page))
        if href
    ]
    if links:
        listed["Further pages"] = tag("span", *(part for link in links for part in (link, " ")))
    return [comparison_page.render_facts(listed)]


def render_registry(side: ComparisonSide) -> verdict_page.Body:
    """What became of the training."""
    if not side.standing:
        return "It was neither judged by the gate nor promoted."
    return [tag("ul", *(tag("li", text) for text in dict.fromkeys(side.standing)))]


# The report of one training, for people: one HTML file that loads nothing, whole without its script.

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))


def write(side: ComparisonSide, examination: RunEvaluation | None, origin: RunProvenance, target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        side: the training: a group of one.
        examination: what its evaluation has of single rows, if there is one.
        origin: where it comes from.
        target: the HTML file.
    """
    placed.write(target, render(side, examination, origin))


def render(side: ComparisonSide, examination: RunEvaluation | None, origin: RunProvenance) -> str:
    """The page's text. See `write`."""
    account = side.accounts[0]
    pictures = curves.build_plots([side])
    measured = account.course.progress.memory.peaks
    sections: dict[str, Sequence[Html] | str] = {
        "Figures": [
            comparison_page.render_facts(
                {name: value for name, [value] in comparison_page.summarize_sides([side]) if value != NONE}
            )
        ],
        "Curves": _render_curves(pictures, side) if pictures else "It has not done a step.",
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
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    data = curves.render_script_data(pictures, [side])
    title = f"Run {account.run_id}"
    return html.document(title, style + more + PART_STYLE, _render_header(side), contents, main, data, script=script)


def _render_curves(pictures: Sequence[curves.CurvePlot], side: ComparisonSide) -> list[Html]:
    shown = [explanation(curves.describe_legend([side])), curves.render_controls([side])]
    return [*shown, *(curves.render_figure(one, [side]) for one in pictures)]


def _render_header(side: ComparisonSide) -> Html:
    account = side.accounts[0]
    course = account.course

    def figures() -> Iterator[tuple[str, str, str]]:
        best, planned = account.best, course.progress.planned_steps
        yield "Validation loss", f"{best[1]:.4f}" if best else NONE, f"lowest, step {best[0]:,}" if best else "not yet"
        yield "Steps", f"{course.step:,}", f"of {planned:,} planned" if planned else "none planned yet"
        speed = f"{account.tokens_per_s:,.0f} input tokens/s" if account.tokens_per_s else ""
        yield "Time in training", format_duration(course.seconds) if course.seconds else NONE, speed
        forecast = f"forecast {format_bytes(account.forecast_bytes)}" if account.forecast_bytes else ""
        yield "Peak memory", format_bytes(account.peak_bytes) if account.peak_bytes else NONE, forecast
        if account.report is not None:
            whole = account.report.total_parameters
            share = format_percentage(account.report.trainable_parameters, whole)
            yield "Trained", share, f"{account.report.trainable_parameters:,} of {whole:,} parameters"

    shown = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in figures()
    ]
    events = sum(course.counts.values())
    said = f"{account.state}; {format_count(course.progress.attempts, 'attempt')}, {format_count(events, 'event')}"
    known = "; ".join(dict.fromkeys((*(m.about for m in side.subject.members if m.about), *side.standing)))
    title = tag("h1", f"Run {account.run_id}", tag("span", f"{said}; {known}" if known else said))
    return tag("header", tag("p", "Training", class_="quiet"), title, tag("dl", *shown))
