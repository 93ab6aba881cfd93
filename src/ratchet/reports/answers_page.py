"""A panel as a page: one HTML file that loads nothing and needs no script."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.evaluation import answer_analysis
from ratchet.evaluation.answer_analysis import AnswerAnalysis, LabelAnalysis, LikelihoodAnalysis, UnparseableAnswers
from ratchet.evaluation.metrics import OTHER
from ratchet.reports import comparison_page, plots, run_page, verdict_page
from ratchet.reports.forest_plot import format_significant
from ratchet.reports.run_page import HOUSE_STYLE, STYLE
from ratchet.reports.verdict_page import Body, ReliabilityDiagramBin, render_reliability_diagram
from ratchet.storage import files, html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, tag
from ratchet.storage.records.evaluation import MetricValue

TEXT_SHOWN = 300
"""Characters of an answer."""


def render(panel: AnswerAnalysis) -> str:
    """The page's text; equal panels give equal text."""
    sections: dict[str, Body] = {"Figures": _render_figures(panel), "How answers ended": _render_finish_reasons(panel)}
    if panel.labels is not None:
        sections |= {
            "By label": _render_labels(panel.labels),
            "Precision and recall": _render_curves(panel, panel.labels.likely),
            "Calibration": _render_calibration(panel, panel.labels.likely),
        }
    if panel.unparseable is not None:
        sections["Unparseable answers"] = _render_unparseable(panel.unparseable)
    if panel.answers.judged:
        sections["Errors by category"] = _render_categories(panel)
    if panel.agreement is not None:
        sections["Agreement among samples"] = _render_agreement(panel)
    sections["Generation"] = _render_generation(panel)
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style = "".join(path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE))
    return html.document(f"Answers of generation {panel.answers.card.id}", style, _render_header(panel), contents, main)


def calibration_bins(likely: LikelihoodAnalysis) -> list[ReliabilityDiagramBin]:
    """The bins of a calibration, to be drawn."""
    return [
        ReliabilityDiagramBin(
            one.low, one.high, one.confidence, one.right.value, one.right.low, one.right.high, one.right.n
        )
        for one in likely.calibration.bins
    ]


def _render_header(panel: AnswerAnalysis) -> Html:
    card = panel.answers.card

    def shown() -> Iterator[tuple[str, str, str]]:
        yield "Answers", f"{card.answers:,}", f"to {format_count(card.prompts, 'prompt')}"
        main = _main_metric(panel)
        if main is not None:
            name, metric = main
            said = f"{_format_number(metric.low)} to {_format_number(metric.high)} (95 %), n {metric.n:,}"
            yield name, _format_number(metric.value), said
        if (found := panel.unparseable) is not None:
            yield "Unparseable", f"{found.count:,}", f"{format_percentage(found.count, found.of)} of all answers"
        if panel.labels is not None and panel.labels.likely is not None:
            calibration = panel.labels.likely.calibration
            said = f"sure by {calibration.confidence:.3f}, right {calibration.right.value:.3f}"
            yield "Calibration error", f"{calibration.error:.3f}", said
        if panel.tokens is not None:
            yield "Tokens", f"{panel.tokens.median:,.0f}", f"in the median, {panel.tokens.greatest:,.0f} at most"

    listed = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in shown()
    ]
    title = tag("h1", panel.answers.path.name, tag("span", f"generation {card.id}, by {card.model_name}"))
    return tag("header", tag("p", "Answers", class_="quiet"), title, tag("dl", *listed))


def _main_metric(panel: AnswerAnalysis) -> tuple[str, MetricValue] | None:
    if panel.labels is not None:
        return "Accuracy", panel.labels.figures["accuracy"]
    return next(((name.replace("_", " ").capitalize(), one) for name, one in panel.right.items()), None)


def _render_figures(panel: AnswerAnalysis) -> Body:
    rows = _metric_rows(panel.labels.figures if panel.labels else panel.right)
    if panel.labels is not None and (likely := panel.labels.likely) is not None:
        found = likely.calibration
        rows += _metric_rows(
            {"likeliest label is right": found.right, "mean average precision": likely.average_precision}
        )
        unit = "mean distance, 0 to 1; lower is better"
        rows.append(("expected calibration error", _format_number(found.error), f"{likely.n:,}", NONE, unit))
        rows += _metric_rows({"Brier score": found.brier})
    shown = [explanation(note) for note in answer_analysis.describe_omissions(panel)]
    if rows:
        shown.append(_render_metrics("Figures", rows))
    return shown or "Nothing was measured."


