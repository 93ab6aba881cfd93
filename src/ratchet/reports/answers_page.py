"""Renders the analysis of generated answers as one self-contained HTML page without scripts."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from ratchet.config.units import format_count
from ratchet.evaluation import answer_analysis
from ratchet.evaluation.answer_analysis import AnswerAnalysis
from ratchet.reports import pages, verdict_page
from ratchet.storage.html import format_percentage
from ratchet.storage.records.evaluation import MetricValue


def render(analysis: AnswerAnalysis) -> str:
    """Render the page as text. Equal analyses give equal text."""
    labels, card = analysis.labels, analysis.answers.card
    notes = list(answer_analysis.describe_omissions(analysis))
    likelihoods = labels.likelihoods if labels else None
    sections = ["Figures", "How answers ended"]
    sections += ["By label", "Precision and recall", "Calibration"] if labels else []
    sections += ["Unparseable answers"] if analysis.unparseable is not None else []
    sections += ["Errors by category"] if analysis.answers.with_reference else []
    sections += ["Agreement among samples"] if analysis.agreement is not None else []
    distributions = {"tokens of an answer": analysis.tokens, "mean log-probability (nats)": analysis.log_probabilities}
    return pages.render(
        "answers",
        title=f"Answers of generation {card.id}",
        sections=[*sections, "Generation"],
        heading=analysis.answers.path.name,
        card=card,
        figures=list(_key_figures(analysis)),
        analysis=analysis,
        number_format=f"%.{answer_analysis.PLACES}f",
        notes=notes,
        metrics=_list_metrics(analysis),
        distributions=[(name, found) for name, found in distributions.items() if found is not None],
        labels=labels
        and {
            "results": verdict_page.tabulate_labels("the first answers", labels.classes, None),
            "confusion": pages.describe_confusion(labels.confusion.labels, labels.confusion.matrix),
            "confused": verdict_page.summarize_confusions(labels.confused_pairs),
            "other": answer_analysis.NO_REFERENCE,
            "curves": likelihoods and pages.describe_precision_recall(likelihoods.curves),
        },
        likelihoods=likelihoods,
        text_only=next((note for note in notes if note.startswith("Only text")), "No likelihoods are available."),
        categories=[
            (name, sorted(by_value.items(), key=lambda item: (-item[1].value, item[0])))
            for name, by_value in analysis.categories.items()
        ],
        agreement=_list_agreement(analysis),
        facts=_describe_generation(analysis),
    )


def _key_figures(analysis: AnswerAnalysis) -> Iterator[tuple[str, str, str]]:
    card = analysis.answers.card
    yield "Answers", f"{card.answers:,}", f"to {format_count(card.prompts, 'prompt')}"
    main = [("accuracy", analysis.labels.metrics["accuracy"])] if analysis.labels else analysis.text_metrics.items()
    for name, metric in list(main)[:1]:
        places = answer_analysis.PLACES
        note = f"{metric.low:.{places}f} to {metric.high:.{places}f} (95 %), n {metric.n:,}"
        yield name.replace("_", " ").capitalize(), f"{metric.value:.{places}f}", note
    if (unparseable := analysis.unparseable) is not None:
        share = format_percentage(unparseable.count, unparseable.total)
        yield "Unparseable", f"{unparseable.count:,}", f"{share} of all answers"
    if analysis.labels is not None and analysis.labels.likelihoods is not None:
        found = analysis.labels.likelihoods.calibration
        note = f"mean confidence {found.confidence:.3f}, accuracy {found.accuracy.value:.3f}"
        yield "Calibration error", f"{found.error:.3f}", note
    if analysis.tokens is not None:
        yield "Tokens", f"{analysis.tokens.median:,.0f}", f"median; maximum {analysis.tokens.maximum:,.0f}"


def _list_metrics(analysis: AnswerAnalysis) -> list[tuple[str, MetricValue | SimpleNamespace]]:
    """Return the metrics by name. The calibration error has no interval."""
    if analysis.labels is None:
        return list(analysis.text_metrics.items())
    rows: list[tuple[str, MetricValue | SimpleNamespace]] = list(analysis.labels.metrics.items())
    if (likelihoods := analysis.labels.likelihoods) is not None:
        found = likelihoods.calibration
        unit = "mean distance, 0 to 1; lower is better"
        rows += [
            ("most likely label is right", found.accuracy),
            ("mean average precision", likelihoods.average_precision),
            ("expected calibration error", SimpleNamespace(value=found.error, n=likelihoods.n, unit=unit)),
            ("Brier score", found.brier),
        ]
    return rows


def _list_agreement(analysis: AnswerAnalysis) -> list[tuple[str, MetricValue]]:
    if (agreement := analysis.agreement) is None:
        return []
    rows = [
        ("pairs of answers that agree", agreement.agreement),
        ("prompts whose answers all agree", agreement.unanimous),
    ]
    return rows + ([("most frequent answer is right", agreement.majority)] if agreement.majority is not None else [])


def _describe_generation(analysis: AnswerAnalysis) -> dict[str, str]:
    card = analysis.answers.card
    spec, settings = card.spec, card.spec.generate.model_dump(mode="json")
    facts = {
        "generation": card.id, "model": card.model_name, "model digest": spec.model.digest[:12],
        "weights": spec.model.weight_format,
        "prompts": f"{card.prompts:,}", "prompts digest": spec.prompts_digest[:12],
        "records skipped": f"{card.faults:,}", "output, SHA-256": card.output,
    }  # fmt: skip
    return facts | {f"generate.{name}": _format_setting(value) for name, value in settings.items()}


def _format_setting(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
