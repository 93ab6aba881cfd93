"""Renders the analysis of generated answers as one self-contained HTML page without scripts, and as PNG plots."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.evaluation import answer_analysis
from ratchet.evaluation.answer_analysis import AnswerAnalysis, LabelAnalysis, LikelihoodAnalysis, UnparseableAnswers
from ratchet.evaluation.metrics import OTHER
from ratchet.reports import comparison_page, plots, run_page, verdict_page
from ratchet.reports.forest_plot import format_significant
from ratchet.reports.run_page import PAGE_STYLE, STYLE
from ratchet.reports.verdict_page import Body, ReliabilityDiagramBin, render_reliability_diagram
from ratchet.storage import files, html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, tag
from ratchet.storage.records.evaluation import MetricValue

TEXT_SHOWN = 300
"""Maximum number of characters shown of an answer."""

CONFUSION, CURVES, RELIABILITY = "confusion.png", "precision_recall.png", "reliability.png"
LABELS_DRAWN = 200
"""Maximum number of labels in the plot of the confusion matrix. A plot of more labels exceeds the limits of image
viewers."""


def render(analysis: AnswerAnalysis) -> str:
    """Render the page as text. Equal analyses give equal text."""
    sections: dict[str, Body] = {
        "Figures": _render_figures(analysis),
        "How answers ended": _render_finish_reasons(analysis),
    }
    if analysis.labels is not None:
        sections |= {
            "By label": _render_labels(analysis.labels),
            "Precision and recall": _render_curves(analysis, analysis.labels.likelihoods),
            "Calibration": _render_calibration(analysis, analysis.labels.likelihoods),
        }
    if analysis.unparseable is not None:
        sections["Unparseable answers"] = _render_unparseable(analysis.unparseable)
    if analysis.answers.with_reference:
        sections["Errors by category"] = _render_categories(analysis)
    if analysis.agreement is not None:
        sections["Agreement among samples"] = _render_agreement(analysis)
    sections["Generation"] = _render_generation(analysis)
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style = "".join(path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE))
    return html.document(
        f"Answers of generation {analysis.answers.card.id}", style, _render_header(analysis), contents, main
    )


def calibration_bins(likelihoods: LikelihoodAnalysis) -> list[ReliabilityDiagramBin]:
    """Convert the bins of the calibration analysis to bars of the reliability diagram."""
    return [
        ReliabilityDiagramBin(
            calibration_bin.low,
            calibration_bin.high,
            calibration_bin.confidence,
            calibration_bin.accuracy.value,
            calibration_bin.accuracy.low,
            calibration_bin.accuracy.high,
            calibration_bin.accuracy.n,
        )
        for calibration_bin in likelihoods.calibration.bins
    ]


def _render_header(analysis: AnswerAnalysis) -> Html:
    card = analysis.answers.card

    def key_figures() -> Iterator[tuple[str, str, str]]:
        yield "Answers", f"{card.answers:,}", f"to {format_count(card.prompts, 'prompt')}"
        main = _main_metric(analysis)
        if main is not None:
            name, metric = main
            interval = f"{_format_number(metric.low)} to {_format_number(metric.high)} (95 %), n {metric.n:,}"
            yield name, _format_number(metric.value), interval
        if (unparseable := analysis.unparseable) is not None:
            yield (
                "Unparseable",
                f"{unparseable.count:,}",
                f"{format_percentage(unparseable.count, unparseable.total)} of all answers",
            )
        if analysis.labels is not None and analysis.labels.likelihoods is not None:
            calibration = analysis.labels.likelihoods.calibration
            interval = f"mean confidence {calibration.confidence:.3f}, accuracy {calibration.accuracy.value:.3f}"
            yield "Calibration error", f"{calibration.error:.3f}", interval
        if analysis.tokens is not None:
            yield "Tokens", f"{analysis.tokens.median:,.0f}", f"median; maximum {analysis.tokens.maximum:,.0f}"

    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in key_figures()
    ]
    title = tag("h1", analysis.answers.path.name, tag("span", f"generation {card.id}, model {card.model_name}"))
    return tag("header", tag("p", "Answers", class_="quiet"), title, tag("dl", *items))


def _main_metric(analysis: AnswerAnalysis) -> tuple[str, MetricValue] | None:
    if analysis.labels is not None:
        return "Accuracy", analysis.labels.metrics["accuracy"]
    return next(((name.replace("_", " ").capitalize(), metric) for name, metric in analysis.text_metrics.items()), None)


def _render_figures(analysis: AnswerAnalysis) -> Body:
    rows = _metric_rows(analysis.labels.metrics if analysis.labels else analysis.text_metrics)
    if analysis.labels is not None and (likelihoods := analysis.labels.likelihoods) is not None:
        calibration = likelihoods.calibration
        rows += _metric_rows(
            {
                "most likely label is right": calibration.accuracy,
                "mean average precision": likelihoods.average_precision,
            }
        )
        unit = "mean distance, 0 to 1; lower is better"
        rows.append(("expected calibration error", _format_number(calibration.error), f"{likelihoods.n:,}", NONE, unit))
        rows += _metric_rows({"Brier score": calibration.brier})
    content = [explanation(note) for note in answer_analysis.describe_omissions(analysis)]
    if rows:
        content.append(_render_metrics("Figures", rows))
    return content or "Nothing was measured."


def _metric_rows(metrics: Mapping[str, MetricValue]) -> list[Sequence[str]]:
    return [
        (
            tag("bdi", name.replace("_", " ")),
            _render_interval(metric),
            f"{metric.n:,}",
            NONE if metric.chance is None else _format_number(metric.chance),
            f"{metric.unit}; {metric.better} is better" if metric.better != "unknown" else metric.unit,
        )
        for name, metric in metrics.items()
    ]


def _render_metrics(title: str, rows: Sequence[Sequence[str]]) -> Html:
    heads = ("figure", "value, 95 % interval", "n", "most frequent label", "unit")
    return html.table(title, "tnnnw", heads, rows)


def _format_number(value: float) -> str:
    """Format a number with the same number of digits as in the terminal."""
    return f"{value:.{answer_analysis.PLACES}f}"


def _render_interval(metric: MetricValue) -> Html:
    return tag(
        "span",
        _format_number(metric.value),
        tag("small", f"{_format_number(metric.low)} to {_format_number(metric.high)}"),
    )


def _render_finish_reasons(analysis: AnswerAnalysis) -> Body:
    total = analysis.answers.card.answers
    rows = [
        (name, bar(("train", count / max(1, total))), f"{count:,}", format_percentage(count, total),
         NONE if right is None else _render_interval(right))
        for name, (count, right) in analysis.finishes.items()
    ]  # fmt: skip
    heads = ("ended by", "", "answers", "share", "right, of answers with a reference")
    content = [html.table("How answers ended", "tsnnn", heads, rows)]
    distributions = {"tokens of an answer": analysis.tokens, "mean log-probability (nats)": analysis.log_probabilities}
    lines = [
        (
            name,
            *(
                format_significant(value)
                for value in (
                    distribution.minimum,
                    distribution.p5,
                    distribution.median,
                    distribution.p95,
                    distribution.maximum,
                )
            ),
            f"{distribution.n:,}",
        )
        for name, distribution in distributions.items()
        if distribution is not None
    ]
    if lines:
        names = ("quantity", "least", "5 % below", "median", "5 % above", "greatest", "n")
        content.append(html.table("Lengths and log-probabilities", "tnnnnnn", names, lines))
    return content


def _render_labels(labels: LabelAnalysis) -> Body:
    table = {"labels": labels.confusion.labels, "matrix": labels.confusion.matrix}
    content = verdict_page.render_label_tables("the first answers", labels.classes, None)
    note = explanation(f"Column other: {answer_analysis.NO_REFERENCE}.")
    return [
        *content,
        run_page.render_confusion_matrix(table),
        note,
        *verdict_page.render_confusions(labels.confused_pairs),
    ]


def _text_only_note(analysis: AnswerAnalysis) -> str:
    return next(
        (note for note in answer_analysis.describe_omissions(analysis) if note.startswith("Only text")),
        "No likelihoods are available.",
    )


def _render_curves(analysis: AnswerAnalysis, likelihoods: LikelihoodAnalysis | None) -> Body:
    if likelihoods is None:
        return _text_only_note(analysis)
    if not any(curve["precision"] for curve in likelihoods.curves.values()):
        return "No label has a precision-recall curve."
    prompts = format_count(likelihoods.n, "prompt")
    note = f"From the label log-probabilities of {prompts}, independent of the generated answers."
    return [explanation(note), run_page.render_precision_recall(likelihoods.curves)]


def _render_calibration(analysis: AnswerAnalysis, likelihoods: LikelihoodAnalysis | None) -> Body:
    if likelihoods is None:
        return _text_only_note(analysis)
    calibration = likelihoods.calibration
    note = (
        "A label's probability is its share among all labels. Expected calibration error "
        f"{calibration.error:.3f}: the mean distance between confidence and accuracy, in bins of width 0.1. "
        f"Brier score {calibration.brier.value:.3f} ({calibration.brier.low:.3f} to {calibration.brier.high:.3f}), "
        "on a scale from 0 to 2."
    )
    return [explanation(note), render_reliability_diagram(calibration_bins(likelihoods), calibration.error)]


def _render_unparseable(unparseable: UnparseableAnswers) -> Body:
    if not unparseable.count:
        return f"All {format_count(unparseable.total, 'answer')} are valid labels, ignoring surrounding white space."
    rows = [
        (tag("bdi", where), tag("bdi", answer[:TEXT_SHOWN] or "(nothing)"), finish)
        for where, answer, finish in unparseable.first
    ]
    summary = (
        f"{unparseable.count:,} of {format_count(unparseable.total, 'answer')} are not valid labels. "
        "The table lists the first ones."
    )
    heads = ("prompt", "answer", "ended by")
    return [explanation(summary), html.table("The first unparseable answers", "twt", heads, rows)]


def _render_categories(analysis: AnswerAnalysis) -> Body:
    if not analysis.categories:
        return (
            "No field with few distinct values is available. To keep fields of the prompt records, list them in "
            "generate.extra_fields."
        )
    content: list[Html] = []
    for name, by_value in analysis.categories.items():
        rows = [
            (tag("bdi", value), bar(("lost", metric.value)), _render_interval(metric), f"{metric.n:,}")
            for value, metric in sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        ]
        content.append(tag("h3", tag("bdi", name)))
        content.append(html.table(f"Error rate by {name}", "tsnn", (name, "", "error rate, 95 % interval", "n"), rows))
    return content


def _render_agreement(analysis: AnswerAnalysis) -> Body:
    if (agreement := analysis.agreement) is None:
        return "Each prompt has one answer."
    figures = {
        "pairs of answers that agree": agreement.agreement,
        "prompts whose answers all agree": agreement.unanimous,
    }
    if agreement.majority is not None:
        figures["most frequent answer is right"] = agreement.majority
    note = explanation(f"{agreement.samples} answers to each prompt, compared without surrounding white space.")
    return [note, _render_metrics("Agreement among samples", _metric_rows(figures))]


def _render_generation(analysis: AnswerAnalysis) -> Body:
    card = analysis.answers.card
    spec, generate_settings = card.spec, card.spec.generate.model_dump(mode="json")
    facts = {
        "generation": card.id, "model": card.model_name, "model digest": spec.model.digest[:12],
        "weights": spec.model.weight_format,
        "prompts": f"{card.prompts:,}", "prompts digest": spec.prompts_digest[:12],
        "records skipped": f"{card.faults:,}", "output, SHA-256": card.output,
    }  # fmt: skip
    settings = {f"generate.{name}": _format_setting(value) for name, value in generate_settings.items()}
    return [comparison_page.render_facts(facts | settings)]


def _format_setting(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# Plots of the analysis as PNG files, for slides and reviews.


def write_plots(analysis: AnswerAnalysis, folder: Path) -> list[Path]:
    """Write each plot that the analysis has data for: confusion.png, precision_recall.png, reliability.png.

    Each file is written atomically.

    Raises:
        SettingsError: The folder cannot be created.
    """
    labels = analysis.labels
    if labels is None:
        return []
    draw_functions: dict[str, Callable[[Path], None]] = {}
    names, matrix = labels.confusion.labels, labels.confusion.matrix
    if len(names) <= LABELS_DRAWN:
        column_names = [*(answer_analysis.truncate_text(name) for name in names), OTHER]
        draw_functions[CONFUSION] = lambda target: plots.draw_confusion_matrix(column_names, matrix, target)
    if (likelihoods := labels.likelihoods) is not None:
        draw_functions[CURVES] = lambda target: plots.draw_precision_recall(likelihoods.curves, target)
        bins, error = calibration_bins(likelihoods), likelihoods.calibration.error
        draw_functions[RELIABILITY] = lambda target: plots.draw_reliability(bins, error, target)
    try:
        files.make_directory(folder)
    except (FileExistsError, NotADirectoryError) as error:
        raise SettingsError(f"{folder}: cannot create a folder for the plots ({error.strerror})") from None
    for name, draw in draw_functions.items():
        partial = folder / f"{files.PARTIAL}{name}"
        draw(partial)
        files.publish_directory(partial, folder / name)
    return [folder / name for name in draw_functions]


def remove_plots(folder: Path, keep: Collection[Path]) -> None:
    """Remove the plots of an earlier `write_plots` call except `keep`, and the folder if it is empty."""
    for path in (folder / name for name in (CONFUSION, CURVES, RELIABILITY)):
        if path not in keep:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