def _metric_rows(found: Mapping[str, MetricValue]) -> list[Sequence[str]]:
    return [
        (
            tag("bdi", name.replace("_", " ")),
            _render_interval(metric),
            f"{metric.n:,}",
            NONE if metric.chance is None else _format_number(metric.chance),
            f"{metric.unit}; {metric.better} is better" if metric.better != "unknown" else metric.unit,
        )
        for name, metric in found.items()
    ]


def _render_metrics(what: str, rows: Sequence[Sequence[str]]) -> Html:
    heads = ("figure", "value, 95 % interval", "n", "always the most frequent", "unit")
    return html.table(what, "tnnnw", heads, rows)


def _format_number(value: float) -> str:
    """As the terminal has it."""
    return f"{value:.{answer_analysis.PLACES}f}"


def _render_interval(metric: MetricValue) -> Html:
    return tag(
        "span",
        _format_number(metric.value),
        tag("small", f"{_format_number(metric.low)} to {_format_number(metric.high)}"),
    )


def _render_finish_reasons(panel: AnswerAnalysis) -> Body:
    whole = panel.answers.card.answers
    rows = [
        (name, bar(("train", count / max(1, whole))), f"{count:,}", format_percentage(count, whole),
         NONE if right is None else _render_interval(right))
        for name, (count, right) in panel.finishes.items()
    ]  # fmt: skip
    heads = ("ended by", "", "answers", "of all", "right, of those with a reference")
    shown = [html.table("How answers ended", "tsnnn", heads, rows)]
    named = {"tokens of an answer": panel.tokens, "mean log-probability (nats)": panel.nats}
    lines = [
        (
            name,
            *(format_significant(value) for value in (one.least, one.p5, one.median, one.p95, one.greatest)),
            f"{one.n:,}",
        )
        for name, one in named.items()
        if one is not None
    ]
    if lines:
        names = ("of answers", "least", "5 % below", "median", "5 % above", "greatest", "n")
        shown.append(html.table("Lengths and log-probabilities", "tnnnnnn", names, lines))
    return shown


def _render_labels(labels: LabelAnalysis) -> Body:
    table = {"labels": labels.confusion.labels, "matrix": labels.confusion.matrix}
    shown = verdict_page.render_label_tables("the first answers", labels.classes, None)
    other = explanation(f"Column other: {answer_analysis.NO_REFERENCE}.")
    return [*shown, run_page.render_confusion_matrix(table), other, *verdict_page.render_confusions(labels.pairs)]


def _text_only_note(panel: AnswerAnalysis) -> str:
    return next(
        (note for note in answer_analysis.describe_omissions(panel) if note.startswith("Only text")),
        "No likelihoods are known.",
    )


def _render_curves(panel: AnswerAnalysis, likely: LikelihoodAnalysis | None) -> Body:
    if likely is None:
        return _text_only_note(panel)
    if not any(curve["precision"] for curve in likely.curves.values()):
        return "No label has a curve."
    said = f"From the log-probabilities of labels, of {format_count(likely.n, 'prompt')}, whatever was answered."
    return [explanation(said), run_page.render_precision_recall(likely.curves)]


def _render_calibration(panel: AnswerAnalysis, likely: LikelihoodAnalysis | None) -> Body:
    if likely is None:
        return _text_only_note(panel)
    found = likely.calibration
    said = (
        f"A label's probability is its share among all labels. Expected calibration error {found.error:.3f}: mean "
        f"distance between how sure the model is and how often it is right, in ranges of a tenth. Brier score "
        f"{found.brier.value:.3f} ({found.brier.low:.3f} to {found.brier.high:.3f}), from 0 to 2."
    )
    return [explanation(said), render_reliability_diagram(calibration_bins(likely), found.error)]


def _render_unparseable(found: UnparseableAnswers) -> Body:
    if not found.count:
        return f"All {format_count(found.of, 'answer')} are possible ones, without the white space around them."
    rows = [
        (tag("bdi", where), tag("bdi", said[:TEXT_SHOWN] or "(nothing)"), finish) for where, said, finish in found.first
    ]
    said = (
        f"{found.count:,} of {format_count(found.of, 'answer')} are none of the possible ones; "
        "the first of them follow."
    )
    heads = ("prompt", "answer", "ended by")
    return [explanation(said), html.table("The first unparseable answers", "twt", heads, rows)]


def _render_categories(panel: AnswerAnalysis) -> Body:
    if not panel.categories:
        return "No field with few values was kept; generate.keep names fields of the prompts' records to be kept."
    shown: list[Html] = []
    for name, by_value in panel.categories.items():
        rows = [
            (tag("bdi", value), bar(("lost", metric.value)), _render_interval(metric), f"{metric.n:,}")
            for value, metric in sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        ]
        shown.append(tag("h3", tag("bdi", name)))
        shown.append(html.table(f"Error rate by {name}", "tsnn", (name, "", "wrong, 95 % interval", "n"), rows))
    return shown


def _render_agreement(panel: AnswerAnalysis) -> Body:
    if (found := panel.agreement) is None:
        return "One answer was given to each prompt."
    figures = {"pairs of answers that agree": found.agreement, "prompts with one answer only": found.unanimous}
    if found.majority is not None:
        figures["most frequent answer is right"] = found.majority
    said = explanation(f"{found.samples} answers to each prompt, compared without the white space around them.")
    return [said, _render_metrics("Agreement among samples", _metric_rows(figures))]


def _render_generation(panel: AnswerAnalysis) -> Body:
    card = panel.answers.card
    spec, asked = card.spec, card.spec.generate.model_dump(mode="json")
    listed = {
        "generation": card.id, "model": card.model_name, "its digest": spec.model.digest[:12], "held": spec.model.held,
        "prompts": f"{card.prompts:,}", "their digest": spec.prompts_digest[:12],
        "records left out": f"{card.faults:,}", "output, SHA-256": card.output,
    }  # fmt: skip
    settings = {f"generate.{name}": _format_setting(value) for name, value in asked.items()}
    return [comparison_page.render_facts(listed | settings)]


def _format_setting(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# The pictures of a panel as PNG, for slides and reviews.

CONFUSION, CURVES, RELIABILITY = "confusion.png", "precision_recall.png", "reliability.png"

LABELS_DRAWN = 200
"""Of a confusion matrix: with more the picture is larger than what reads it bears."""


def write_plots(panel: AnswerAnalysis, folder: Path) -> list[Path]:
    """Draw what there is: confusion.png, precision_recall.png, reliability.png; each is whole or not there.

    Raises:
        SettingsError: the folder cannot be made.
    """
    labels = panel.labels
    if labels is None:
        return []
    wanted: dict[str, Callable[[Path], None]] = {}
    names, matrix = labels.confusion.labels, labels.confusion.matrix
    if len(names) <= LABELS_DRAWN:
        shown = [*(answer_analysis.truncate_text(name) for name in names), OTHER]
        wanted[CONFUSION] = lambda target: plots.draw_confusion_matrix(shown, matrix, target)
    if (likely := labels.likely) is not None:
        wanted[CURVES] = lambda target: plots.draw_precision_recall(likely.curves, target)
        drawn, error = calibration_bins(likely), likely.calibration.error
        wanted[RELIABILITY] = lambda target: plots.draw_reliability(drawn, error, target)
    try:
        files.make_directory(folder)
    except (FileExistsError, NotADirectoryError) as error:
        raise SettingsError(f"{folder}: no folder can be made there for the pictures ({error.strerror})") from None
    for name, draw in wanted.items():
        aside = folder / f"{files.PARTIAL}{name}"
        draw(aside)
        files.publish_directory(aside, folder / name)
    return [folder / name for name in wanted]


def remove_plots(folder: Path, but: Collection[Path]) -> None:
    """Remove those that an earlier `write_plots` drew, and the folder if nothing else is in it."""
    for path in (folder / name for name in (CONFUSION, CURVES, RELIABILITY)):
        if path not in but:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
